"""Reads documents in a process of its own: a file from elsewhere can hang, or fill the memory."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from samkv_integrations.errors import InvalidOption, MissingExtra, SamkvError
from samkv_integrations.ingest.documents import CONVERTED, Document, read_document

_POLL_S = 0.05
"""Seconds between two looks at the process."""


@dataclass(frozen=True, kw_only=True)
class ReadLimits:
    """Limits for one document.

    file_bytes: of the file. text_bytes: of its text in UTF-8. pages: of a PDF. seconds,
    memory_bytes: of the process that converts it to text; memory is what the process has in RAM.
    """

    file_bytes: int = 200 * 2**20
    text_bytes: int = 50 * 2**20
    pages: int = 2000
    seconds: float = 60.0
    memory_bytes: int = 2 * 2**30


class DocumentReader:
    """Reads documents, those that have to be converted in a process of its own.

    The process is started for the first of them, and again after one that exceeded a limit.
    """

    def __init__(self, limits: ReadLimits, encoding: str | None = None) -> None:
        self._limits, self._encoding = limits, encoding
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None

    @classmethod
    @contextmanager
    def opened(cls, limits: ReadLimits, encoding: str | None = None) -> Iterator[DocumentReader]:
        """A reader, whose process ends with the block. encoding: see `read_document`."""
        reader = cls(limits, encoding)
        try:
            yield reader
        finally:
            reader._end()

    def read(self, path: Path, *, follows_links: bool = False) -> Document:
        """The document, as `read_document` reads it.

        Raises InvalidOption, also if it exceeds a limit, and MissingExtra.
        """
        if path.suffix.lower() not in CONVERTED:
            found = _read(path, self._limits, self._encoding, follows_links)
        else:
            found = self._converted(path, follows_links)
        if isinstance(found, SamkvError):
            raise found
        return found

    def _converted(self, path: Path, follows_links: bool) -> Document | SamkvError:
        try:
            from psutil import NoSuchProcess, Process
        except ImportError as error:
            raise MissingExtra.of("psutil", "documents") from error
        limits, (process, connection) = self._limits, self._started()
        until = time.monotonic() + limits.seconds
        try:
            connection.send((path, limits, self._encoding, follows_links))
            while not connection.poll(_POLL_S):
                if time.monotonic() > until:
                    self._exceeded(
                        f"{path} took more than {limits.seconds:g} seconds to read",
                        "allow more with --read-seconds",
                    )
                with suppress(NoSuchProcess):
                    if Process(process.pid).memory_info().rss > limits.memory_bytes:
                        self._exceeded(
                            f"{path} needs more than {limits.memory_bytes} bytes of memory",
                            "allow more with --read-memory",
                        )
            kind, *found = connection.recv()
        except (EOFError, OSError):
            self._exceeded(f"{path} has ended the process that reads documents", "mend it")
        if kind == Document.__name__:
            return Document(**found[0])
        return (MissingExtra if kind == MissingExtra.__name__ else InvalidOption)(found[0])

    def _exceeded(self, what: str, next_step: str) -> NoReturn:
        self._end()
        raise InvalidOption(f"{what}; leave it out, or {next_step}")

    def _started(self) -> tuple[SpawnProcess, Connection]:
        if self._process is not None and not self._process.is_alive():
            self._end()
        if self._process is None or self._connection is None:
            own, other = get_context("spawn").Pipe()
            process = get_context("spawn").Process(target=_serve, args=(other,), daemon=True)
            process.start()
            other.close()
            self._process, self._connection = process, own
        return self._process, self._connection

    def _end(self) -> None:
        if self._process is not None and self._connection is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
        self._process = self._connection = None


def _read(
    path: Path, limits: ReadLimits, encoding: str | None, follows_links: bool
) -> Document | SamkvError:
    try:
        found = read_document(
            path, encoding=encoding, most_bytes=limits.file_bytes, most_pages=limits.pages,
            follows_links=follows_links,
        )  # fmt: skip
    except SamkvError as error:
        return error
    except (MemoryError, RecursionError) as error:
        return InvalidOption(f"{path} cannot be read ({type(error).__name__}); leave it out")
    n_bytes = sum(len(page.encode(errors="surrogatepass")) for page in found.pages)
    if n_bytes > limits.text_bytes:
        return InvalidOption(
            f"{path} holds {n_bytes} bytes of text, and {limits.text_bytes} are allowed at most "
            "(--max-text)"
        )
    return found


def _serve(connection: Connection) -> None:
    """The process: reads what it is told, until nobody tells it any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    silence = os.open(os.devnull, os.O_WRONLY)
    for standard in (1, 2):  # converters print
        os.dup2(silence, standard)
    # markitdown imports it to guess kinds of files, which we know, and with it onnxruntime, which
    # reports to its maker over the network
    sys.modules["magika"] = ModuleType("magika")
    while True:
        try:
            path, limits, encoding, follows_links = connection.recv()
        except EOFError:
            return
        found = _read(path, limits, encoding, follows_links)
        of_document = vars(found) if isinstance(found, Document) else str(found)
        connection.send((type(found).__name__, of_document))


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
