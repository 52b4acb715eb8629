"""Loading a model as the user says, and choosing tokens as transformers does."""

from __future__ import annotations

import io
import json
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from benchmarks.models import random_model
from samkv_integrations import Engine
from samkv_integrations.errors import InvalidOption, ModelNotFound, UnsupportedModel
from samkv_integrations.options import Sampling
from samkv_integrations.runtimes.transformers.loading import load_model, load_tokenizer
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.runtimes.transformers.sampling import TransformersSampler
from tests.support.models import byte_tokenizer, hf_model, save_model, tiny_model

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that somebody saved, its tokenizer elsewhere."""
    path = tmp_path_factory.mktemp("saved")
    hf_model("llama").save_pretrained(path / "model")
    byte_tokenizer(bos=True).save_pretrained(path / "tokenizer")
    return path


class TestLoading:
    def test_tokenizer_from_elsewhere(self, folder: Path) -> None:
        tokenizer = load_tokenizer(str(folder / "tokenizer"))
        model = load_model(str(folder / "model"), device="cpu", tokenizer=tokenizer)
        assert model.tokenizer.get_vocab() == tokenizer.get_vocab()
        assert model.weights_digest == tiny_model().weights_digest

    def test_a_tokenizer_is_told_nothing_by_what_others_do_with_it(self, folder: Path) -> None:
        tokenizer = load_tokenizer(str(folder / "tokenizer"))
        text = "<|end|>"
        models = [Model(hf_model("llama"), tokenizer, name) for name in ("one", "other")]
        expected = {special: models[0].tokenize(text, special=special) for special in (True, False)}
        assert expected[True] != expected[False]
        failures = []

        def ask(model: Model, special: bool) -> None:
            for _ in range(2000):
                if model.tokenize(text, special=special) != expected[special]:
                    failures.append((model.name, special))

        work = [
            threading.Thread(target=ask, args=(model, special))
            for model, special in zip(models, (True, False), strict=True)
        ]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
        assert failures == []

    def test_options_reach_from_pretrained(self, folder: Path) -> None:
        model = load_model(
            str(folder / "model"),
            device="cpu",
            tokenizer=load_tokenizer(str(folder / "tokenizer"), {"pad_token": "<|end|>"}),
            model_kwargs={"max_position_embeddings": 99, "local_files_only": True},
        )
        assert model.context_window == 99
        assert model.tokenizer.pad_token == "<|end|>"
        with pytest.raises(UnsupportedModel, match="dynamic"):  # checked as it will be loaded
            rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
            load_model(str(folder / "model"), model_kwargs={"rope_parameters": rope})

    @pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("is_slow", [True, False])
    def test_auto_takes_float32_where_bfloat16_is_slow(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, is_slow: bool
    ) -> None:
        save_model(hf_model("llama").to(stored), tmp_path)
        monkeypatch.setattr(
            "samkv_integrations.runtimes.transformers.loading.bfloat16_is_slow",
            lambda device: is_slow,
        )
        expected = torch.float32 if is_slow else stored
        assert load_model(str(tmp_path), device="cpu").dtype == expected
        asked = load_model(str(tmp_path), device="cpu", dtype="bfloat16")
        assert asked.dtype == torch.bfloat16  # who says so gets it
        shape = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 16,
                 "num_attention_heads": 2, "intermediate_size": 16}  # fmt: skip
        made = random_model(shape, name="r", dtype="auto", device="cpu", seed=0)
        assert made.dtype == (torch.float32 if is_slow else torch.bfloat16)

    @pytest.mark.parametrize(
        ("name", "instead"),
        [
            ("torch_dtype", "give dtype"),
            ("dtype", "give dtype"),
            ("attn_implementation", "leave it out"),
            ("load_in_8bit", "give quantization_config=BitsAndBytesConfig"),
        ],
    )
    def test_what_is_decided_here(self, name: str, instead: str) -> None:
        with pytest.raises(InvalidOption, match=f"model_kwargs holds '{name}': .*{instead}"):
            load_model("builtin", model_kwargs={name: None})

    @pytest.mark.parametrize(
        "error",
        [
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 112.00 MiB."),
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 GB"),
            MemoryError(),
        ],
    )
    @pytest.mark.parametrize("place", ["from_pretrained", "to"])
    def test_what_does_not_fit_into_memory(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception
    ) -> None:
        """While weights are read, and when they go to their device."""

        def fail(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(PreTrainedModel, place, fail)
        with pytest.raises(InvalidOption, match="does not fit into memory .*quantised weights"):
            load_model(str(folder / "model"))

    def test_what_cannot_be_loaded(self, folder: Path) -> None:
        with pytest.raises(InvalidOption, match=r"model_kwargs=\['colour'\].*leave them out"):
            load_model(str(folder / "model"), model_kwargs={"colour": "red"})
        with pytest.raises(ModelNotFound, match="tokenizer .*model' could not be loaded"):
            load_model(str(folder / "model"), device="cpu")
        with pytest.raises(ModelNotFound, match="holds no config.json"):
            load_model(str(folder / "tokenizer"))
        for device in ("balanced", "xpu", {"": 0}):
            with pytest.raises(InvalidOption, match="allowed: auto, .*model_kwargs"):
                load_model("builtin", device=device)  # type: ignore[arg-type]
        with pytest.raises(InvalidOption, match="device 'cuda:99', but torch finds"):
            load_model("builtin", device="cuda:99")

    @pytest.mark.parametrize("name", ["./nowhere", "/no/where", "~/nowhere", ".."])
    def test_a_folder_that_is_not_there_is_named(self, name: str, folder: Path) -> None:
        if name == "..":
            name = str(folder / "nowhere")
        with pytest.raises(ModelNotFound, match=rf"the folder '{name}' does not exist; give one"):
            load_model(name, device="cpu")

    def test_what_is_no_loaded_model(self) -> None:
        tokenizer = byte_tokenizer(bos=True)
        with pytest.raises(UnsupportedModel, match="a Linear; it must be a transformers model"):
            Model(torch.nn.Linear(1, 1), tokenizer, "mine")  # type: ignore[arg-type]


class TestDamagedCheckpoints:
    @pytest.fixture
    def saved(self, folder: Path, tmp_path: Path) -> Path:
        for part in ("model", "tokenizer"):
            shutil.copytree(folder / part, tmp_path / "saved", dirs_exist_ok=True)
        return tmp_path / "saved"

    @pytest.mark.parametrize("n_missing", [1, 5])
    def test_a_weight_that_is_missing_is_not_made_up(self, saved: Path, n_missing: int) -> None:
        file = saved / "model.safetensors"
        weights = load_file(file)
        missing = sorted(name for name in weights if "proj" in name)[:n_missing]
        renamed = {f"{name}x" * (name in missing) or name: weights[name] for name in weights}
        save_file(renamed, file, metadata={"format": "pt"})
        with pytest.raises(ModelNotFound, match=f"lacks {n_missing} of its.*{missing[0]}.*again"):
            load_model(str(saved), device="cpu")

    def test_a_tied_head_is_not_missing(self, saved: Path) -> None:
        hf_model("llama", tie_word_embeddings=True).save_pretrained(saved)
        assert "lm_head.weight" not in load_file(saved / "model.safetensors")
        load_model(str(saved), device="cpu")

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_weights_that_are_no_numbers(self, saved: Path, dtype: str) -> None:
        file = saved / "model.safetensors"
        nothing = {name: torch.full_like(x, torch.nan) for name, x in load_file(file).items()}
        save_file(nothing, file, metadata={"format": "pt"})
        with pytest.raises(ModelNotFound, match="weight 'model.embed_tokens.weight' of .* NaN"):
            load_model(str(saved), device="cpu", dtype=dtype)

    @pytest.mark.parametrize(
        ("family", "trusts", "says"),
        [
            ("mine", False, "family 'mine' is not supported"),
            ("mine", True, "family 'mine' is not supported"),
            (None, True, "family None is not supported"),
            ("llama", None, "tokenizer .* needs code of its own, .*tokenizer_kwargs="),
        ],
    )
    def test_its_code_is_run_only_if_the_caller_says_so(
        self, saved: Path, monkeypatch: pytest.MonkeyPatch, family: str | None, trusts: bool | None,
        says: str,
    ) -> None:  # fmt: skip
        """Whatever standard input says, which transformers would ask."""
        monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
        code = ["mine.Mine", "mine.Mine"]
        models = {"AutoConfig": code[0], "AutoModelForCausalLM": code[0], "AutoTokenizer": code}
        for name, more in {
            "config.json": {"model_type": family, "auto_map": models},
            "tokenizer_config.json": {"tokenizer_class": "Mine", "auto_map": models},
        }.items():
            fields = json.loads((saved / name).read_text()) | more
            (saved / name).write_text(json.dumps({k: v for k, v in fields.items() if v}))
        (saved / "mine.py").write_text(f"open({str(saved / 'it-was-run')!r}, 'w')")
        with pytest.raises(UnsupportedModel, match=says):
            load_model(str(saved), model_kwargs={"trust_remote_code": trusts})
        assert not (saved / "it-was-run").exists()


class TestEndIds:
    def test_more_than_the_model_has(self) -> None:
        model = tiny_model()
        assert model.end_ids(()) == model.eos_ids
        assert model.end_ids([5, 6]) == model.eos_ids | {5, 6}

    @pytest.mark.parametrize("wrong", [None, -1, 262, 1.0, "</s>", True])
    def test_what_is_no_token(self, wrong: Any) -> None:
        with pytest.raises(InvalidOption, match="it must be a token id of 'tiny-llama', 0 to 261"):
            tiny_model().end_ids([5, wrong])

    def test_they_end_an_answer(self) -> None:
        engine = Engine(tiny_model())
        ids = generated(12)
        at = next(i for i in range(3, 12) if ids[i] not in ids[:i])
        answer = engine.generate(PROMPT, max_new_tokens=12, stop_ids=[ids[at]])
        assert answer.report.completion_tokens == at
        assert answer.text == engine.model.detokenize(ids[:at])
        assert engine.generate(PROMPT, stop_ids=[ids[0]]).text == ""
        with pytest.raises(InvalidOption, match="stop id 999"):
            engine.stream(PROMPT, stop_ids=[999])


def generated(n_tokens: int, **options: Any) -> list[int]:
    """What transformers' own greedy search says after `PROMPT`."""
    model = tiny_model()
    ids = torch.tensor([[model.bos_id, *model.tokenize(PROMPT, special=True)]])
    out = model.hf.generate(ids, max_new_tokens=n_tokens, do_sample=False, **options)
    return out[0, ids.shape[1] :].tolist()


