"""A layout as tensors, for the parts of methods and passes that use tensors."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor, from_numpy

from samkv_integrations.prompt.layout import Layout


class TensorLayout:
    """A `Layout` whose arrays are tensors on the CPU. They share its memory: never change them.

    arrays: the layout itself. All other attributes are named as its own.
    """

    def __init__(self, arrays: Layout) -> None:
        self.arrays = arrays
        self.n_tokens, self.n_context = arrays.n_tokens, arrays.n_context
        self.n_chunks, self.n_blocks = arrays.n_chunks, arrays.n_blocks
        self.n_prefix = arrays.n_prefix
        self.token_range, self.block_range = arrays.token_range, arrays.block_range
        self.token_ids: Tensor = from_numpy(arrays.token_ids)
        self.uncached: Tensor = from_numpy(arrays.uncached)
        self.context_positions: Tensor = from_numpy(arrays.context_positions)
        self.offset_in_chunk: Tensor = from_numpy(arrays.offset_in_chunk)
        self.block_of_token: Tensor = from_numpy(arrays.block_of_token)
        self.chunk_of_token: Tensor = from_numpy(arrays.chunk_of_token)
        self.chunk_lengths: Tensor = from_numpy(arrays.chunk_lengths)
        self.block_lengths: Tensor = from_numpy(arrays.block_lengths)
        self.block_chunk: Tensor = from_numpy(arrays.block_chunk)
        self.block_in_chunk: Tensor = from_numpy(arrays.block_in_chunk)
        self.is_anchor: Tensor = from_numpy(arrays.is_anchor)
        self.exact: Tensor = from_numpy(arrays.exact)
        self.question: Tensor = from_numpy(arrays.question)

    @cached_property
    def prefilled_positions(self) -> Tensor:
        """(Tctx,) position of each context token when its cache was computed."""
        return from_numpy(self.arrays.prefilled_positions)

    @cached_property
    def middle_of_chunk(self) -> Tensor:
        """(C, Nb) bool: the middle blocks of each chunk."""
        return from_numpy(self.arrays.middle_of_chunk)
