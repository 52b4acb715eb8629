"""Documents of users: text, Markdown, and formats that markitdown converts to Markdown."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from samkv_integrations.errors import InvalidOption, MissingExtra

TEXTS = (".md", ".txt")
CONVERTED = (".csv", ".docx", ".htm", ".html", ".pdf", ".pptx")
SUFFIXES = (*TEXTS, *CONVERTED)
"""Suffixes that `read_document` reads; converted formats need the extra ``documents``."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """The text of each page; one page for formats without pages. title: "" if it is unknown."""

    pages: tuple[str, ...]
    title: str = ""

    @property
    def text(self) -> str:
        return "\n".join(self.pages)


def read_text(path: Path) -> str:
    """The text of a regular file, without a byte order mark.

    Raises InvalidOption if ``path`` is not a regular file, or cannot be read as UTF-8.
    """
    with _opened(path, os.O_NONBLOCK) as file:
        return _decoded(path, file)


def read_document(path: Path, *, follows_links: bool = False) -> Document:
    """A document with one of `SUFFIXES`, as Markdown; pages of a PDF as text. Text must be UTF-8.

    follows_links: whether ``path`` may be a symbolic link. Raises InvalidOption if ``path`` is not
    a regular file or cannot be read, MissingExtra if markitdown is needed and not installed.
    """
    with _opened(path, os.O_NONBLOCK | (0 if follows_links else os.O_NOFOLLOW)) as file:
        if path.suffix.lower() not in CONVERTED:
            return Document(pages=(_decoded(path, file),))
        return _converted(path, file)


def _converted(path: Path, file: BinaryIO) -> Document:
    try:
        from markitdown import StreamInfo, converters
    except ImportError as error:
        raise MissingExtra.of("markitdown", "documents") from error
    suffix = path.suffix.lower()
    kinds: dict[str, Any] = {
        ".csv": converters.CsvConverter, ".docx": converters.DocxConverter,
        ".pdf": converters.PdfConverter, ".pptx": converters.PptxConverter,
    }  # fmt: skip
    convert = kinds.get(suffix, converters.HtmlConverter)().convert
    about = StreamInfo(extension=suffix, charset="utf-8")
    try:
        found = convert(file, about)
    except Exception as error:  # each converter's library has its own errors
        why = str(error) or type(error).__name__  # the error of an encrypted PDF has no message
        raise InvalidOption(f"{path} cannot be read as {suffix} ({why})") from error
    pages = [found.markdown]
    if suffix == ".pdf":
        pages = found.markdown.removesuffix("\f").split("\f")
    return Document(pages=tuple(pages), title=" ".join((found.title or "").split()))


def _opened(path: Path, flags: int) -> BinaryIO:
    try:
        opener = lambda name, mode: os.open(name, mode | flags)  # noqa: E731
        file = open(path, "rb", opener=opener)  # noqa: SIM115
    except FileNotFoundError as error:
        raise InvalidOption(f"{path} does not exist; give an existing file") from error
    except OSError as error:
        raise InvalidOption(f"{path} cannot be read ({error})") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise InvalidOption(f"{path} must be a regular file; give a file with the text")
    return file


def _decoded(path: Path, file: BinaryIO) -> str:
    try:
        return file.read().decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(f"{path} cannot be read as UTF-8 text ({error})") from error
