"""The benches of time, on tiny models. Times are printed, never asserted."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import ingest, latency, models, shapes
from benchmarks.ingest import IngestConfig
from benchmarks.latency import LatencyConfig, PageCache
from samkv_integrations import METHODS
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.report import Report
from samkv_integrations.engine.stream import Answer
from samkv_integrations.errors import PromptTooLong
from tests.bench.running import error_of, run

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
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "SHAPES", {**shapes.SHAPES, "tiny": TINY})


def tiny(**changes: Any) -> LatencyConfig:  # noqa: ANN401
    fields = {"shape": "tiny", "dtype": "float32", "n_chunks": (3,), "chunk_tokens": (40,),
              "repeats": 1, "memory": False}  # fmt: skip
    return LatencyConfig(**{**fields, **changes})


# -- what is measured ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page_caches",
    [
        ("warm",),
        # which cells are asked; what is dropped before a cold one has a test of its own
        pytest.param(("warm", "cold"), marks=pytest.mark.slow),
    ],
)
def test_every_cell_question_and_method_has_a_row_with_all_columns(
    page_caches: tuple[PageCache, ...],
) -> None:
    config = tiny(
        text_tokens=(20,), cached_shares=(1.0, 0.5), page_caches=page_caches,
        n_chunks=(4,), chunk_tokens=(60,), new_tokens=3, memory=True,
    )  # fmt: skip
    rows = list(latency.run(config, METHODS_HERE))
    keys = [(*(row[name] for name in sorted(CELL)), row["label"]) for row in rows]
    n_rows = len(page_caches) * 3 * len(NAMES)  # 3: one question, and two
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
            # all but what the first question has left in memory: the beginning of the prompt
            assert row["computed_tokens"] == row["prompt_tokens"] - row["prefix_tokens"]
            share = row["computed_tokens"] / row["prompt_tokens"]
            assert row["arithmetic_floor_s"] == pytest.approx(row["ttft_s"] * share)


def test_a_grid_is_every_combination() -> None:
    config = tiny(n_chunks=(1, 4), text_tokens=(0, 9), cached_shares=(0.5, 1.0))
    cells = config.cells(30)
    found = [(c.cached_share, c.n_chunks, c.text_tokens, c.n_cached, c.questions) for c in cells]
    assert found == [
        (1.0, 1, 0, 1, 1), (1.0, 1, 9, 1, 1), (1.0, 4, 0, 4, 1), (1.0, 4, 9, 4, 1),
        (0.5, 1, 0, 0, 2), (0.5, 1, 9, 0, 2), (0.5, 4, 0, 2, 2), (0.5, 4, 9, 2, 2),
    ]  # fmt: skip
    assert {(c.chunk_tokens, c.page_cache) for c in cells} == {(30, "warm")}


def test_ratios_of_bytes_are_to_a_cache_in_bfloat16() -> None:
    (row,) = latency.run(tiny(n_chunks=(2,)), {"reuse": METHODS["reuse"]})
    per_token = 2 * 2 * 2 * 8 * 2  # keys and values, layers, KV heads, head, bytes
    assert row["bytes_ratio"] == row["bytes_read"] / (row["prompt_tokens"] * per_token)
    assert row["kv_ratio"] == row["kv_bytes"] / row["full_kv_bytes"]
    assert 0.25 < row["disk_ratio"] < 1.1  # 4 bits of 16, and there is more in a file
    missing = ("ttft_ratio", "decode_ratio", "peak_ratio", "arithmetic_floor_s", "floor_ratio")
    assert [row[name] for name in missing] == [None] * len(missing)  # there is no full prefill


def test_what_the_first_question_leaves_is_there_for_the_second_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = Engine.generate

    def keeps(self: Engine, prompt: str, chunks: list[str], **options: Any) -> Answer:  # noqa: ANN401
        made = answer(self, prompt, chunks, **options)
        self.cache_chunks(chunks)
        return made

    monkeypatch.setattr(Engine, "generate", keeps)
    rows = list(latency.run(tiny(n_chunks=(4,), cached_shares=(0.5,), repeats=2), METHODS_HERE))
    for row in rows:
        row["had"] = row["found"] - sum(row["chunk_misses"].values())
    assert [(row["question"], row["stored_share"], row["had"]) for row in rows] == [
        (1, 0.5, 2), (2, 1, 4), (1, 0.5, 2), (2, 1, 4),
    ]  # fmt: skip


def test_methods_take_turns_after_a_round_that_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    answer = Engine.generate

    def noted(self: Engine, *arguments: Any, **options: Any) -> Answer:  # noqa: ANN401
        asked.append(options["method"].name)
        return answer(self, *arguments, **options)

    monkeypatch.setattr(Engine, "generate", noted)
    list(latency.run(tiny(repeats=2, memory=True), METHODS_HERE))
    assert asked == [*NAMES] * (1 + 2 + 1)


@pytest.mark.slow  # a process for the memory of each cell
def test_the_built_in_model_is_a_shape() -> None:
    command = [
        "latency",
        "--shape",
        "builtin",
        "--chunks",
        "2",
        "--chunk-tokens",
        "48,64",
        "--methods",
        "recompute,reuse",
        "--repeats",
        "1",
        "--new-tokens",
        "2",
        "--json",
    ]
    done = run(*command)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["model"] == "builtin"
    assert [row["chunk_tokens"] for row in found["rows"]] == [48, 48, 64, 64]
    assert all(row["layers"] == 8 and row["peak_bytes"] > 0 for row in found["rows"])


def test_a_table_leaves_out_what_does_not_differ() -> None:
    command = ["latency", "--shape", "tiny", "--chunks", "1,2", "--chunk-tokens", "20",
               "--methods", "recompute", "--repeats", "1", "--no-memory"]  # fmt: skip
    done = run(*command)
    assert done.exit_code == 0, done.output
    header, _, *rows = done.stdout.strip().splitlines()
    assert header.startswith("| n chunks | label | ttft s | ttft ratio | floor ratio |")
    assert "peak" not in header and "page cache" not in header
    assert [row.split(" | ")[0] for row in rows] == ["| 1", "| 2"]


def test_fewer_layers_are_part_of_the_name() -> None:
    (row,) = latency.run(tiny(layers=1), {"recompute": METHODS["recompute"]})
    assert row["layers"] == 1
    assert row["model"] == "tiny, 1 of 2 layers (random weights)"


@pytest.mark.parametrize("n_tokens", [1, 2, 40])
def test_a_text_has_the_tokens_that_were_asked_for(n_tokens: int) -> None:
    words = models.Words(tiny().model(), seed=1)
    assert [words.count(words.text(n_tokens)) - n_tokens for _ in range(5)] == [0] * 5


# -- the page cache -----------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this platform drops no files")
def test_a_cold_question_finds_every_file_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    opened: dict[int, str] = {}
    answer, fsync, advise, open_ = Engine.generate, os.fsync, os.posix_fadvise, os.open

    def opens(path: Any, *arguments: Any, **options: Any) -> int:  # noqa: ANN401
        descriptor = open_(path, *arguments, **options)
        opened[descriptor] = str(path)
        return descriptor

    def syncs(descriptor: int) -> None:
        fsync(descriptor)
        events.append(f"sync {opened.get(descriptor)}")

    def advises(descriptor: int, offset: int, length: int, advice: int) -> None:
        assert (offset, length, advice) == (0, 0, os.POSIX_FADV_DONTNEED)  # 0: to the end
        advise(descriptor, offset, length, advice)
        events.append(f"drop {opened[descriptor]}")

    def asks(self: Engine, *arguments: Any, **options: Any) -> Answer:  # noqa: ANN401
        events.append("ask")
        return answer(self, *arguments, **options)

    config = tiny(n_chunks=(2,), page_caches=("cold",), repeats=2, memory=True)
    monkeypatch.setattr(os, "open", opens)
    monkeypatch.setattr(os, "fsync", syncs)
    monkeypatch.setattr(os, "posix_fadvise", advises)
    monkeypatch.setattr(Engine, "generate", asks)
    list(latency.run(config, METHODS_HERE))
    asked = [at for at, event in enumerate(events) if event == "ask"]
    assert len(asked) == len(NAMES) * (1 + 2 + 1)
    for at in asked:
        first, second, third, fourth = events[at - 4 : at]
        assert first.endswith(".safetensors") and third.endswith(".safetensors")
        assert first != third
        assert [second, fourth] == [first.replace("sync", "drop"), third.replace("sync", "drop")]


# -- ingest -------------------------------------------------------------------------------------


def test_ingest_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    forward = ingest._forward

    def noted(model: Any, batches: list[torch.Tensor]) -> None:  # noqa: ANN401
        passes.append(sum(batch.numel() for batch in batches))
        forward(model, batches)

    def timed(model: Any, call: Callable[[], object]) -> float:  # noqa: ANN401
        call()
        return next(times)

    times = itertools.cycle([1.0, 1.5, 2.0])  # the forward, into memory, onto the disk
    monkeypatch.setattr(ingest, "seconds_of", timed)
    monkeypatch.setattr(ingest, "_forward", noted)
    monkeypatch.setattr(ingest, "_LEAST_SHARE", 1e-9)  # a busy disk makes others small
    config = IngestConfig(
        shape="tiny", dtype="float32", n_chunks=(1, 3), chunk_tokens=(20,), repeats=2
    )
    rows = list(ingest.run(config))
    assert [(row["n_chunks"], row["n_tokens"]) for row in rows] == [(1, 20), (3, 60)]
    assert passes == [21] * 3 + [61] * 3  # the chunks, and BOS once; one round more warms up
    for row in rows:
        assert row["tokens_per_s"] == row["n_tokens"] / 2.0
        assert row["forward_tokens_per_s"] == row["n_tokens"] / 1.0
        shares = [row[name] for name in ("speed_ratio", "analysis_share", "write_share")]
        assert shares == [0.5, 0.25, 0.25]
        assert "cache.formats.quantise.encode" in row["stages"]
        assert "engine.chunks.prepare" not in row["stages"]  # it runs the pass
        assert all(0 < share <= 1 for share in row["stages"].values())


def test_ingest_is_a_command(tmp_path: Path) -> None:
    command = ["ingest", "--shape", "tiny", "--layers", "1", "--chunks", "2",
               "--chunk-tokens", "20", "--repeats", "1", "--dir", str(tmp_path)]  # fmt: skip
    done = run(*command)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("| n chunks | chunk tokens | n tokens | tokens per s |")
    assert "\n2 chunks of 20: " in done.stdout
    assert not list(tmp_path.iterdir())


# -- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "huge"), "unknown shape 'huge'; known: builtin, llama-3.1-8b, llama-3.2-1b, "),
        (("--layers", "25"), "layers=25; shape 'qwen2.5-0.5b' takes 1 to 24"),
        (("--layers", "0"), "layers=0; shape 'qwen2.5-0.5b' takes 1 to 24"),
        (("--shape", "builtin", "--layers", "2"), "layers=2 with shape='builtin'"),
        (("--dtype", "int8"), "dtype='int8'; allowed: auto, float32, bfloat16"),
        (("--chunks", "4,0"), "chunks=0; it must be at least 1"),
        (("--chunks", "x"), "--chunks 'x'; give whole numbers, as in 4,8"),
        (("--chunks", ""), "chunks is empty; give one whole number or more"),
        (("--chunk-tokens", "0"), "chunk_tokens=0; it must be at least 1"),
        (("--uncached", "-1"), "uncached=-1; it must be at least 0"),
        (("--cached", "1.0,2.0"), "cached=2; a share must be between 0 and 1"),
        (("--cached", "half"), "--cached 'half'; give numbers"),
        (("--cached", ""), "cached is empty; give one share or more"),
        (("--page-cache", "hot"), "page_cache='hot'; allowed: warm, cold, both"),
        (("--repeats", "0"), "repeats=0; it must be at least 1"),
        (("--new-tokens", "0"), "new_tokens=0; it must be at least 1"),
        (("--methods", ","), "--methods ',' names none; give some, or 'all'"),
        (("--methods", "magic"), "unknown method 'magic'"),
        (("--dir", "nowhere"), "folder nowhere is not there, or not writable; make it first"),
        (("--device", "tpu"), "device 'tpu'; allowed: auto, cpu, cuda, cuda:N"),
    ],
)
def test_a_wrong_option_is_named(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(shapes.SHAPES, "tiny")  # type: ignore[arg-type]
    assert message in error_of("latency", *arguments)


@pytest.mark.parametrize("command", ["latency", "ingest"])
def test_a_gpu_that_is_not_there_is_named_before_a_model_is_built(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    line = error_of(command, "--device", "cuda", "--shape", "llama-3.1-8b", "--chunks", "10",
                    "--chunk-tokens", "1024")  # fmt: skip
    assert "device 'cuda', but torch finds 0 CUDA devices here; give 'auto' or 'cpu'" in line


def test_a_platform_that_cannot_drop_files_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    for word in ("cold", "both"):
        line = error_of("latency", "--page-cache", word)
        assert "page_cache='cold': this platform has no posix_fadvise" in line
        assert "give 'warm', or measure on Linux" in line
    assert latency.page_caches("warm") == tiny().page_caches


def test_a_grid_that_the_built_in_model_cannot_take_is_refused_at_once() -> None:
    line = error_of("latency", "--shape", "builtin", "--chunks", "1,40", "--chunk-tokens", "128")
    assert "chunks=40 of chunk_tokens=128 make a prompt of about" in line
    assert "give fewer or shorter chunks, or another shape" in line
    with pytest.raises(PromptTooLong):
        next(latency.run(LatencyConfig(shape="builtin", n_chunks=(40,)), METHODS_HERE))
