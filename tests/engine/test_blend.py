"""The blend and the decoder against a dense reference that keeps lists, not masks.

The reference runs the model's own submodules layer by layer. For every layer it writes down which
entries (position, key, value) there are, and every token attends, by a softmax written out here, to
those at its own and earlier positions. Nothing of it is shared with the package but the
way back from stored bytes (`tests/cache/test_quantise.py`): not the rotation, not the attention,
not the sets of tokens. Both sides take the same numbers from the caches, so nothing depends on
their bits.

Everything is float32. The two sides add up the same numbers in another order, which moves the
logits and keys of these models (of up to 6) by about 2e-5 after four layers; one wrong token,
position or entry moves them by a hundredth at least (`test_every_kind_of_mistake_would_show`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from samkv_integrations.engine.decode import Decoder
from samkv_integrations.methods.ape import ApeAttention
from samkv_integrations.methods.base import Checked, Positions, Update, overwrite
from samkv_integrations.model.model import Model
from tests.support.blend_reference import (
    CLOSE,
    LAYERS,
    UPDATES,
    Case,
    assert_entries,
    assert_equal,
    blended,
    case_of,
    reference,
)
from tests.support.covering import covering
from tests.support.models import FAMILIES, tiny_model, turned


@pytest.mark.parametrize(
    ("family", "update", "weight"),
    [(family, *update) for family, update in covering(FAMILIES, UPDATES, times=2)],
)
def test_any_selection_and_any_tokens_equal_the_dense_reference(
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
        assert len(set(done.cache.lengths)) > 1, "layers should hold different numbers of entries"
    assert only_carried > 10, "no token passed through a layer where its block is not kept"


@pytest.mark.parametrize(
    ("lengths", "shares"),
    covering(
        [(1,), (3,), (30,), (9, 1, 14, 4)],
        [(0.0, 0.0), (0.3, 0.0), (0.5, 1.0), (1.0, 0.3)],
        times=2,
    ),
    ids=str,
)
def test_any_lengths_and_shares(lengths: tuple[int, ...], shares: tuple[float, float]) -> None:
    kept, stale = shares
    model = tiny_model("llama")
    for seed in (5, 6):
        case = case_of(seed, lengths=lengths, kept=kept, stale=stale)
        done = blended(model, case)
        assert_equal(done, reference(model, case), case)


CUT_AT_BOTH_ENDS = ([range(3, 20)], [range(1, 5)], [range(9, 17)])
IN_PIECES = ([range(7), range(7, 15), range(18, 22)], [range(5)], [range(2, 6), range(15, 17)])
PARTS: dict[str, Sequence[Sequence[range]]] = {"cut": CUT_AT_BOTH_ENDS, "in pieces": IN_PIECES}


@pytest.mark.parametrize(
    ("shares", "family", "cuts", "ends_with_chunk"),
    [
        ((1.0, 0.0), "llama", "cut", False),
        ((1.0, 0.0), "llama3-rope", "in pieces", True),
        ((1.0, 0.0), "qwen3", "cut", True),
        ((0.6, 0.4), "llama", "in pieces", True),
        ((0.6, 0.4), "llama3-rope", "cut", False),
        ((0.6, 0.4), "qwen3", "in pieces", False),
        ((1.0, 1.0), "llama", "in pieces", False),
        ((1.0, 1.0), "llama3-rope", "cut", True),
        ((1.0, 1.0), "qwen3", "cut", True),
    ],
)
def test_chunks_of_which_the_prompt_holds_a_part(
    shares: tuple[float, float], family: str, cuts: str, ends_with_chunk: bool
) -> None:
    """Each token has the entry of its own place in the chunk, turned to its place in the prompt."""
    (kept, stale), parts = shares, PARTS[cuts]
    model = tiny_model(family)
    for seed, (update, weight) in enumerate(UPDATES):
        case = case_of(
            seed, cuts=parts, kept=kept, stale=stale, ends_with_chunk=ends_with_chunk,
            prefix=(1,) if seed else (),
        )  # fmt: skip
        assert case.layout.n_context == sum(len(run) for of_chunk in parts for run in of_chunk)
        done = blended(model, case, update=update, capacity=3)
        expected = reference(model, case, weight=weight)
        assert_equal(done, expected, case)
        if kept == stale == 1.0 and update is overwrite:
            with torch.inference_mode():
                plain = model.hf(torch.tensor([case.ids])).logits[0, -1]
            torch.testing.assert_close(done.logits, plain, **CLOSE)
        decoder = Decoder(model, done.cache, case.layout.n_tokens)
        with torch.inference_mode():
            for token in (70, 9, 201):
                torch.testing.assert_close(decoder.step(token), expected.step(token), **CLOSE)


@pytest.mark.parametrize("stale", [0.0, 0.5])
def test_a_prompt_that_ends_with_a_chunk_computes_its_last_token(stale: float) -> None:
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


def one_token(at_layers: tuple[int, ...], kept_at: tuple[int, ...]) -> tuple[Case, int, int]:
    """A case with one token recomputed at some layers, its block kept at some; with its number
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
def test_one_token(at_layers: tuple[int, ...], kept_at: tuple[int, ...]) -> None:
    model = tiny_model("qwen3")
    case, _, position = one_token(at_layers, kept_at)
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


