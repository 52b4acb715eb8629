"""Documents of users: text, Markdown, and formats that are converted to Markdown."""

from __future__ import annotations

import codecs
import os
import re
import stat
from codecs import lookup
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from samkv_integrations.errors import InvalidOption, MissingExtra, SamkvError

TEXTS = (".md", ".txt", ".rst")
CONVERTED = (
    ".csv", ".docx", ".eml", ".epub", ".htm", ".html", ".ipynb", ".pdf", ".pptx", ".xlsx",
)  # fmt: skip
SUFFIXES = (*TEXTS, *CONVERTED)
"""Suffixes of documents; converted formats need the extra ``documents``."""

CODE = (
    ".bash", ".c", ".cc", ".cfg", ".conf", ".cpp", ".cs", ".css", ".go", ".h", ".hpp", ".ini",
    ".java", ".js", ".json", ".jsonl", ".jsx", ".kt", ".lua", ".php", ".pl", ".proto", ".ps1",
    ".py", ".pyi", ".r", ".rb", ".rs", ".scala", ".sh", ".sql", ".swift", ".toml", ".ts", ".tsx",
    ".vue", ".xml", ".yaml", ".yml",
)  # fmt: skip
"""Suffixes of source code, configuration and data, which are read as text.

In folders they are read only if that is asked for: lock files, data and generated code would
outweigh the documents."""

_PLAIN = (".txt", ".rst", ".pdf", ".eml", *CODE)
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

_NOT_ASCII = bytes(range(128, 256))

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


def is_markdown(suffix: str) -> bool:
    """Whether the text of a document with this suffix is Markdown."""
    return suffix.lower() not in _PLAIN


def read_text(path: Path) -> str:
    """The text of a regular file, without a byte order mark.

    Raises InvalidOption if ``path`` is not a regular file, or cannot be read as UTF-8.
    """
    with _opened(path, os.O_NONBLOCK) as file:
        return _decoded(path, _content(path, file), UTF_8)


def read_document(
    path: Path, *, encoding: str | None = None, most_bytes: int | None = None,
    most_pages: int | None = None, follows_links: bool = False,
) -> Document:  # fmt: skip
    """A document with one of `SUFFIXES` or `CODE`: Markdown, or text, see `is_markdown`.

    encoding: of files of text; None to detect it. most_bytes: of the file. most_pages: of a PDF.
    follows_links: whether ``path`` may be a symbolic link.

    Raises InvalidOption if ``path`` is not a regular file, is too large or cannot be read,
    MissingExtra if a package is needed that is not installed.
    """
    with _opened(path, os.O_NONBLOCK | (0 if follows_links else os.O_NOFOLLOW)) as file:
        size = os.fstat(file.fileno()).st_size
        if most_bytes is not None and size > most_bytes:
            raise InvalidOption(
                f"{path} has {size} bytes, and {most_bytes} are allowed at most (--max-file)"
            )
        suffix = path.suffix.lower()
        if suffix in CONVERTED and suffix not in _OF_TEXT:
            return _converted(path, file, encoding if suffix == ".eml" else None, most_pages)
        content = _content(path, file)
        encoding = _named(encoding) if encoding else _encoding_of(path, content)
        if suffix in CONVERTED:
            return _converted(path, BytesIO(content), encoding)
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
            f"{path} cannot be read as text: it holds NUL bytes; name its encoding "
            "(--encoding), or leave it out"
        )
    try:
        content.decode()
        return UTF_8
    except UnicodeDecodeError as error:
        text = content.decode(errors="replace")
        n_bad, n_ascii = text.count("\ufffd"), len(content.translate(None, _NOT_ASCII))
        if len(text) - n_ascii > 10 * n_bad:
            raise InvalidOption(
                f"{path} is UTF-8 but for {n_bad} bytes ({error}); mend it, or name its "
                "encoding (--encoding)"
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
            f"{path} cannot be read as text in a likely encoding; name it (--encoding), or leave "
            "the file out"
        )
    for each in found:  # of equally likely ones the usual one
        is_likely = each.chaos <= best.chaos and each.coherence >= best.coherence
        if is_likely and "cp1252" in each.could_be_from_charset:
            return "cp1252"
    return best.encoding


def _converted(
    path: Path, file: BinaryIO, encoding: str | None, most_pages: int | None = None
) -> Document:
    try:
        from markitdown import StreamInfo, converters
    except ImportError as error:
        raise MissingExtra.of("markitdown", "documents") from error
    suffix = path.suffix.lower()
    kinds: dict[str, Any] = {
        ".csv": converters.CsvConverter, ".docx": converters.DocxConverter,
        ".epub": converters.EpubConverter, ".ipynb": converters.IpynbConverter,
        ".pptx": converters.PptxConverter,
    }  # fmt: skip
    pages, read_as = list[str](), encoding or UTF_8
    try:
        if suffix == ".pdf":
            title, text, pages = "", "", _pages(path, file, most_pages)
        elif suffix == ".eml":
            title, text, read_as = _mail(path, file, encoding)
        elif suffix == ".xlsx":
            title, text = _workbook(file)
        else:
            convert = kinds.get(suffix, converters.HtmlConverter)().convert
            found = convert(file, StreamInfo(extension=suffix, charset=encoding))
            title, text = found.title or "", found.markdown
    except SamkvError:
        raise
    except Exception as error:  # each converter's library has its own errors
        why = str(error) or type(error).__name__  # the error of an encrypted PDF has no message
        raise InvalidOption(f"{path} cannot be read as {suffix} ({why})") from error
    # half characters cannot be stored
    texts = tuple(page.encode(errors="replace").decode() for page in pages or [text])
    return Document(pages=texts, title=" ".join(str(title).split()), encoding=read_as)


