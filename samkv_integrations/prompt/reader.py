"""From a prompt to its token ids, and the chunks that they contain."""

from __future__ import annotations

import secrets
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate

from samkv_integrations.errors import Given, InvalidOption, PromptTooLong, StoreError
from samkv_integrations.prompt.handles import Handles
from samkv_integrations.prompt.layout import PromptChunk, find_runs
from samkv_integrations.prompt.quoting import Chat, RenderedPrompt
from samkv_integrations.prompt.rag_template import bodies_of, shorten
from samkv_integrations.prompt.text import ModelText
from samkv_integrations.store.base import Outage, Store
from samkv_integrations.store.chunk import ChunkRef, Fingerprint
from samkv_integrations.store.windows import MIN_RUN, ChunkIndex, MemoryIndex

Prompt = str | RenderedPrompt | Sequence[dict[str, str]] | Chat
"""A string, or chat messages (``role``, ``content``) for the model's chat template, as a `Chat` if
there are tools. Control tokens count in a string, and where the template writes them; in a message
they are text."""

MAX_EXPECTED = 4096
"""Announced chunks that are remembered; the oldest are dropped first."""


class PromptReader:
    """Reads the prompts of one engine. Thread-safe.

    The prompt is tokenised once, as a whole, and its tokens are never changed: a cache is used for
    the token ids that prompt and chunk have in common, see `find_runs`. outage: logs a failure of
    the store, during which only announced chunks are found.
    """

    def __init__(self, model: ModelText, store: Store, outage: Outage) -> None:
        self._model, self._store, self._outage = model, store, outage
        self.handles = Handles()
        self._lock = threading.Lock()
        self._secret = secrets.token_bytes(32)
        self._expected = MemoryIndex(self._secret)  # announced chunks, by text
        self._order: OrderedDict[str, str] = OrderedDict()  # text -> key, oldest first

    def render(self, prompt: Prompt, *, most: int | None = None) -> RenderedPrompt:
        """The prompt as one string.

        most: raises PromptTooLong for a chat of more turns, because templates are slow.

        Raises InvalidOption if it is not a prompt, or if the chat template refuses it.
        """
        if isinstance(prompt, str):
            return RenderedPrompt(prompt)
        if isinstance(prompt, RenderedPrompt):
            return prompt
        turns: object = prompt.messages if isinstance(prompt, Chat) else prompt
        if not isinstance(turns, Sequence) or not turns:
            raise InvalidOption(
                Given("prompt", turns), "; it must be a string, or a list of chat messages"
            )
        if most is not None and len(turns) > most:
            raise self._too_long(f"a chat of {len(turns)} turns", most)
        for message in turns:  # a template would write nothing for a message without content
            is_one = isinstance(message, Mapping) and isinstance(message.get("role"), str)
            if not is_one or not isinstance(message.get("content"), str):
                raise InvalidOption(
                    f"message {message!r} of the prompt; it must be a mapping of role and content, "
                    "two strings"
                )
        return self._model.render_chat(prompt)

    def count_tokens(self, prompt: Prompt, made_by: Fingerprint, *, most: int | None = None) -> int:
        """Tokens of a prompt, with the chunks of its handles.

        Raises PromptTooLong if there are more than ``most``; None for no limit.
        """
        spelled, _ = self._spelled_out(self.render(prompt, most=most), (), made_by)
        return len(self._tokens_of(spelled, most))

    def _tokens_of(self, rendered: RenderedPrompt, most: int | None) -> list[int]:
        """The token ids. Raises PromptTooLong for more than ``most``, as early as possible."""
        least = len(rendered.text) // self._model.longest_token
        if most is not None and least > most:
            what = f"prompt of at least {least} tokens (chunks at full size)"
            raise self._too_long(what, most)
        ids = self._model.tokenize_prompt(rendered)
        if most is not None and len(ids) > most:
            raise self._too_long(f"prompt of {len(ids)} tokens (chunks at full size)", most)
        return ids

    def _too_long(self, what: str, most: int) -> PromptTooLong:
        return PromptTooLong(
            f"{what} exceeds the context window of {most} of {self._model.name!r}; shorten "
            f"it or its history, or retrieve fewer chunks{self._model.wider_window}"
        )

    def read(
        self, prompt: Prompt, chunks: Sequence[str] | None, made_by: Fingerprint, *,
        window: int | None = None,
    ) -> tuple[list[int], list[PromptChunk]]:  # fmt: skip
        """The token ids of a prompt, and its chunks in order.

        chunks: texts of chunks to look for; None for the announced ones and those of the store.
            Chunks of handles are always looked for.
        made_by: fingerprint of the chunks to find in the store.
        window: the context window of an answer; None if the prompt is not to be answered.

        Raises:
            InvalidOption: the prompt does not contain one of ``chunks``.
            PromptTooLong: the prompt has more tokens than the window.
            HandleError: there is a window, and something cut a handle in two, or its chunk has been
                deleted.
        """
        rendered, bodies = self._spelled_out(
            self.render(prompt, most=window), chunks, made_by, must_be_whole=window is not None
        )
        ids = self._tokens_of(rendered, window)  # before chunks are tokenised or looked for
        of_store = made_by if chunks is None else None
        indexes: list[ChunkIndex] = []
        given = [] if chunks is None else bodies_of(chunks)
        if named := [*bodies, *given]:
            if "" in named:
                raise InvalidOption(
                    "an empty chunk was given; chunks must hold text, so leave it out"
                )
            index = MemoryIndex(self._secret)
            for body in named:
                index.add(body, self._model.tokenize(body, special=False))
            indexes.append(index)
        if chunks is None:
            indexes.append(self._expected)
        if isinstance(prompt, str):  # other prompts mark which names of special tokens count
            quoted = self._with_documents_quoted(rendered, indexes, of_store)
            ids = ids if quoted == rendered else self._model.tokenize_prompt(quoted)
        found = self._runs(ids, indexes, of_store)
        for chunk in found:
            if chunk.index < len(indexes):  # the keys of these indexes are texts
                chunk.key, chunk.text = "", chunk.key
        texts = {chunk.text for chunk in found}
        for body in given:
            if body not in texts and body not in rendered.text:
                raise InvalidOption(
                    f"chunk {shorten(body)!r} does not occur in the prompt; put the text of every "
                    "chunk (or its handle) where the model should read it"
                )
        return ids, found

    def _spelled_out(
        self, rendered: RenderedPrompt, chunks: Sequence[str] | None, made_by: Fingerprint, *,
        must_be_whole: bool = False,
    ) -> tuple[RenderedPrompt, list[str]]:  # fmt: skip
        """The prompt with the texts of chunks in place of their handles, and these texts.

        A handle inside a document is text. Documents are ``chunks``, or the announced ones.
        must_be_whole: raises HandleError for a piece of a handle outside documents.
        """
        text = rendered.text
        if "[[" not in text and "]]" not in text:
            return rendered, []  # neither a handle nor a piece of one
        with self._lock:
            documents = list(self._order) if chunks is None else bodies_of(chunks)
        spans: list[range] = []  # documents that quote handles, then handles that are replaced
        for body in documents:
            at = text.find(body) if "[[" in body or "]]" in body else -1
            while at >= 0:
                spans.append(range(at, at + len(body)))
                at = text.find(body, at + len(body))
        quoting = list(spans)
        parts: list[RenderedPrompt] = []
        bodies: list[str] = []
        end = 0

        @cache  # a handle may occur many times
        def is_kept(body: str) -> bool:
            """Whether a chunk is not deleted: the store has its text or cache, or cannot tell."""
            with self._outage.survived():
                key = self._store.key(made_by, self._model.tokenize(body, special=False))
                return self._store.text(key) is not None or self._store.contains(key, made_by)
            return True

        for span in self.handles.find(text):
            is_quoted = any(of.start <= span.start and span.stop <= of.stop for of in quoting)
            if not is_quoted and is_kept(span.body):
                parts.append(rendered.part(end, span.start))
                parts.append(self._model.special_tokens.quote(span.body))
                bodies.append(span.body)
                spans.append(range(span.start, span.stop))
                end = span.stop
        parts.append(rendered.part(end, len(text)))
        if must_be_whole:
            end = 0
            for each in sorted(spans, key=lambda of: of.start):
                self.handles.require_whole(text[end : each.start])
                end = max(end, each.stop)
            self.handles.require_whole(text[end:])
        return RenderedPrompt.joined(parts, is_chat=rendered.is_chat), bodies

    def _runs(
        self, ids: Sequence[int], indexes: Sequence[ChunkIndex], of_store: Fingerprint | None
    ) -> list[PromptChunk]:
        """Chunks of the indexes in a prompt, and of the store with the fingerprint ``of_store``."""
        if of_store is not None:
            try:
                return find_runs(ids, [*indexes, self._store.chunk_index(of_store)])
            except StoreError as error:
                self._outage.tell(error)
        return find_runs(ids, indexes)

    def _with_documents_quoted(
        self,
        rendered: RenderedPrompt,
        indexes: Sequence[ChunkIndex],
        of_store: Fingerprint | None,
    ) -> RenderedPrompt:
        """The prompt with the names of special tokens inside its chunks marked as text."""
        names = self._model.special_tokens.quote(rendered.text).quoted
        if not names:
            return rendered
        ids, spans = self._model.token_spans(rendered.text)
        starts, quoted = [start for start, _ in spans], set(rendered.quoted)
        of_chunk = [False] * (len(ids) + 1)
        for chunk in self._runs(ids, indexes, of_store):
            for run in chunk.runs:
                of_chunk[run.position : run.span.stop] = [True] * len(run)
        n_others = [0, *accumulate(not each for each in of_chunk)]
        for name in names:
            first = max(bisect_right(starts, name.start) - 1, 0)
            last = bisect_right(starts, name.stop - 1)
            # a token that merged with text around the chunk is in no run
            first += starts[first] < name.start
            last -= spans[last - 1][1] > name.stop
            if first < last and n_others[last] == n_others[first]:
                quoted.add(name)
        return replace(rendered, quoted=tuple(sorted(quoted, key=lambda span: span.start)))

    # -- announced chunks -----------------------------------------------------------------------

    def expect(self, chunks: Sequence[ChunkRef]) -> None:
        """Find these chunks in prompts, stored or not; the latest `MAX_EXPECTED` are remembered."""
        long = {chunk.text: chunk for chunk in chunks if len(chunk.token_ids) >= MIN_RUN}
        with self._lock:
            for body, chunk in long.items():
                self._expected.add(body, chunk.token_ids)
                self._order[body] = chunk.key
                self._order.move_to_end(body)
            while len(self._order) > MAX_EXPECTED:
                self._expected.remove(self._order.popitem(last=False)[0])

    def forget(self, texts: Sequence[str] = (), keys: Collection[str] = ()) -> None:
        """Remove announced chunks by text or by key, and the handles of these texts."""
        bodies = set(bodies_of(texts))
        with self._lock:
            for body in bodies | {body for body, key in self._order.items() if key in keys}:
                self._order.pop(body, None)
                self._expected.remove(body)
        self.handles.forget(bodies)
