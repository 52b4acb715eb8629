"""The blend and the decoder against a dense reference that keeps lists, not masks.

The reference runs the model's own submodules layer by layer. For every layer it writes down which
entries (position, key, value) there are, and every row attends, by a softmax written out here, to
those at its own and earlier positions. Nothing of it is shared with the package but the
way back from stored bytes (`tests/cache/test_quantise.py`): not the rotation, not the attention,
not the sets of tokens. Both sides take the same numbers from the caches, so nothing depends on
their bits.

Everything is float32. The two sides add up the same numbers in another order, which moves the
logits and keys of these models (of up to 6) by about 2e-5 after four layers; one wrong row,
position or entry moves them by a hundredth at least (`test_every_kind_of_mistake_would_show`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import pytest
import torch
from torch import Tensor

from samkv_integrations.cache.blocks import BlockScheme
from samkv_integrations.cache.chunk import ChunkCache
from samkv_integrations.cache.fingerprint import Fingerprint
from samkv_integrations.cache.memory import MemoryChunk
from samkv_integrations.engine.blend import Blend
from samkv_integrations.engine.decode import Decoder
from samkv_integrations.engine.dense_cache import DenseCache
from samkv_integrations.engine.loader import Context
from samkv_integrations.engine.plan import PassPlan, plan_pass
from samkv_integrations.methods.ape import ApeAttention
from samkv_integrations.methods.base import Checked, Positions, ProbedLayer, Update, overwrite
from samkv_integrations.methods.parts import Fusion
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.layout import Layout, Segment
from tests.support.chunks import decoded, random_chunk, tiny_fingerprint
from tests.support.models import FAMILIES, tiny_model, turned

CLOSE = {"rtol": 1e-5, "atol": 1e-4}
BLOCK = 4
LAYERS = 4
Entry = tuple[int, Tensor, Tensor]  # position, key (G, D) rotated, value (G, D)


# --- requests ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Tokens of a prompt: a chunk if it has a cache."""

    ids: tuple[int, ...]
    cache: ChunkCache | None = None

    @cached_property
    def decoded(self) -> tuple[Tensor, Tensor]:
        """(L, T, G, D) un-rotated keys, and values, of its entries."""
        assert self.cache is not None
        return decoded(self.cache)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One request: what is kept and what is recomputed, by context token.

    waiting: uncached tokens that the pass leaves out.
    """

    pieces: tuple[Piece, ...]
    prefix: tuple[int, ...]
    keep: Tensor  # (L, Nb)
    recompute: Tensor  # (L, Tctx), kept rows alone
    layout: Layout
    fingerprint: Fingerprint
    waiting: frozenset[int] = frozenset()

    @property
    def ids(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.ids]

    def context(self, cos: Tensor, sin: Tensor) -> Context:
        caches = [piece.cache for piece in self.pieces if piece.cache is not None]
        opened = [MemoryChunk(cache, self.fingerprint) for cache in caches]
        return Context(self.layout, opened, self.fingerprint, cos.float(), sin.float())


def fingerprint(store_bits: int) -> Fingerprint:
    return tiny_fingerprint(
        n_layers=LAYERS, n_heads=4, n_kv_heads=2, head_dim=16, block_size=BLOCK,
        store_bits=store_bits,
    )  # fmt: skip


def case_of(
    seed: int,
    *,
    lengths: tuple[int, ...] = (22, 5, 17),
    prefix: tuple[int, ...] = (1,),
    kept: float = 0.6,
    stale: float = 0.4,
    ends_with_chunk: bool = False,
) -> Case:
    """Random chunk caches, different blocks kept at every layer, any kept row recomputed.

    Entries have 4, 8 and 16 bits in turn.
    """
    rng = random.Random(seed)
    made_by = fingerprint((4, 8, 16)[seed % 3])

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(rng.randrange(6, 262) for _ in range(n))

    pieces = [Piece(prefix + tokens(rng.choice((0, 3))))]
    for index, length in enumerate(lengths):
        if index and rng.random() < 0.5:
            pieces.append(Piece(tokens(rng.randint(1, 4))))
        pieces.append(Piece(tokens(length), random_chunk(100 * seed + index, length, made_by)))
    if not ends_with_chunk:
        pieces.append(Piece(tokens(5)))
    scheme = BlockScheme(size=BLOCK)
    layout = Layout.of(
        [
            Segment(
                token_ids=piece.ids,
                blocks=None if piece.cache is None else scheme.of(len(piece.ids)),
                is_context=piece.cache is not None,
            )
            for piece in pieces
        ],
        prefix,
    )
    generator = torch.Generator().manual_seed(seed)
    n_blocks = sum(math.ceil(n / BLOCK) for n in lengths)
    keep = torch.rand(LAYERS, n_blocks, generator=generator) < kept
    block_of = []
    for length in lengths:
        first = block_of[-1] + 1 if block_of else 0
        block_of += [first + token // BLOCK for token in range(length)]
    wanted = torch.rand(LAYERS, sum(lengths), generator=generator) < stale
    return Case(
        pieces=tuple(pieces),
        prefix=prefix,
        keep=keep,
        recompute=wanted & keep[:, block_of],
        layout=layout,
        fingerprint=made_by,
    )


# --- the reference -----------------------------------------------------------------------------


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum() / (a.square().sum().sqrt() * b.square().sum().sqrt())


@dataclass(frozen=True)
class Apart:
    """Attention in two parts, as APE has it: to these positions, and to all others."""

    positions: frozenset[int]
    temperature: float
    scale: float

    def output(self, at: list[int], logits: Tensor, values: Tensor) -> Tensor:
        """(D,) of one head: each part's own output, weighed by their sums of exponentials."""
        of_context = torch.tensor([place in self.positions for place in at])
        parts = []
        for chosen, temperature, scale in (
            (of_context, self.temperature, self.scale),
            (~of_context, 1.0, 1.0),
        ):
            if bool(chosen.any()):
                own = logits[chosen] / temperature
                mass = scale * float(own.double().exp().sum().log())
                parts.append((mass, torch.softmax(own, dim=0) @ values[chosen]))
        total = sum(math.exp(mass) for mass, _ in parts)
        return sum((math.exp(mass) / total * part for mass, part in parts), torch.zeros(()))


