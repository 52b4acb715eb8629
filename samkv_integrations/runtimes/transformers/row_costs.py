"""What a pass over several tokens costs, for drafts of the next tokens."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from samkv_integrations.runtimes.base import MOST_ROWS, RowCosts
from samkv_integrations.runtimes.transformers.model.model import LayeredModel

_TIMED = (1, 2, 4, MOST_ROWS)  # the costs between are interpolated
_COMPARED = 2**15  # logits compared: a difference in rounding shows in one of thousands


def row_costs(model: LayeredModel) -> RowCosts:
    """Costs of the rows of a pass, measured with its first layer and output matrix, in some .2 s.

    16-bit products on CPUs give a token the same bits, whatever other tokens the pass has. Float32
    products differ in the last bits. If 16-bit products differ, nothing is drafted: equal logits
    are frequent in 16 bits, and another one of them could win.
    """
    rotation = model.rotation(torch.arange(MOST_ROWS))
    n_known = model.config.vocab_size

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        return query.contiguous()

    def run(tokens: Tensor, first: int, end: int) -> tuple[Tensor, float]:
        """Logits of some of the tokens, and seconds of a pass through all layers."""
        rows = slice(first, end)
        cos, sin = (side[rows] for side in rotation.of(0))
        embedded = model.embed(tokens[None, rows])
        with model.decoding(end - first):
            began = time.perf_counter()
            hidden = model.layer(0, embedded, cos, sin, attend)
            after = time.perf_counter()
            logits = model.logits(hidden[0])
            ended = time.perf_counter()
        return logits, model.n_layers * (after - began) + ended - after

    is_same, n_rows = True, MOST_ROWS // 2
    for trial in range(1 + _COMPARED // (n_rows * n_known)):
        tokens = (torch.arange(MOST_ROWS) + trial * MOST_ROWS) % n_known
        alone = torch.cat([run(tokens, row, row + 1)[0] for row in range(n_rows)])
        if not torch.equal(alone, run(tokens, 0, n_rows)[0]):
            is_same = False
            break
    if not is_same and model.dtype != torch.float32:
        return RowCosts()
    seconds = [min(run(tokens, 0, n)[1] for _ in range(3)) for n in _TIMED]
    costs: list[float] = np.interp(range(1, MOST_ROWS + 1), _TIMED, seconds).tolist()
    return RowCosts(tuple(cost / max(costs[0], 1e-9) for cost in costs), 0.0 if is_same else 0.01)
