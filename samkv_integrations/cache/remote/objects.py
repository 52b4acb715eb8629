"""Objects below a URL of fsspec, such as a bucket or a mounted folder."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from io import BufferedReader
from pathlib import Path
from typing import Any

from samkv_integrations.cache.files.atomic import MAX_SMALL_BYTES, write_file
from samkv_integrations.cache.files.chunk_file import NotAFile, open_regular
from samkv_integrations.errors import CacheMiss, InvalidOption, MissingExtra

AT_ONCE = 16
"""Objects that are read or written in parallel."""

GONE_S = 15.0
"""Seconds for which a place that failed is not asked again, see `Objects.ask_again`."""

LEFT_S = 86400.0
"""Age in seconds from which an unfinished file is taken for one that a killed process left."""

_UNFINISHED = re.compile(r".*\.[0-9a-f]{16}\.tmp", re.DOTALL)
_TIMES = ("LastModified", "mtime", "created")
_S3 = {"connect_timeout": 5, "read_timeout": 10, "retries": {"max_attempts": 2}}


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """Size of an object in bytes, and when it was written, in seconds since 1970."""

    n_bytes: int
    modified_at: float


class Objects:
    """The objects below a URL, by their paths relative to it. Safe to use from many threads.

    Every method raises `CacheMiss` ("io") if the file system fails. After a failure all calls fail
    at once for `GONE_S`, so that questions do not wait for an outage one after the other. Retries
    are left to the file system.

    Args:
        url: such as ``s3://bucket/prefix``, ``file:///mnt/share/kv`` or ``memory://name``.
        options: of the fsspec file system, such as ``{"endpoint_url": ...}``.

    Raises InvalidOption if the URL names no place, MissingExtra if its file system is not
    installed.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        if not isinstance(url, str):
            raise InvalidOption(f"remote={url!r:.60}; it must be a URL, a string")
        if not isinstance(options, Mapping):
            raise InvalidOption(
                f"remote_options={options!r:.60}; it must be a mapping of fsspec's options"
            )
        try:
            from fsspec.core import url_to_fs
            from fsspec.implementations.local import LocalFileSystem

            given = {"config_kwargs": _S3} if url.startswith(("s3://", "s3a://")) else {}
            self._fs, root = url_to_fs(
                url, use_listings_cache=False, skip_instance_cache=True, **{**given, **options}
            )
        except ImportError as error:
            raise MissingExtra.of(error.name or url.partition(":")[0], "remote") from error
        except (ValueError, TypeError) as error:
            raise InvalidOption(
                f"remote={url!r} with options {sorted(map(str, options))}: {error}; give a URL of "
                "fsspec, such as 's3://bucket/prefix' or 'file:///mnt/share/kv'"
            ) from error
        if "://" not in url or not root.strip("/"):
            raise InvalidOption(
                f"remote={url!r} names no place; give a URL with a bucket or folder, such as "
                "'s3://bucket/prefix' or 'file:///mnt/share/kv'"
            )
        self.url, self.root = url, root.rstrip("/")
        self.is_local = isinstance(self._fs, LocalFileSystem)
        self.pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="samkv-remote")
        self._gone_until, self._why_gone = 0.0, ""

    @property
    def is_gone(self) -> bool:
        """Whether a call failed less than `GONE_S` ago."""
        return time.monotonic() < self._gone_until

    def give_up(self, why: str) -> None:
        """Let all calls fail for `GONE_S`."""
        self._gone_until, self._why_gone = time.monotonic() + GONE_S, why

    def ask_again(self) -> None:
        """Try the place again, although it failed a moment ago: for commands and deletions."""
        self._gone_until = 0.0

    def gone(self) -> CacheMiss:
        """The error of a call while the place is given up."""
        return CacheMiss("io", f"{self.url} did not answer a moment ago ({self._why_gone})")

    def read(self, path: str, n_bytes: int | None = None) -> bytes:
        """An object, or its first ``n_bytes``. Raises FileNotFoundError."""
        with self._asked(FileNotFoundError):
            if self.is_local:
                return read_regular(self._place(path), n_bytes)
            part = {} if n_bytes is None else {"start": 0, "end": n_bytes}
            return bytes(self._fs.cat_file(self._place(path), **part))

    def read_small(self, path: str) -> bytes:
        """A small object. Raises FileNotFoundError."""
        # A bucket is read whole: S3 refuses a range of an empty object.
        return self.read(path, MAX_SMALL_BYTES if self.is_local else None)

    def write(self, path: str, data: bytes, *, is_new: bool = False) -> None:
        """Write an object atomically. is_new: raise FileExistsError if there is one."""
        # A missing folder is a failure here: it cannot be made, as the share is not mounted.
        with self._asked(*[FileExistsError] * is_new):
            if self.is_local:
                write_whole(self._place(path), data, is_new)
            else:
                mode = "create" if is_new else "overwrite"
                self._fs.pipe_file(self._place(path), data, mode=mode)

    def info(self, path: str) -> ObjectInfo:
        """Size and time of an object. Raises FileNotFoundError."""
        with self._asked(FileNotFoundError):
            return _info(self._fs.info(self._place(path)))

    def listed(self, path: str) -> dict[str, ObjectInfo]:
        """All objects below a folder, by their paths relative to it.

        In a local folder, unfinished files that killed processes left are deleted.
        """
        folder = self._place(path)
        with self._asked():
            found = {name: _info(info) for name, info in self._find(folder).items()}
            for name in [name for name in found if self.is_local and _UNFINISHED.fullmatch(name)]:
                if found.pop(name).modified_at < time.time() - LEFT_S:
                    with suppress(OSError):
                        os.unlink(name)
        return {name[len(folder) + 1 :]: info for name, info in found.items()}

    def _find(self, folder: str) -> dict[str, Mapping[str, Any]]:
        """Fsspec's information on all files below a folder, by full path.

        Buckets list a whole prefix per request. Elsewhere fsspec's ``find`` omits folders that
        cannot be read, and a chunk that is not listed counts as deleted; so folders are listed
        here, one by one.
        """
        from fsspec.asyn import AsyncFileSystem

        if isinstance(self._fs, AsyncFileSystem):
            return dict(self._fs.find(folder, detail=True))
        found: dict[str, Mapping[str, Any]] = {}
        folders = [folder]
        while folders:
            with suppress(FileNotFoundError):  # the folder does not exist, or was just deleted
                for info in self._fs.ls(folders.pop(), detail=True):
                    if info["type"] == "directory":
                        folders.append(info["name"])
                    else:
                        found[info["name"]] = info
        return found

    def names(self, path: str) -> list[str]:
        """The names in a folder; none if the folder does not exist."""
        with suppress(FileNotFoundError), self._asked(FileNotFoundError):
            found = self._fs.ls(self._place(path), detail=False)
            return [name.rstrip("/").rpartition("/")[2] for name in found]
        return []

    def remove(self, path: str) -> bool:
        """Delete an object; whether there was one."""
        with self._asked():
            if not self._fs.exists(self._place(path)):
                return False
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._place(path))
            return True

    def _place(self, path: str) -> str:
        return f"{self.root}/{path}"

    @contextmanager
    def _asked(self, *expected: type[Exception]) -> Iterator[None]:
        """A block that asks the file system; errors that are not expected become `CacheMiss`."""
        if self.is_gone:
            raise self.gone()
        try:
            yield
        except expected:
            raise
        except Exception as error:  # each file system raises errors of its own library
            why = f"{type(error).__name__}: {error}"
            self.give_up(why)
            raise CacheMiss("io", f"{self.url}: {why}") from error


def read_regular(file: str, n_bytes: int | None) -> bytes:
    """A regular file, or its first ``n_bytes``; nothing of a link, pipe, device or folder.

    Otherwise whoever may write the place could make readers wait forever, or exhaust their memory.
    """
    try:
        with open_regular(Path(file)) as opened, BufferedReader(opened) as buffered:
            return buffered.read(-1 if n_bytes is None else n_bytes)
    except NotAFile:
        return b""


def write_whole(file: str, data: bytes, is_new: bool) -> None:
    """Write a file atomically, as an object store does."""
    path = Path(file)
    os.makedirs(path.parent, exist_ok=True)
    write_file(path, [data], (lambda made: os.link(made, path)) if is_new else None, mode=0o666)


def _info(info: Mapping[str, Any]) -> ObjectInfo:
    """What a file system says of an object; a link, pipe, device or folder counts as empty."""
    when = next((info[name] for name in _TIMES if info.get(name)), 0.0)
    at = when.timestamp() if isinstance(when, datetime) else float(when)
    is_file = info["type"] == "file" and not info.get("islink")
    return ObjectInfo(n_bytes=int(info["size"] or 0) if is_file else 0, modified_at=at)