class TestSampling:
    @pytest.mark.parametrize("penalty", [0.8, 1.2, 3.0])
    def test_repetition_penalty_is_transformers(self, penalty: float) -> None:
        model = tiny_model()
        expected = generated(16, repetition_penalty=penalty)
        answer = Engine(model).generate(PROMPT, max_new_tokens=16, repetition_penalty=penalty)
        assert answer.text == model.detokenize([i for i in expected if i not in model.eos_ids])
        assert expected != generated(16)  # it does something here

    def test_penalty_of_a_call_wins_over_the_generation_config(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = Engine(tiny_model())
        plain = engine.generate(PROMPT, max_new_tokens=16).text
        monkeypatch.setattr(engine.model.hf.generation_config, "repetition_penalty", 3.0)
        assert engine.generate(PROMPT, max_new_tokens=16).text != plain
        assert engine.generate(PROMPT, max_new_tokens=16, repetition_penalty=1).text == plain

    def test_top_k_draws_from_the_likeliest(self) -> None:
        model, logits = tiny_model(), torch.linspace(-1, 1, 262)

        def drawn(**options: Any) -> Counter[int]:
            sampling = Sampling.of(temperature=50.0, seed=0, **options)
            sampler = TransformersSampler(model, [1], sampling)
            return Counter(sampler.next(logits) for _ in range(200))

        assert set(drawn(top_k=3)) == {259, 260, 261}
        assert set(drawn(top_k=1)) == {261}
        assert len(drawn(top_k=0)) > 100
        assert set(drawn(top_k=3, top_p=0.3)) == {261}  # both count, top_k first

    @pytest.mark.parametrize(
        "options",
        [{"temperature": 1}, {"temperature": 1e-5}, {"temperature": 1e-5, "repetition_penalty": 1}],
    )
    def test_the_ends_of_what_is_allowed(self, options: dict[str, Any]) -> None:
        model = tiny_model()
        logits = torch.linspace(-20, 20, model.config.vocab_size)
        token = TransformersSampler(model, [1], Sampling.of(seed=0, **options)).next(logits)
        assert token == len(logits) - 1 or options["temperature"] == 1

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            ({"top_k": -1}, "top_k=-1; it must be 0"),
            ({"top_k": 2.5}, "top_k=2.5; it must be a whole number"),
            ({"repetition_penalty": 0}, "repetition_penalty=0; it must be 1e-05 or more"),
            ({"repetition_penalty": 1e-46}, "repetition_penalty=1e-46; it must be 1e-05 or more"),
            ({"temperature": 1e-46}, "temperature=1e-46; it must be 0 .greedy., or 1e-05 or more"),
            ({"temperature": "hot"}, "temperature='hot'; it must be a number"),
            ({"max_new_tokens": True}, "max_new_tokens=True; it must be a whole number"),
        ],
    )
    def test_values_out_of_range(self, option: dict[str, Any], message: str) -> None:
        with pytest.raises(InvalidOption, match=message):
            Sampling.of(**option)