def test_a_carried_token_is_seen_by_later_tokens_of_its_layer_alone() -> None:
    """Its entry counts in the attention of a layer where its block is not kept, and is gone from
    the working cache, so that answer tokens never see it there."""
    model = tiny_model("llama")
    case, token, position = one_token((3,), (3,))
    done = blended(model, case)
    expected = reference(model, case)
    for layer in range(3):
        assert position not in [at for at, *_ in expected.entries[layer]]
    bare = replace(case, recompute=torch.zeros_like(case.recompute))
    assert float((done.logits - reference(model, bare).logits).abs().max()) > 1e-3


def test_tokens_to_recompute_that_are_not_kept_are_ignored() -> None:
    """What `Recompute.choose` promises to those who write a method."""
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
    """(heads, n, D) of some tokens of a layer, as the reference has them."""
    return torch.stack([by_position[layer][at] for at in rows], dim=1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ends_with_chunk", [False, True])
def test_a_probe_shows_the_queries_of_every_token_that_it_computed(
    family: str, ends_with_chunk: bool
) -> None:
    """Rotated, layer by layer."""
    model = tiny_model(family)
    case = case_of(2, ends_with_chunk=ends_with_chunk, stale=0.0)
    done, expected = blended(model, case, probes=True), reference(model, case)
    torch.testing.assert_close(done.logits, expected.logits, **CLOSE)
    assert done.cache.lengths == [0] * LAYERS, "a probe keeps nothing"
    rows = case.layout.uncached.nonzero()[:, 0].tolist()
    cos, sin = model.rotation(torch.tensor(rows)).of(0)
    assert len(done.probed) == LAYERS
    for layer, probed in enumerate(done.probed):
        asking = of_rows(expected.queries, layer, rows)
        own = [turned(asking[:, i], at, model) for i, at in enumerate(rows)]
        torch.testing.assert_close(probed.queries, torch.stack(own, dim=1), **CLOSE)
        assert torch.equal(probed.cos, cos) and torch.equal(probed.sin, sin)


# --- deciding in mid-pass ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at_layer", "family", "kept"),
    [(0, "llama", 1.0), (0, "qwen3", 0.6), (1, "qwen3", 1.0), (1, "llama", 0.6),
     (2, "llama", 1.0), (2, "qwen3", 0.6), (3, "qwen3", 1.0), (3, "llama", 0.6)],
)  # fmt: skip
def test_a_check_layer_equals_the_dense_reference(family: str, at_layer: int, kept: float) -> None:
    """Tokens computed up to it, of which some go on; what it is shown is what the layer made."""
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
        # a token that is needed at a layer is computed at all before it
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
        for row in piece.rows
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


@pytest.mark.parametrize(
    ("family", "weights", "positions"),
    covering(FAMILIES, [(0.9, 0.9), (0.3, 1.4), (2.0, 0.0)], ["local", "global"], times=2),
)
def test_attention_in_two_parts_equals_the_dense_reference(
    family: str, weights: tuple[float, float], positions: Positions
) -> None:
    """Also of answer tokens, which are none of the context."""
    model, case = tiny_model(family), case_of(4, stale=0.0)
    attend = ApeAttention(temperature=weights[0], scale=weights[1])
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
    """Their positions count entries that are missing, and count no entry twice."""
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
    assert_entries(done.cache, expected.entries)
    assert decoder.position == case.layout.n_tokens + 6


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


def one_token_less(model: Model, case: Case) -> Tensor:
    rows = case.recompute.clone()
    layer, token = rows.nonzero()[len(rows.nonzero()) // 2].tolist()
    rows[layer, token] = False
    return reference(model, replace(case, recompute=rows)).logits


def as_prefilled(model: Model, case: Case) -> Tensor:
    return reference(model, case, positions="local").logits


def carried_tokens_hidden(model: Model, case: Case) -> Tensor:
    return reference(model, case, passing="hidden").logits


def carried_tokens_from_the_cache(model: Model, case: Case) -> Tensor:
    """What the paper does (docs/methods.md)."""
    return reference(model, case, passing="cached").logits


def mixed_by_the_wrong_weight(model: Model, case: Case) -> Tensor:
    return reference(model, case, weight=0.98).logits


@pytest.mark.parametrize(
    "mistake",
    [
        one_block_less,
        one_token_less,
        as_prefilled,
        carried_tokens_hidden,
        carried_tokens_from_the_cache,
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
