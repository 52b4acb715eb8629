"""Files and folders of a store: readable by their owner only, and whole or not there."""

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
"""Seconds after which a temporary file is taken for one that a killed process has left."""

MAX_SMALL_BYTES = 1 << 20


def folder_named(what: str, path: object) -> Path:
    """The path of a folder. Raises InvalidOption for what can be none; what: the option's name."""
    try:
        found = Path(path)  # type: ignore[arg-type]
        is_path = b"\0" not in os.fsencode(found)
    except (TypeError, UnicodeEncodeError):
        is_path = False
    if not is_path:
        raise InvalidOption(f"{what}={path!r:.60}; it must be the path of a folder, without NUL")
    return found


def make_folder(path: Path) -> None:
    """Make a folder that its owner alone may enter, whatever the umask is."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)


def cannot(action: str, path: Path, error: OSError) -> StoreError:
    """What to raise when the operating system refuses."""
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
    """Write a file that others see whole or not at all, and that survives a power cut.

    place: moves the temporary file, which is whole, to ``path``; None to replace what is there.
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
        with suppress(FileNotFoundError):  # the usual case: it has been renamed
            os.unlink(temporary)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_new(path: Path, data: bytes) -> bool:
    """Write a small file unless there is one; whether it was written."""
    try:
        write_file(path, [data], lambda temporary: os.link(temporary, path))
    except FileExistsError:
        return False
    return True


def read_small(path: Path) -> bytes:
    """The bytes of a small file of a store, such as its marker, a note or the settings.

    Never waits, as for the writer of a pipe, and never reads without an end, as from a device.

    Raises OSError, also if it is no regular file, nor a link to one, or is too large.
    """
    flags = os.O_NONBLOCK | os.O_CLOEXEC
    with open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_SMALL_BYTES:
            raise OSError(errno.EINVAL, f"{path.name} is no regular file of at most 1 MiB")
        return file.read(MAX_SMALL_BYTES)


def remove(path: Path) -> int:
    """Delete a file, or whatever is there in its place; how many bytes it took.

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
