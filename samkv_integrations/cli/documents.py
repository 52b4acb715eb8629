"""The documents that ``samkv ingest`` reads, and the chunks that it makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samkv_integrations.cache.chunk import normalise
from samkv_integrations.documents import read_text
from samkv_integrations.errors import EmptyInput, InvalidOption, MissingExtra
from samkv_integrations.model.model import Model

SUFFIXES = (".txt", ".md")


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


def find_documents(paths: Sequence[Path], leave_out: Path | None = None) -> list[Path]:
    """The files among ``paths`` and the documents in the folders among them, sorted, once each.

    leave_out: a folder in which nothing is looked for. Hidden files and folders are left out too.

    Raises:
        InvalidOption: a path does not exist, or is a file of another kind.
        EmptyInput: there is no document.
    """
    found: set[Path] = set()
    for path in paths:
        if path.is_dir():
            found.update(
                file
                for file in path.rglob("*")
                if file.suffix.lower() in SUFFIXES
                and file.is_file()
                and not any(part.startswith(".") for part in file.relative_to(path).parts)
                and not (leave_out and file.resolve().is_relative_to(leave_out.resolve()))
            )
        elif not path.exists():
            raise InvalidOption(f"{path} does not exist; give files or folders of documents")
        elif path.suffix.lower() not in SUFFIXES:
            raise InvalidOption(f"{path} is not a document; known kinds: {', '.join(SUFFIXES)}")
        else:
            found.add(path)
    if not found:
        raise EmptyInput(
            f"no document ({', '.join(SUFFIXES)}) in {', '.join(map(str, paths))}; "
            "give a folder that holds some"
        )
    return sorted(found)


def read_chunks(files: Sequence[Path], model: Model, chunk_size: int) -> list[DocumentChunk]:
    """The chunks of ``files``, each of at most ``chunk_size`` tokens of ``model``.

    Raises EmptyInput if the files hold no text.
    """
    if chunk_size < 1:
        raise InvalidOption(f"chunk size {chunk_size}; it must be at least 1 token")
    chunks = []
    for file in files:
        texts = _split(read_text(file), model, chunk_size, markdown=file.suffix.lower() == ".md")
        source = str(file.resolve())
        chunks += [
            DocumentChunk(source=source, number=n, text=text) for n, text in enumerate(texts)
        ]
    if not chunks:
        raise EmptyInput(f"the {len(files)} documents hold no text")
    return chunks


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
