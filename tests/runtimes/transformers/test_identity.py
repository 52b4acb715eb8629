"""Digests of what a model computes with: nothing that changes an answer is left out."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from samkv_integrations.errors import UnsupportedModel
from samkv_integrations.runtimes.transformers.loading import load_model
from samkv_integrations.runtimes.transformers.model import identity
from samkv_integrations.runtimes.transformers.runtime import Model
from tests.support.models import byte_tokenizer, hf_model, save_model

Change = Callable[[Any], object]


def model_of(hf: PreTrainedModel) -> Model:
    return Model(hf, byte_tokenizer(bos=True), "tiny")


def digests(hf: PreTrainedModel) -> tuple[str, str, str]:
    about = model_of(hf).identity
    return about.weights, about.config, about.rope


def in_one_value(hf: PreTrainedModel) -> None:
    """A model's matrix, in a value that no sample at a fixed stride would have met."""
    with torch.no_grad():
        hf.model.layers[2].mlp.down_proj.weight[7, 13] += 0.5


class TestDigests:
    def test_are_of_numbers_and_of_nothing_else(self, tmp_path: Path) -> None:
        hf = hf_model("llama")
        hf.save_pretrained(tmp_path)
        again = type(hf).from_pretrained(tmp_path)
        again.config.use_cache = False
        again.config.unk_token_id = 0  # as transformers makes of a GGUF file
        again.generation_config.temperature = 0.3
        assert digests(hf_model("llama")) == digests(again) == digests(hf)

    @pytest.mark.parametrize("family", ["qwen2", "qwen3"])  # with biases, and with more norms
    def test_see_a_single_value_of_every_tensor(self, family: str) -> None:
        hf = hf_model(family)
        seen = {digests(hf)}
        for parameter in hf.parameters():
            with torch.no_grad():
                parameter.view(-1)[-2] += 0.25
            seen.add(digests(hf))
        assert len(seen) == 1 + len(list(hf.parameters()))

    @pytest.mark.parametrize("pieces", [1, 64, 1000])
    def test_do_not_depend_on_threads_and_layout(
        self, pieces: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hf, other = hf_model("llama"), hf_model("llama")
        weight = other.lm_head.weight
        other.lm_head.weight = nn.Parameter(weight.detach().t().contiguous().t())
        assert not other.lm_head.weight.is_contiguous()
        assert digests(other) == digests(hf)
        many = hf_model("llama").to(torch.bfloat16)
        assert digests(many)[0] != digests(hf)[0]
        expected = digests(hf)[0]
        monkeypatch.setattr(torch, "get_num_threads", lambda: pieces)
        assert digests(hf)[0] == expected

    @pytest.mark.parametrize(
        ("family", "changed"),
        [
            ("llama", {"rms_norm_eps": 0.05}),
            ("llama", {"hidden_act": "gelu"}),
            ("llama", {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
            ("llama", {"max_position_embeddings": 2048}),
            ("mistral", {"rms_norm_eps": 1e-5}),
            ("qwen3", {"rms_norm_eps": 1e-5}),
        ],
    )
    def test_see_the_config(self, family: str, changed: dict[str, Any]) -> None:
        plain, other = digests(hf_model(family)), digests(hf_model(family, **changed))
        assert plain[0] == other[0] and plain[1] != other[1]

    def test_see_numbers_that_modules_keep(self) -> None:
        hf = hf_model("llama")
        before = digests(hf)[1]
        hf.model.layers[1].self_attn.scaling *= 2
        scaled = digests(hf)[1]
        hf.model.norm.variance_epsilon = 0.05
        assert len({before, scaled, digests(hf)[1]}) == 3

    @pytest.mark.parametrize(
        "changed", [{"eos_token_id": 5}, {"use_cache": False}, {"initializer_range": 0.2001}]
    )
    def test_leave_out_what_matters_to_no_cache(self, changed: dict[str, Any]) -> None:
        hf = hf_model("llama")
        before = digests(hf)
        hf.config.update(changed)
        assert digests(hf) == before


class Scaled(nn.Linear):
    """A layer whose numbers are a state of its own kind."""

    extra: Any = None

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


def with_extra_state(extra: object) -> Any:
    hf = hf_model("llama")
    layer = Scaled(64, 96, bias=False)
    layer.weight = hf.model.layers[0].mlp.up_proj.weight
    layer.extra = extra
    hf.model.layers[0].mlp.up_proj = layer
    return hf


class TestAllOfTheState:
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_packed_weights_are_refused(self) -> None:
        """They are no parameters and no buffers."""
        packed = torch.ao.quantization.quantize_dynamic(hf_model("llama"), {nn.Linear})
        with pytest.raises(UnsupportedModel, match="in float32 or bfloat16"):
            digests(packed)

    def test_extra_state_that_is_a_tensor(self) -> None:
        found = [digests(with_extra_state(torch.ones(3) * n))[0] for n in (1, 2, 1)]
        assert found[0] == found[2] != found[1]
        assert digests(with_extra_state(torch.ones(1, 3)))[0] != found[0]

    def test_what_has_no_digest_is_refused(self) -> None:
        with pytest.raises(UnsupportedModel, match="up_proj._extra_state.* is a object, whose"):
            digests(with_extra_state(object()))

    def test_weights_of_a_class_of_their_own_are_refused(self) -> None:
        class Packed(nn.Parameter):
            pass

        hf = hf_model("llama")
        layer = hf.model.layers[0].mlp.up_proj
        layer.weight = Packed(layer.weight.detach())
        with pytest.raises(UnsupportedModel, match="up_proj.weight.* is a Packed, whose numbers"):
            digests(hf)

    @pytest.mark.parametrize("at", ["model.layers.1.self_attn.q_proj", "lm_head"])
    def test_a_weight_that_is_nowhere_is_refused(self, at: str) -> None:
        hf = hf_model("llama")
        layer = hf.get_submodule(at)
        weight = layer.weight.detach()
        del layer.weight
        layer.weight = weight
        with pytest.raises(UnsupportedModel, match=f"lacks the weight of '{at}'"):
            digests(hf)


def rewritten(hf: Any) -> None:
    hf.load_state_dict(hf_model("llama", seed=1).state_dict())


def replaced(hf: Any) -> None:
    hf.model.layers[1].mlp = hf_model("llama", seed=1).model.layers[1].mlp


def reassigned(hf: Any) -> None:
    layer = hf.model.layers[3].self_attn
    layer.q_proj.weight = nn.Parameter(layer.q_proj.weight.detach() + 0.1)


def trained(hf: Any) -> None:
    optimizer = torch.optim.SGD(hf.parameters(), lr=0.1)
    hf(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    optimizer.step()
    hf.zero_grad()


def merged(hf: Any) -> None:
    """As peft merges an adapter: behind PyTorch's counter."""
    for layer in hf.model.layers:
        weight = layer.self_attn.q_proj.weight
        weight.data += torch.outer(torch.ones(len(weight)), torch.arange(weight.shape[1])) / 99


CHANGES: list[Change] = [in_one_value, rewritten, replaced, reassigned, trained, merged]


class TestLooking:
    @pytest.mark.parametrize("change", CHANGES)
    def test_sees_changed_weights(self, change: Change) -> None:
        model = model_of(hf_model("llama"))
        before, generation = model.identity.weights, model.identity.generation
        assert model.identity.look() == generation
        change(model.hf)
        assert model.identity.look() > generation
        assert model.identity.weights not in (before, "")
        assert model.identity.weights == digests(model.hf)[0]
        assert model.identity.look() == model.identity.generation  # once is enough

    def test_sees_weights_that_count_no_writes(self) -> None:
        with torch.inference_mode():
            hf = hf_model("llama")
            model = model_of(hf)
            generation = model.identity.look()
            hf.lm_head.weight.zero_()
        assert model.identity.look() > generation

    def test_sees_the_config_and_hashes_no_weights_for_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = model_of(hf_model("llama"))
        weights, config = model.identity.weights, model.identity.config
        monkeypatch.setattr(identity, "weights_digest", None)
        model.hf.config.rms_norm_eps = 0.05
        assert model.identity.look() and model.identity.config != config
        assert model.identity.weights == weights

    def test_nothing_has_changed_when_answers_were_generated(self) -> None:
        model = model_of(hf_model("llama"))
        generation = model.identity.look()
        model.hf.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, do_sample=False)
        model.hf.requires_grad_(False).train(False)
        assert model.identity.look() == generation

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda hf: hf.to(torch.bfloat16), "was float32 on cpu .* and is bfloat16 on cpu now"),
            (lambda hf: hf.to("meta"), "is float32 on meta now; make a new Model"),
            (lambda hf: hf.set_attn_implementation("sdpa"), "changed to 'sdpa'.*'samkv'"),
            (lambda hf: adapted(hf), "not merged into its weights.* merge_and_unload"),
        ],
    )
    def test_refuses_another_kind_of_model(self, change: Change, says: str) -> None:
        model = model_of(hf_model("llama"))
        change(model.hf)
        for _ in range(2):
            with pytest.raises(UnsupportedModel, match=says):
                model.identity.look()

    def test_an_adapter_is_refused_at_once(self) -> None:
        with pytest.raises(UnsupportedModel, match="merge_and_unload"):
            model_of(adapted(hf_model("llama")))


