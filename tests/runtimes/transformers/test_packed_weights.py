"""Packed weights: products are those of the file's values, and nothing that is stored changes."""

from __future__ import annotations

import copy
import logging
import os
import platform
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from samkv_integrations import Engine, MemoryStore
from samkv_integrations.errors import InvalidOption, ModelNotFound
from samkv_integrations.lab.doctor import examine
from samkv_integrations.options import AnswerSettings
from samkv_integrations.runtimes.base import Observer
from samkv_integrations.runtimes.transformers import loading
from samkv_integrations.runtimes.transformers.loading import load_model
from samkv_integrations.runtimes.transformers.model import packed_weights
from samkv_integrations.runtimes.transformers.model.gguf_file import GgufFile
from samkv_integrations.runtimes.transformers.model.packed_weights import (
    Buffer,
    FileMatrix,
    Int4Matrix,
    Int8Matrix,
    LargeInt8Matrix,
    OpenFile,
    SevenBitMatrix,
    kernels_work,
    large_kind,
    pack,
    packed_bytes,
    packed_products,
    unpacked,
)
from samkv_integrations.runtimes.transformers.passes.prefill import entries_before
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.serving.first_token import first_token
from tests.support.gguf_files import model_for_gguf, same_weights, write_gguf
from tests.support.models import byte_tokenizer, hf_model

pytestmark = pytest.mark.skipif(not kernels_work(), reason="no kernels of packed weights here")

IN_4_BITS = (Kind.Q4_0, Kind.Q4_1, Kind.Q4_K)
KINDS = (*IN_4_BITS, Kind.Q5_0, Kind.Q5_1, Kind.Q5_K, Kind.Q6_K, Kind.Q8_0, Kind.Q3_K)
FLOATS_AT = {
    Kind.Q4_0: (0,), Kind.Q4_1: (0, 2), Kind.Q4_K: (0, 2), Kind.Q5_0: (0,), Kind.Q5_1: (0, 2),
    Kind.Q5_K: (0, 2), Kind.Q6_K: (208,), Kind.Q8_0: (0,), Kind.Q3_K: (108,),
}  # fmt: skip
"""Where a block has its scales in float16."""

TEXTS = ["The first chunk is about the theatre.", "The second one is about the others."]


