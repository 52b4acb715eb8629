"""A chunk file opened without trust: nothing is handed out of it that its store did not write."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from hmac import compare_digest
from io import FileIO
from pathlib import Path
from typing import Any

from samkv_integrations.cache.chunk import FORMAT_VERSION
from samkv_integrations.cache.file_format import MAC_BYTES, file_key, mac
from samkv_integrations.errors import CacheMiss

MAX_HEADER_BYTES = 1 << 20
# What reading JSON from anybody, or looking for something in it, may raise.
BAD_JSON = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
# A link (which O_NOFOLLOW refuses), and what cannot be opened for reading: a socket, a device.
_NO_FILE = (errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EOPNOTSUPP)
_Identity = tuple[int, int, int]  # of a file: device, number, size; not its time, which is touched
_MAX_VIEWS = 1024  # of one read: IOV_MAX of Linux and macOS


class NotAFile(OSError):
    """A link, folder, pipe, socket or device where a file should be."""


def open_regular(path: Path) -> FileIO:
    """Open a file for reading; never a link, and never waiting, as for the writer of a pipe.

    Raises OSError; `NotAFile` if it is no regular file.
    """
    try:
        handle = os.open(path, _FLAGS)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise NotAFile(error.errno, "not a regular file") from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise NotAFile(errno.EINVAL, "not a regular file")
        return FileIO(handle)
    except BaseException:
        os.close(handle)
        raise


class CheckedFile:
    """A chunk file of this format version, open, whose header was written with ``secret``.

    Whatever is wrong raises `CacheMiss`. It holds a shared lock, by which eviction knows that the
    file is being read; where there are no locks, it goes without.

    size: bytes of the file when it was opened.
    header: everything before the tensors. table: the JSON in it. metadata: its strings about all.
    bytes_read: bytes read so far.
    """

    def __init__(self, path: Path, secret: bytes) -> None:
        self.bytes_read = 0
        self._path = path
        self._macs = b""
        self._let_go: _Identity | None = None
        self._file = self._open()
        try:
            self._read_header(secret)
        except BaseException:
            self.close()
            raise

    def _open(self) -> FileIO:
        try:
            file = open_regular(self._path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CacheMiss("absent", str(self._path)) from error
        except NotAFile as error:
            raise self.corrupt("not a regular file") from error
        except OSError as error:
            raise self._io(error) from error
        with suppress(OSError):
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        return file

    def _read_header(self, secret: bytes) -> None:
        try:
            self.size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise self._io(error) from error
        prefix = bytearray(8)
        self._fill(0, memoryview(prefix))
        n_bytes = int.from_bytes(prefix, "little")
        if n_bytes > min(MAX_HEADER_BYTES, self.size - len(prefix) - MAC_BYTES):
            raise self.corrupt("header length")
        text, own_mac = bytearray(n_bytes), bytearray(MAC_BYTES)
        self._fill(len(prefix), memoryview(text), memoryview(own_mac))
        self.header = bytes(prefix + text)
        self._macs = bytes(own_mac)
        self._key = file_key(self.header, secret)
        try:
            self.table: dict[str, Any] = json.loads(text)
            self.metadata: dict[str, str] = self.table["__metadata__"]
            version = self.metadata["format_version"]
        except BAD_JSON as error:
            raise self.corrupt("header") from error
        if isinstance(version, str) and version != str(FORMAT_VERSION):
            raise CacheMiss("format", f"{self._path}: version {version[:20]}, not {FORMAT_VERSION}")
        self.check([self.header], [0], "header")
        if not all(isinstance(value, str) for value in self.metadata.values()):
            raise self.corrupt("metadata")

    def read_macs(self, n_macs: int) -> None:
        """Read the first MACs, at least those of the regions that are checked next."""
        rest = bytearray((n_macs - 1) * MAC_BYTES)
        self.read(MAC_BYTES, memoryview(rest))
        self._macs = self._macs[:MAC_BYTES] + bytes(rest)  # that of the header was read with it

    def read(self, start: int, *views: memoryview) -> None:
        """Fill the views with what follows each other; start: counted from the header's end."""
        self._fill(len(self.header) + start, *views)

    def _fill(self, offset: int, *views: memoryview) -> None:
        if self._let_go is None:
            assert not self._file.closed, "closed"
            self._fill_from(self._file, offset, views)
            return
        with self._open() as file:  # its header is known, and what is read is checked anyway
            if _identity(file) != self._let_go:
                raise CacheMiss("absent", f"{self._path} was replaced")
            self._fill_from(file, offset, views)

    def _fill_from(self, file: FileIO, offset: int, views: Sequence[memoryview]) -> None:
        handle = file.fileno()
        left = [view for view in views if len(view)]
        while left:
            try:
                got = os.preadv(handle, left[:_MAX_VIEWS], offset)
            except OSError as error:
                raise self._io(error) from error
            if not got:
                raise self.corrupt("too short")
            self.bytes_read += got
            offset += got
            # All of it, but for more than 2 GiB, or more views than one read takes.
            while got and got >= len(left[0]):
                got -= len(left.pop(0))
            if got:
                left[0] = left[0][got:]

    def check(
        self, regions: Sequence[bytes | memoryview], positions: Sequence[int], what: str
    ) -> None:
        """Compare what was read of regions with their MACs; positions: which regions they are."""
        key, macs = self._key, self._macs
        found = [mac(key, i, data) for i, data in zip(positions, regions, strict=True)]
        expected = [macs[i * MAC_BYTES : (i + 1) * MAC_BYTES] for i in positions]
        if not compare_digest(b"".join(found), b"".join(expected)):
            raise self.corrupt(what)

    def corrupt(self, what: str) -> CacheMiss:
        """What to raise if ``what`` is not as it was written."""
        return CacheMiss("corrupt", f"{self._path}: {what}")

    def _io(self, error: OSError) -> CacheMiss:
        return CacheMiss("io", f"{self._path}: {error}")

    def let_go(self) -> None:
        """Hold neither file nor lock, but while reading; the file is opened anew for each read."""
        if self._let_go is None:
            self._let_go = _identity(self._file)
            self._file.close()

    def close(self) -> None:
        """Close the file, which frees its lock. May be called again."""
        self._file.close()
        self._let_go = None

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _identity(file: FileIO) -> _Identity:
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size