def adapted(hf: Any) -> Any:
    """A layer under an adapter, as peft puts it there."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base_layer = base

    attention = hf.model.layers[0].self_attn
    attention.q_proj = Adapted(attention.q_proj)
    return hf


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A model in a folder."""
    return save_model(hf_model("llama"), tmp_path / "model")


def overwrite(folder: Path, seed: int) -> None:
    """Other weights of the same size in the same file, and its old time of writing."""
    weights, other = folder / "model.safetensors", folder / "other"
    at = weights.stat()
    hf_model("llama", seed=seed).save_pretrained(other)
    with open(weights, "r+b") as file:
        file.write((other / "model.safetensors").read_bytes())
    os.utime(weights, ns=(at.st_atime_ns, at.st_mtime_ns))
    assert weights.stat().st_size == at.st_size


class TestLoading:
    def test_every_load_hashes_what_is_in_memory(self, saved: Path) -> None:
        found = [load_model(str(saved), device="cpu").identity.weights for _ in range(2)]
        assert found == [digests(hf_model("llama"))[0]] * 2
        overwrite(saved, seed=1)
        again = load_model(str(saved), device="cpu").identity.weights
        assert again == digests(hf_model("llama", seed=1))[0] != found[0]

    def test_a_served_model_whose_file_is_written_to(self, saved: Path) -> None:
        """On the CPU weights may be the file itself, mapped: they change, and nothing counts it."""
        model = load_model(str(saved), device="cpu")
        before, generation = model.identity.weights, model.identity.look()
        overwrite(saved, seed=1)
        is_mapped = torch.equal(model.hf.lm_head.weight, hf_model("llama", seed=1).lm_head.weight)
        assert (model.identity.look() > generation) == is_mapped
        assert (model.identity.weights != before) == is_mapped
        assert model.identity.weights == digests(model.hf)[0]
