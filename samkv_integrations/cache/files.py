"""Files and folders of a store: readable by their owner only, and whole or not there."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from samkv_integrations.errors import StoreError

TEMPORARY = ".tmp"
_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_LOOKS_S = 0.01
# Locks of the writers of this process.
_HANDLES: set[int] = set()


def make_folder(path: Path) -> None:
    """Make a folder that its owner alone may enter, whatever the umask is."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)


def claim_folder(path: Path) -> None:
    """Make the folder of a store, or see that nobody but its owner can write there.

    Raises StoreError if it is something else, or others may write.
    """
    if path.exists() and not path.is_dir():
        raise StoreError(f"{path} is not a folder; next step: name a new or empty folder")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        make_folder(path)
    if path.stat().st_mode & _OF_OTHERS:
        raise StoreError(
            f"others than its owner may write to {path}, and so decide what the model reads; "
            f"next step: chmod go-w {path}"
        )


def cannot(action: str, path: Path, error: OSError) -> StoreError:
    """What to raise when the operating system refuses."""
    return StoreError(
        f"cannot {action} {path}: {error.strerror or error}; "
        "next step: make room or allow access there, or use a store in another folder"
    )


def write_file(
    path: Path,
    pieces: Iterable[bytes | memoryview],
    temporary: Path,
    *,
    exclusive: bool = False,
) -> None:
    """Write a file that others see whole or not at all, and that survives a power cut.

    temporary: its name until it is whole, in the same folder.
    exclusive: an existing file stays as it is, and FileExistsError is raised.
    """
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        (os.link if exclusive else os.replace)(temporary, path)
    finally:
        with suppress(FileNotFoundError):  # the usual case: it has been renamed
            os.unlink(temporary)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make sure that names in a folder survive a power cut."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def locked(path: Path, patience_s: float) -> Iterator[None]:
    """Hold a lock that one process at a time can hold; it ends with the process.

    Raises TimeoutError if another process, which may have been stopped, does not let go of it.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        stops_at = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > stops_at:
                    raise TimeoutError(
                        f"another process has held {path.name} for {patience_s:.0f} s"
                    ) from None
                time.sleep(_LOOKS_S)
        yield
    finally:
        os.close(handle)


def unlink_unless_read(path: Path) -> bool:
    """Delete a chunk file unless somebody reads it, see `ChunkFile`; whether it is gone."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


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


class Writer:
    """This process, as one that writes into a store: others can tell whether it is alive.

    It holds a lock on a file of its own, and the operating system lets go of it when the process
    ends, however it does.
    """

    def __init__(self, store: Path) -> None:
        self._folder = store / "writers"
        self._name: str | None = None
        self._process = -1

    @property
    def name(self) -> str:
        """32 hex digits. Raises OSError if the store cannot be written."""
        if self._name is None or self._process != os.getpid():  # a fork is another process
            self._name, self._process = self._enrol(), os.getpid()
        return self._name

    def temporary(self, path: Path) -> Path:
        """A name for a file that is going to be ``path``."""
        return path.with_name(f"{path.name}.{self.name}-{secrets.token_hex(4)}{TEMPORARY}")

    def _enrol(self) -> str:
        make_folder(self._folder)
        while True:
            name = secrets.token_hex(16)
            new = self._folder / f"{name}.new"
            handle = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # someone looks whether it is alive
                os.close(handle)
                continue
            except OSError:  # no locks here: nobody can tell, nor clears up
                pass
            # Under its name only when it is locked: unlocked ones are taken for dead.
            try:
                new.rename(self._folder / name)
            except FileNotFoundError:  # taken for dead already
                os.close(handle)
                continue
            _watch_forks()
            _HANDLES.add(handle)
            weakref.finalize(self, _leave, self._folder / name, handle, os.getpid())
            return name


def _leave(file: Path, handle: int, process: int) -> None:
    if os.getpid() == process:
        with suppress(OSError):
            file.unlink()
        _HANDLES.discard(handle)
        os.close(handle)


def _leave_to_parent() -> None:
    """A child that kept locks of its parent would make it look alive when it is not."""
    while _HANDLES:
        os.close(_HANDLES.pop())


@cache
def _watch_forks() -> None:
    """Once a process, and not at import."""
    os.register_at_fork(after_in_child=_leave_to_parent)


def dead_writers(store: Path) -> list[str]:
    """Names of the processes that ended without a word while they might have been writing.

    They are forgotten by `bury`.
    """
    try:
        names = os.listdir(store / "writers")
    except OSError:
        return []
    return [name for name in names if _is_dead(store / "writers" / name)]


def bury(store: Path, writers: Iterable[str]) -> None:
    """Forget processes that have ended, when all that they left is cleared up."""
    for name in writers:
        with suppress(OSError):
            (store / "writers" / name).unlink()


def is_left_behind(store: Path, temporary: Path, dead: Iterable[str]) -> bool:
    """Whether a temporary file is that of a process which has ended, or of no known one."""
    writer = temporary.name.removesuffix(TEMPORARY).rpartition(".")[2].partition("-")[0]
    return writer in dead or not (store / "writers" / writer).exists()


def _is_dead(file: Path) -> bool:
    try:
        handle = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True
