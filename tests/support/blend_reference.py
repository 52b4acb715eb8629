"""A request computed entry by entry, with lists and not masks, and the blend of the same one."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from samkv_integrations.methods import METHODS
from samkv_integrations.methods.base import Positions, Select
from samkv_integrations.prompt.layout import ChunkPart, Layout, Run
from samkv_integrations.runtimes.transformers.entries.hot import HotChunks
from samkv_integrations.runtimes.transformers.layout import TensorLayout
from samkv_integrations.runtimes.transformers.model.families import Rotation
from samkv_integrations.runtimes.transformers.papers.base import ProbedLayer, Update
from samkv_integrations.runtimes.transformers.papers.samkv import fuse
from samkv_integrations.runtimes.transformers.passes.blend import Blend
from samkv_integrations.runtimes.transformers.passes.loader import CachedEntries
from samkv_integrations.runtimes.transformers.passes.method import Probe
from samkv_integrations.runtimes.transformers.passes.pass_plan import PassPlan, plan_pass
from samkv_integrations.runtimes.transformers.passes.working_cache import DenseCache
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.store.chunk import BlockScheme, ChunkCache, Fingerprint
from samkv_integrations.store.memory import MemoryChunk, MemoryStore
from tests.support.chunks import TINY, decoded, random_chunk
from tests.support.laws import mixed
from tests.support.models import turned

CLOSE = {"rtol": 1e-5, "atol": 1e-4}
BLOCK = 4
LAYERS = 4
Entry = tuple[int, Tensor, Tensor]  # position, key (G, D) rotated, value (G, D)


@dataclass(frozen=True)
class Piece:
    """Tokens of a prompt: those ``rows`` of a chunk if it has a cache.

    chunk: which of the prompt's it is; two pieces may be of one.
    """

    ids: tuple[int, ...]
    cache: ChunkCache | None = None
    rows: range = range(0)
    chunk: int = -1

    @cached_property
    def decoded(self) -> tuple[Tensor, Tensor]:
        """(L, T, G, D) un-rotated keys, and values, of all entries of the chunk."""
        assert self.cache is not None
        return decoded(self.cache)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One request: what is kept and what is recomputed, by context token."""

    pieces: tuple[Piece, ...]
    prefix: tuple[int, ...]
    keep: Tensor  # (L, Nb)
    recompute: Tensor  # (L, Tctx), kept tokens alone
    layout: TensorLayout
    fingerprint: Fingerprint

    @property
    def ids(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.ids]

    def context(self, rotation: Rotation) -> CachedEntries:
        caches = {piece.chunk: piece.cache for piece in self.pieces if piece.cache is not None}
        opened = [MemoryChunk(cache, self.fingerprint) for cache in caches.values()]
        hot = HotChunks(MemoryStore())
        return CachedEntries(self.layout, opened, self.fingerprint, rotation, hot)


def fingerprint(store_bits: int) -> Fingerprint:
    return replace(
        TINY, n_layers=LAYERS, n_heads=4, n_kv_heads=2, head_dim=16, block_size=BLOCK,
        store_bits=store_bits,
    )  # fmt: skip


