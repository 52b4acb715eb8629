"""Writing and reading the files of a store: private to their owner, and written atomically."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from samkv_integrations.errors import InvalidOption, StoreError

TEMPORARY = ".tmp"
LEFT_S = 3600.0
"""Age in seconds from which a temporary file is taken for one that a killed process left."""

MAX_SMALL_BYTES = 1 << 20


def folder_named(what: str, path: object) -> Path:
    """The path of a folder. Raises InvalidOption for what is no path. what: name of the option."""
    try:
        found = Path(path)  # type: ignore[arg-type]
        is_path = b"\0" not in os.fsencode(found)
    except (TypeError, UnicodeEncodeError):
        is_path = False
    if not is_path:
        raise InvalidOption(f"{what}={path!r:.60}; it must be the path of a folder, without NUL")
    return found


def make_folder(path: Path) -> None:
    """Make a folder that only its owner can use, whatever the umask is; one may exist already."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)


def cannot(action: str, path: Path, error: OSError) -> StoreError:
    """The error to raise when the operating system refuses something."""
    return StoreError(
        f"cannot {action} {path}: {error.strerror or error}; "
        "next step: make room or allow access there, or use a store in another folder"
    )


def write_file(
    path: Path,
    pieces: Iterable[bytes | memoryview],
    place: Callable[[Path], object] | None = None,
    *,
    mode: int = 0o600,
) -> None:
    """Write a file atomically and durably: under a temporary name, synced, then renamed.

    place: moves the complete temporary file to ``path``; None to replace what is there.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        if place is None:
            os.replace(temporary, path)
        else:
            place(temporary)
    finally:
        with suppress(FileNotFoundError):  # as usual: it has been renamed
            os.unlink(temporary)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_new(path: Path, data: bytes) -> bool:
    """Write a small file unless it exists; whether it was written."""
    try:
        write_file(path, [data], lambda temporary: os.link(temporary, path))
    except FileExistsError:
        return False
    return True


def read_small(path: Path) -> bytes:
    """The bytes of a small file of a store: its marker, secret, a note or the settings.

    It may be a link to a regular file. A pipe or device is refused: reading it might never end.

    Raises OSError, also if it is no regular file, or larger than `MAX_SMALL_BYTES`.
    """
    flags = os.O_NONBLOCK | os.O_CLOEXEC
    with open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_SMALL_BYTES:
            raise OSError(errno.EINVAL, f"{path.name} is no regular file of at most 1 MiB")
        return file.read(MAX_SMALL_BYTES)


def remove(path: Path) -> int:
    """Delete a file, or whatever is in its place; the bytes of a regular file, else 0.

    Raises StoreError if the operating system refuses.
    """
    try:
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode):
            shutil.rmtree(path)
            return 0
        path.unlink()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise cannot("delete", path, error) from error
    return found.st_size if stat.S_ISREG(found.st_mode) else 0
