"""From a prompt to its pieces: rendered, and cut at handles and at the texts of chunks."""

from __future__ import annotations

from collections.abc import Sequence

from samkv_integrations.model.chat import Chat
from samkv_integrations.model.model import Model
from samkv_integrations.model.quoting import RenderedPrompt
from samkv_integrations.prompt.announced import Announced
from samkv_integrations.prompt.finder import KnownTexts, find_given
from samkv_integrations.prompt.handles import Handles
from samkv_integrations.prompt.length import refuse_far_too_long, refuse_too_long
from samkv_integrations.prompt.resolve import OnMiss
from samkv_integrations.prompt.split import Piece, PlainText, split_prompt
from samkv_integrations.prompt.text import bodies_of, check_messages

Prompt = str | RenderedPrompt | Sequence[dict[str, str]] | Chat
"""A string, read to the letter: control tokens in it count. Or chat messages (``role``,
``content``) for the model's chat template, as a `Chat` if there are tools: those that the template
writes count, and no others."""


class PromptReader:
    """Reads the prompts of one engine.

    known: the chunks that are found by their text. handles: those that stand for a chunk.
    announced: chunks that a retriever has found and no prompt has held yet.
    """

    def __init__(self, model: Model, known: KnownTexts) -> None:
        self._model = model
        self.known = known
        self.handles = Handles()
        self.announced = Announced()

    def render(self, prompt: Prompt) -> RenderedPrompt:
        """The prompt as one string.

        Raises InvalidOption if it is no prompt, or if the chat template refuses.
        """
        if isinstance(prompt, str):
            return RenderedPrompt(prompt)
        if isinstance(prompt, RenderedPrompt):
            return prompt
        check_messages(prompt.messages if isinstance(prompt, Chat) else prompt)
        return self._model.render_chat(prompt)

    def pieces(self, prompt: Prompt, chunks: Sequence[str] | None) -> list[Piece]:
        """Cut at handles and at ``chunks``; None for all chunks that are known."""
        rendered = self.render(prompt)
        handles = self.handles.find(rendered.text)
        kept = {body for body in {span.body for span in handles} if self.known.is_kept(body)}
        handles = [span for span in handles if span.body in kept]
        if chunks is None:
            return split_prompt(rendered, [*handles, *self.known.find(rendered.text)])
        return split_prompt(rendered, find_given(rendered.text, chunks, handles))

    def read(
        self,
        prompt: Prompt,
        chunks: Sequence[str] | None,
        on_miss: OnMiss,
        context_window: int | None = None,
    ) -> tuple[list[Piece], int]:
        """`pieces`, and how many announced chunks they hold in a changed form.

        context_window: most tokens of prompt and answer, if fewer than the model's.

        Raises:
            PromptTooLong: it cannot fit, however it is tokenised.
            HandleError: something cut a handle in two, or its chunk has been deleted.
            ChunkNotCached: ``on_miss`` is ``error``, and a chunk is there in a changed form.
        """
        rendered = self.render(prompt)
        refuse_far_too_long(self._model, rendered.text, context_window)
        pieces = self.pieces(rendered, chunks)
        refuse_too_long(self._model, pieces, context_window)
        for piece in pieces:
            if isinstance(piece, PlainText):
                self.handles.require_whole(piece.text)
                self.handles.require_live(piece.text)
        return pieces, self.announced.count(pieces, on_miss) if chunks is None else 0

    def expect(self, bodies: Sequence[str], *, for_next_prompt: bool = False) -> None:
        """Find these chunks too, and wait for them, see `Announced.add`."""
        self.known.expect(bodies)
        self.announced.add(bodies, for_next_prompt=for_next_prompt)

    def forget(self, texts: Sequence[str]) -> None:
        """Find none of these texts in prompts because of what is held here, nor by a handle."""
        bodies = set(bodies_of(texts))
        self.known.forget(texts)
        self.handles.forget(bodies)
        self.announced.forget(bodies)
