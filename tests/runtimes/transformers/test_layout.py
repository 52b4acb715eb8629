"""A layout as tensors is the same layout, in the same memory."""

from __future__ import annotations

import numpy as np

from samkv_integrations.runtimes.transformers.layout import TensorLayout
from tests.support.layouts import layout_of


def test_every_attribute_of_a_layout_is_there_as_a_tensor() -> None:
    for layout in (layout_of((20, 7), before=3), layout_of(())):
        tensors = TensorLayout(layout)
        named = [*vars(layout), "prefilled_positions", "middle_of_chunk"]
        for name in named:
            mine, theirs = getattr(tensors, name), getattr(layout, name)
            if isinstance(theirs, np.ndarray):
                assert theirs.dtype in (np.int64, np.bool_), name
                assert np.shares_memory(mine.numpy(), theirs) or not theirs.size, name
                assert mine.shape == theirs.shape, name
            else:
                assert mine == theirs, name
