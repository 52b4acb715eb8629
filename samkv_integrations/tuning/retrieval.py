"""The documents of questions: what the collection holds nearest to each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from samkv_integrations.bench.data import Question
from samkv_integrations.bench.question_caches import prompt_tokens
from samkv_integrations.chroma.link import ChromaLink, nearest
from samkv_integrations.chroma.records import Records
from samkv_integrations.errors import EmptyInput

MOST_CHUNKS = 2_000
"""Chunks that questions are made of: the first ones of a collection."""


@dataclass(kw_only=True)
class Retrieval:
    """What becomes of questions on their way to a prompt.

    too_long: left out, as prompt and answer exceed the context window. uncached: left out, as a
    chunk has no cache, so that there is nothing to measure.
    """

    too_long: int = 0
    uncached: int = 0

    def with_documents(
        self,
        link: ChromaLink,
        questions: Sequence[Question],
        *,
        top_k: int,
        max_new_tokens: int,
        chat: bool,
        most: int,
    ) -> list[Question]:
        """The first ``most`` questions that can be asked, each with its nearest chunks.

        A question that has documents keeps them: another retriever has found them.

        Raises EmptyInput if there is none, else as `nearest` does.
        """
        found: list[Question] = []
        for question in questions:
            if len(found) == most:
                break
            documents = question.documents or tuple(
                one.text for one in nearest(link, question.question, top_k)
            )
            ready = replace(question, documents=documents, max_new_tokens=max_new_tokens)
            if self._can_be_asked(link, ready, chat=chat):
                found.append(ready)
        if not found:
            raise EmptyInput(
                f"none of {len(questions)} questions can be asked: {self.too_long} prompts are "
                f"longer than the context window, {self.uncached} have chunks without a cache; "
                "retrieve fewer chunks with --top-k, or run 'samkv store sync'"
            )
        return found

    def _can_be_asked(self, link: ChromaLink, question: Question, *, chat: bool) -> bool:
        engine = link.engine
        n_tokens = prompt_tokens(engine.model, question, chat=chat)
        if n_tokens + question.max_new_tokens > engine.model.context_window:
            self.too_long += 1
            return False
        chunks = engine.chunks.refer(question.documents)
        if any(ref.state != "cached" for ref in engine.chunks.look_up(chunks, "exists")):
            self.uncached += 1
            return False
        return True


def texts_of(link: ChromaLink, most: int = MOST_CHUNKS) -> list[str]:
    """The texts of a collection's first records, each once."""
    texts = dict.fromkeys(_texts(Records(link.collection), most))
    return [text for text in texts if text.strip()]


def _texts(records: Records, most: int) -> Iterator[str]:
    ids = sorted(records.ids(None))[:most]
    for part in records.slices(len(ids)):
        rows = records.read(records.collection, ids=ids[part], include=["documents"])
        at = dict(zip(rows["ids"], rows["documents"] or (), strict=True))
        yield from (at[id_] or "" for id_ in ids[part] if id_ in at)
