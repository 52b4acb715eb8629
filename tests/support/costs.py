"""Costs by which `auto` goes one way or the other, whatever a machine is like."""

from __future__ import annotations

from samkv_integrations.methods.costs import CostModel

# Only computed tokens cost anything, so that what the model computes can be held against it.
TOKENS_ONLY = CostModel(layer_s=0, token_s=1, pair_s=0, entry_s=0, read_s=0)
# A pass as such costs so much that it hardly counts what it computes: reuse never wins.
ONE_PASS = CostModel(layer_s=1e5, token_s=1, pair_s=0, entry_s=0, read_s=0)
