"""Random requests with random evidence, and their blocks worked out without `Layout`."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from samkv_integrations.layout import BlockScheme, Layout, Segment
from samkv_integrations.methods.parts import Evidence


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block of a request: its number, chunk, tokens [start, stop) of the context, and place."""

    index: int
    chunk: int
    start: int
    stop: int
    anchor: bool
    initial: bool


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a random request is made of.

    lengths: tokens of each chunk. before: plain tokens in front of the first chunk, besides the
    prefix, which is one token where ``prefix`` is set. heads: query heads a group.
    scale: spread of the queries; large ones make every softmax one-sided.
    """

    seed: int
    lengths: tuple[int, ...]
    size: int = 4
    n_init: int = 1
    n_local: int = 2
    prefix: bool = True
    before: int = 0
    n_layers: int = 2
    groups: int = 2
    heads: int = 2
    dim: int = 4
    window: int = 3
    scale: float = 1.0


def shapes(**fixed: object) -> st.SearchStrategy[Shape]:
    """Requests of 1 to 6 chunks, some of them without a middle or a single token long."""
    drawn: dict[str, st.SearchStrategy[object]] = {
        "seed": st.integers(0, 2**32 - 1),
        "lengths": st.lists(st.integers(1, 45), min_size=1, max_size=6).map(tuple),
        "size": st.integers(1, 5),
        "n_init": st.integers(1, 2),
        "n_local": st.integers(1, 2),
        "prefix": st.booleans(),
        "before": st.integers(0, 2),
        "n_layers": st.integers(1, 4),
        "groups": st.integers(1, 3),
        "heads": st.integers(1, 3),
        "dim": st.sampled_from((2, 4, 6)),
        "window": st.integers(1, 4),
        "scale": st.sampled_from((0.3, 1.0, 3.0)),
    }
    return st.builds(Shape, **(drawn | {name: st.just(value) for name, value in fixed.items()}))


@dataclass(frozen=True, kw_only=True)
class Request:
    """A layout, evidence for it and queries, all of them in float64.

    blocks: all blocks in prompt order. exact: for each chunk, whether it begins right after the
    prefix that it was prefilled with.
    """

    shape: Shape
    layout: Layout
    evidence: Evidence
    queries: Tensor
    blocks: list[Block]
    exact: list[bool]

    @property
    def n_context(self) -> int:
        return sum(self.shape.lengths)

    def middle(self, chunk: int) -> list[Block]:
        return [b for b in self.blocks if b.chunk == chunk and not b.anchor]

    def chunk_of(self, token: int) -> int:
        return next(b.chunk for b in self.blocks if b.start <= token < b.stop)


def blocks_of(shape: Shape) -> list[Block]:
    """Chunks cut into blocks by counting, one after another."""
    blocks: list[Block] = []
    first = 0
    for chunk, length in enumerate(shape.lengths):
        n_blocks = len(range(0, length, shape.size))
        for i in range(n_blocks):
            start = first + i * shape.size
            from_end = n_blocks - 1 - i
            blocks.append(
                Block(
                    index=len(blocks),
                    chunk=chunk,
                    start=start,
                    stop=min(start + shape.size, first + length),
                    anchor=i < shape.n_init or from_end < shape.n_local,
                    initial=i < shape.n_init,
                )
            )
        first += length
    return blocks


def request_of(shape: Shape) -> Request:
    """The request of ``shape``: its content follows from the seed."""
    rng = random.Random(shape.seed)
    generator = torch.Generator().manual_seed(shape.seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    scheme = BlockScheme(size=shape.size, n_init=shape.n_init, n_local=shape.n_local)
    prefix = (1,) if shape.prefix else ()
    segments = [Segment(token_ids=prefix + (7,) * shape.before)]
    for chunk, length in enumerate(shape.lengths):
        if chunk and rng.random() < 0.5:
            segments.append(Segment(token_ids=(8,) * rng.randint(1, 3)))
        segments.append(Segment(token_ids=(9,) * length, blocks=scheme.of(length), is_context=True))
    segments.append(Segment(token_ids=(5,) * shape.window))
    layout = Layout.of(segments, prefix)
    blocks = blocks_of(shape)
    n_chunks, n_blocks, n_context = len(shape.lengths), len(blocks), sum(shape.lengths)
    n_layers, n_heads, dim = shape.n_layers, shape.groups * shape.heads, shape.dim

    summaries = normal(n_layers, n_blocks, shape.groups, dim)
    anchor_mean = normal(n_layers, n_chunks, shape.groups, dim)
    block_max = torch.full((n_layers, n_chunks), -1)
    block_min = torch.full((n_layers, n_chunks), -1)
    outliers = torch.zeros(n_layers, n_context, dtype=torch.bool)
    for chunk in range(n_chunks):
        middle = [b for b in blocks if b.chunk == chunk and not b.anchor]
        if not middle:
            continue
        for layer in range(n_layers):
            top, low = rng.choice(middle).index, rng.choice(middle).index
            block_max[layer, chunk], block_min[layer, chunk] = top, low
            # between the two, or just beyond, so that both cases of equation 2 occur
            mix = rng.uniform(-0.3, 1.3)
            between = mix * summaries[layer, top] + (1 - mix) * summaries[layer, low]
            anchor_mean[layer, chunk] = between + 0.05 * anchor_mean[layer, chunk]
            for block in middle:
                for token in range(block.start, block.stop):
                    outliers[layer, token] = rng.random() < 0.2
    stable = sorted(rng.sample(range(n_layers), rng.randint(1, n_layers)))
    turns = normal(n_context + shape.window, dim // 2)
    angle = torch.cat((turns, turns), dim=1)  # both halves turn alike, as in every rotary model
    evidence = Evidence(
        n_layers=n_layers,
        summaries=summaries,
        keys=normal(n_layers, n_context, shape.groups, dim),
        local_query=normal(n_layers, n_chunks, n_heads, dim),
        anchor_mean=anchor_mean,
        block_max=block_max,
        block_min=block_min,
        outliers=outliers,
        stable_layers=tuple(stable),
        context_cos=angle[:n_context].cos(),
        context_sin=angle[:n_context].sin(),
        question_cos=angle[n_context:].cos(),
        question_sin=angle[n_context:].sin(),
    )
    first_is_exact = shape.before == 0
    return Request(
        shape=shape,
        layout=layout,
        evidence=evidence,
        queries=shape.scale * normal(n_layers, n_heads, shape.window, dim),
        blocks=blocks,
        exact=[first_is_exact and chunk == 0 for chunk in range(n_chunks)],
    )


def as_stored(request: Request) -> Request:
    """The same request in float32, as a real one comes."""
    evidence = request.evidence
    narrow = {
        name: value.float()
        for name, value in vars(evidence).items()
        if isinstance(value, Tensor) and value.dtype == torch.float64
    }
    return replace(request, evidence=replace(evidence, **narrow), queries=request.queries.float())
