"""The benches of time, on tiny models. Times are printed, never asserted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import latency, shapes
from benchmarks.latency import LatencyConfig
from samkv_integrations import METHODS
from samkv_integrations.report import Report
from tests.bench.running import run

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = {
    "model_type": "llama",
    "vocab_size": 2880,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,  # random weights take longer prompts all the same
}
NAMES = ("recompute", "samkv-guided")
METHODS_HERE = {name: METHODS[name] for name in NAMES}
CELL = {"n_chunks", "chunk_tokens", "text_tokens", "cached_share", "page_cache", "question"}
SETTINGS = {"label", "shape", "layers", "dtype", "device", "threads", "repeats", "new_tokens"}
MEASURED = {
    "stored_share", "ttft_ratio", "decode_ratio", "bytes_ratio", "kv_ratio", "disk_ratio",
    "peak_bytes", "peak_ratio", "peak_python_bytes", "computed_tokens", "disk_bytes_per_s",
    "arithmetic_floor_s", "disk_floor_s", "floor_ratio",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "SHAPES", {**shapes.SHAPES, "tiny": TINY})


def tiny(**changes: Any) -> LatencyConfig:  # noqa: ANN401
    fields = {"shape": "tiny", "dtype": "float32", "n_chunks": (3,), "chunk_tokens": (40,),
              "repeats": 1, "memory": False}  # fmt: skip
    return LatencyConfig(**{**fields, **changes})


def test_every_cell_question_and_method_has_a_row_with_all_columns() -> None:
    config = tiny(
        text_tokens=(20,), cached_shares=(1.0, 0.5),
        n_chunks=(4,), chunk_tokens=(60,), new_tokens=3, memory=True,
    )  # fmt: skip
    rows = list(latency.run(config, METHODS_HERE))
    keys = [(*(row[name] for name in sorted(CELL)), row["label"]) for row in rows]
    n_rows = 3 * len(NAMES)  # 3: one question, and two
    assert len(keys) == len(set(keys)) == n_rows
    for row in rows:
        assert set(row) == CELL | SETTINGS | MEASURED | set(Report.__dataclass_fields__)
        assert not [name for name in MEASURED if row[name] is None]
        assert row["completion_tokens"] == 3
        n_cached = round(row["n_chunks"] * row["cached_share"])
        n_missed = row["n_chunks"] - n_cached
        n_computed = 0 if row["label"] == "recompute" else n_missed  # it wants no caches
        if row["question"] == 2:  # finds what the first one computed and kept
            n_cached, n_missed, n_computed = n_cached + n_computed, n_missed - n_computed, 0
        assert row["found"] == row["n_chunks"]
        assert row["reused"] == (0 if row["label"] == "recompute" else n_cached)
        assert row["computed_now"] == n_computed
        assert sum(row["chunk_misses"].values()) == n_missed
        assert row["stored_share"] == n_cached / row["n_chunks"]
        assert row["context_tokens"] == row["n_chunks"] * row["chunk_tokens"]
        assert row["uncached_tokens"] > row["text_tokens"]
        if row["label"] == "recompute":
            ones = ("ttft_ratio", "decode_ratio", "kv_ratio", "peak_ratio")
            assert [row[name] for name in ones] == [1] * len(ones)
            assert row["computed_tokens"] == row["prompt_tokens"]
            share = row["computed_tokens"] / row["prompt_tokens"]
            assert row["arithmetic_floor_s"] == pytest.approx(row["ttft_s"] * share)


def test_ingest_is_a_command(tmp_path: Path) -> None:
    command = ["ingest", "--shape", "tiny", "--layers", "1", "--chunks", "2",
               "--chunk-tokens", "20", "--repeats", "1", "--dir", str(tmp_path)]  # fmt: skip
    done = run(*command)
    assert done.exit_code == 0, done.output
    assert "| n chunks | chunk tokens | n tokens |" in done.stdout
    assert "\n| 2 | 20 | 32 |" in done.stdout
    assert not list(tmp_path.iterdir())
