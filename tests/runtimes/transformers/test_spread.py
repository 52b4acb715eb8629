"""Layers that are spread over devices, or loaded from memory and disk as they run.

This is rehearsed with the processor and the disk: several devices are as many places.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from samkv_integrations.engine import Engine
from samkv_integrations.errors import InvalidOption
from samkv_integrations.runtimes.transformers.loading import load_model
from samkv_integrations.store.memory import MemoryStore
from tests.support.laws import CHUNKS, PROMPT, first_logits
from tests.support.models import hf_model, save_model

accelerate = pytest.importorskip("accelerate")

PLACES = {
    "model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu",
    "model.layers.1": "disk", "model.layers.2": "disk", "model.layers.3": "cpu",
    "model.norm": "cpu", "lm_head": "disk",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(hf_model("llama"), tmp_path_factory.mktemp("model"))


def test_it_computes_the_same_and_shares_caches(folder: Path, tmp_path: Path) -> None:
    options = {"device_map": PLACES, "offload_folder": str(tmp_path)}
    spread = load_model(str(folder), dtype="float32", model_kwargs=options)
    whole = load_model(str(folder), device="cpu", dtype="float32")
    assert any(weight.is_meta for weight in spread.hf.parameters())
    assert spread.identity.weights == whole.identity.weights
    store = MemoryStore()
    one = Engine(whole, store, store_bits=16)
    one.cache_chunks(CHUNKS)
    other = Engine(spread, store, store_bits=16)
    before = spread.identity.look()
    for method in ("recompute", "reuse", "samkv-guided"):
        mine, asked = first_logits(other, PROMPT, CHUNKS, method)
        theirs, _ = first_logits(one, PROMPT, CHUNKS, method)
        assert torch.equal(mine, theirs)
        assert asked.layout.n_chunks == len(CHUNKS)
    mine, theirs = (each.generate(PROMPT, CHUNKS, max_new_tokens=8).text for each in (other, one))
    assert mine == theirs
    assert spread.identity.look() == before


def test_a_look_while_weights_are_loaded_sees_no_change(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a request that arrives while the model answers another."""
    options = {"device_map": PLACES, "offload_folder": str(tmp_path)}
    spread = load_model(str(folder), dtype="float32", model_kwargs=options)
    generations: list[int] = []
    load = accelerate.hooks.AlignDevicesHook.pre_forward

    def look_after_loading(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        generations.append(spread.identity.look())
        return loaded

    monkeypatch.setattr(accelerate.hooks.AlignDevicesHook, "pre_forward", look_after_loading)
    Engine(spread, MemoryStore(), store_bits=16).cache_chunks(CHUNKS)
    assert set(generations) == {0}


def test_a_model_of_which_few_layers_are_in_memory(tmp_path: Path) -> None:
    """The cheap check looks at a matrix a layer, of those that are there."""
    folder = save_model(hf_model("llama", num_hidden_layers=60), tmp_path / "model")
    places = {name: "cpu" for name in PLACES if "layers" not in name}
    places |= {f"model.layers.{n}": "cpu" if n < 7 else "disk" for n in range(60)}
    options = {"device_map": places, "offload_folder": str(tmp_path / "weights")}
    spread = load_model(str(folder), dtype="float32", model_kwargs=options)
    assert spread.identity.look() == 0
    with torch.no_grad():
        spread.hf.model.layers[3].mlp.up_proj.weight[0, 0] += 1
    assert spread.identity.look() == 1


def test_a_weight_on_disk_that_differs_is_another_model(folder: Path, tmp_path: Path) -> None:
    options = {"device_map": PLACES, "offload_folder": str(tmp_path)}
    spread = load_model(str(folder), dtype="float32", model_kwargs=options)
    hf = hf_model("llama")
    with torch.no_grad():
        hf.model.layers[2].mlp.up_proj.weight[3, 4] += 1
    options["offload_folder"] = str(tmp_path / "weights")
    saved = save_model(hf, tmp_path / "other")
    other = load_model(str(saved), dtype="float32", model_kwargs=options)
    assert spread.identity.weights != other.identity.weights


def test_a_head_on_disk_that_is_tied_to_the_embedding_is_refused(tmp_path: Path) -> None:
    folder = save_model(hf_model("llama", tie_word_embeddings=True), tmp_path / "model")
    options = {"device_map": {"model": "cpu", "lm_head": "disk"}, "offload_folder": str(tmp_path)}
    model = load_model(str(folder), dtype="float32", model_kwargs=options)
    with pytest.raises(InvalidOption, match="puts 'lm_head' on disk.*the same place"):
        assert model.weights_digest


def test_a_map_without_a_layer_is_refused(folder: Path) -> None:
    places = {name: place for name, place in PLACES.items() if name != "model.layers.3"}
    with pytest.raises(InvalidOption, match="model_kwargs=.*device_map"):
        load_model(str(folder), dtype="float32", model_kwargs={"device_map": places})


def test_an_apple_gpu_that_is_not_there(folder: Path) -> None:
    if torch.backends.mps.is_available():
        assert load_model(str(folder), device="mps").device.type == "mps"
    else:
        with pytest.raises(InvalidOption, match="no Apple GPU here"):
            load_model(str(folder), device="mps")
