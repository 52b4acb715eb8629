"""Measured costs of passes, kept beside the caches."""

from __future__ import annotations

import json
from dataclasses import asdict

from samkv_integrations.methods.costs import CostModel
from samkv_integrations.runtimes.base import Runtime
from samkv_integrations.store.base import Notes


def kept_costs(model: Runtime, store: Notes) -> CostModel:
    """The costs kept beside the caches for this machine, else the assumed ones."""
    text = store.note(model.costs_name)
    try:
        kept = CostModel(**json.loads(text or ""))
        if all(0 <= seconds < 1e6 for seconds in asdict(kept).values()):
            return kept
    except (ValueError, TypeError):  # none, or damaged
        pass
    return model.assumed_costs()


def keep_costs(model: Runtime, store: Notes, costs: CostModel) -> None:
    """Write measured costs beside the caches. Raises StoreError if that fails."""
    store.put_note(model.costs_name, json.dumps(asdict(costs)))
