"""What a request reads of its chunks, against the chunks themselves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from samkv_integrations.cache.chunk import ChunkCache, Fingerprint
from samkv_integrations.cache.memory import MemoryChunk
from samkv_integrations.engine.loader import ChunkLost, Context
from samkv_integrations.errors import CacheMiss
from samkv_integrations.model.families import Rotation
from samkv_integrations.prompt.layout import ChunkPart, Layout, Run
from tests.support.chunks import decoded, random_chunk, tiny_fingerprint

LENGTHS = (22, 5, 17)


class Opened(MemoryChunk):
    """Notes whether its key range was read."""

    is_range_read = False

    def key_range(self) -> Tensor:
        self.is_range_read = True
        return super().key_range()


class Case:
    """Three random chunks, opened; blocks of 4 tokens.

    cuts: the runs of each chunk that the prompt holds, with a token of text between; None for all
    of each. order: of the chunks in the prompt, one of which may stand there twice.
    """

    def __init__(
        self,
        bits: int,
        lengths: Sequence[int] = LENGTHS,
        cuts: Sequence[Sequence[range]] | None = None,
        order: Sequence[int] = (0, 1, 2),
    ) -> None:
        self.made_by: Fingerprint = tiny_fingerprint(store_bits=bits)
        self.caches: list[ChunkCache] = [
            random_chunk(seed, n, self.made_by) for seed, n in enumerate(lengths)
        ]
        self.held = cuts or [[range(lengths[chunk])] for chunk in order]
        ids, parts = [1], []
        for chunk, of_chunk in zip(order, self.held, strict=True):
            runs = []
            for rows in of_chunk:
                ids += [7] if runs else []
                runs.append(Run(len(ids), rows.start, rows.stop))
                ids += self.caches[chunk].token_ids[rows.start : rows.stop].tolist()
            parts.append(ChunkPart(runs=tuple(runs), blocks=self.caches[chunk].blocks))
        self.layout = Layout.of([*ids, 5, 6], parts, (1,))
        opened = [Opened(cache, self.made_by) for cache in self.caches]
        self.opened, self.order = [opened[chunk] for chunk in order], order  # opened once each
        cos = torch.ones(self.layout.n_context, self.made_by.head_dim)
        nowhere = Rotation(turns=[(cos, 0 * cos)], kinds=[0] * self.made_by.n_layers)
        self.context = Context(self.layout, self.opened, self.made_by, nowhere)
        self.ids_bytes = sum(self.caches[chunk].token_ids.nbytes for chunk in set(order))

    @property
    def bytes_read(self) -> int:
        return sum(chunk.bytes_read for chunk in set(self.opened))

    @property
    def entries_read(self) -> int:
        """Entries, not counting token ids and key ranges."""
        ranges = sum(
            self.caches[chunk].key_range.nbytes
            for chunk, opened in dict(zip(self.order, self.opened, strict=True)).items()
            if opened.is_range_read
        )
        read = self.bytes_read - self.ids_bytes - ranges
        assert read % self.made_by.entry_format.n_bytes == 0
        return read // self.made_by.entry_format.n_bytes

    def expected(self) -> tuple[Tensor, Tensor]:
        """(L, Tctx, G, D) keys and values of the context's tokens."""
        keys, values = [], []
        for chunk, of_chunk in zip(self.order, self.held, strict=True):
            rows = [row for run in of_chunk for row in run]
            for to, side in zip((keys, values), decoded(self.caches[chunk]), strict=True):
                to.append(side[:, rows])
        return torch.cat(keys, dim=1), torch.cat(values, dim=1)


masks = st.lists(st.booleans(), min_size=26, max_size=26).map(lambda m: torch.tensor(m).view(2, 13))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from((4, 8, 16)), st.lists(masks, min_size=1, max_size=3))
def test_what_was_asked_for_is_there_and_is_that_of_the_chunks(
    bits: int, asked: list[Tensor]
) -> None:
    """However it was asked for: entries of the blocks, at their layers, of their own chunks."""
    case = Case(bits)
    assert case.layout.n_blocks == 13
    keys, values = case.expected()
    so_far = torch.zeros(2, 13, dtype=torch.bool)
    for blocks in asked:
        case.context.load(blocks)
        so_far |= blocks
        for layer in range(2):
            tokens = so_far[layer, case.layout.block_of_token].nonzero()[:, 0]
            found_keys, found_values = case.context.keys_and_values(layer, tokens)
            # one rounding where the plain way has two
            torch.testing.assert_close(found_keys, keys[layer, tokens], rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(found_values, values[layer, tokens], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 16])