class TestChangedParts:
    """Layers of Llama's kind are computed in our own operations; a changed part counts too."""

    @pytest.mark.parametrize(
        "change", ["norm hook", "norm", "activation", "hook of three axes", "linear"]
    )
    def test_first_logits_are_those_of_the_changed_model(self, change: str) -> None:
        hf = hf_model("qwen3")
        attention, mlp = hf.model.layers[1].self_attn, hf.model.layers[1].mlp
        size = attention.q_norm.weight.shape[0]

        class OtherLinear(torch.nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                _, n_tokens, _ = x.shape
                return super().forward(x) * 1.5 + n_tokens

        if change == "norm hook":
            attention.q_norm.register_forward_hook(lambda _, given, result: 2 * result)
        elif change == "norm":
            attention.k_norm = torch.nn.LayerNorm(size)
        elif change == "activation":
            mlp.act_fn = torch.nn.GELU()
        elif change == "hook of three axes":
            mlp.up_proj.register_forward_hook(lambda _, given, result: result[:, :, :] * 0.5)
        else:
            attention.v_proj.__class__ = OtherLinear
        model = Model(hf, byte_tokenizer(bos=True), "changed")
        engine = Engine(model)
        ours = engine.logits(PROMPT, method="recompute")[0]
        ids = torch.tensor([engine.resolve(PROMPT).token_ids])
        with torch.inference_mode():
            plain = hf(ids).logits[0, -1]
        torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)
