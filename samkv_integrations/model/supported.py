"""Which models are supported, and sizes that their configs leave to be worked out."""

from __future__ import annotations

from typing import Any

from samkv_integrations.errors import UnsupportedModel
from samkv_integrations.model.families import (
    SUPPORTED_ROPE,
    family_of,
    ropes_of,
    text_config,
    windows_of,
)

SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")


def refuse_unsupported(config: Any) -> None:  # noqa: ANN401
    """Raise UnsupportedModel, before anything is cached, for what could not be exact."""
    text = text_config(config)
    for rope in ropes_of(text).values():
        kind = rope.get("rope_type", "default")
        if kind not in SUPPORTED_ROPE:
            reason = "its rotation is not known to be exact here"
            if kind == "dynamic":
                reason = "its frequencies change with the prompt length"
            raise UnsupportedModel(
                f"RoPE type {kind!r} cannot be re-aligned exactly: {reason}; "
                f"supported: {', '.join(SUPPORTED_ROPE)}"
            )
        part = rope.get("partial_rotary_factor", 1.0)
        if part != 1.0 and not family_of(text).may_turn_part:
            raise UnsupportedModel(
                f"partial_rotary_factor={part}: models of family {text.model_type!r} are supported "
                "if they rotate the whole head"
            )
    layers = set(getattr(text, "layer_types", None) or ["full_attention"])
    if unknown := sorted(layers - {"full_attention", "sliding_attention"}):
        raise UnsupportedModel(
            f"layer types {unknown}: every layer must attend to all tokens or to a sliding window"
        )
    windows_of(text)  # which refuses a window of nothing
    if getattr(text, "use_bidirectional_attention", None):
        raise UnsupportedModel(
            "its attention looks at later tokens too; chunk caches need causal attention"
        )


def refuse_adapters(hf: Any, name: str) -> None:  # noqa: ANN401
    """Raise UnsupportedModel if an adapter is not merged, as it could be switched off unnoticed."""
    if any(hasattr(module, "base_layer") for module in hf.modules()):
        raise UnsupportedModel(
            f"{name!r} has an adapter that is not merged into its weights, and can be switched on "
            "and off; merge it with peft's merge_and_unload, and give the model that this returns"
        )


def head_dim_of(config: Any) -> int:  # noqa: ANN401
    """Channels of a head."""
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def context_window_of(config: Any) -> int:  # noqa: ANN401
    """Most tokens of prompt and answer together.

    With longrope those of its first range: other frequencies hold for longer prompts, so that no
    cache would serve both (LongRoPE, arXiv 2402.13753, section 3.3).
    """
    first_ranges = [
        int(rope["original_max_position_embeddings"])
        for rope in ropes_of(config).values() if rope.get("rope_type") == "longrope"
    ]  # fmt: skip
    return min([int(config.max_position_embeddings), *first_ranges])
