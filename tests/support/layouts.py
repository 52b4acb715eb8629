"""Layouts of prompts that hold whole chunks, one right after the other."""

from __future__ import annotations

from samkv_integrations.prompt.layout import ChunkPart, Layout
from samkv_integrations.runtimes.transformers.layout import TensorLayout
from samkv_integrations.store.chunk import BlockScheme


def layout_of(
    lengths: tuple[int, ...], *, before: int = 0, size: int = 4, question: int = 2
) -> Layout:
    """Chunks of these lengths behind a prefix of one token and ``before`` others.

    Blocks have ``size`` tokens; the first and the last two of a chunk are its anchors. A chunk's
    token ids are all 9, those of the question 5.
    """
    scheme = BlockScheme(size=size)
    ids, chunks = [1] * (1 + before), []
    for n in lengths:
        chunks.append(ChunkPart.whole(scheme.of(n), len(ids)))
        ids += [9] * n
    return Layout([*ids, *[5] * question], chunks, (1,))


def tensor_layout_of(
    lengths: tuple[int, ...], *, before: int = 0, question: int = 2
) -> TensorLayout:
    """The same as tensors, in blocks of four tokens."""
    return TensorLayout(layout_of(lengths, before=before, question=question))
