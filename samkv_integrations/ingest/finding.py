"""Finds the documents in folders."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from samkv_integrations.errors import EmptyInput, InvalidOption
from samkv_integrations.ingest.documents import CODE, SUFFIXES

_LINK = "symbolic links in folders are not followed; name the target"


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A file that is not ingested. is_failure: whether this is an error, rather than by design."""

    path: Path
    why: str
    is_failure: bool = False


@dataclass(frozen=True, kw_only=True)
class Found:
    """The documents that were found: real paths, sorted and distinct.

    others: suffix -> number of files in folders that have an unknown suffix.
    """

    files: Sequence[Path]
    skipped: Sequence[Skipped] = ()
    others: Counter[str] = field(default_factory=Counter)


def find_documents(
    paths: Sequence[Path], leave_out: Path | None = None, *, with_code: bool = False
) -> Found:
    """The documents among ``paths``, and in the folders among them.

    In folders only regular files count: a symbolic link may lead to private files. A path itself
    may be a link. Hidden files and folders are ignored.

    leave_out: a folder to ignore. with_code: whether files of `CODE` count in folders, too.

    Raises:
        InvalidOption: a path is not a regular file or a folder.
        EmptyInput: there is no document.
    """
    found, skipped, others = set[Path](), list[Skipped](), Counter[str]()
    named = {*SUFFIXES, *CODE}
    in_folders = named if with_code else {*SUFFIXES}

    def skip(file: Path, why: str, *, is_failure: bool = False) -> None:
        skipped.append(Skipped(path=file, why=why, is_failure=is_failure))

    def unreadable(error: OSError) -> None:
        skip(Path(str(error.filename)), f"it cannot be read: {error.strerror}", is_failure=True)

    def look_at(file: Path, *, is_named: bool) -> None:
        kind = file.suffix.lower()
        is_known = kind in (named if is_named else in_folders)
        if file.is_symlink() and not is_named and (is_known or file.is_dir()):
            skip(file, _LINK)
        elif not is_known and is_named:  # as of a shell's *
            why = f"it is not a document; known kinds: {', '.join(SUFFIXES)} and source code"
            skip(file, why, is_failure=True)
        elif not is_known:
            others[kind or file.name] += 1
        elif not file.is_file() and is_named:
            raise InvalidOption(f"{file} must be a regular file; give a file with the text")
        elif not file.is_file():
            skip(file, "it is not a regular file")
        elif re.search(r"[\ud800-\udfff]", str(file.resolve())):  # ids of records are text
            skip(file, "its name is not UTF-8", is_failure=True)
        else:
            found.add(file.resolve())

    for path in paths:
        below = _below(path, leave_out, unreadable) if path.is_dir() else [path]
        for file in below:
            try:
                look_at(file, is_named=file is path)
            except OSError as error:  # a folder that may be listed and not entered
                skip(file, f"it cannot be read: {error.strerror}", is_failure=True)
    if not found:
        raise EmptyInput(
            f"no document ({', '.join(SUFFIXES)}) in {', '.join(map(str, paths))}"
            + (f" ({skipped[0].path}: {skipped[0].why})" if skipped else "")
            + "; give a folder that holds some"
            + (", or --code to read source code and data" if others.keys() & {*CODE} else "")
        )
    return Found(files=sorted(found), skipped=list(dict.fromkeys(skipped)), others=others)


def _below(
    folder: Path, leave_out: Path | None, onerror: Callable[[OSError], None]
) -> Iterator[Path]:
    """Files in a folder, and links to folders. Hidden ones are ignored, and links not followed."""
    left, ignored = [folder], leave_out and leave_out.resolve()
    while left:  # os.walk calls itself for each folder in a folder
        here = left.pop()
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
            shown = [entry for entry in entries if not entry.name.startswith(".")]
            folders = {entry.name for entry in shown if entry.is_dir(follow_symlinks=False)}
            is_ignored = ignored is not None and here.resolve() == ignored
        except OSError as error:
            onerror(error)
            continue
        if not is_ignored:
            left += [here / name for name in folders]
            yield from (here / entry.name for entry in shown if entry.name not in folders)
