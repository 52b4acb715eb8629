"""A prompt string becomes pieces: plain text, and the bodies of chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from samkv_integrations.model.quoting import RenderedPrompt
from samkv_integrations.prompt.finder import Span


@dataclass(frozen=True)
class PlainText:
    """Text that is computed at query time."""

    prompt: RenderedPrompt

    @property
    def text(self) -> str:
        return self.prompt.text


@dataclass(frozen=True)
class ChunkText:
    """The body of a chunk."""

    text: str


Piece = PlainText | ChunkText


def split_prompt(prompt: RenderedPrompt, spans: Sequence[Span] = ()) -> list[Piece]:
    """Cut ``prompt`` at ``spans``; where two overlap, at the earlier or longer one.

    So what stands inside the body of a chunk is never looked at: a document cannot smuggle a
    handle in.
    """
    pieces: list[Piece] = []
    end = 0
    for span in sorted(spans, key=lambda span: (span.start, -span.stop)):
        if span.start >= end:
            if span.start > end:
                pieces.append(PlainText(prompt.part(end, span.start)))
            pieces.append(ChunkText(span.body))
            end = span.stop
    if end < len(prompt.text):
        pieces.append(PlainText(prompt.part(end, len(prompt.text))))
    return pieces