def test_few_blocks_are_read_by_themselves_and_once(bits: int) -> None:
    case = Case(bits)
    some = torch.zeros(2, 13, dtype=torch.bool)
    some[0, [0, 2, 5]] = True  # the last block of the first chunk holds 2 tokens
    some[1, [9, 10]] = True
    case.context.load(some)
    assert case.entries_read == 4 + 4 + 2 + 4 + 4
    case.context.load(some)
    assert case.entries_read == 18
    more = some.clone()
    more[0, 1] = True
    case.context.load(more)
    assert case.entries_read == 22


def test_a_chunk_of_which_most_is_missing_is_read_whole_and_others_are_not() -> None:
    """Of the second chunk's two blocks at two layers three are asked for."""
    case = Case(4)
    blocks = torch.zeros(2, 13, dtype=torch.bool)
    blocks[:, 6], blocks[0, 7] = True, True
    case.context.load(blocks)
    assert case.entries_read == 2 * 5
    blocks[1, 7] = True
    case.context.load(blocks)
    assert case.entries_read == 2 * 5, "it was read before"


def test_nothing_asked_for_is_nothing_read() -> None:
    case = Case(4)
    case.context.load(torch.zeros(2, 13, dtype=torch.bool))
    assert case.bytes_read == case.ids_bytes
    keys, values = case.context.keys_and_values(0, torch.empty(0).long())
    assert keys.shape == values.shape == (0, 2, 8)


# --- parts of chunks -----------------------------------------------------------------------------

LONG = (150, 70, 140)
"""Tokens of chunks that have several groups of key ranges, one of which is of few tokens."""

PARTS = {
    "cut at both ends": [[range(5, 149)], [range(9, 66)], [range(70, 131)]],
    "behind the first groups": [[range(130, 150)], [range(65, 70)], [range(129, 140)]],
    "in pieces": [
        [range(2, 20), range(30, 41), range(41, 60), range(126, 150)],
        [range(70)],
        [range(60, 66), range(125, 130)],
    ],
}


