"""Objects in a place of fsspec's, such as a bucket: whole, with retries, and for many threads."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

from samkv_integrations.cache.file_format import NotAFile, open_regular
from samkv_integrations.cache.files import write_file
from samkv_integrations.errors import CacheMiss, InvalidOption, MissingExtra

AT_ONCE = 16
"""Objects that are read or written at a time."""

GONE_S = 15.0
"""Seconds in which a place that failed is not asked again, but by who asks patiently."""

LEFT_S = 86400.0
"""Seconds after which a file that is not whole yet is one that a killed process has left."""

_ATTEMPTS = 3
_UNFINISHED = re.compile(r".*\.[0-9a-f]{16}\.tmp", re.DOTALL)
_FINAL = (FileNotFoundError, FileExistsError, PermissionError)
_TIMES = ("LastModified", "mtime", "created")
_S3 = {"connect_timeout": 5, "read_timeout": 10, "retries": {"max_attempts": 2}}
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """Bytes of an object, and when it was written (seconds since 1970)."""

    n_bytes: int
    modified_at: float


class Objects:
    """The objects under a URL, by their paths below it.

    Every method raises `CacheMiss` ("io") if the place does not answer after several tries; those
    that are not ``patiently`` asked fail at once for `GONE_S` after that. A forked process opens
    its own.

    Args:
        url: such as ``s3://bucket/prefix``, ``file:///mnt/share/kv`` or ``memory://name``.
        options: of the file system, as fsspec takes them, such as ``{"endpoint_url": ...}``.

    Raises InvalidOption if the URL names no place, MissingExtra if its file system is missing.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        if not isinstance(url, str):
            raise InvalidOption(f"remote={url!r:.60}; it must be a URL, a string")
        if not isinstance(options, Mapping):
            raise InvalidOption(
                f"remote_options={options!r:.60}; it must be a mapping of fsspec's options"
            )
        self.url = url
        self._gone_until, self._why_gone = 0.0, ""
        try:
            import tenacity  # noqa: F401
            from fsspec.core import url_to_fs
            from fsspec.implementations.local import LocalFileSystem

            given = {"config_kwargs": _S3} if url.startswith(("s3://", "s3a://")) else {}
            # listings are ours to remember
            self._fs, root = url_to_fs(
                url, use_listings_cache=False, skip_instance_cache=True, **{**given, **options}
            )
        except ImportError as error:
            raise MissingExtra.of(error.name or url.partition(":")[0], "remote") from error
        except (ValueError, TypeError) as error:
            raise InvalidOption(
                f"remote={url!r} with options {sorted(map(str, options))}: {error}; give a URL of "
                "fsspec's, such as 's3://bucket/prefix' or 'file:///mnt/share/kv'"
            ) from error
        if "://" not in url or not root.strip("/"):
            raise InvalidOption(
                f"remote={url!r} names no place; give a URL with a bucket or folder, such as "
                "'s3://bucket/prefix' or 'file:///mnt/share/kv'"
            )
        self.root = root.rstrip("/")
        self.is_local = isinstance(self._fs, LocalFileSystem)
        self.pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="samkv-remote")

    @property
    def is_gone(self) -> bool:
        """Whether it did not answer a moment ago."""
        return time.monotonic() < self._gone_until

    def give_up(self, why: str) -> None:
        """Take it for one that does not answer, for a while."""
        self._gone_until, self._why_gone = time.monotonic() + GONE_S, why

    def gone(self) -> CacheMiss:
        """What to raise instead of asking it."""
        return CacheMiss("io", f"{self.url} did not answer a moment ago ({self._why_gone})")

    def read(self, path: str, *, n_bytes: int | None = None, patiently: bool = False) -> bytes:
        """An object, or its first ``n_bytes``. Raises FileNotFoundError."""
        part = {} if n_bytes is None else {"start": 0, "end": n_bytes}

        def work(file: str) -> bytes:
            if self.is_local:
                return read_regular(file, n_bytes)
            return bytes(self._fs.cat_file(file, **part))

        return self._try(work, path, patiently=patiently)

    def write(
        self, path: str, data: bytes, *, is_new: bool = False, patiently: bool = False
    ) -> None:
        """Write an object that others see whole or not at all.

        is_new: raise FileExistsError if there is one.
        """

        def work(file: str) -> None:
            if self.is_local:
                write_whole(file, data, is_new)
            else:
                self._fs.pipe_file(file, data, mode="create" if is_new else "overwrite")

        try:
            self._try(work, path, patiently=patiently)
        except (FileNotFoundError, FileExistsError) as error:
            if is_new and isinstance(error, FileExistsError):
                raise
            raise self._failed(error) from error  # a folder that cannot be made: no share there

    def info(self, path: str, *, patiently: bool = False) -> ObjectInfo:
        """What is known of an object. Raises FileNotFoundError."""
        return _info(self._try(self._fs.info, path, patiently=patiently))

    def listed(self, path: str, *, patiently: bool = False) -> dict[str, ObjectInfo]:
        """All objects in a folder and below, by their paths in it.

        In a folder of a file system, what killed processes were writing there is deleted.
        """

        def work(folder: str) -> dict[str, ObjectInfo]:
            found = {name: _info(info) for name, info in self._find(folder).items()}
            for name in [name for name in found if self.is_local and _UNFINISHED.fullmatch(name)]:
                if found.pop(name).modified_at < time.time() - LEFT_S:
                    with suppress(OSError):
                        os.unlink(name)
            return {name[len(folder) + 1 :]: info for name, info in found.items()}

        return self._try(work, path, patiently=patiently)

    def _find(self, folder: str) -> dict[str, Mapping[str, Any]]:
        """All files below a folder, with what is known of them; none if there is no such folder.

        Most file systems' own ``find`` takes a folder that cannot be read for an empty one, and
        what is not listed counts as deleted. Buckets list all in one request.
        """
        from fsspec.asyn import AsyncFileSystem

        if isinstance(self._fs, AsyncFileSystem):
            return dict(self._fs.find(folder, detail=True))
        found: dict[str, Mapping[str, Any]] = {}
        folders = [folder]
        while folders:
            with suppress(FileNotFoundError):  # there is none, or it went meanwhile
                for info in self._fs.ls(folders.pop(), detail=True):
                    if info["type"] == "directory":
                        folders.append(info["name"])
                    else:
                        found[info["name"]] = info
        return found

    def names(self, path: str, *, patiently: bool = False) -> list[str]:
        """The names of what is in a folder; none if there is no such folder."""
        try:
            found = self._try(self._fs.ls, path, patiently=patiently, detail=False)
        except FileNotFoundError:
            return []
        return [name.rstrip("/").rpartition("/")[2] for name in found]

    def remove(self, path: str) -> bool:
        """Delete an object; whether there was one."""

        def work(file: str) -> bool:
            if not self._fs.exists(file):
                return False
            with suppress(FileNotFoundError):
                self._fs.rm_file(file)
            return True

        return self._try(work, path, patiently=True)

    def _try(
        self, work: Callable[..., _Result], path: str, *, patiently: bool, **options: object
    ) -> _Result:
        """What ``work`` makes of a path and options, after several tries if need be."""
        import tenacity

        if not patiently and self.is_gone:
            raise self.gone()
        trying = tenacity.Retrying(
            retry=tenacity.retry_if_not_exception_type(_FINAL),
            stop=tenacity.stop_after_attempt(_ATTEMPTS),
            wait=tenacity.wait_random_exponential(multiplier=0.1, max=1.0),
            reraise=True,
        )
        try:
            result = trying(work, f"{self.root}/{path}", **options)
        except (FileNotFoundError, FileExistsError):
            self._gone_until = 0.0
            raise
        except Exception as error:  # file systems raise what their libraries raise
            raise self._failed(error) from error
        self._gone_until = 0.0
        return result

    def _failed(self, error: Exception) -> CacheMiss:
        why = f"{type(error).__name__}: {error}"
        self.give_up(why)
        return CacheMiss("io", f"{self.url}: {why}")


def read_regular(file: str, n_bytes: int | None) -> bytes:
    """A file, or its first ``n_bytes``; nothing of a link, a pipe, a device or a folder.

    Whoever may write a place could else have its readers wait for ever, or fill their memory.
    """
    try:
        with open_regular(Path(file)) as opened, BufferedReader(opened) as buffered:
            return buffered.read(-1 if n_bytes is None else n_bytes)
    except NotAFile:
        return b""


def write_whole(file: str, data: bytes, is_new: bool) -> None:
    """Write a file as object stores do: it is there when it is whole."""
    path = Path(file)
    os.makedirs(path.parent, exist_ok=True)
    write_file(path, [data], (lambda made: os.link(made, path)) if is_new else None, mode=0o666)


def _info(info: Mapping[str, Any]) -> ObjectInfo:
    """What a file system knows of an object; what is no plain file counts as an empty one."""
    when = next((info[name] for name in _TIMES if info.get(name)), 0.0)
    at = when.timestamp() if isinstance(when, datetime) else float(when)
    is_file = info["type"] == "file" and not info.get("islink")
    return ObjectInfo(n_bytes=int(info["size"] or 0) if is_file else 0, modified_at=at)
