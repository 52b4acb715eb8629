"""Quantised weights, as transformers loads them; each kind that a CPU computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from samkv_integrations.cache.memory import MemoryStore
from samkv_integrations.engine.engine import Engine
from samkv_integrations.errors import ChunkNotCached, InvalidOption, UnsupportedModel
from samkv_integrations.model.loading import load_model
from samkv_integrations.model.model import Model
from tests.support.laws import CHUNKS, PROMPT, TOLERANCE, first_logits, plain_logits
from tests.support.models import byte_tokenizer, hf_model

KINDS = ("torchao int8", "torchao int8, activations too", "bitsandbytes 8", "bitsandbytes nf4")
ROUNDED = ("torchao int8, activations too", "bitsandbytes 8")
"""Which round activations too."""
SIZES = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}


def quantisation(kind: str) -> Any:  # noqa: ANN401
    if kind.startswith("torchao"):
        quantisations: Any = pytest.importorskip("torchao.quantization")
        from transformers import TorchAoConfig

        name = "Int8WeightOnlyConfig"
        if kind.endswith("too"):
            name = "Int8DynamicActivationInt8WeightConfig"
        return TorchAoConfig(getattr(quantisations, name)())
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    if kind.endswith("8"):
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    hf_model("llama", **SIZES).save_pretrained(path)
    byte_tokenizer(bos=True).save_pretrained(path)
    return path


def loaded(folder: Path, kind: str | None, dtype: str = "float32") -> Model:
    further = {} if kind is None else {"quantization_config": quantisation(kind)}
    return load_model(str(folder), device="cpu", dtype=dtype, model_kwargs=further)


def engine_of(model: Model, store: MemoryStore | None = None) -> Engine:
    engine = Engine(model, store, store_bits=16, prefix="bos")
    engine.cache_chunks(CHUNKS)
    return engine


@pytest.mark.parametrize("kind", KINDS)
def test_full_prefill_and_a_first_chunk_are_exact(folder: Path, kind: str) -> None:
    engine = engine_of(loaded(folder, kind))
    # Rounded activations carry the last bit of a sum on; and LLM.int8 rounds a token by others.
    near = {"atol": 0.3, "rtol": 0.0} if kind in ROUNDED else TOLERANCE
    whole, query = first_logits(engine, PROMPT, CHUNKS, "recompute")
    torch.testing.assert_close(whole, plain_logits(engine.model, query.layout), **near)
    reused, query = first_logits(engine, f"{CHUNKS[0]} Why?", CHUNKS[:1], "reuse")
    torch.testing.assert_close(reused, plain_logits(engine.model, query.layout), **near)
    assert float(whole.std()) > 1, "logits too flat to notice a mistake"


@pytest.mark.parametrize("kind", KINDS)
def test_its_caches_are_its_own(folder: Path, kind: str) -> None:
    """A change of one packed number is seen, and a miss says what differs."""
    store = MemoryStore()
    engine_of(loaded(folder, None), store)
    quantised = loaded(folder, kind)
    engine = Engine(quantised, store, store_bits=16, prefix="bos")
    with pytest.raises(ChunkNotCached, match="has no usable cache"):
        engine.generate(PROMPT, CHUNKS, max_new_tokens=1, on_miss="error")
    again = loaded(folder, kind)
    assert again.identity.weights == quantised.identity.weights
    layer = again.hf.model.layers[2].mlp.down_proj
    packed = max(
        (x for x in [*layer.parameters(), *layer.state_dict().values()]), key=lambda x: x.numel()
    )
    inner = getattr(packed, "qdata", packed)
    with torch.no_grad():
        inner.reshape(-1)[5] ^= 1
    again.identity.refresh()
    assert again.identity.weights != quantised.identity.weights


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_not_seen_to_change_by_being_used(folder: Path, kind: str) -> None:
    engine = engine_of(loaded(folder, kind))
    before = engine.model.identity.look()
    engine.generate(PROMPT, CHUNKS, max_new_tokens=3)
    assert engine.model.identity.look() == before


def test_half_precision(folder: Path) -> None:
    assert loaded(folder, None, "float16").dtype == torch.float16
    engine = engine_of(loaded(folder, None, "float16"))
    whole, query = first_logits(engine, PROMPT, CHUNKS, "recompute")
    expected = plain_logits(engine.model, query.layout)
    assert float((whole - expected).abs().max()) < 0.01 * float(expected.abs().max())


def test_a_checkpoint_in_half_precision_is_widened_on_processors(tmp_path: Path) -> None:
    hf_model("llama").half().save_pretrained(tmp_path)
    byte_tokenizer(bos=True).save_pretrained(tmp_path)
    assert load_model(str(tmp_path), device="cpu").dtype == torch.float32


def test_a_package_that_is_not_there_is_named(folder: Path) -> None:
    import json

    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    quantised = folder.parent / "gptq"
    quantised.mkdir()
    for file in folder.iterdir():
        (quantised / file.name).write_bytes(file.read_bytes())
    (quantised / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="needs a package.*(optimum|gptqmodel)"):
        load_model(str(quantised), device="cpu")


def test_the_older_names_are_told_the_newer_one(folder: Path) -> None:
    with pytest.raises(InvalidOption, match="give quantization_config=BitsAndBytesConfig"):
        load_model(str(folder), model_kwargs={"load_in_4bit": True})
