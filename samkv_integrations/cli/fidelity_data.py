"""The questions of ``samkv bench fidelity``: shipped, of a user, or of a user's documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from samkv_integrations.bench.data import BUILTIN, Question, load
from samkv_integrations.bench.fidelity import QUESTIONS, Part, of_part, with_fewer
from samkv_integrations.bench.neighbours import neighbour_questions
from samkv_integrations.cli.ingest import SUFFIXES, Found, find_documents, read_chunks
from samkv_integrations.errors import InvalidOption
from samkv_integrations.figures import visible
from samkv_integrations.model.model import Model

FOLDER_DOCUMENTS = 8
"""Chunks of a folder that stand in one prompt, unless it is said how many."""


class FidelityQuestions:
    """Questions of files and folders.

    Args:
        sources: ``builtin`` for those that are shipped, JSON Lines files, and folders of documents.
        part: which half of them.
        n_documents: most documents a question; None for all, and `FOLDER_DOCUMENTS` of a folder.
        chunk_size: longest chunk of a document in a folder, in tokens.

    Raises:
        InvalidOption: a source does not exist or is broken, or an option is out of range.
        UnknownOption: an unknown part.
        EmptyInput: a folder holds no document, or a file no question.
    """

    def __init__(
        self, sources: Sequence[str], part: Part, n_documents: int | None, chunk_size: int
    ) -> None:
        self._part, self._n_documents, self._chunk_size = part, n_documents, chunk_size
        folders = [source for source in sources if Path(source).is_dir()]
        files = [s for s in sources if s not in folders and s != BUILTIN]
        for file in files:
            if not Path(file).exists():
                raise InvalidOption(
                    f"unknown data {file!r}; give {BUILTIN!r}, a JSON Lines file, or a folder of "
                    f"{' and '.join(SUFFIXES)}"
                )
        given = load([str(QUESTIONS)], prompt="rag") if BUILTIN in sources else []
        given += load(files, labelled=False) if files else []
        self._given = self._chosen(given)
        self._folders = {
            Path(name).resolve().name: find_documents([Path(name)]) for name in folders
        }
        if len(self._folders) < len(folders):
            raise InvalidOption(f"two of {', '.join(folders)} have one name; rename one")
        self._of_folders: list[Question] | None = None

    def of(self, model: Model) -> list[Question]:
        """All questions. Documents of folders are cut by the tokenizer of the first ``model``.

        So every model is asked the same.
        """
        if self._of_folders is None:
            self._of_folders = [
                question
                for name, found in self._folders.items()
                for question in self._of_folder(name, found, model)
            ]
        questions = [*self._given, *self._of_folders]
        if len({question.id for question in questions}) < len(questions):
            raise InvalidOption("two questions have one id; rename one of the files and folders")
        return questions

    def _of_folder(self, name: str, found: Found, model: Model) -> list[Question]:
        read = read_chunks(found.files, model, self._chunk_size)
        for skipped in (*found.skipped, *read.skipped):
            typer.echo(visible(f"left out: {skipped.path}: {skipped.why}"), err=True)
        n_documents = FOLDER_DOCUMENTS if self._n_documents is None else self._n_documents
        texts = [chunk.text for chunk in read.chunks]
        return of_part(neighbour_questions(texts, n_documents, name), self._part)

    def _chosen(self, questions: Sequence[Question]) -> list[Question]:
        chosen = of_part(questions, self._part)
        most = self._n_documents
        return chosen if most is None else [with_fewer(q, most) for q in chosen]
