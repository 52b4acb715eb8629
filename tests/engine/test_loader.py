"""What a request reads of its chunks, against the chunks themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from samkv_integrations.cache.chunk import ChunkCache
from samkv_integrations.cache.fingerprint import Fingerprint
from samkv_integrations.cache.memory import MemoryChunk
from samkv_integrations.engine.loader import ChunkLost, Context
from samkv_integrations.errors import CacheMiss
from samkv_integrations.prompt.layout import Layout, Segment
from tests.support.chunks import decoded, random_chunk, tiny_fingerprint

LENGTHS = (22, 5, 17)


class Opened(MemoryChunk):
    """Notes whether its key range was read."""

    is_range_read = False

    def key_range(self) -> Tensor:
        self.is_range_read = True
        return super().key_range()


class Case:
    """Three random chunks, opened; blocks of 4 tokens."""

    def __init__(self, bits: int) -> None:
        self.made_by: Fingerprint = tiny_fingerprint(store_bits=bits)
        self.caches: list[ChunkCache] = [
            random_chunk(seed, n, self.made_by) for seed, n in enumerate(LENGTHS)
        ]
        segments = [Segment(token_ids=(1,))]
        for cache in self.caches:
            ids = tuple(cache.token_ids.tolist())
            segments.append(Segment(token_ids=ids, blocks=cache.blocks, is_context=True))
        segments.append(Segment(token_ids=(5, 6)))
        self.layout = Layout.of(segments, (1,))
        self.opened = [Opened(cache, self.made_by) for cache in self.caches]
        cos = torch.ones(self.layout.n_context, self.made_by.head_dim)  # at no position
        self.context = Context(self.layout, self.opened, self.made_by, cos, 0 * cos)
        self.ids_bytes = sum(cache.token_ids.nbytes for cache in self.caches)

    @property
    def entries_read(self) -> int:
        """Entries, not counting token ids and key ranges."""
        ranges = sum(c.key_range.nbytes for c, o in zip(self.caches, self.opened, strict=True)
                     if o.is_range_read)  # fmt: skip
        read = self.context.bytes_read - self.ids_bytes - ranges
        assert read % self.made_by.entry_format.n_bytes == 0
        return read // self.made_by.entry_format.n_bytes

    def expected(self) -> tuple[Tensor, Tensor]:
        keys, values = zip(*map(decoded, self.caches), strict=True)
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
    assert case.context.bytes_read == case.ids_bytes
    keys, values = case.context.keys_and_values(0, torch.empty(0).long())
    assert keys.shape == values.shape == (0, 2, 8)


@pytest.mark.parametrize("reads", ["read_all", "read_blocks", "key_range", "local_query"])
def test_a_chunk_that_fails_is_named_by_its_place(
    reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(4)

    def fail(*_: object) -> None:
        raise CacheMiss("io", "unplugged")

    monkeypatch.setattr(case.opened[1], reads, fail)
    blocks = torch.zeros(2, 13, dtype=torch.bool)
    blocks[:, 6] = True
    if reads == "read_all":
        blocks[:] = True
    with pytest.raises(ChunkLost) as lost:
        if reads == "local_query":
            case.context.inputs(frozenset(("local_query",)), ())
        else:
            case.context.load(blocks)
    assert (lost.value.index, lost.value.miss.reason) == (1, "io")
