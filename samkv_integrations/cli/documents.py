"""The documents that ``samkv ingest`` reads, and the chunks that it makes of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from samkv_integrations.cache.chunk import normalise
from samkv_integrations.documents import read_document
from samkv_integrations.errors import EmptyInput, InvalidOption, MissingExtra
from samkv_integrations.model.model import Model

SUFFIXES = (".txt", ".md")

_LINK = "a symbolic link in a folder is not followed; name what it leads to"


@dataclass(frozen=True, kw_only=True)
class DocumentChunk:
    """One chunk of a document: ``number`` counts the chunks of the file ``source`` (absolute)."""

    source: str
    number: int
    text: str

    @property
    def id(self) -> str:
        """Name of the chunk in a collection; the same at every ingest."""
        return f"{self.source}#{self.number}"


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A file that is not ingested. is_failure: not by design, but because it cannot be read."""

    path: Path
    why: str
    is_failure: bool = False


@dataclass(frozen=True, kw_only=True)
class Found:
    """Documents by their real paths, sorted, once each, and what beside them is left out."""

    files: Sequence[Path]
    skipped: Sequence[Skipped] = ()


def find_documents(paths: Sequence[Path], leave_out: Path | None = None) -> Found:
    """The files among ``paths`` and the documents in the folders among them.

    In a folder no symbolic link is followed, as it may lead to what nobody meant to index, and
    nothing but regular files is read. What is named itself may be a link.

    leave_out: a folder in which nothing is looked for. Hidden files and folders are left out too.

    Raises:
        InvalidOption: a path does not exist, or is no regular file, or of another kind.
        EmptyInput: there is no document.
    """
    found: set[Path] = set()
    skipped: list[Skipped] = []
    for path in paths:
        if path.is_dir():
            for file in _candidates(path, leave_out, skipped):
                if reason := _reason_against(file):
                    skipped.append(reason)
                else:
                    found.add(file.resolve())
        elif not path.exists():
            raise InvalidOption(f"{path} does not exist; give files or folders of documents")
        elif path.suffix.lower() not in SUFFIXES:
            raise InvalidOption(f"{path} is not a document; known kinds: {', '.join(SUFFIXES)}")
        elif not path.is_file():
            raise InvalidOption(f"{path} is no regular file; give a file that holds the text")
        else:
            found.add(path.resolve())
    if not found:
        raise EmptyInput(
            f"no document ({', '.join(SUFFIXES)}) in {', '.join(map(str, paths))}"
            + (f" ({skipped[0].path}: {skipped[0].why})" if skipped else "")
            + "; give a folder that holds some"
        )
    return Found(files=sorted(found), skipped=skipped)


def _candidates(folder: Path, leave_out: Path | None, skipped: list[Skipped]) -> Iterator[Path]:
    """Whatever is called like a document below a folder; adds links to folders to ``skipped``."""

    def failed(error: OSError) -> None:
        why = f"it cannot be read: {error.strerror}"
        skipped.append(Skipped(path=Path(str(error.filename)), why=why, is_failure=True))

    for root, folders, names in os.walk(folder, onerror=failed):  # which follows no links
        here = Path(root)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        skipped += [Skipped(path=here / n, why=_LINK) for n in folders if (here / n).is_symlink()]
        if leave_out:
            folders[:] = [n for n in folders if (here / n).resolve() != leave_out.resolve()]
        for name in names:
            if not name.startswith(".") and Path(name).suffix.lower() in SUFFIXES:
                yield here / name


def _reason_against(file: Path) -> Skipped | None:
    """Why a file of a folder is not ingested; None if it is."""
    if file.is_symlink():
        return Skipped(path=file, why=_LINK)
    if not file.is_file():
        return Skipped(path=file, why="it is no regular file")
    try:
        str(file.resolve()).encode()  # the name of its records
    except UnicodeEncodeError:
        return Skipped(path=file, why="its name is not UTF-8", is_failure=True)
    return None


@dataclass(frozen=True, kw_only=True)
class Read:
    """The chunks of documents. sources: the documents that were read, those without text too."""

    chunks: Sequence[DocumentChunk]
    sources: Sequence[str]
    skipped: Sequence[Skipped]


def read_chunks(files: Sequence[Path], model: Model, chunk_size: int) -> Read:
    """The chunks of ``files``, real paths, each of at most ``chunk_size`` tokens of ``model``.

    A file that cannot be read is skipped: it must not keep the others from being ingested.

    Raises:
        EmptyInput: the files hold no text.
        InvalidOption: ``chunk_size`` is not positive, or none of them can be read.
    """
    if chunk_size < 1:
        raise InvalidOption(f"chunk size {chunk_size}; it must be at least 1 token")
    chunks: list[DocumentChunk] = []
    sources, skipped = [], []
    for file in files:
        try:
            whole = read_document(file)
        except InvalidOption as error:
            why = f"it {str(error).removeprefix(f'{file} ')}"
            skipped.append(Skipped(path=file, why=why, is_failure=True))
            continue
        source = str(file)
        sources.append(source)
        texts = _split(whole, model, chunk_size, markdown=file.suffix.lower() == ".md")
        chunks += [
            DocumentChunk(source=source, number=n, text=text) for n, text in enumerate(texts)
        ]
    if not sources:
        first = skipped[0]
        raise InvalidOption(
            f"none of the {len(files)} documents can be read; {first.path}, the first: {first.why}"
        )
    if not chunks:
        raise EmptyInput(f"the {len(files)} documents hold no text")
    return Read(chunks=chunks, sources=sources, skipped=skipped)


def _split(text: str, model: Model, chunk_size: int, *, markdown: bool) -> list[str]:
    body = normalise(text)
    if len(model.tokenize(body, special=False)) <= chunk_size:
        return [body] if body else []
    try:
        from semantic_text_splitter import MarkdownSplitter, TextSplitter
    except ImportError as error:
        raise MissingExtra.of("semantic-text-splitter", "chroma") from error
    kind = MarkdownSplitter if markdown else TextSplitter
    splitter = kind.from_huggingface_tokenizer(model.tokenizer.backend_tokenizer, chunk_size)
    return [text for chunk in splitter.chunks(body) if (text := normalise(chunk))]
