"""What passes of llama.cpp cost: assumed, and measured on the loaded model.

A call of llama_decode reads all weights once, however few tokens it computes. That constant counts
for each run of recomputed tokens.
"""

from __future__ import annotations

import time

import numpy as np

from samkv_integrations.methods.costs import CostModel
from samkv_integrations.runtimes.base import MOST_ROWS, RowCosts
from samkv_integrations.runtimes.llama_cpp.library.context import N_UBATCH, LlamaContext

_LENGTHS = (1, 16, 128, N_UBATCH)


def assumed(context: LlamaContext, n_layers: int) -> CostModel:
    """The costs of a typical machine, used until costs are measured."""
    on_card = context.is_on_card
    n_entries = 2 * context.n_kv_heads * context.head_dim
    run_s = context.n_weight_bytes / (400e9 if on_card else 20e9) / n_layers
    flops = 20e12 if on_card else 150e9 * context.n_threads
    return CostModel(
        layer_s=run_s, run_s=run_s, token_s=2 * context.n_parameters / n_layers / flops,
        pair_s=4 * context.n_heads * context.head_dim / flops, entry_s=4e-9 * n_entries,
        read_s=1e-9 * n_entries,
    )  # fmt: skip


def measured(context: LlamaContext, sequence: int, n_layers: int) -> CostModel:
    """Measured by decoding made-up tokens in a free ``sequence``; takes some seconds."""
    lengths = [n for n in _LENGTHS if n <= min(context.n_cells, context.n_trained) // 2]
    ns = np.array(lengths, np.float64)
    spent = [min(_seconds(context, sequence, n) for _ in range(3)) for n in lengths]
    parts = np.stack((np.ones_like(ns), ns, ns * (ns + 1) / 2), axis=1)
    found = np.linalg.lstsq(parts, np.array(spent) / n_layers, rcond=None)[0].clip(0.0).tolist()
    run_s, token_s, pair_s = found
    typical = assumed(context, n_layers)
    return CostModel(
        layer_s=run_s, run_s=run_s, token_s=token_s, pair_s=pair_s, entry_s=typical.entry_s,
        read_s=typical.read_s,
    )  # fmt: skip


MOST_OF_TWO = 1.7
"""A pass over two tokens that takes longer than so many over one saves no time with drafts."""


def row_costs(context: LlamaContext, sequence: int) -> RowCosts:
    """What a pass over several tokens of one answer costs, in a free ``sequence`` with few cells.

    On CPUs two tokens were measured to take 1.7 to 3.1 times as long as one; then nothing is
    drafted. On a graphics card drafts may pay; none was measured.
    """
    one, two = (min(_seconds(context, sequence, n) for _ in range(2)) for n in (1, 2))
    if two > MOST_OF_TWO * one:
        return RowCosts()
    seconds = [one, two, *(_seconds(context, sequence, n) for n in (4, MOST_ROWS))]
    costs = np.interp(range(1, MOST_ROWS + 1), (1, 2, 4, MOST_ROWS), seconds) / one
    tokens, rows = range(MOST_ROWS), range(MOST_ROWS)
    together = context.decode(tokens, rows, [sequence] * MOST_ROWS, rows)
    context.remove(sequence)
    alone = [context.decode([token], [token], [sequence], [0])[0] for token in tokens]
    context.remove(sequence)
    differs = float(np.abs(np.stack(alone) - together).max())
    return RowCosts(tuple(costs.tolist()), 2 * differs)


def _seconds(context: LlamaContext, sequence: int, n_tokens: int) -> float:
    """Of a decode; on a CPU those that the calling thread computes, whatever else is running."""
    clock = time.perf_counter if context.is_on_card else time.thread_time
    began = clock()
    context.decode([0] * n_tokens, range(n_tokens), [sequence] * n_tokens)
    seconds = clock() - began
    context.remove(sequence)
    return seconds