def assert_loaded(case: Case, loaded: Tensor) -> None:
    """The entries of the blocks that were loaded are those of the chunks."""
    keys, values = case.expected()
    for layer in range(2):
        tokens = loaded[layer, case.layout.block_of_token].nonzero()[:, 0]
        found_keys, found_values = case.context.keys_and_values(layer, tokens)
        torch.testing.assert_close(found_keys, keys[layer, tokens], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found_values, values[layer, tokens], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("share", [0.1, 0.4, 0.6, 1.0])
@pytest.mark.parametrize("cuts", PARTS.values(), ids=list(PARTS))
def test_of_a_part_of_a_chunk_there_is_what_the_prompt_holds(
    bits: int, share: float, cuts: Sequence[Sequence[range]]
) -> None:
    """Whether a few blocks are read or all of the chunk; with the key range of each one's group,
    which is counted from the beginning of its chunk."""
    case = Case(bits, LONG, cuts)
    layout = case.layout
    assert layout.n_context == sum(len(run) for of_chunk in cuts for run in of_chunk)
    generator = torch.Generator().manual_seed(bits)
    so_far = torch.zeros(2, layout.n_blocks, dtype=torch.bool)
    for _ in range(3):
        blocks = torch.rand(2, layout.n_blocks, generator=generator) < share
        case.context.load(blocks)
        so_far |= blocks
        assert_loaded(case, so_far)


def test_of_a_block_that_is_held_in_part_the_whole_block_is_read_and_no_other() -> None:
    """Chunk 0 in two pieces, blocks of 4: block 5 is held from token 22 on, and the tokens that
    the prompt lacks lie in blocks 6 and 7."""
    case = Case(4, LONG, [[range(22, 24), range(33, 36)], [range(70)], [range(140)]])
    assert case.layout.block_in_chunk[:2].tolist() == [5, 8]
    assert case.layout.block_lengths[:2].tolist() == [2, 3]
    some = torch.zeros(2, case.layout.n_blocks, dtype=torch.bool)
    some[0, 0] = some[1, 1] = True  # half of this chunk's: not most
    case.context.load(some)
    assert case.entries_read == 4 + 4
    assert_loaded(case, some)
    some[1, 0] = True
    case.context.load(some)
    assert case.entries_read == 4 + 4 + 4
    assert_loaded(case, some)


def test_a_chunk_of_which_all_that_is_held_is_missing_is_read_whole() -> None:
    case = Case(4, LONG, [[range(20, 140)], [range(70)], [range(140)]])
    blocks = torch.zeros(2, case.layout.n_blocks, dtype=torch.bool)
    blocks[:, case.layout.block_chunk == 0] = True
    case.context.load(blocks)
    assert case.entries_read == 2 * 150
    assert_loaded(case, blocks)


WHOLE, PIECES, END = [range(150)], [range(3, 30), range(64, 129)], [range(65, 150)]


@pytest.mark.parametrize(
    "places", [[WHOLE, PIECES], [PIECES, WHOLE], [PIECES, END], [WHOLE, WHOLE]], ids=str
)
def test_a_chunk_in_two_places_is_read_once(places: Sequence[Sequence[range]]) -> None:
    case = Case(4, LONG, places, order=(0, 0))
    everything = torch.ones(2, case.layout.n_blocks, dtype=torch.bool)
    case.context.load(everything)
    assert case.entries_read == 2 * 150
    assert_loaded(case, everything)


def test_a_selection_is_given_what_it_needs_of_the_blocks_and_tokens_that_are_held() -> None:
    found = [assert_inputs(Case(16, LONG, cuts)) for cuts in PARTS.values()]
    blocks = torch.cat(found)
    assert bool((blocks >= 0).any()) and bool((blocks == -1).any())


def assert_inputs(case: Case) -> Tensor:
    """All inputs, chunk by chunk. Returns the best and worst blocks."""
    names = frozenset(("block_means", "local_query", "anchor_mean", "statistics"))
    inputs = case.context.inputs(names, (1,))
    keys, _ = case.expected()
    block = token = 0
    for chunk, (cache, of_chunk) in enumerate(zip(case.caches, case.held, strict=True)):
        rows = [row for run in of_chunk for row in run]
        held = sorted({row // 4 for row in rows})
        middle, statistics = cache.blocks.middle_blocks, cache.statistics
        assert torch.equal(inputs.local_query[:, chunk], cache.local_query)
        for place, of_block in enumerate(held, block):
            if of_block in middle:
                codes, scale = cache.block_means.codes, cache.block_means.scale.float()
                at = of_block - middle.start
                expected = codes[:, at].float() * scale[:, at, :, None]
            else:
                expected = torch.zeros_like(inputs.block_means[:, place])
            assert torch.equal(inputs.block_means[:, place], expected)
        for name in ("block_max", "block_min"):
            for layer, best in enumerate(getattr(statistics, name).tolist()):
                found = int(getattr(inputs, name)[layer, chunk])
                assert found == (block + held.index(best) if best in held else -1)
        own = slice(token, token + len(rows))
        assert torch.equal(inputs.outliers[:, own], statistics.outliers[:, rows])
        anchors = [token + i for i, row in enumerate(rows) if row // 4 not in middle]
        mean = keys[:, anchors].mean(1) if anchors else torch.zeros_like(keys[:, 0])
        torch.testing.assert_close(inputs.anchor_mean[:, chunk], mean, rtol=1e-5, atol=1e-6)
        block, token = block + len(held), token + len(rows)
    assert (block, token) == (case.layout.n_blocks, case.layout.n_context)
    return torch.cat((inputs.block_max, inputs.block_min))


@pytest.mark.parametrize("reads", ["read_layers", "read_blocks", "key_range", "local_query"])
def test_a_chunk_that_fails_is_named_by_its_place(
    reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(4)

    def fail(*_: object) -> None:
        raise CacheMiss("io", "unplugged")

    monkeypatch.setattr(case.opened[1], reads, fail)
    blocks = torch.zeros(2, 13, dtype=torch.bool)
    blocks[:, 6] = True
    if reads == "read_layers":
        blocks[:] = True
    with pytest.raises(ChunkLost) as lost:
        if reads == "local_query":
            case.context.inputs(frozenset(("local_query",)), ())
        else:
            case.context.load(blocks)
    assert (lost.value.index, lost.value.miss.reason) == (1, "io")