@dataclass
class Reference:
    """A request computed entry by entry. ``entries``: of each layer, what later rows may read."""

    model: Model
    entries: list[list[Entry]]
    queries: list[dict[int, Tensor]]  # [layer][position]: (H, D) before RoPE
    keys: list[dict[int, Tensor]]  # (G, D) before RoPE, of the rows that were computed
    values: list[dict[int, Tensor]]  # (G, D), of the same
    logits: Tensor
    n_tokens: int
    n_only_carried: int = 0
    apart: Apart | None = None

    def step(self, token: int) -> Tensor:
        """Logits after one token more, at the next place of the whole prompt."""
        hidden = self.model.hf.model.embed_tokens(torch.tensor(token))
        for layer in range(LAYERS):
            query, key, value = projections(self.model, layer, hidden)
            entry = (self.n_tokens, turned(key, self.n_tokens, self.model), value)
            self.entries[layer].append(entry)
            hidden = after_attention(
                self.model, layer, hidden, query, self.n_tokens, self.entries[layer], self.apart
            )
        self.n_tokens += 1
        return self.model.hf.lm_head(self.model.hf.model.norm(hidden))


def projections(model: Model, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query (H, D), key and value (G, D) of one row, before RoPE."""
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
    apart: Apart | None = None,
) -> Tensor:
    """One row through one layer; it sees the entries at its own and earlier positions."""
    block = model.hf.model.layers[layer]
    places = [at for at, *_ in entries if at <= position]
    visible = [(key, value) for at, key, value in entries if at <= position]
    rotated = turned(query, position, model)
    per_group = model.n_heads // model.n_kv_heads
    heads = []
    for h in range(model.n_heads):
        keys = torch.stack([key[h // per_group] for key, _ in visible])
        values = torch.stack([value[h // per_group] for _, value in visible])
        logits = keys @ rotated[h] / math.sqrt(model.head_dim)
        if apart is None:
            heads.append(torch.softmax(logits, dim=0) @ values)
        else:
            heads.append(apart.output(places, logits, values))
    hidden = hidden + block.self_attn.o_proj(torch.cat(heads))
    return hidden + block.mlp(block.post_attention_layernorm(hidden))


@torch.inference_mode()
def reference(
    model: Model,
    case: Case,
    *,
    weight: float | None | str = "overwrite",
    positions: Positions = "global",
    passing: Literal["fresh", "cached", "hidden"] = "fresh",
    ape: ApeAttention | None = None,
) -> Reference:
    """The whole request.

    weight: of fusion (None: the cosine), or ``overwrite``. passing: what other rows see of a row
    that is carried through a layer where its block is not kept.
    """
    ids = case.ids
    # the context: position, keys and values of its chunk, row there, block, position of its prefill
    context: list[tuple[int, tuple[Tensor, Tensor], int, int, int]] = []
    start = first_block = 0
    for piece in case.pieces:
        if piece.cache is not None:
            for row in range(len(piece.ids)):
                at, block = start + row, first_block + row // BLOCK
                context.append((at, piece.decoded, row, block, len(case.prefix) + row))
            first_block += math.ceil(len(piece.ids) / BLOCK)
        start += len(piece.ids)
    n_tokens = len(ids)
    # the last row gives the logits and is computed even if it belongs to a chunk
    of_chunk = {at for at, *_ in context if at != n_tokens - 1}
    stale = [
        {at for index, (at, *_) in enumerate(context) if bool(case.recompute[layer, index])}
        for layer in range(LAYERS)
    ]
    hidden = {at: model.hf.model.embed_tokens(torch.tensor(ids[at])) for at in range(n_tokens)}
    apart = ape and Apart(frozenset(of_chunk), ape.temperature, ape.scale)
    out = Reference(model, [], [], [], [], torch.empty(0), n_tokens, apart=apart)
    for layer in range(LAYERS):
        needed = set().union(*stale[layer:])
        waiting = of_chunk | case.waiting
        rows = [at for at in range(n_tokens) if at not in waiting or at in needed]
        fresh = {}
        queries, raw = {}, {}
        for at in rows:
            query, key, value = projections(model, layer, hidden[at])
            fresh[at] = (turned(key, at, model), value)
            queries[at], raw[at] = query, key
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
        # rows that only pass through leave no entry behind
        passed = {at for at in rows if at in of_chunk and at not in kept}
        entries += [(at, *fresh[at]) for at in rows if at not in kept | passed]
        if passing == "fresh":
            entries += [(at, *fresh[at]) for at in passed]
        if passing == "cached":
            entries += [
                (at, turned(keys[layer, row], at, model), values[layer, row])
                for at, (keys, values), row, *_ in context
                if at in passed
            ]
        entries.sort(key=lambda entry: entry[0])
        hidden = {
            at: after_attention(model, layer, hidden[at], queries[at], at, entries, apart)
            for at in rows
        }
        out.n_only_carried += len(passed)
        entries = [entry for entry in entries if entry[0] not in passed]
        out.entries.append(entries)
        out.queries.append(queries)
        out.keys.append(raw)
        out.values.append({at: value for at, (_, value) in fresh.items()})
    out.logits = model.hf.lm_head(model.hf.model.norm(hidden[n_tokens - 1]))
    return out


# --- comparison --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Blended:
    """A pass that has run. plan: what its last layers did. probed: its layers, where they were
    observed instead of kept."""

    logits: Tensor
    cache: DenseCache
    plan: PassPlan
    context: Context
    probed: list[ProbedLayer]


def blended(
    model: Model,
    case: Case,
    *,
    recompute: Tensor | None = None,
    update: Update = overwrite,
    positions: Positions = "global",
    attend: ApeAttention | None = None,
    capacity: int = 0,
    check: tuple[int, Callable[[Checked], Tensor]] | None = None,
    probes: bool = False,
) -> Blended:
    """The pass of a case. check: a layer, and what gives the rows of all later ones there."""
    layout, rows = case.layout, case.recompute if recompute is None else recompute
    uncached = layout.uncached.clone()
    uncached[list(case.waiting)] = False
    plans: list[PassPlan] = []

    def plan_of(of_rows: Tensor) -> PassPlan:
        plan = plan_pass(
            layout, case.keep, of_rows, device=model.device, dtype=model.dtype, uncached=uncached,
            mixes=update is not overwrite, weighs=attend is not None,
        )  # fmt: skip
        plans.append(plan)
        return plan

    def decide(checked: Checked) -> PassPlan:
        after = rows.clone()
        after[check[0] + 1 :] = check[1](checked)
        return plan_of(after)

    cos, sin = model.cos_sin(torch.arange(layout.n_tokens))
    at = layout.context_positions if positions == "global" else layout.prefilled_positions
    context = case.context(cos[at], sin[at])
    plan = plan_of(rows)
    context.load(plan.blocks if check is None else case.keep)
    cache, probed = DenseCache(LAYERS, capacity, weigh=attend), []
    blend = Blend(
        model=model, layout=layout, context=context, cos=cos, sin=sin, update=update,
        weigh=attend, cache=None if probes else cache, observe=probed.append if probes else None,
        check=check and (check[0], decide),
    )  # fmt: skip
    with torch.inference_mode():
        logits = blend.run(plan)
    return Blended(logits=logits, cache=cache, plan=plans[-1], context=context, probed=probed)


def assert_rows(cache: DenseCache, entries: list[list[Entry]]) -> None:
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
    assert_rows(done.cache, expected.entries)


UPDATES: list[tuple[Update, float | None | str]] = [
    (overwrite, "overwrite"),
    (Fusion(), None),
    (Fusion(weight=0.3), 0.3),
]


@pytest.mark.parametrize(("update", "weight"), UPDATES, ids=["overwrite", "cosine", "weight"])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_selection_and_any_rows_equal_the_dense_reference(
    family: str, update: Update, weight: float | None | str
) -> None:
    model = tiny_model(family)
    only_carried = 0
    for seed in range(2):
        case = case_of(seed, prefix=(1,) if seed else ())
        done = blended(model, case, update=update)
        expected = reference(model, case, weight=weight)
        assert_equal(done, expected, case)
        only_carried += expected.n_only_carried
        assert len(set(done.cache.lengths)) > 1, "layers should hold different numbers of rows"
    assert only_carried > 10, "no row passed through a layer where its block is not kept"


@pytest.mark.parametrize(("kept", "stale"), [(0.0, 0.0), (0.3, 0.0), (0.5, 1.0), (1.0, 0.3)])
@pytest.mark.parametrize("lengths", [(1,), (3,), (30,), (9, 1, 14, 4)], ids=str)
def test_any_lengths_and_shares(lengths: tuple[int, ...], kept: float, stale: float) -> None:
    model = tiny_model("llama")
    for seed in (5, 6):
        case = case_of(seed, lengths=lengths, kept=kept, stale=stale)
        done = blended(model, case)
        assert_equal(done, reference(model, case), case)


@pytest.mark.parametrize("stale", [0.0, 0.5])
def test_a_prompt_that_ends_with_a_chunk_computes_its_last_row(stale: float) -> None:
    model = tiny_model("llama")
    for seed in range(3):
        case = case_of(seed, ends_with_chunk=True, stale=stale)
        done = blended(model, case)
        assert_equal(done, reference(model, case), case)


def test_keys_stay_where_they_were_prefilled_with_local_positions() -> None:
    model = tiny_model("llama")
    for seed, prefix in enumerate([(1,), (), (1, 40, 41)]):
        case = case_of(seed, prefix=prefix, stale=0.0)
        done = blended(model, case, positions="local")
        assert_equal(done, reference(model, case, positions="local"), case)
        elsewhere = reference(model, case).logits
        assert float((done.logits - elsewhere).abs().max()) > 0.05


# --- rules 1 and 2 of section 3.3 --------------------------------------------------------------


def one_row(at_layers: tuple[int, ...], kept_at: tuple[int, ...]) -> tuple[Case, int, int]:
    """A case with one row recomputed at some layers, its block kept at some; with the row's number
    in the context and its position."""
    case = case_of(3, lengths=(12, 12), stale=0.0, kept=1.0)
    token, block = 6, 1
    keep, rows = case.keep.clone(), case.recompute.clone()
    keep[:, block] = False
    keep[list(kept_at), block] = True
    rows[list(at_layers), token] = True
    position = int(case.layout.context_positions[token])
    return replace(case, keep=keep, recompute=rows), token, position


@pytest.mark.parametrize(
    ("at_layers", "kept_at"),
    [
        ((0,), (0, 1, 2, 3)),  # example 1 of figure 5: lower layer, upper not
        ((), (0, 1, 2, 3)),  # 2: neither
        ((3,), (0, 1, 2, 3)),  # 3: upper layer, lower not: the cached entries stay below
        ((0, 1, 2, 3), (0, 1, 2, 3)),  # 4: both
        ((3,), (3,)),  # carried through layers where its block is not kept
        ((1, 3), (1, 3)),
        ((2,), (0, 2)),
    ],
    ids=str,
)
def test_one_row(at_layers: tuple[int, ...], kept_at: tuple[int, ...]) -> None:
    model = tiny_model("qwen3")
    case, _, position = one_row(at_layers, kept_at)
    done = blended(model, case)
    expected = reference(model, case)
    assert_equal(done, expected, case)
    # rule 1: computed at every layer up to the last where it is needed, and at none above
    assert int(done.plan.computed.sum()) == (max(at_layers) + 1 if at_layers else 0)
    # rule 2: where it is not recomputed, the cached entry stays to the bit, if it is kept at all
    untouched = blended(model, replace(case, recompute=torch.zeros_like(case.recompute)))
    for layer in range(LAYERS):
        places = [at for at, *_ in expected.entries[layer]]
        assert (position in places) == (layer in kept_at)
        if layer in kept_at:
            row = places.index(position)
            same = torch.equal(done.cache.keys[layer][row], untouched.cache.keys[layer][row])
            assert same == (layer not in at_layers)


def test_a_carried_row_is_seen_by_later_rows_of_its_layer_alone() -> None:
    """Its entry counts in the attention of a layer where its block is not kept, and is gone from
    the working cache, so that answer tokens never see it there."""
    model = tiny_model("llama")
    case, token, position = one_row((3,), (3,))
    done = blended(model, case)
    expected = reference(model, case)
    for layer in range(3):
        assert position not in [at for at, *_ in expected.entries[layer]]
    bare = replace(case, recompute=torch.zeros_like(case.recompute))
    assert float((done.logits - reference(model, bare).logits).abs().max()) > 1e-3


def test_rows_to_recompute_that_are_not_kept_are_ignored() -> None:
    """What `Recompute.rows` promises to those who write a method."""
    model = tiny_model("llama")
    case = case_of(1)
    anywhere = torch.rand(case.recompute.shape, generator=torch.Generator().manual_seed(9)) < 0.4
    of_kept = anywhere & case.keep[:, case.layout.block_of_token]
    assert int(anywhere.sum()) > int(of_kept.sum())
    done = blended(model, case, recompute=anywhere)
    masked = replace(case, recompute=of_kept)
    assert_equal(done, reference(model, masked), masked)


# --- probes --------------------------------------------------------------------------------------


def of_rows(by_position: list[dict[int, Tensor]], layer: int, rows: list[int]) -> Tensor:
    """(heads, n, D) of some rows of a layer, as the reference has them."""
    return torch.stack([by_position[layer][at] for at in rows], dim=1)


def waits_at_first(case: Case, n_last: int) -> Case:
    """The same case without the uncached tokens before the last ones."""
    uncached = case.layout.uncached.nonzero()[:, 0].tolist()
    return replace(case, waiting=frozenset(uncached[1:-n_last]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ends_with_chunk", [False, True])
def test_a_probe_shows_its_queries_and_the_keys_that_they_saw(
    family: str, ends_with_chunk: bool
) -> None:
    """Queries of every token that it computed, keys of the blocks that it is over, both rotated."""
    model = tiny_model(family)
    for n_last in (1, 3, 99):
        case = case_of(2, ends_with_chunk=ends_with_chunk, stale=0.0)
        case = waits_at_first(case, n_last)
        done, expected = blended(model, case, probes=True), reference(model, case)
        torch.testing.assert_close(done.logits, expected.logits, **CLOSE)
        assert done.cache.lengths == [0] * LAYERS, "a probe keeps nothing"
        uncached = case.layout.uncached.nonzero()[:, 0].tolist()
        rows = [at for at in uncached if at not in case.waiting]
        stored = set(case.layout.context_positions.tolist()) - set(uncached)
        assert [probed.layer for probed in done.probed] == list(range(LAYERS))
        for probed in done.probed:
            assert probed.n_layers == LAYERS
            assert probed.scaling == pytest.approx(model.head_dim**-0.5)
            asking = of_rows(expected.queries, probed.layer, rows)
            own = [turned(asking[:, i], at, model) for i, at in enumerate(rows)]
            torch.testing.assert_close(probed.queries, torch.stack(own, dim=1), **CLOSE)
            cos, sin = model.cos_sin(torch.tensor(rows))
            assert torch.equal(probed.cos, cos) and torch.equal(probed.sin, sin)
            keys = [key for at, key, _ in expected.entries[probed.layer] if at in stored]
            torch.testing.assert_close(probed.keys, torch.stack(keys), **CLOSE)


@pytest.mark.parametrize("stale", [0.0, 0.4])
@pytest.mark.parametrize("ends_with_chunk", [False, True])
def test_tokens_that_wait_are_as_if_they_were_not_there(
    stale: float, ends_with_chunk: bool
) -> None:
    """All others keep their positions."""
    model = tiny_model("qwen3")
    for seed in range(3):
        whole = case_of(seed, stale=stale, ends_with_chunk=ends_with_chunk)
        case = waits_at_first(whole, 2)
        if not case.waiting:
            continue
        done = blended(model, case, capacity=2)
        assert_equal(done, reference(model, case), case)
        assert float((done.logits - reference(model, whole).logits).abs().max()) > 1e-3


# --- deciding in mid-pass ----------------------------------------------------------------------


@pytest.mark.parametrize("kept", [1.0, 0.6])
@pytest.mark.parametrize("at_layer", [0, 1, 2, 3])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_check_layer_equals_the_dense_reference(family: str, at_layer: int, kept: float) -> None:
    """Rows computed up to it, of which some go on; what it is shown is what the layer made."""
    model = tiny_model(family)
    for seed in range(2):
        case = case_of(seed, kept=kept, stale=0.7)
        rows = case.recompute[0].repeat(LAYERS, 1)
        rows &= case.keep[:, case.layout.block_of_token]
        rows[at_layer + 1 :] = False
        of_layer = rows[at_layer].nonzero()[:, 0]
        shown: list[Checked] = []
        chosen = torch.zeros(case.recompute.shape[1], dtype=torch.bool)
        chosen[of_layer[::3]] = True

        def check(checked: Checked, shown: list[Checked] = shown, chosen: Tensor = chosen):  # noqa: ANN202
            cached = checked.cached()  # the entries are freed when the pass is done with the layer
            shown.append(replace(checked, cached=lambda: cached))
            return chosen

        done = blended(model, case, recompute=rows, check=(at_layer, check), capacity=3)
        after = rows.clone()
        after[at_layer + 1 :] = chosen & case.keep[at_layer + 1 :, case.layout.block_of_token]
        dense = replace(case, recompute=after)
        expected = reference(model, dense)
        assert_equal(done, expected, case)
        # a row that is needed at a layer is computed at all before it
        needed = after.flip(0).cummax(0).values.flip(0)
        assert int(done.plan.computed.sum()) == int(needed.sum())
        (checked,) = shown
        assert torch.equal(checked.tokens, of_layer)
        at = case.layout.context_positions[checked.tokens].tolist()
        question = range(len(case.ids) - 5, len(case.ids))
        assert checked.scaling == pytest.approx(model.head_dim**-0.5)
        for place, position in enumerate(at):
            key = turned(expected.keys[at_layer][position], position, model)
            torch.testing.assert_close(checked.keys[place], key, **CLOSE)
            value = expected.values[at_layer][position]
            torch.testing.assert_close(checked.values[place], value, **CLOSE)
        for place, position in enumerate(question):
            query = turned(expected.queries[at_layer][position], position, model)
            torch.testing.assert_close(checked.queries[:, place], query, **CLOSE)
        assert_cached(model, case, at_layer, checked)
        decoder = Decoder(model, done.cache, case.layout.n_tokens)
        with torch.inference_mode():
            for token in (70, 9, 201):
                torch.testing.assert_close(decoder.step(token), expected.step(token), **CLOSE)


def assert_cached(model: Model, case: Case, layer: int, checked: Checked) -> None:
    """The cached entries that a check is given are those of the chunk caches."""
    cached = [
        (piece.decoded, row)
        for piece in case.pieces
        if piece.cache is not None
        for row in range(len(piece.ids))
    ]
    with torch.inference_mode():
        keys, values = checked.cached()
    for place, token in enumerate(checked.tokens.tolist()):
        (stored_keys, stored_values), row = cached[token]
        position = int(case.layout.context_positions[token])
        torch.testing.assert_close(
            keys[place], turned(stored_keys[layer, row], position, model), **CLOSE
        )
        assert torch.equal(values[place], stored_values[layer, row])


# --- attention that treats the context apart ---------------------------------------------------


@pytest.mark.parametrize("positions", ["local", "global"])
@pytest.mark.parametrize(("temperature", "scale"), [(0.9, 0.9), (0.3, 1.4), (2.0, 0.0)])
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_in_two_parts_equals_the_dense_reference(
    family: str, temperature: float, scale: float, positions: Positions
) -> None:
    """Also of answer tokens, which are none of the context."""
    model, case = tiny_model(family), case_of(4, stale=0.0)
    attend = ApeAttention(temperature=temperature, scale=scale)
    done = blended(model, case, positions=positions, attend=attend, capacity=4)
    expected = reference(model, case, positions=positions, ape=attend)
    assert_equal(done, expected, case)
    plain = reference(model, case, positions=positions)
    assert float((done.logits - plain.logits).abs().max()) > 100 * CLOSE["atol"]
    decoder = Decoder(model, done.cache, case.layout.n_tokens)
    with torch.inference_mode():
        for token in (70, 9, 201, 33):
            torch.testing.assert_close(decoder.step(token), expected.step(token), **CLOSE)
    of_context = set(case.layout.context_positions.tolist())
    for layer, entries in enumerate(expected.entries):
        flags = [at in of_context for at, *_ in entries]
        assert done.cache.is_context(layer).tolist() == [flags] * model.n_kv_heads


# --- decoding ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("update", "weight"), UPDATES[:2], ids=["overwrite", "cosine"])
@pytest.mark.parametrize("family", FAMILIES)
def test_answer_tokens_continue_the_whole_prompt(
    family: str, update: Update, weight: float | None | str
) -> None:
    """Their positions count rows that are missing, and count no row twice."""
    model, case = tiny_model(family), case_of(7, kept=0.4)
    done = blended(model, case, update=update, capacity=6)
    expected = reference(model, case, weight=weight)
    lengths = list(done.cache.lengths)
    assert len(set(lengths)) > 1 and max(lengths) < case.layout.n_tokens
    decoder = Decoder(model, done.cache, case.layout.n_tokens)
    with torch.inference_mode():
        for count, token in enumerate((70, 9, 9, 201, 33, 8), start=1):
            torch.testing.assert_close(decoder.step(token), expected.step(token), **CLOSE)
            assert done.cache.lengths == [n + count for n in lengths]
    assert_rows(done.cache, expected.entries)
    assert decoder.position == case.layout.n_tokens + 6


def test_kv_bytes_count_the_rows_that_are_held() -> None:
    model, case = tiny_model("llama"), case_of(7)
    done = blended(model, case, capacity=100)
    held = sum(done.cache.lengths) * 2 * 2 * 16 * 4
    assert done.cache.kv_bytes == done.cache.prompt_bytes == held
    with torch.inference_mode():
        Decoder(model, done.cache, case.layout.n_tokens).step(70)
    assert done.cache.kv_bytes == held + LAYERS * 2 * 2 * 16 * 4
    assert done.cache.prompt_bytes == held


# --- the reference itself ----------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_is_transformers_when_nothing_is_cached(family: str) -> None:
    model, case = tiny_model(family), case_of(0, kept=1.0, stale=1.0)
    assert bool(case.recompute.all())
    with torch.inference_mode():
        plain = model.hf(torch.tensor([case.ids])).logits[0, -1]
    torch.testing.assert_close(reference(model, case).logits, plain, **CLOSE)


def one_block_less(model: Model, case: Case) -> Tensor:
    keep = case.keep.clone()
    layer, block = keep.nonzero()[len(keep.nonzero()) // 2].tolist()
    keep[layer, block] = False
    rows = case.recompute & keep[:, case.layout.block_of_token]
    return reference(model, replace(case, keep=keep, recompute=rows)).logits


def one_row_less(model: Model, case: Case) -> Tensor:
    rows = case.recompute.clone()
    layer, token = rows.nonzero()[len(rows.nonzero()) // 2].tolist()
    rows[layer, token] = False
    return reference(model, replace(case, recompute=rows)).logits


def as_prefilled(model: Model, case: Case) -> Tensor:
    return reference(model, case, positions="local").logits


def carried_rows_hidden(model: Model, case: Case) -> Tensor:
    return reference(model, case, passing="hidden").logits


def carried_rows_from_the_cache(model: Model, case: Case) -> Tensor:
    """What the paper does (docs/methods.md)."""
    return reference(model, case, passing="cached").logits


def mixed_by_the_wrong_weight(model: Model, case: Case) -> Tensor:
    return reference(model, case, weight=0.98).logits


@pytest.mark.parametrize(
    "mistake",
    [
        one_block_less,
        one_row_less,
        as_prefilled,
        carried_rows_hidden,
        carried_rows_from_the_cache,
        mixed_by_the_wrong_weight,
    ],
    ids=lambda f: f.__name__,
)
def test_every_kind_of_mistake_would_show(mistake: Callable[[Model, Case], Tensor]) -> None:
    """In logits: many times what the comparisons above let pass."""
    model = tiny_model("llama")
    for seed in range(2):
        case = case_of(seed)
        right = reference(model, case).logits
        assert float((mistake(model, case) - right).abs().max()) > 100 * CLOSE["atol"]
