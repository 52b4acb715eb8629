"""Random requests with random selection inputs, their blocks worked out without `Layout`."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from hypothesis import strategies as st
from torch import Tensor

from samkv_integrations.cache.chunk import BlockScheme
from samkv_integrations.methods.base import ProbedLayer, SelectionInputs
from samkv_integrations.prompt.layout import ChunkPart, Layout, Run


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

    lengths: tokens of each chunk. cut: how likely it is that the prompt holds a part of one only:
    from one token to another, or two such runs with text between. before: plain tokens in front of
    the first chunk, besides the prefix, which is one token where ``prefix`` is set. heads: query
    heads a group. window: tokens of the question; with 0 the prompt ends with a chunk.
    scale: spread of the queries; large ones make every softmax one-sided.
    """

    seed: int
    lengths: tuple[int, ...]
    cut: float = 0.0
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
        "cut": st.sampled_from((0.0, 0.6)),
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
    """A layout, selection inputs for it and what a probe shows, all of them in float64.

    queries: (L, H, R, D), rotated by cos and sin (R, D), of the R uncached tokens. mean_query: (L,
    H, D). blocks: all blocks in prompt order.
    exact: for each chunk, whether one run of it begins right after the prefix that it was prefilled
    with. held: of each chunk, which of its tokens the prompt holds. positions: in the prompt, of
    the context tokens.
    """

    shape: Shape
    layout: Layout
    inputs: SelectionInputs
    queries: Tensor
    cos: Tensor
    sin: Tensor
    mean_query: Tensor
    blocks: list[Block]
    exact: list[bool]
    held: list[list[int]]
    positions: list[int]

    def probed(self, layer: int) -> ProbedLayer:
        """What a probe over everything shows of ``layer``."""
        return ProbedLayer(queries=self.queries[layer], cos=self.cos, sin=self.sin)

    @property
    def n_context(self) -> int:
        return len(self.positions)

    @property
    def spans(self) -> list[range]:
        """The context tokens of each chunk."""
        ends = list(accumulate(map(len, self.held)))
        return [range(end - len(of), end) for end, of in zip(ends, self.held, strict=True)]

    def middle(self, chunk: int) -> list[Block]:
        return [b for b in self.blocks if b.chunk == chunk and not b.anchor]

    def chunk_of(self, token: int) -> int:
        return next(b.chunk for b in self.blocks if b.start <= token < b.stop)


def blocks_of(shape: Shape, held: list[list[int]]) -> list[Block]:
    """Chunks cut into blocks by counting, one after another; without those that nothing is of."""
    blocks: list[Block] = []
    start = 0
    for chunk, (length, tokens) in enumerate(zip(shape.lengths, held, strict=True)):
        n_blocks = len(range(0, length, shape.size))
        for i in range(n_blocks):
            n_held = sum(i * shape.size <= token < (i + 1) * shape.size for token in tokens)
            if not n_held:
                continue
            from_end = n_blocks - 1 - i
            blocks.append(
                Block(
                    index=len(blocks),
                    chunk=chunk,
                    start=start,
                    stop=start + n_held,
                    anchor=i < shape.n_init or from_end < shape.n_local,
                    initial=i < shape.n_init,
                )
            )
            start += n_held
    return blocks


def runs_of(rng: random.Random, length: int) -> list[range]:
    """A part of a chunk of ``length`` tokens: one run, or two that do not touch."""
    start = rng.randrange(length)
    stop = rng.randint(start + 1, length)
    if stop - start < 3 or rng.random() < 0.4:
        return [range(start, stop)]
    first = rng.randint(start + 1, stop - 2)
    return [range(start, first), range(rng.randint(first + 1, stop - 1), stop)]


def request_of(shape: Shape) -> Request:
    """The request of ``shape``: its content follows from the seed."""
    rng, cuts = random.Random(shape.seed), random.Random(f"cuts of {shape.seed}")
    generator = torch.Generator().manual_seed(shape.seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    scheme = BlockScheme(size=shape.size, n_init=shape.n_init, n_local=shape.n_local)
    prefix = (1,) if shape.prefix else ()
    ids = [*prefix] + [7] * shape.before
    parts, held, positions = [], [], []
    for chunk, length in enumerate(shape.lengths):
        if chunk and rng.random() < 0.5:
            ids += [8] * rng.randint(1, 3)
        is_cut = cuts.random() < shape.cut
        of_chunk = runs_of(cuts, length) if is_cut else [range(length)]
        runs = []
        for run in of_chunk:
            if runs:
                ids += [8] * cuts.randint(1, 3)
            runs.append(Run(len(ids), run.start, run.stop))
            positions += range(len(ids), len(ids) + len(run))
            ids += [9] * len(run)
        parts.append(ChunkPart(runs=tuple(runs), blocks=scheme.of(length)))
        held.append([token for run in of_chunk for token in run])
    layout = Layout.of(ids + [5] * shape.window, parts, prefix)
    blocks = blocks_of(shape, held)
    n_chunks, n_blocks, n_context = len(shape.lengths), len(blocks), len(positions)
    n_layers, n_heads, dim = shape.n_layers, shape.groups * shape.heads, shape.dim

    block_means = normal(n_layers, n_blocks, shape.groups, dim)
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
            if len(held[chunk]) < shape.lengths[chunk]:  # one may be of a block that is not held
                block_max[layer, chunk] = -1 if cuts.random() < 0.2 else top
                block_min[layer, chunk] = -1 if cuts.random() < 0.2 else low
            # between the two, or just beyond, so that both cases of equation 2 occur
            mix = rng.uniform(-0.3, 1.3)
            between = mix * block_means[layer, top] + (1 - mix) * block_means[layer, low]
            anchor_mean[layer, chunk] = between + 0.05 * anchor_mean[layer, chunk]
            for block in middle:
                for token in range(block.start, block.stop):
                    outliers[layer, token] = rng.random() < 0.2
    stable = sorted(rng.sample(range(n_layers), rng.randint(1, n_layers)))
    inputs = SelectionInputs(
        n_layers=n_layers,
        block_means=block_means,
        local_query=normal(n_layers, n_chunks, n_heads, dim),
        anchor_mean=anchor_mean,
        block_max=block_max,
        block_min=block_min,
        outliers=outliers,
        stable_layers=tuple(stable),
    )
    n_missed = int(layout.uncached.sum())
    turns = normal(n_missed, dim // 2)
    angle = torch.cat((turns, turns), dim=1)  # both halves turn alike, as in every rotary model
    one_run = len(parts[0].runs) == 1 and held[0][0] == 0
    first_is_exact = shape.before == 0 and one_run
    return Request(
        shape=shape,
        layout=layout,
        inputs=inputs,
        queries=shape.scale * normal(n_layers, n_heads, n_missed, dim),
        cos=angle.cos(),
        sin=angle.sin(),
        mean_query=shape.scale * normal(n_layers, n_heads, dim),
        blocks=blocks,
        exact=[first_is_exact and chunk == 0 for chunk in range(n_chunks)],
        held=held,
        positions=positions,
    )


def as_stored(request: Request) -> Request:
    """The same request in float32, as a real one comes."""

    def narrow(of: object) -> dict[str, Tensor]:
        return {
            name: value.float()
            for name, value in vars(of).items()
            if isinstance(value, Tensor) and value.dtype == torch.float64
        }

    inputs = replace(request.inputs, **narrow(request.inputs))
    return replace(request, inputs=inputs, **narrow(request))
