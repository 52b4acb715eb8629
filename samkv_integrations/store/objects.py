"""Objects below a URL of fsspec, such as a bucket or a mounted folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from samkv_integrations.errors import CacheMiss, Given, InvalidOption, MissingExtra
from samkv_integrations.store.chunk_file import open_regular
from samkv_integrations.store.folder import written

AT_ONCE = 16
"""Objects that are read or written in parallel."""

GONE_S = 15.0
"""Seconds for which a place that failed is not asked again, see `Objects.ask_again`."""

_TIMES = ("LastModified", "mtime", "created")
_S3 = {"connect_timeout": 5, "read_timeout": 10, "retries": {"max_attempts": 2}}


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """Size of an object in bytes, and when it was written, in seconds since 1970."""

    n_bytes: int
    modified_at: float


class Objects:
    """The objects below a URL, by their paths relative to it. Safe to use from many threads.

    Every method raises `CacheMiss` ("io") if the file system fails, which does its own retries.
    After a failure all calls fail at once for `GONE_S`, so that questions do not wait for an outage
    one after the other.

    url: such as ``s3://bucket/prefix``. options: of the fsspec file system.

    Raises InvalidOption if the URL has no bucket or folder, MissingExtra if its file system is not
    installed.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        try:
            from fsspec.core import url_to_fs
            from fsspec.implementations.local import LocalFileSystem

            given = {"config_kwargs": _S3} if url.startswith(("s3://", "s3a://")) else {}
            self._fs, root = url_to_fs(
                url, use_listings_cache=False, skip_instance_cache=True, **{**given, **options}
            )
        except ImportError as error:
            raise MissingExtra.of(error.name or url.partition(":")[0], "remote") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise InvalidOption(
                Given("remote", url),
                f" cannot be opened: {error}; give a URL of fsspec, such as "
                "'s3://bucket/prefix' or 'file:///mnt/share/kv', and remote_options= as a mapping",
            ) from error
        if "://" not in url or not root.strip("/"):
            raise InvalidOption(
                Given("remote", url),
                "; it must be a URL with a bucket or folder, such as "
                "'s3://bucket/prefix' or 'file:///mnt/share/kv'",
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
        """Let calls ask the place, although one has just failed: for commands and deletions."""
        self._gone_until = 0.0

    def gone(self) -> CacheMiss:
        """The error of a call while the place is given up."""
        return CacheMiss("io", f"{self.url} did not answer a moment ago ({self._why_gone})")

    def read(self, path: str, n_bytes: int | None = None) -> bytes:
        """An object, or its first ``n_bytes``. Raises FileNotFoundError."""
        with self._asked(FileNotFoundError):
            if self.is_local:
                with open_regular(Path(self._place(path))) as file:
                    return file.read(-1 if n_bytes is None else n_bytes)
            part = {} if n_bytes is None else {"start": 0, "end": n_bytes}
            return bytes(self._fs.cat_file(self._place(path), **part))

    def write(self, path: str, data: bytes, *, is_new: bool = False) -> None:
        """Write an object atomically. is_new: raise FileExistsError if there is one."""
        place = self._place(path)
        # A missing folder is a failure here: it cannot be made, as the share is not mounted.
        with self._asked(*[FileExistsError] * is_new):
            if self.is_local:  # fsspec does not write files atomically
                os.makedirs(os.path.dirname(place), exist_ok=True)
                with written(Path(place), [data], mode=0o666) as temporary:
                    (os.link if is_new else os.replace)(temporary, place)
            else:
                self._fs.pipe_file(place, data, mode="create" if is_new else "overwrite")

    def exists(self, path: str) -> bool:
        """Whether there is an object."""
        with suppress(FileNotFoundError), self._asked(FileNotFoundError):
            self._fs.info(self._place(path))  # fsspec's exists() may report a failure as absence
            return True
        return False

    def listed(self, path: str) -> dict[str, ObjectInfo]:
        """The objects below a folder, by their paths.

        Some file systems leave out folders that cannot be read.
        """
        with self._asked():
            found = self._fs.find(self._place(path), detail=True)
        return {name[len(self.root) + 1 :]: _info(info) for name, info in found.items()}

    def names(self, path: str) -> list[str]:
        """The names in a folder; none if the folder does not exist."""
        with suppress(FileNotFoundError), self._asked(FileNotFoundError):
            found = self._fs.ls(self._place(path), detail=False)
            return [name.rstrip("/").rpartition("/")[2] for name in found]
        return []

    def remove(self, path: str) -> bool:
        """Delete an object, even if a call has just failed; returns whether it existed."""
        self.ask_again()
        if not self.exists(path):
            return False
        with suppress(FileNotFoundError), self._asked(FileNotFoundError):
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


def _info(info: Mapping[str, Any]) -> ObjectInfo:
    when = next((info[name] for name in _TIMES if info.get(name)), 0.0)
    at = when.timestamp() if isinstance(when, datetime) else float(when)
    return ObjectInfo(n_bytes=int(info["size"] or 0), modified_at=at)
