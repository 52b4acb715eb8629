"""Documents of users: text, Markdown, and formats that markitdown converts to Markdown."""

from __future__ import annotations

import codecs
import os
import re
import stat
from codecs import lookup
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from samkv_integrations.errors import InvalidOption, MissingExtra

TEXTS = (".md", ".txt")
CONVERTED = (".csv", ".docx", ".htm", ".html", ".pdf", ".pptx")
SUFFIXES = (*TEXTS, *CONVERTED)
"""Suffixes that `read_document` reads; converted formats need the extra ``documents``."""

_HTML = (".htm", ".html")
_OF_TEXT = (".csv", *_HTML)
_DECLARED = re.compile(rb"charset=[\"']?([\w-]+)", re.IGNORECASE)

UTF_8 = "utf-8-sig"
"""UTF-8, with a byte order mark or without."""

_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"),
)  # fmt: skip

_LIKELY = [
    "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "iso8859_2", "koi8_r", "big5",
    "euc_jp", "euc_kr", "gb18030", "shift_jis",
]  # fmt: skip

_SAMPLE = 200_000
"""Bytes by which an encoding is detected."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """The text of each page; one page for formats without pages.

    title: "" if it is unknown. encoding: of a file of text.
    """

    pages: tuple[str, ...]
    title: str = ""
    encoding: str = UTF_8

    @property
    def text(self) -> str:
        return "\n".join(self.pages)


def read_text(path: Path) -> str:
    """The text of a regular file, without a byte order mark.

    Raises InvalidOption if ``path`` is not a regular file, or cannot be read as UTF-8.
    """
    with _opened(path, os.O_NONBLOCK) as file:
        return _decoded(path, _content(path, file), UTF_8)


def read_document(
    path: Path, *, encoding: str | None = None, most_bytes: int | None = None,
    follows_links: bool = False,
) -> Document:  # fmt: skip
    """A document with one of `SUFFIXES`, as Markdown; pages of a PDF as text.

    encoding: of files of text; None to detect it. most_bytes: of the file. follows_links: whether
    ``path`` may be a symbolic link.

    Raises InvalidOption if ``path`` is not a regular file, is too large or cannot be read,
    MissingExtra if a package is needed that is not installed.
    """
    with _opened(path, os.O_NONBLOCK | (0 if follows_links else os.O_NOFOLLOW)) as file:
        size = os.fstat(file.fileno()).st_size
        if most_bytes is not None and size > most_bytes:
            raise InvalidOption(f"{path} has {size} bytes, and {most_bytes} are allowed at most")
        suffix = path.suffix.lower()
        if suffix in CONVERTED and suffix not in _OF_TEXT:
            return _converted(path, file, None)
        content = _content(path, file)
        encoding = _named(encoding) if encoding else _encoding_of(path, content)
        if suffix in CONVERTED:
            converted = _converted(path, BytesIO(content), encoding)
            return replace(converted, encoding=encoding)
        return Document(pages=(_decoded(path, content, encoding),), encoding=encoding)


def _named(encoding: str) -> str:
    """The encoding, without a byte order mark if it is UTF-8."""
    with suppress(LookupError):
        return UTF_8 if lookup(encoding).name in ("utf-8", UTF_8) else encoding
    return encoding


def _encoding_of(path: Path, content: bytes) -> str:
    """The encoding of a file of text: that of its byte order mark, UTF-8, or what is likely.

    Raises InvalidOption if none is, MissingExtra if the detector is not installed.
    """
    for mark, encoding in _MARKS:
        if content.startswith(mark):
            return encoding
    sample = content[:_SAMPLE]
    if b"\0" in sample:
        raise InvalidOption(
            f"{path} cannot be read as text: it holds NUL bytes; name its encoding, or leave it out"
        )
    try:
        content.decode()
        return UTF_8
    except UnicodeDecodeError as error:
        text = content.decode(errors="replace")
        n_bad = text.count("\ufffd")
        if sum(map(text.count, set(text) - set(map(chr, range(128))))) > 10 * n_bad:
            raise InvalidOption(
                f"{path} is UTF-8 but for {n_bad} bytes ({error}); mend it, or name its encoding"
            ) from error
    if path.suffix.lower() in _HTML and (declared := _DECLARED.search(sample)):
        with suppress(LookupError):
            return lookup(declared[1].decode()).name
    try:
        from charset_normalizer import from_bytes
    except ImportError as error:
        raise MissingExtra.of("charset-normalizer", "chroma") from error
    if len(content) > len(sample):  # it may end within a character
        sample = sample[: sample.rfind(b"\n") + 1] or sample
    found = from_bytes(sample, cp_isolation=["cp1252", *_LIKELY])
    if (best := found.best()) is None:
        raise InvalidOption(
            f"{path} cannot be read as text in a likely encoding; name it, or leave the file out"
        )
    for each in found:  # of equally likely ones the usual one
        is_likely = each.chaos <= best.chaos and each.coherence >= best.coherence
        if is_likely and "cp1252" in each.could_be_from_charset:
            return "cp1252"
    return best.encoding


def _converted(path: Path, file: BinaryIO, encoding: str | None) -> Document:
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
    about = StreamInfo(extension=suffix, charset=encoding)
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


def _content(path: Path, file: BinaryIO) -> bytes:
    try:
        return file.read()
    except OSError as error:
        raise InvalidOption(f"{path} cannot be read ({error})") from error


def _decoded(path: Path, content: bytes, encoding: str) -> str:
    try:
        text = content.decode(encoding)
        text.encode()  # an encoding may give half characters, which nothing can store
    except (LookupError, UnicodeError) as error:
        name = "UTF-8" if encoding == UTF_8 else encoding
        raise InvalidOption(f"{path} cannot be read as {name} text ({error})") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")
