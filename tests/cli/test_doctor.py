"""``samkv doctor``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from samkv_integrations.lab import doctor
from samkv_integrations.lab.doctor import Check
from samkv_integrations.runtimes.transformers.costs import name_of
from samkv_integrations.runtimes.transformers.loading import load_model
from samkv_integrations.store.disk import ChunkStore
from tests.cli.running import ran, rows_of, run


def test_doctor_exits_with_1_if_a_check_fails(monkeypatch: pytest.MonkeyPatch, tiny: str) -> None:
    rows = rows_of("doctor", "--model", tiny)
    assert all(set(row) == {"check", "ok", "detail"} and row["ok"] for row in rows)
    checks = [Check(name="rotation", ok=True, detail="off by 0")]
    monkeypatch.setattr(doctor, "examine", lambda model, store: iter(checks))
    told = " ".join(ran("doctor", "--model", tiny, "--dtype", "bfloat16").split())
    assert told.endswith("in bfloat16 on cpu: computed as by transformers")
    checks = [Check(name="rotation", ok=False, detail="off by 3")]
    result = run("doctor", "--model", tiny)
    assert result.exit_code == 1
    assert "FAILED: rotation" in result.stdout
    result = run("doctor", "--model", tiny, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["rows"][0]["ok"] is False


def test_the_doctor_keeps_what_passes_cost_where_ask_looks(town: Path) -> None:
    torch.set_num_threads(2)  # times are kept by the number of threads
    rows = rows_of("doctor", "--dir", "kept")
    (speed,) = (row for row in rows if row["check"] == "speed")
    assert speed["detail"].endswith("/kept/kv")
    assert all(row["ok"] for row in rows), "the built-in model passes"
    torch.set_num_threads(2)
    ran("ingest", str(town), "--dir", "kept")
    assert ChunkStore(Path("kept/kv")).note(name_of(load_model("builtin"))) is not None


def test_the_model_is_that_of_the_folder(town: Path, tiny: str) -> None:
    ran("ingest", str(town), "--collection", "town", "--model", tiny, "--dtype", "float32")
    told = " ".join(ran("doctor", "--dir", ".samkv").split())
    assert f"{Path(tiny).resolve()} in float32 on cpu" in told
    assert "builtin in bfloat16" in ran(
        "doctor", "--dir", ".samkv", "--model", "builtin", "--dtype", "bfloat16"
    )
