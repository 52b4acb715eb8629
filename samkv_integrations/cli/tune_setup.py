"""What ``samkv tune`` measures with: an engine on the caches, and questions with their chunks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samkv_integrations.bench.data import Question
from samkv_integrations.bench.journal import Journal, digest
from samkv_integrations.bench.run_settings import common_settings
from samkv_integrations.bench.variants import Variant
from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.chroma.link import ChromaLink
from samkv_integrations.chroma.records import Records
from samkv_integrations.engine.costs import name_of
from samkv_integrations.engine.engine import Engine
from samkv_integrations.errors import EmptyInput, InvalidOption
from samkv_integrations.tuning.candidates import Candidate
from samkv_integrations.tuning.measure import Measurer
from samkv_integrations.tuning.model_questions import asked_by_model
from samkv_integrations.tuning.questions import distinct, from_chunks, shuffled
from samkv_integrations.tuning.retrieval import Retrieval, texts_of
from samkv_integrations.tuning.run import Run, TuneConfig

MOST_ASKED_BY_MODEL = 100
"""Questions that the model is asked to write; each takes a pass over a chunk, and an answer."""


@dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """Which questions are asked, and how; see the options of the command.

    given: those of a file, None for questions that are made.
    """

    given: Sequence[Question] | None
    asked_by: str
    top_k: int
    max_new_tokens: int
    chat: bool
    seed: int
    most: int

    def __post_init__(self) -> None:
        if self.asked_by not in ("chunks", "model"):
            raise InvalidOption(f"--asked-by {self.asked_by!r}; allowed: chunks, model")
        for name in ("top_k", "max_new_tokens", "most"):
            if getattr(self, name) < 1:
                option = name.replace("_", "-")
                raise InvalidOption(f"--{option} {getattr(self, name)}; give at least 1")


@dataclass(frozen=True, kw_only=True)
class TuneSetup:
    """Ready to measure. folder: of what a run keeps. retrieval: what was left out.

    asked: all questions, without what is retrieved for them.
    """

    link: ChromaLink
    store: ChunkStore
    options: QuestionOptions
    asked: Sequence[Question]
    questions: Sequence[Question]
    retrieval: Retrieval
    folder: Path

    @classmethod
    def of(
        cls, link: ChromaLink, store: ChunkStore, options: QuestionOptions, folder: Path
    ) -> TuneSetup:
        """Make or order the questions, and retrieve their chunks.

        Raises EmptyInput if none can be asked.
        """
        _calibrate(link.engine)
        retrieval, asked = Retrieval(), _questions(link, options, folder)
        questions = retrieval.with_documents(
            link, asked, top_k=options.top_k,
            max_new_tokens=options.max_new_tokens, chat=options.chat, most=options.most,
        )  # fmt: skip
        return cls(
            link=link, store=store, options=options, asked=asked, questions=questions,
            retrieval=retrieval, folder=folder,
        )  # fmt: skip

    @property
    def engine(self) -> Engine:
        """On the collection's caches."""
        return self.link.engine

    @contextmanager
    def run(
        self,
        config: TuneConfig,
        candidates: Sequence[Candidate],
        output: Path | None,
        *,
        fresh: bool,
    ) -> Iterator[tuple[Run, Path]]:
        """A run over the questions, and its folder."""
        settings = self._settings(candidates)
        place, options = output or self.folder / digest(settings), self.options
        with (
            Journal(place, settings, fresh=fresh) as journal,
            Measurer(
                self.engine, candidates, max_new_tokens=options.max_new_tokens, chat=options.chat
            ) as measurer,
        ):
            yield Run(config, candidates, self.questions, measurer, journal), place

    def _settings(self, candidates: Sequence[Candidate]) -> Mapping[str, Any]:
        """What the rows of a run depend on: not the target, nor the minutes.

        Nor single chunks that were found: Chroma's search is approximate, and finds another one
        where two are nearly as near. The collection's chunks stand for them.
        """
        variants = {each.label: Variant.of(each.method) for each in candidates}
        keys = "".join(sorted(Records(self.link.collection).keys()))
        return {
            **common_settings(self.engine.model, self.asked, variants),
            "store_bits": [each.setting.store_bits for each in candidates],
            "collection": self.link.collection.name,
            "chunks": hashlib.sha256(keys.encode()).hexdigest(),
            "chat": self.options.chat,
            "top_k": self.options.top_k,
            "max_new_tokens": self.options.max_new_tokens,
            "most": self.options.most,
        }


def _questions(link: ChromaLink, options: QuestionOptions, folder: Path) -> list[Question]:
    """In the order of asking, without documents. folder: keeps those that the model asks."""
    if options.given is not None:
        return shuffled(distinct(options.given), seed=options.seed)
    texts, engine = texts_of(link), link.engine
    if options.asked_by == "chunks":
        if asked := from_chunks(texts, seed=options.seed):
            return asked
        raise EmptyInput(
            f"no question can be made of the {len(texts)} chunks of collection "
            f"{link.collection.name!r}: none has a title, or a sentence of a few words; give "
            "--questions FILE, or --asked-by model"
        )
    model = engine.model
    settings = {"model": model.name, "weights": model.weights_digest, "chat": options.chat}
    with Journal(folder / f"questions-{digest(settings)}", settings) as journal:
        return asked_by_model(
            engine, texts, journal, seed=options.seed,
            most=min(options.most, MOST_ASKED_BY_MODEL), chat=options.chat,
        )  # fmt: skip


def _calibrate(engine: Engine) -> None:
    """Measure what passes cost if nobody has: ``auto`` decides by it."""
    if engine.store.note(name_of(engine.model)) is None:
        engine.calibrate()
