"""Which models are computed exactly, and which are refused."""

from __future__ import annotations

from typing import Any

from samkv_integrations.errors import UnsupportedModel

SUPPORTED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SUPPORTED_DTYPES = ("float32", "bfloat16")
SUPPORTED_ROPE = ("default", "linear", "llama3")


def refuse_unsupported(config: Any) -> None:  # noqa: ANN401
    """Raise UnsupportedModel, before anything is cached, for what could not be exact."""
    family = config.model_type
    if family not in SUPPORTED_FAMILIES:
        raise UnsupportedModel(
            f"model family {family!r} is not supported; supported: {', '.join(SUPPORTED_FAMILIES)}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in SUPPORTED_ROPE:
        reason = {
            "yarn": "it scales attention with the context length",
            "longrope": "it scales attention with the context length",
            "dynamic": "its frequencies change with the prompt length",
        }.get(kind, "its rotation is not known to be exact here")
        raise UnsupportedModel(
            f"RoPE type {kind!r} cannot be re-aligned exactly: {reason}; "
            f"supported: {', '.join(SUPPORTED_ROPE)}"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(
            f"partial_rotary_factor={rope['partial_rotary_factor']}: only models that rotate the "
            "whole head are supported"
        )
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if len(layers) > 1 or layers - {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(f"layer types {sorted(layers)}: every layer must use full attention")
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(
            "quantised weights are not supported; load the model in float32 or bfloat16"
        )


def refuse_adapters(hf: Any, name: str) -> None:  # noqa: ANN401
    """Raise UnsupportedModel if an adapter sits on a layer: it can be switched, unseen by us."""
    if any(hasattr(module, "base_layer") for module in hf.modules()):
        raise UnsupportedModel(
            f"{name!r} has an adapter that is not merged into its weights, and can be switched on "
            "and off; merge it with peft's merge_and_unload, and give the model that this returns"
        )
