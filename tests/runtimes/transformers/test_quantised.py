"""Quantised weights, as transformers loads them; each kind that a CPU computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from samkv_integrations.engine import Engine
from samkv_integrations.errors import ChunkNotCached, InvalidOption, UnsupportedModel
from samkv_integrations.runtimes.transformers.loading import load_model
from samkv_integrations.runtimes.transformers.model.decode_layer import is_plain
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.store.disk import ChunkStore
from samkv_integrations.store.memory import MemoryStore
from tests.support.asking import announce
from tests.support.laws import CHUNKS, PROMPT, TOLERANCE, first_logits, plain_logits
from tests.support.models import byte_tokenizer, hf_model, save_model

BUFFERS = ("awq", "gptq", "marlin")
"""Kinds whose projections have no ``weight``. A CPU has no package for them: see `Packed4`."""
KINDS = (
    "torchao int8", "torchao int8, activations too", "bitsandbytes 8", "bitsandbytes nf4", *BUFFERS
)  # fmt: skip
ROUNDED = ("torchao int8, activations too", "bitsandbytes 8", "bitsandbytes nf4")
"""Which round activations too; the last one to bfloat16, on CPUs that multiply it."""
SIZES = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}


def quantisation(kind: str) -> Any:
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
    return save_model(hf_model("llama", **SIZES), tmp_path_factory.mktemp("model"))


class Packed4(torch.nn.Module):
    """A projection with the tensors of gptqmodel's modules, which transformers puts there.

    ``awq``: AwqGEMMLinear, AwqTorchLinear; ``gptq``: TorchLinear; ``marlin``: MarlinLinear, which
    has integers as parameters. Two of them convert their scales when they first run. AwqGEMMLinear
    counts tokens by the first two of three axes.
    """

    __module__ = "gptqmodel.nn_modules.qlinear"

    def __init__(self, linear: torch.nn.Linear, kind: str) -> None:
        super().__init__()
        self.kind, self.group_size, self.adapter = kind, 32, None
        self.in_features, self.out_features = linear.in_features, linear.out_features
        groups = linear.weight.detach().T.unflatten(0, (-1, self.group_size))
        low, high = groups.amin(1), groups.amax(1)
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).round().clamp(0, 15)
        codes = (groups / scales[:, None] + zeros[:, None]).round().clamp(0, 15).flatten(0, 1)
        qweight = self.packed(codes) if kind == "awq" else self.packed(codes.T).T.contiguous()
        self.keep("qweight", qweight)
        self.keep("qzeros", self.packed(zeros))
        self.keep("scales", scales)
        if kind != "awq":
            group = torch.arange(self.in_features, dtype=torch.int32) // self.group_size
            self.keep("g_idx", group)
        if kind == "gptq":
            shifts = torch.arange(0, 32, 4, dtype=torch.int32)[None, None]
            self.register_buffer("wf_unsqueeze_zero", shifts, persistent=False)
        self.bias = None

    def keep(self, name: str, tensor: Tensor) -> None:
        if self.kind == "marlin":
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        else:
            self.register_buffer(name, tensor)

    @staticmethod
    def packed(codes: Tensor) -> Tensor:
        """(n, m) codes -> (n, m / 8) int32."""
        parts = codes.long().unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
        return parts.sum(-1).to(torch.int32)

    @staticmethod
    def codes(packed: Tensor) -> Tensor:
        return (packed[..., None] >> torch.arange(0, 32, 4) & 15).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        assert x.dim() == 3
        if self.kind != "gptq" and self.scales.dtype != x.dtype:
            self.keep("scales", self.scales.to(x.dtype))
        is_awq = self.kind == "awq"
        codes = self.codes(self.qweight) if is_awq else self.codes(self.qweight.T).T
        group = torch.arange(self.in_features) // self.group_size
        weight = (codes - self.codes(self.qzeros)[group]) * self.scales[group].to(x.dtype)
        return x @ weight


def with_buffers(folder: Path, kind: str, dtype: str) -> Model:
    from transformers import AutoModelForCausalLM, AwqConfig, GPTQConfig

    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    for name, module in list(hf.named_modules()):
        if name.endswith("_proj"):
            hf.set_submodule(name, Packed4(module, kind))
    quantised = AwqConfig if kind == "awq" else GPTQConfig
    hf.config.quantization_config = quantised(bits=4, group_size=32)
    return Model(hf, byte_tokenizer(bos=True), "tiny")


def loaded(folder: Path, kind: str | None, dtype: str = "float32") -> Model:
    if kind in BUFFERS:
        return with_buffers(folder, kind, dtype)
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


@pytest.mark.parametrize("kind", KINDS)
def test_ingest_and_a_blended_pass_leave_weights_packed(folder: Path, kind: str) -> None:
    hf = (model := loaded(folder, kind)).hf

    def held() -> list[object]:
        named = [(name, id(each), each.dtype) for name, each in hf.named_parameters()]
        return [hf.get_memory_footprint(), hf.state_dict().keys(), *named]

    before = held()
    report = engine_of(model).generate(PROMPT, CHUNKS, method="epic", max_new_tokens=3).report
    assert (report.ran, report.reused) == ("epic", len(CHUNKS)) and report.recompute_ratio < 1
    assert held() == before
    plain = loaded(folder, None)
    assert model.layer_parameters == plain.layer_parameters
    assert model.n_parameters == plain.n_parameters
    if kind in BUFFERS:
        assert is_plain(hf.config, hf.model.layers[0]), "a layer takes few launches"


@pytest.mark.parametrize("kind", ["bitsandbytes nf4", *BUFFERS])
def test_caches_are_found_by_another_load_and_hot_once_announced(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    """Its weights have the same digest before and after they are used."""
    options: dict[str, Any] = {"store_bits": 16, "prefix": "bos", "method": "epic"}
    options |= {"hot_bytes": 2**26, "prefix_bytes": 0}
    Engine(loaded(folder, kind), ChunkStore(tmp_path), **options).cache_chunks(CHUNKS)
    engine = Engine(loaded(folder, kind), ChunkStore(tmp_path), **options)
    cold = engine.logits(PROMPT, CHUNKS)
    announce(engine, CHUNKS)
    report = engine.generate(PROMPT, CHUNKS, max_new_tokens=1, on_miss="error").report
    assert (report.reused, report.bytes_read) == (len(CHUNKS), 0)
    assert torch.equal(engine.logits(PROMPT, CHUNKS), cold)


def test_half_precision(folder: Path) -> None:
    assert loaded(folder, None, "float16").dtype == torch.float16
    engine = engine_of(loaded(folder, None, "float16"))
    whole, query = first_logits(engine, PROMPT, CHUNKS, "recompute")
    expected = plain_logits(engine.model, query.layout)
    assert float((whole - expected).abs().max()) < 0.01 * float(expected.abs().max())


def test_a_checkpoint_in_half_precision_is_widened_on_processors(tmp_path: Path) -> None:
    save_model(hf_model("llama").half(), tmp_path)
    assert load_model(str(tmp_path), device="cpu").dtype == torch.float32


Packed = Callable[[str, Tensor], dict[str, Tensor]]
"""What a checkpoint holds in place of a projection's weight, by the weight's name."""


def checkpoint(path: Path, packed: Packed, quantisation: dict[str, Any]) -> Path:
    """A folder as quantisers write one."""
    hf = hf_model("llama", **SIZES)
    save_model(hf, path)
    state: dict[str, Tensor] = {}
    for name, weight in hf.state_dict().items():
        state |= packed(name, weight) if name.endswith("_proj.weight") else {name: weight}
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": quantisation}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_a_package_that_is_not_there_is_named(tmp_path: Path, method: str) -> None:
    if method == "compressed-tensors" and find_spec("compressed_tensors"):
        pytest.skip("it is there")
    how = {"quant_method": method, "bits": 4, "group_size": 64}
    path = checkpoint(tmp_path, lambda name, weight: {name: weight}, how)
    with pytest.raises(UnsupportedModel, match="needs a package.*(optimum|gptqmodel|compressed)"):
        load_model(str(path), device="cpu")


def test_fp8_is_widened_on_processors(tmp_path: Path) -> None:
    """Codes of 8 bits, and a scale for each block of 32 x 32."""
    expected: dict[str, Tensor] = {}

    def packed(name: str, weight: Tensor) -> dict[str, Tensor]:
        blocks = weight.unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        expected[name] = (codes.float() * scale[:, None, :, None]).reshape(weight.shape)
        return {name: codes.reshape(weight.shape), f"{name}_scale_inv": scale}

    how = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    model = load_model(str(checkpoint(tmp_path, packed, how)), device="cpu")
    assert model.dtype == torch.float32 and expected
    for name, weight in model.hf.named_parameters():
        assert name not in expected or torch.equal(weight, expected[name])
    whole, query = first_logits(engine_of(model), PROMPT, CHUNKS, "recompute")
    torch.testing.assert_close(whole, plain_logits(model, query.layout), **TOLERANCE)


def test_compressed_tensors_are_unpacked_before_a_layer_runs(tmp_path: Path) -> None:
    """Codes of 4 bits, and a scale for each row."""
    pack: Any = pytest.importorskip("compressed_tensors.compressors").pack_to_int32
    expected: dict[str, Tensor] = {}

    def packed(name: str, weight: Tensor) -> dict[str, Tensor]:
        scale = weight.abs().amax(1, keepdim=True) / 7
        codes = (weight / scale).round().to(torch.int8)
        expected[name] = codes * scale
        parts = {"packed": pack(codes, 4), "scale": scale, "shape": torch.tensor(weight.shape)}
        return {f"{name}_{part}": tensor for part, tensor in parts.items()}

    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}
    how = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
    }  # fmt: skip
    model = load_model(str(checkpoint(tmp_path, packed, how)), device="cpu")
    engine = engine_of(model)
    found = dict(model.hf.named_parameters())
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight)
    before = model.identity.look()
    whole, query = first_logits(engine, PROMPT, CHUNKS, "recompute")
    torch.testing.assert_close(whole, plain_logits(model, query.layout), **TOLERANCE)
    assert model.identity.look() == before


def test_the_older_names_are_told_the_newer_one(folder: Path) -> None:
    with pytest.raises(InvalidOption, match="give quantization_config=BitsAndBytesConfig"):
        load_model(str(folder), model_kwargs={"load_in_4bit": True})