def case_of(
    seed: int,
    *,
    lengths: tuple[int, ...] = (22, 5, 17),
    cuts: Sequence[Sequence[range]] | None = None,
    prefix: tuple[int, ...] = (1,),
    kept: float = 0.6,
    stale: float = 0.4,
    ends_with_chunk: bool = False,
) -> Case:
    """Random chunk caches, different blocks kept at every layer, any kept token recomputed.

    Entries have 4, 8 and 16 bits in turn.

    cuts: the runs of each chunk that the prompt holds, with text between; None for all of each.
    """
    rng = random.Random(seed)
    made_by = fingerprint((4, 8, 16)[seed % 3])

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(rng.randrange(6, 262) for _ in range(n))

    pieces = [Piece(prefix + tokens(rng.choice((0, 3))))]
    for index, length in enumerate(lengths):
        if index and rng.random() < 0.5:
            pieces.append(Piece(tokens(rng.randint(1, 4))))
        ids, cache = tokens(length), random_chunk(100 * seed + index, length, made_by)
        for number, rows in enumerate([range(length)] if cuts is None else cuts[index]):
            if number:
                pieces.append(Piece(tokens(rng.randint(1, 4))))
            pieces.append(Piece(ids[rows.start : rows.stop], cache, rows, index))
    if not ends_with_chunk:
        pieces.append(Piece(tokens(5)))
    runs: list[list[Run]] = [[] for _ in lengths]
    block_of: list[int] = []  # of each context token
    numbers: dict[tuple[int, int], int] = {}
    start = 0
    for piece in pieces:
        if piece.cache is not None:
            runs[piece.chunk].append(Run(start, piece.rows.start, piece.rows.stop))
            places = [(piece.chunk, row // BLOCK) for row in piece.rows]
            block_of += [numbers.setdefault(place, len(numbers)) for place in places]
        start += len(piece.ids)
    scheme = BlockScheme(size=BLOCK)
    layout = Layout(
        [token for piece in pieces for token in piece.ids],
        [
            ChunkPart(runs=tuple(of_chunk), blocks=scheme.of(length))
            for of_chunk, length in zip(runs, lengths, strict=True)
        ],
        prefix,
    )
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(LAYERS, len(numbers), generator=generator) < kept
    wanted = torch.rand(LAYERS, len(block_of), generator=generator) < stale
    return Case(
        pieces=tuple(pieces),
        prefix=prefix,
        keep=keep,
        recompute=wanted & keep[:, block_of],
        layout=TensorLayout(layout),
        fingerprint=made_by,
    )


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum() / (a.square().sum().sqrt() * b.square().sum().sqrt())


@dataclass
class Reference:
    """A request computed entry by entry. ``entries``: of each layer, what later tokens may read."""

    model: Model
    entries: list[list[Entry]]
    queries: list[dict[int, Tensor]]  # [layer][position]: (H, D) before RoPE
    logits: Tensor
    n_tokens: int
    n_only_carried: int = 0

    def step(self, token: int) -> Tensor:
        """Logits after one token more, at the next place of the whole prompt."""
        hidden = self.model.hf.model.embed_tokens(torch.tensor(token))
        for layer in range(LAYERS):
            query, key, value = projections(self.model, layer, hidden)
            entry = (self.n_tokens, turned(key, self.n_tokens, self.model), value)
            self.entries[layer].append(entry)
            hidden = after_attention(
                self.model, layer, hidden, query, self.n_tokens, self.entries[layer]
            )
        self.n_tokens += 1
        return self.model.hf.lm_head(self.model.hf.model.norm(hidden))


def projections(model: Model, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query (H, D), key and value (G, D) of one token, before RoPE."""
    block = model.hf.model.layers[layer]
    attn, x = block.self_attn, block.input_layernorm(hidden)
    query = attn.q_proj(x).view(model.n_heads, model.head_dim)
    key = attn.k_proj(x).view(model.n_kv_heads, model.head_dim)
    value = attn.v_proj(x).view(model.n_kv_heads, model.head_dim)
    if hasattr(attn, "q_norm"):
        query, key = attn.q_norm(query), attn.k_norm(key)
    return query, key, value


def after_attention(
    model: Model,
    layer: int,
    hidden: Tensor,
    query: Tensor,
    position: int,
    entries: list[Entry],
) -> Tensor:
    """One token through one layer; it sees the entries at its own and earlier positions."""
    block = model.hf.model.layers[layer]
    visible = [(key, value) for at, key, value in entries if at <= position]
    rotated = turned(query, position, model)
    per_group = model.n_heads // model.n_kv_heads
    heads = []
    for h in range(model.n_heads):
        keys = torch.stack([key[h // per_group] for key, _ in visible])
        values = torch.stack([value[h // per_group] for _, value in visible])
        logits = keys @ rotated[h] / math.sqrt(model.head_dim)
        heads.append(torch.softmax(logits, dim=0) @ values)
    hidden = hidden + block.self_attn.o_proj(torch.cat(heads))
    return hidden + block.mlp(block.post_attention_layernorm(hidden))


@torch.inference_mode()
def reference(
    model: Model,
    case: Case,
    *,
    weight: float | None | str = "overwrite",
    positions: Positions = "global",
) -> Reference:
    """The whole request.

    weight: of fusion (None: the cosine), or ``overwrite``.
    """
    ids = case.ids
    # of the context: position, keys and values of its chunk, token there, block, prefilled position
    context: list[tuple[int, tuple[Tensor, Tensor], int, int, int]] = []
    numbers: dict[tuple[int, int], int] = {}  # of the blocks, by chunk and block within it
    start = 0
    for piece in case.pieces:
        if piece.cache is not None:
            for at, row in enumerate(piece.rows, start):
                block = numbers.setdefault((piece.chunk, row // BLOCK), len(numbers))
                context.append((at, piece.decoded, row, block, len(case.prefix) + row))
        start += len(piece.ids)
    n_tokens = len(ids)
    # the last token gives the logits and is computed even if it belongs to a chunk
    of_chunk = {at for at, *_ in context if at != n_tokens - 1}
    stale = [
        {at for index, (at, *_) in enumerate(context) if bool(case.recompute[layer, index])}
        for layer in range(LAYERS)
    ]
    hidden = {at: model.hf.model.embed_tokens(torch.tensor(ids[at])) for at in range(n_tokens)}
    out = Reference(model, [], [], torch.empty(0), n_tokens)
    for layer in range(LAYERS):
        needed = set().union(*stale[layer:])
        rows = [at for at in range(n_tokens) if at not in of_chunk or at in needed]
        fresh = {}
        queries = {}
        for at in rows:
            query, key, value = projections(model, layer, hidden[at])
            fresh[at] = (turned(key, at, model), value)
            queries[at] = query
        entries: list[Entry] = []
        kept = set()
        for at, (keys, values), row, block, prefilled in context:
            if at not in of_chunk or not bool(case.keep[layer, block]):
                continue
            kept.add(at)
            where = at if positions == "global" else prefilled
            key, value = turned(keys[layer, row], where, model), values[layer, row]
            if at in stale[layer]:
                new_key, new_value = fresh[at]
                if weight == "overwrite":
                    key, value = new_key, new_value
                else:
                    t_key = cosine(new_key, key) if weight is None else weight
                    t_value = cosine(new_value, value) if weight is None else weight
                    key = t_key * new_key + (1 - t_key) * key
                    value = t_value * new_value + (1 - t_value) * value
            entries.append((at, key, value))
        # tokens that only pass through leave no entry behind
        passed = {at for at in rows if at in of_chunk and at not in kept}
        entries += [(at, *fresh[at]) for at in rows if at not in kept]
        entries.sort(key=lambda entry: entry[0])
        hidden = {
            at: after_attention(model, layer, hidden[at], queries[at], at, entries) for at in rows
        }
        out.n_only_carried += len(passed)
        entries = [entry for entry in entries if entry[0] not in passed]
        out.entries.append(entries)
        out.queries.append(queries)
    out.logits = model.hf.lm_head(model.hf.model.norm(hidden[n_tokens - 1]))
    return out


@dataclass(frozen=True, kw_only=True)
class Blended:
    """A pass that has run. probed: its layers, where they were observed instead of kept."""

    logits: Tensor
    cache: DenseCache
    plan: PassPlan
    probed: list[ProbedLayer]


class _Seen(Select):
    """A selection that notes what a probe shows it."""

    def __init__(self) -> None:
        self.probed: list[ProbedLayer] = []

    def score(self, probed: ProbedLayer, layout: TensorLayout) -> Tensor:
        self.probed.append(probed)
        return torch.empty(0)

    def choose(self, *given: object) -> Tensor:
        raise NotImplementedError


def blended(
    model: Model,
    case: Case,
    *,
    recompute: Tensor | None = None,
    update: Update | None = None,
    positions: Positions = "global",
    capacity: int = 0,
    probes: bool = False,
) -> Blended:
    """The pass of a case."""
    layout, rows = case.layout, case.recompute if recompute is None else recompute
    rotation = model.rotation(torch.arange(layout.n_tokens))
    at = layout.context_positions if positions == "global" else layout.prefilled_positions
    context = case.context(model.rotation(at))
    plan = plan_pass(model, layout, case.keep, rows, updates=update is not None)
    context.load(plan.blocks)
    cache, seen = DenseCache(LAYERS, capacity), _Seen()
    probe = Probe(select=seen, layout=layout, rotation=rotation, device=torch.device("cpu"))
    blend = Blend(
        model=model, cached=context, rotation=rotation,
        method=replace(METHODS["reuse"], update=update), cache=None if probes else cache,
        observers=(probe,) if probes else (),
    )  # fmt: skip
    with torch.inference_mode():
        logits = blend.run(plan)
    return Blended(logits=logits, cache=cache, plan=plan, probed=seen.probed)


def assert_entries(cache: DenseCache, entries: list[list[Entry]]) -> None:
    """Every layer holds exactly the reference's entries, in the order of their positions."""
    assert cache.lengths == [len(of_layer) for of_layer in entries]
    for layer, of_layer in enumerate(entries):
        n = cache.lengths[layer]
        assert [at for at, *_ in of_layer] == sorted(at for at, *_ in of_layer)
        keys = torch.stack([key for _, key, _ in of_layer])
        values = torch.stack([value for *_, value in of_layer])
        torch.testing.assert_close(cache.keys[layer][:n], keys, **CLOSE)
        torch.testing.assert_close(cache.values[layer][:n], values, **CLOSE)


def assert_equal(done: Blended, expected: Reference, case: Case) -> None:
    torch.testing.assert_close(done.logits, expected.logits, **CLOSE)
    assert torch.equal(done.plan.kept, case.keep)
    for of_layer in done.plan.layers:  # the attention of a row that sees nothing would be NaN
        assert all(bool((mask == 0).any(-1).all()) for mask in of_layer.masks.values())
    assert_entries(done.cache, expected.entries)


UPDATES: list[tuple[Update | None, float | None | str]] = [
    (None, "overwrite"),
    (fuse, None),
    (partial(mixed, 0.3), 0.3),
]