_BROKEN_WORD = re.compile(r"(?<=[^\W\d_])\ufffe(?=[^\W\d_])")
"""What PDFium makes of a hyphen and a line end between letters."""


def _pages(path: Path, file: BinaryIO, most: int | None) -> list[str]:
    """The text of each page of a PDF, line by line: cells of a row of a table stay in one line.

    PDFium is a hundred times faster than markitdown, which joins the words of all pages if one of
    them looks like a form, and then does not tell where pages end.

    Raises InvalidOption if there are more than ``most`` pages, MissingExtra.
    """
    try:
        from pypdfium2 import PdfDocument
    except ImportError as error:
        raise MissingExtra.of("pypdfium2", "documents") from error
    pages: list[str] = []
    with closing(PdfDocument(file)) as document:
        n_pages = len(document)
        if most is not None and n_pages > most:
            raise InvalidOption(
                f"{path} has {n_pages} pages, and {most} are allowed at most (--max-pages)"
            )
        for number in range(n_pages):
            with closing(document[number]) as page, closing(page.get_textpage()) as text:
                lines = text.get_text_range().replace("\r\n", "\n")
            pages.append(_BROKEN_WORD.sub("", lines).replace("\ufffe", "-"))
    return pages


_HEADERS = ("Subject", "From", "To", "Date")


def _mail(path: Path, file: BinaryIO, encoding: str | None) -> tuple[str, str, str]:
    """Subject, text and encoding of an e-mail, see `_mail_text`.

    The text is headers, the plain body or else the HTML one or the first text, and the names of
    attachments. encoding: of a body whose own one is missing, unknown or wrong; None for a likely
    one.
    """
    from email import message_from_binary_file, policy

    message = message_from_binary_file(file, policy=policy.default)
    body = message.get_body(("plain", "html"))
    if body is None:  # another text, or one whose parts are not divided as its head says
        kinds = ("text", "multipart")
        texts = (part for part in message.walk() if part.get_content_maintype() in kinds)
        body = next((part for part in texts if not part.is_multipart()), None)
    text, read_as = "", UTF_8
    if body is not None:
        text, read_as = _mail_text(path, body, encoding)
        if body.get_content_subtype() == "html":
            from markitdown.converters import HtmlConverter

            text = HtmlConverter().convert_string(text).markdown
    found = {name: _said(partial(message.get, name)) for name in _HEADERS}
    heads = [f"{name}: {value}" for name, value in found.items() if value]
    names = [_said(part.get_filename) or "unnamed" for part in message.iter_attachments()]
    ends = [f"Attachments, not read: {', '.join(names)}"] if names else []
    text = "\n\n".join(["\n".join(heads), text.replace("\r\n", "\n").strip(), *ends])
    return found["Subject"], text, read_as


def _mail_text(path: Path, body: Any, encoding: str | None) -> tuple[str, str]:  # noqa: ANN401
    """The text of a part of an e-mail, and the encoding if the part does not tell it (else UTF-8).

    Raises InvalidOption if no encoding is likely.
    """
    content = body.get_payload(decode=True) or b""
    named = body.get_content_charset()
    try:
        return content.decode(named or "ascii"), UTF_8
    except (LookupError, ValueError):  # an unknown encoding, or another one
        pass
    try:
        guessed = encoding or _encoding_of(path, content)
        return _decoded(path, content, guessed), guessed
    except InvalidOption:
        with suppress(LookupError, ValueError):  # most of it
            return content.decode(named or UTF_8, errors="replace"), UTF_8
        raise


def _said(read: Callable[[], object]) -> str:
    """The value of a header; "" for one that the library cannot read."""
    try:
        return str(read() or "")
    except Exception:  # noqa: BLE001 - it raises many errors of malformed headers
        return ""


def _workbook(file: BinaryIO) -> tuple[str, str]:
    """The sheets of a workbook as Markdown tables, without empty rows; its title is not known."""
    try:
        from openpyxl import load_workbook
    except ImportError as error:
        raise MissingExtra.of("openpyxl", "documents") from error
    lines: list[str] = []
    for sheet in load_workbook(file, read_only=True, data_only=True).worksheets:
        sheet.reset_dimensions()  # it may declare more cells than it has
        lines += ["", f"## {sheet.title}", ""]
        is_first = True
        for row in sheet.iter_rows(values_only=True):
            cells = ["" if cell is None else _cell(str(cell)) for cell in row]
            while cells and not cells[-1]:
                cells.pop()
            if cells:
                lines.append(f"| {' | '.join(cells)} |")
                if is_first:
                    lines.append(f"|{' --- |' * len(cells)}")
                is_first = False
    return "", "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


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
