"""What is worked out of a model's config, against files, reports and the engine's cost model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.cache.file_format import FileLayout
from samkv_integrations.engine.costs import CostModel
from samkv_integrations.errors import InvalidOption
from samkv_integrations.evaluation import sizing
from samkv_integrations.evaluation.shapes import SHAPES, sizes_of
from samkv_integrations.evaluation.sizing import Machine, Workload
from samkv_integrations.methods import DEFAULT_METHOD, METHODS
from samkv_integrations.model.loading import load_model, load_shape
from samkv_integrations.model.model import Model
from samkv_integrations.model.shape import ModelShape
from tests.support.models import FAMILIES, tiny_model

TEXT = "Ein Stück Text, das zwischengespeichert wird. "


def shape_of(model: Model) -> ModelShape:
    return ModelShape.of(model.config, model.name, model.dtype_name)


def layout_of(engine: Engine, text: str) -> FileLayout:
    """Of the chunk ``text``, by the config of the engine's model."""
    return sizing.file_layout(
        shape_of(engine.model), chunk_tokens=len(engine.model.tokenize(text, special=False)),
        store_bits=engine.store_bits, n_text=len(text.encode()), prefix=engine.prefix,
    )  # fmt: skip


def text_of(n_bytes: int) -> str:
    return (TEXT * (n_bytes // len(TEXT) + 1)).encode()[:n_bytes].decode(errors="ignore").strip()


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_those_of_files(tmp_path: Path, family: str, bits: int) -> None:
    dtype = torch.bfloat16 if family == "qwen2" else torch.float32
    for n_bytes in (5, 64, 517):
        store = ChunkStore(tmp_path / str(n_bytes))
        engine = Engine(tiny_model(family, dtype), store, store_bits=bits)
        text = text_of(n_bytes)
        engine.cache_chunks([text])
        (file,) = store.path.rglob("*.safetensors")
        assert sizing.file_bytes(layout_of(engine, text)) == file.stat().st_size


def test_bytes_of_the_builtin_model_are_those_of_files(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    engine = Engine(load_model("builtin", device="cpu", dtype="float32"), store)
    text = "Felix Floksen was born in Fovwood. " * 20
    engine.cache_chunks([text.strip()])
    (file,) = store.path.rglob("*.safetensors")
    layout = layout_of(engine, text.strip())
    assert sizing.file_bytes(layout) == file.stat().st_size
    assumed = sizing.file_layout(
        load_shape("builtin", dtype="float32"), chunk_tokens=layout.n_tokens, store_bits=4
    )
    # the text is not that of 4 bytes a token, and the prefix of two bytes is not known
    assert sizing.file_bytes(assumed) == pytest.approx(file.stat().st_size, rel=0.01)


@pytest.mark.parametrize("method", ["reuse", "samkv-guided"])
def test_bytes_read_are_those_of_a_report(tmp_path: Path, method: str) -> None:
    engine = Engine(tiny_model(), ChunkStore(tmp_path))
    chunks = [f"{i} {text_of(200)}" for i in range(3)]
    engine.cache_chunks(chunks)
    report = engine.generate("\n".join([*chunks, "?"]), method=method, max_new_tokens=1).report
    assert report.reused == 3
    expected = sum(sizing.read_bytes(layout_of(engine, text)) for text in chunks)
    assert report.bytes_read == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shape_has_the_sizes_of_its_model(family: str) -> None:
    model = tiny_model(family)
    for name, value in vars(shape_of(model)).items():
        assert value == (model.dtype_name if name == "dtype" else getattr(model, name)), name


PUBLISHED = {
    "qwen2.5-0.5b": 0.36, "qwen2.5-1.5b": 1.31, "qwen2.5-7b": 6.53, "llama-3.2-1b": 0.97,
    "llama-3.2-3b": 2.82, "llama-3.1-8b": 6.98, "mistral-7b-v0.3": 6.98, "qwen3-4b": 3.6,
    "qwen3-8b": 6.95, "qwen3-14b": 13.2,
}  # fmt: skip
"""Billions of parameters without embeddings, by the models' cards."""


def test_shapes_have_the_parameters_that_are_published() -> None:
    assert set(PUBLISHED) == set(SHAPES)
    for name, billions in PUBLISHED.items():
        shape = sizes_of(name, layers=None, dtype="auto")
        assert shape.n_layers * shape.layer_parameters / 1e9 == pytest.approx(billions, rel=0.01)


SHAPE = sizes_of("qwen2.5-1.5b", layers=None, dtype="auto")
WORK = Workload(n_chunks=1_000_000)


def test_a_given_speed_is_that_of_caching_chunks_in_the_assumed_proportions() -> None:
    costs = sizing.costs_of(SHAPE, Machine(prefill_tokens_s=2_000), 512)
    assert SHAPE.n_layers * costs.chunks_s([512]) == pytest.approx(512 / 2_000)
    assumed = CostModel.assumed_on(SHAPE, on_gpu=False)
    for name in ("layer_s", "pair_s", "entry_s"):
        share = getattr(costs, name) / costs.token_s
        assert share == pytest.approx(getattr(assumed, name) / assumed.token_s)
    found = sizing.size_up(SHAPE, WORK, Machine(prefill_tokens_s=2_000))
    one = SHAPE.n_layers * costs.chunks_s([512], sizing.CHUNK_PREFIX)  # of more tokens
    assert found.ingest_s == pytest.approx(1_000_000 * one)
    assert found.recompute_s == pytest.approx(8 * one, rel=0.01) and one > 512 / 2_000


def test_seconds_are_those_of_the_cost_model() -> None:
    machine = Machine(on_gpu=True, disk_gb_s=2.0)
    found = sizing.size_up(SHAPE, WORK, machine)
    costs = sizing.costs_of(SHAPE, machine, 512)
    assert costs == replace(CostModel.assumed_on(SHAPE, on_gpu=True), read_s=0.0)
    n_tokens, n_context = 8 * 512 + 64, 8 * 512
    assert found.full_prefill_s == SHAPE.n_layers * costs.full_prefill_s(n_tokens)
    assert found.recompute_s == SHAPE.n_layers * costs.chunks_s([512] * 8, sizing.CHUNK_PREFIX)
    ratio = METHODS[DEFAULT_METHOD].recompute.most_ratio(n_context, 8)
    on_disk_s = 8 * found.read_bytes * (1 / 2e9 + 1 / 4.0e9)
    with_disk = replace(costs, read_s=on_disk_s / (n_context * SHAPE.n_layers))
    expected = SHAPE.n_layers * with_disk.blended_s(n_tokens, n_context, ratio)
    assert found.first_token_s == pytest.approx(expected)
    assert found.requests_per_s == pytest.approx(1 / expected)


def test_totals() -> None:
    machine = Machine(disk_usd_gb_month=0.08, remote_usd_gb_month=0.02)
    found = sizing.size_up(SHAPE, WORK, machine)
    assert found.total_bytes == 1_000_000 * found.chunk_bytes
    assert found.chunk_ratio == found.chunk_bytes / (512 * 28 * 2 * 2 * 128 * 2)
    assert found.disk_usd_month == pytest.approx(found.total_bytes / 1e9 * 0.08)
    assert found.remote_usd_month == pytest.approx(found.total_bytes / 1e9 * 0.02)
    assert (found.fetch_s, found.read_s, found.remote_requests_per_s) == (None, 0, None)


@pytest.mark.parametrize("latency_ms", [0, 400])
def test_fetching_takes_as_long_as_recomputing_at_the_break_even(latency_ms: float) -> None:
    machine = Machine(remote_gb_s=1.0, remote_latency_ms=latency_ms, prefill_tokens_s=5_000)
    even = sizing.size_up(SHAPE, WORK, machine).break_even_gb_s
    assert even is not None
    at = sizing.size_up(SHAPE, WORK, replace(machine, remote_gb_s=even))
    assert at.fetch_s is not None
    assert at.fetch_s + at.check_s == pytest.approx(at.recompute_s)


def test_recomputing_always_wins_where_the_first_byte_comes_too_late() -> None:
    machine = Machine(remote_gb_s=100.0, remote_latency_ms=1_000, prefill_tokens_s=5_000)
    found = sizing.size_up(SHAPE, WORK, machine)
    assert found.recompute_s < 1 and found.break_even_gb_s is None


@pytest.mark.parametrize(
    ("machine", "bound", "remote_bound"),
    [
        (Machine(remote_gb_s=10.0), "compute", "compute"),
        (Machine(prefill_tokens_s=1e6, remote_gb_s=10.0), "check", "check"),
        (Machine(prefill_tokens_s=1e6, disk_gb_s=0.1, remote_gb_s=10.0), "disk", "disk"),
        (Machine(prefill_tokens_s=1e6, remote_gb_s=0.1), "check", "remote"),
    ],
)
def test_what_bounds_a_replica(machine: Machine, bound: str, remote_bound: str) -> None:
    found = sizing.size_up(SHAPE, WORK, machine)
    assert (found.bound, found.remote_bound) == (bound, remote_bound)
    if remote_bound == "remote":
        assert found.remote_requests_per_s == pytest.approx(0.1e9 / (8 * found.chunk_bytes))
    else:
        assert found.remote_requests_per_s == found.requests_per_s


def test_tokens_after_the_first_take_their_time() -> None:
    first = sizing.size_up(SHAPE, WORK, Machine(on_gpu=True))
    work, machine = replace(WORK, answer_tokens=101), Machine(on_gpu=True, decode_tokens_s=500)
    whole = sizing.size_up(SHAPE, work, machine)
    assert 1 / whole.requests_per_s == pytest.approx(1 / first.requests_per_s + 0.2)
    assert whole.first_token_s == first.first_token_s
    with pytest.raises(InvalidOption, match=r"answer_tokens=101 without decode_tokens_s; give"):
        sizing.size_up(SHAPE, work, Machine())
