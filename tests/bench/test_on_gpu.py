"""`benchmarks.on_gpu`, on the processor."""

from __future__ import annotations

from pathlib import Path

from benchmarks.on_gpu import PLAIN, Ways, rows_of
from samkv_integrations.model.loading import load_model


def test_each_way_has_a_row(tmp_path: Path):
    model = load_model("builtin")
    model.eos_ids = frozenset()
    plain, reuse = rows_of(Ways(model, tmp_path, 3, 60), [PLAIN, "reuse"], 1)
    assert (plain["way"], plain["first_ratio"], plain["read_gb"]) == (PLAIN, 1.0, 0.0)
    assert (reuse["ran"], reuse["chunks"]) == ("reuse", 3)
    assert reuse["prompt_tokens"] > 180 and reuse["read_gb"] > 0
    assert reuse["first_ratio"] == reuse["first_s"] / plain["first_s"] and reuse["step_ms"] > 0
