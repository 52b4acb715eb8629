"""From a prompt to its pieces: rendered, and cut at handles and at the texts of chunks."""

from __future__ import annotations

from collections.abc import Sequence

from samkv_integrations.model.model import Model
from samkv_integrations.model.quoting import RenderedPrompt
from samkv_integrations.prompt.finder import KnownTexts, find_given
from samkv_integrations.prompt.handles import Handles
from samkv_integrations.prompt.split import Piece, PlainText, split_prompt
from samkv_integrations.prompt.text import bodies_of

Prompt = str | RenderedPrompt | Sequence[dict[str, str]]
"""A string, read to the letter: control tokens in it count. Or chat messages (``role``,
``content``) for the model's chat template: those that the template writes count, and no others."""


class PromptReader:
    """Reads the prompts of one engine.

    known: the chunks that are found by their text. handles: those that stand for a chunk.
    """

    def __init__(self, model: Model, known: KnownTexts) -> None:
        self._model = model
        self.known = known
        self.handles = Handles()

    def render(self, prompt: Prompt) -> RenderedPrompt:
        """The prompt as one string. Raises InvalidOption if the chat template refuses."""
        if isinstance(prompt, str):
            return RenderedPrompt(prompt)
        return prompt if isinstance(prompt, RenderedPrompt) else self._model.render_chat(prompt)

    def pieces(self, prompt: Prompt, chunks: Sequence[str] | None) -> list[Piece]:
        """Cut at handles and at ``chunks``; None for all chunks that are known."""
        rendered = self.render(prompt)
        handles = self.handles.find(rendered.text)
        if chunks is None:
            return split_prompt(rendered, [*handles, *self.known.find(rendered.text)])
        return split_prompt(rendered, find_given(rendered.text, chunks, handles))

    def whole_pieces(self, prompt: Prompt, chunks: Sequence[str] | None) -> list[Piece]:
        """`pieces`. Raises HandleError if something cut a handle in two."""
        pieces = self.pieces(prompt, chunks)
        for piece in pieces:
            if isinstance(piece, PlainText):
                self.handles.require_whole(piece.text)
        return pieces

    def forget(self, texts: Sequence[str]) -> None:
        """Find none of these texts in prompts because of what is held here, nor by a handle."""
        self.known.forget(texts)
        self.handles.forget(set(bodies_of(texts)))