def blocks_of(kind: Kind, n_rows: int, n_columns: int) -> np.ndarray[Any, Any]:
    """(n_rows, bytes) random blocks; only their scales are not any bytes."""
    random = np.random.default_rng(int(kind))
    n_numbers, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (n_rows * n_columns // n_numbers, n_bytes), np.uint8)
    for at in FLOATS_AT[kind]:
        scales = random.uniform(0.5, 2, (len(blocks), 1)) * random.choice([-1, 1], (len(blocks), 1))
        scales = scales.astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(n_rows, -1)


def matrix_of(kind: Kind, folder: Path) -> tuple[FileMatrix, Tensor]:
    """A matrix in a file, and its values as the gguf package has them."""
    blocks, path = blocks_of(kind, 144, 256), folder / "blocks"
    path.write_bytes(b"before" + blocks.tobytes())
    values = torch.tensor(gguf.dequantize(blocks, kind))
    return FileMatrix(OpenFile(path), 6, kind, (144, 256), None), values


class TestMatrices:
    @pytest.mark.parametrize("is_large", [False, True])
    @pytest.mark.parametrize("kind", KINDS)
    def test_the_product_is_that_of_the_values(
        self, kind: Kind, is_large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(packed_weights, "LARGE", 1 if is_large else 10**9)
        monkeypatch.setattr(packed_weights, "LARGE_BLOCK", 64 * 256)
        monkeypatch.setattr(packed_weights, "BLOCK_NUMBERS", 64 * 256)  # three blocks of rows
        matrix, values = matrix_of(kind, tmp_path)
        [packed] = pack([matrix], Buffer())
        assert packed.n_bytes == packed_bytes(kind, (144, 256))
        assert isinstance(packed, Int4Matrix) == (kind in IN_4_BITS)
        for n_tokens in (1, 3, 8):
            random = torch.Generator().manual_seed(n_tokens)
            x = torch.randn(n_tokens, 256, generator=random)
            x = (x * torch.logspace(-4, 4, n_tokens)[:, None]).bfloat16()
            expected = x.float() @ values.T
            difference = packed.product(x).float() - expected
            error = (difference.norm(dim=1) / expected.norm(dim=1)).max()
            assert torch.equal(packed.product(x)[-1:], packed.product(x[-1:]))  # drafting needs it
            assert error < 0.012  # 2^-8 is a step of bfloat16, and 8 bits a row are nearly as fine

    @pytest.mark.skipif(large_kind() is LargeInt8Matrix, reason="it has VNNI")
    def test_largest_digits_do_not_overflow(self) -> None:
        rows, large = Int8Matrix((64, 256)), SevenBitMatrix((64, 256))
        rows.fill(0, torch.ones(64, 256) * torch.tensor([[1.0], [-1.0]]).repeat(32, 1))
        large.append(rows)
        x = torch.full((1, 256), 64.0)  # the largest low digit
        x[0, :2] = 63 * 128
        torch.testing.assert_close(large.product(x), x @ rows.rows(0, 64).T, rtol=1e-6, atol=0)

    @pytest.mark.parametrize("kind", IN_4_BITS)
    def test_4_bits_are_those_of_the_file(self, kind: Kind, tmp_path: Path) -> None:
        """Each weight differs by what bfloat16 rounds off its scale and its offset."""
        matrix, values = matrix_of(kind, tmp_path)
        [packed] = pack([matrix], Buffer())
        found = packed.product(torch.eye(256).bfloat16()).float().T
        groups = values.view(144, -1, 32)
        largest = groups.abs().amax(-1) + (groups.amax(-1) - groups.amin(-1))
        assert ((found.view_as(groups) - groups).abs().amax(-1) <= largest * 2**-7).all()

    @pytest.mark.parametrize("kind", KINDS)
    def test_unpacked_values_are_exact(self, kind: Kind, tmp_path: Path) -> None:
        matrix, values = matrix_of(kind, tmp_path)
        found = unpacked(matrix, torch.float32)
        assert torch.equal(found.view(torch.int32), values.view(torch.int32))  # signs of zeros too
        assert torch.equal(matrix.rows_at([5, 143, 5]), values[[5, 143, 5]])

    def test_a_file_that_is_changed_or_cut(self, tmp_path: Path) -> None:
        matrix, _ = matrix_of(Kind.Q8_0, tmp_path)
        path = tmp_path / "blocks"
        path.rename(tmp_path / "elsewhere")
        path.write_bytes(b"another file of the name")
        matrix.rows(0, 144)
        with (tmp_path / "elsewhere").open("r+b") as file:
            file.truncate(1000)
        with pytest.raises(ModelNotFound, match="changed after the model was loaded"):
            matrix.rows(0, 144)


def load(path: Path, **options: Any) -> Model:
    return load_model(str(path), device="cpu", **options)


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tied = request.param == "qwen3"
    hf = model_for_gguf(request.param, tie_word_embeddings=tied)
    return write_gguf(tmp_path / "tiny.gguf", hf, kind=Kind.Q4_1 if tied else Kind.Q5_0)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", model_for_gguf("llama"), kind=Kind.Q4_0)


class TestModels:
    @pytest.mark.parametrize(
        ("weights", "dtype"), [("packed", "bfloat16"), ("auto", "bfloat16"), ("packed", "float32")]
    )
    def test_passes_and_digests_are_those_of_unpacked_weights(
        self, weights: str, dtype: str, file: Path
    ) -> None:
        plain = load(file, dtype=dtype, weights="unpacked")
        model = load(file, dtype=dtype, weights=weights)
        kept = "both" if weights == "auto" else weights
        assert (plain.weights, model.weights) == ("unpacked", kept)
        ids = torch.arange(3, 203)[None]
        with torch.no_grad():
            for some in (ids, ids[:, :1]):
                assert torch.equal(model.hf(some).logits, plain.hf(some).logits)
        assert model.identity.weights == plain.identity.weights
        assert model.identity.config == plain.identity.config
        assert model.identity.rope == plain.identity.rope
        assert model.layer_parameters == plain.layer_parameters
        assert model.eos_ids == plain.eos_ids
        if weights == "auto":
            assert same_weights(model.hf, plain.hf)

    @pytest.mark.parametrize(("dtype", "other"), [("bfloat16", "float32"), ("float32", "bfloat16")])
    def test_chunk_caches_are_shared(self, dtype: str, other: str, file: Path) -> None:
        store = MemoryStore()
        Engine(load(file, dtype=dtype, weights="packed"), store).cache_chunks(TEXTS)
        unpacked = Engine(load(file, dtype=dtype, weights="unpacked"), store)
        assert all(map(unpacked.is_cached, TEXTS))
        in_other = Engine(load(file, dtype=other, weights="unpacked"), store)
        assert not any(map(in_other.is_cached, TEXTS))

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_answers_are_those_of_unpacked_weights(
        self, dtype: str, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(loading, "bfloat16_is_fast", lambda device: dtype == "bfloat16")
        engines = [Engine(load(file, weights=each)) for each in ("unpacked", "packed", "auto")]
        assert {engine.model.dtype_name for engine in engines} == {dtype}
        prompt = "\n\n".join([*TEXTS, "What is the theatre?"])
        plain, *_ = (each.generate(prompt, TEXTS, max_new_tokens=12).text for each in engines)
        tokens = engines[0].model.tokenize(plain, special=False)[:12]
        logits = [each.logits(prompt, TEXTS, follow=tokens) for each in engines]
        assert torch.equal(logits[0][0], logits[2][0])  # the first token is no decoded one
        assert not torch.equal(logits[0][0], logits[1][0])  # this one does not wait for unpacking
        for found in logits[1:]:
            assert (found - logits[0]).norm() < 0.08 * logits[0].norm()
            assert not torch.equal(found, logits[0])
            best = logits[0].topk(2).values
            clear = best[:, 0] - best[:, 1] > 2 * (found - logits[0]).abs().amax(-1)
            assert (found.argmax(-1) == logits[0].argmax(-1))[clear].all()

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    @pytest.mark.parametrize("n_tokens", [1, 5])
    def test_a_step_is_that_of_the_modules(self, file: Path, n_tokens: int, dtype: str) -> None:
        model = load(file, weights="packed", dtype=dtype)
        hidden = model.embed(torch.arange(7, 7 + n_tokens)[None])
        cos, sin = model.rotation(torch.arange(40, 40 + n_tokens)).of(0)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            return model.attention(layer, query, key, value, scaling, None, n_tokens > 1)

        with torch.no_grad():
            with model.decoding(n_tokens) as is_packed:
                found = model.layer(0, hidden, cos, sin, attend, is_packed=is_packed)
            with packed_products():
                expected = model.layer(0, hidden, cos, sin, attend)
            assert torch.allclose(found, expected, rtol=0, atol=0 if dtype == "bfloat16" else 1e-5)
            assert not torch.equal(found, model.layer(0, hidden, cos, sin, attend))

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_a_pass_between_the_layers_of_another(
        self, llama: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = Engine(load(llama, weights="packed", dtype=dtype), block_size=8, prefix_bytes=0)
        model, ids = engine.model, list(range(3, 8))
        between: list[Tensor] = []

        def encoded() -> Tensor:
            """Entries before a chunk, which are computed by exact weights."""
            keys, _ = entries_before(model, ids)[-1]
            return keys

        class Pausing(Observer):
            def pause(self) -> None:
                between.append(encoded())

        def logits(observer: Observer) -> Tensor:
            settings = AnswerSettings.of(method="recompute", eviction="none")
            with engine.resolve("What?", []) as resolved:
                request = engine.request(resolved, settings, capacity=1)
                return engine.scheduler.run(lambda _: first_token(request, observer).logits)

        with torch.inference_mode():
            exact, short = encoded(), logits(Observer())
            assert torch.equal(logits(Pausing()), short)
            assert len(between) == model.n_layers
            assert all(torch.equal(each, exact) for each in between)
            monkeypatch.setattr(model, "short_pass", lambda n_tokens: nullcontext(False))
            assert not torch.equal(logits(Observer()), short)  # computed by packed weights

    def test_changed_weights_are_decoded_with(self, llama: Path) -> None:
        model = load(llama, dtype="bfloat16")
        ids = torch.arange(3, 4)[None]

        def decoded() -> Tensor:
            with torch.no_grad(), model.decoding(1):
                return model.hf(ids).logits

        assert not torch.equal(decoded(), model.hf(ids).logits)
        with torch.no_grad():
            model.hf.model.layers[1].mlp.up_proj.weight.mul_(2)
        model.identity.look()
        assert torch.equal(decoded(), model.hf(ids).logits)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_doctor_finds_no_fault(self, dtype: str, llama: Path) -> None:
        checks = list(examine(load(llama, weights="packed", dtype=dtype)))
        assert [check for check in checks if not check.ok] == []

    def test_files_without_packed_weights(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "tiny.gguf", model_for_gguf("llama"), kind=Kind.BF16)
        assert load(path, dtype="bfloat16").weights == "unpacked"

    def test_a_copy(self, llama: Path) -> None:
        model = load(llama, weights="packed")
        ids = torch.arange(3, 9)[None]
        with torch.no_grad():
            assert torch.equal(copy.deepcopy(model.hf)(ids).logits, model.hf(ids).logits)


class TestChoices:
    @pytest.mark.parametrize(
        ("is_plenty", "options", "expected"),
        [
            (True, {"dtype": "bfloat16"}, ("bfloat16", "both", True)),
            (False, {"dtype": "bfloat16"}, ("bfloat16", "packed", False)),
            (True, {"dtype": "float32"}, ("float32", "unpacked", True)),
            (False, {"dtype": "float32"}, ("float32", "packed", False)),
            (False, {}, ("bfloat16", "packed", False)),
            (True, {"weights": "packed"}, ("bfloat16", "packed", False)),
            (False, {"weights": "unpacked"}, ("bfloat16", "unpacked", True)),
            (True, {}, ("bfloat16", "both", True)),
        ],
    )
    def test_by_memory(
        self, is_plenty: bool, options: dict[str, Any], expected: tuple[str, str, bool],
        llama: Path, monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        n_bytes = 1.2 * GgufFile(llama).n_bytes(torch.float32, "both" if is_plenty else "packed")
        monkeypatch.setattr(loading, "available_bytes", lambda: n_bytes)
        monkeypatch.setattr(loading, "bfloat16_is_fast", lambda device: True)
        model = load(llama, **options)
        layer: Any = model.hf.model.layers[0].mlp.up_proj
        assert (model.dtype_name, model.weights, layer.weight is not None) == expected

    @pytest.mark.parametrize("is_fast", [True, False])
    def test_auto_is_what_the_processor_multiplies_fast(
        self, is_fast: bool, llama: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(loading, "bfloat16_is_fast", lambda device: is_fast)
        assert load(llama).dtype_name == ("bfloat16" if is_fast else "float32")

    @pytest.mark.parametrize("options", [{"weights": "packed"}, {"dtype": "bfloat16"}])
    def test_too_little_memory(
        self, options: dict[str, Any], llama: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(loading, "available_bytes", lambda: 10_000)
        with pytest.raises(InvalidOption, match="GB of memory are available; give a smaller file"):
            load(llama, **options)

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"dtype": "float16"}, "dtype='float16'; packed weights need a CPU and bfloat16 or"),
            ({"model_kwargs": {"revision": "main"}}, r"model_kwargs=\['revision'\]"),
            ({"weights": "folded"}, "weights='folded'; allowed: auto, packed, unpacked, int8"),
            ({"weights": "int8"}, "give weights='packed'"),
        ],
    )
    def test_what_contradicts(self, options: dict[str, Any], says: str, llama: Path) -> None:
        with pytest.raises(InvalidOption, match=says):
            load(llama, **{"weights": "packed", **options})

    def test_other_checkpoints(self) -> None:
        with pytest.raises(InvalidOption, match="'builtin' is something else; .*weights='int8'"):
            load_model("builtin", device="cpu", weights="packed")

    @pytest.mark.parametrize("name", ["_weight_int4pack_mm_for_cpu", "_weight_int8pack_mm"])
    def test_without_the_kernels(
        self, name: str, llama: Path, monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:  # fmt: skip
        def other(x: Tensor, codes: Tensor, *rest: Any) -> Tensor:
            return x.new_zeros(len(x), len(codes))

        kernels_work.cache_clear()
        try:
            monkeypatch.setattr(torch, name, other)
            with caplog.at_level(logging.WARNING):
                assert load(llama, weights="packed").weights == "unpacked"
                load(llama, weights="packed")
            (line,) = caplog.messages
            assert line.startswith("weights are unpacked: PyTorch") and "differs" in line
        finally:
            kernels_work.cache_clear()


WITHOUT_BFLOAT16 = """
import sys, torch
from samkv_integrations.runtimes.transformers.loading import load_model
from samkv_integrations.runtimes.transformers.model import packed_weights
from samkv_integrations.runtimes.transformers.model.packed_weights import large_kind
assert large_kind() is not packed_weights.LargeInt8Matrix  # its sums overflow
plain, model = (load_model(sys.argv[1], device="cpu", weights=w) for w in ("unpacked", "packed"))
assert plain.dtype == model.dtype == torch.float32 and model.weights == "packed"
ids = torch.arange(3, 40)[None]
with torch.no_grad():
    assert torch.equal(model.hf(ids).logits, plain.hf(ids).logits)
    expected = plain.hf(ids[:, :1]).logits
    with model.decoding(1):
        found = model.hf(ids[:, :1]).logits
assert 0 < (found - expected).norm() < 0.05 * expected.norm()
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names instructions of x86-64")
def test_a_processor_with_avx2_alone(llama: Path) -> None:
    only_avx2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    command = [sys.executable, "-c", WITHOUT_BFLOAT16, str(llama)]
    subprocess.run(command, env=os.environ | only_avx2, check=True)


class TestInt8:
    def test_rounds_the_linear_layers(self, tmp_path: Path) -> None:
        hf, tokenizer = hf_model("gemma3_text"), byte_tokenizer(bos=True)
        hf.bfloat16().save_pretrained(tmp_path)
        plain, model = (
            load(tmp_path, tokenizer=tokenizer, dtype="bfloat16", weights=weights)
            for weights in ("auto", "int8")
        )
        assert (plain.dtype_name, model.dtype_name) == ("bfloat16", "bfloat16")
        assert model.identity.weights != plain.identity.weights
        ids = torch.arange(3, 40)[None]
        with torch.no_grad():
            expected, found = plain.hf(ids).logits, model.hf(ids).logits
            assert 0 < (found - expected).norm() < 0.05 * expected.norm()
            alone = model.hf(ids[:, :1]).logits
            with model.decoding(1):
                assert (model.hf(ids[:, :1]).logits - alone).norm() < 0.05 * alone.norm()
