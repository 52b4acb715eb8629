"""Models whose chunks cannot be cached: told before one is, and answered all the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from samkv_integrations import Engine
from samkv_integrations.errors import UnsupportedModel
from samkv_integrations.runtimes.llama_cpp.library.binding import load_binding
from samkv_integrations.runtimes.llama_cpp.loading import load_model
from samkv_integrations.runtimes.llama_cpp.runtime import LlamaCppModel
from tests.support.gguf_files import add_tokenizer
from tests.support.llama_cpp import tiny, with_llama_cpp

pytestmark = with_llama_cpp

N_VOCABULARY, WIDTH, N_LAYERS = 265, 32, 2
CHUNK = "The harbour of Ostmere was built in 1874, and enlarged twice, by engineers of the navy."

ATTENTION = {
    "attn_q.weight": (WIDTH, WIDTH), "attn_k.weight": (WIDTH, WIDTH),
    "attn_v.weight": (WIDTH, WIDTH), "attn_output.weight": (WIDTH, WIDTH),
    "attn_norm.weight": (WIDTH,), "ffn_norm.weight": (WIDTH,), "ffn_gate.weight": (64, WIDTH),
    "ffn_up.weight": (64, WIDTH), "ffn_down.weight": (WIDTH, 64),
}  # fmt: skip
WINDOWED = {
    **ATTENTION, "post_attention_norm.weight": (WIDTH,), "attn_q_norm.weight": (16,),
    "attn_k_norm.weight": (16,), "post_ffw_norm.weight": (WIDTH,),
}  # fmt: skip
RECURRENT = {
    "attn_norm.weight": (WIDTH,), "ssm_in.weight": (128, WIDTH), "ssm_conv1d.weight": (64, 4),
    "ssm_conv1d.bias": (64,), "ssm_x.weight": (2 + 2 * 16, 64), "ssm_dt.weight": (64, 2),
    "ssm_dt.bias": (64,), "ssm_a": (64, 16), "ssm_d": (64,), "ssm_out.weight": (WIDTH, 64),
}  # fmt: skip
BIASED = {**ATTENTION, "attn_q.bias": (WIDTH,), "attn_k.bias": (WIDTH,), "attn_v.bias": (WIDTH,)}

OTHERS: Mapping[str, tuple[str, Mapping[str, tuple[int, ...]], Mapping[str, Any], str]] = {
    "windows": ("gemma3", WINDOWED, {"attention.sliding_window": 16, "attention.key_length": 16,
                "attention.value_length": 16}, "sliding window of 16"),
    "recurrent": ("mamba", RECURRENT, {"ssm.conv_kernel": 4, "ssm.inner_size": 64,
                  "ssm.state_size": 16, "ssm.time_step_rank": 2}, "recurrent"),
    "sections": ("qwen2vl", BIASED, {"rope.dimension_sections": [2, 3, 3, 0]}, "M-RoPE"),
}  # fmt: skip


def written(path: Path, architecture: str, tensors: Any, meta: Mapping[str, Any]) -> Path:
    """A model of random weights."""
    draw = np.random.default_rng(0)
    file = gguf.GGUFWriter(path, architecture)
    file.add_block_count(N_LAYERS)
    file.add_context_length(512)
    file.add_embedding_length(WIDTH)
    file.add_feed_forward_length(64)
    file.add_head_count(2)
    file.add_head_count_kv(2)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_vocab_size(N_VOCABULARY)
    for name, value in meta.items():
        key = f"{architecture}.{name}"
        file.add_array(key, value) if isinstance(value, list) else file.add_uint32(key, value)
    add_tokenizer(file)
    whole = {"token_embd.weight": (N_VOCABULARY, WIDTH), "output_norm.weight": (WIDTH,)}
    whole |= {f"blk.{n}.{name}": shape for n in range(N_LAYERS) for name, shape in tensors.items()}
    for name, shape in whole.items():
        weights = draw.normal(size=shape).astype(np.float32) * 0.2
        if name.endswith("ssm_a"):
            weights = -np.abs(weights)
        file.add_tensor(name, weights + 1 if "norm" in name else weights)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


@pytest.fixture(params=OTHERS)
def refused(request: Any, tmp_path: Path) -> tuple[LlamaCppModel, str]:
    architecture, tensors, meta, reason = OTHERS[request.param]
    path = written(tmp_path / "other.gguf", architecture, tensors, meta)
    return load_model(str(path), n_ctx=512, n_threads=1), reason


def test_no_chunk_is_cached_and_the_next_step_is_told(refused: tuple[LlamaCppModel, str]) -> None:
    model, reason = refused
    engine = Engine(model)
    with pytest.raises(UnsupportedModel, match=rf"{reason}.*method='recompute'"):
        engine.cache_chunks([CHUNK])
    assert not engine.store.keys()


def test_prompts_are_answered_and_conversations_kept(refused: tuple[LlamaCppModel, str]) -> None:
    model, _ = refused
    engine, fresh = Engine(model, method="recompute"), Engine(model, prefix_bytes=0)
    first = engine.generate(CHUNK, max_new_tokens=6)
    assert first.text == fresh.generate(CHUNK, max_new_tokens=6).text
    assert first.report.stays
    ids = model.tokenize_prompt(engine.render(CHUNK))
    again = engine.generate(CHUNK + " " + first.text, max_new_tokens=4)
    assert again.report.prefix_tokens >= (len(ids) if model.context.can_crop else 0)


@pytest.mark.parametrize("asked", ["llama_model_has_encoder", "llama_model_is_diffusion"])
def test_models_that_do_not_write_token_by_token_are_refused(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp would end the process."""
    monkeypatch.setattr(load_binding().library, asked, lambda model: True)
    with pytest.raises(UnsupportedModel, match="give a model that writes one token after another"):
        tiny("llama")


def test_other_types_of_keys_are_refused() -> None:
    model = tiny("llama", type_k="f32", type_v="f32")
    with pytest.raises(UnsupportedModel, match="leave out type_k"):
        Engine(model).cache_chunks([CHUNK])
    assert Engine(model).generate(CHUNK, max_new_tokens=2).text
