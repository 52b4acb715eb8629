"""Which models are supported, and their sizes, from the config alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

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
    """Raise UnsupportedModel if an adapter sits on a layer: it can be switched, unseen by us."""
    if any(hasattr(module, "base_layer") for module in hf.modules()):
        raise UnsupportedModel(
            f"{name!r} has an adapter that is not merged into its weights, and can be switched on "
            "and off; merge it with peft's merge_and_unload, and give the model that this returns"
        )


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model. The fields mean what `Model` means by them.

    dtype: name of the dtype of its weights, ``"bfloat16"``.
    layer_parameters: numbers in the weights of one layer.
    context_window: most tokens of prompt and answer together.

    Raises UnsupportedModel for sizes that no model has.
    """

    name: str
    dtype: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    layer_parameters: int
    context_window: int

    def __post_init__(self) -> None:
        sizes = {name: n for name, n in asdict(self).items() if name not in ("name", "dtype")}
        too_small = [f"{name}={n}" for name, n in sizes.items() if n < 1]
        if too_small or self.n_heads % self.n_kv_heads:
            found = ", ".join(too_small) or f"{self.n_heads} heads over {self.n_kv_heads} of KV"
            raise UnsupportedModel(
                f"the config of {self.name!r} describes no model: {found}; sizes are at least 1, "
                "and heads a multiple of KV heads"
            )

    @classmethod
    def of(cls, config: Any, name: str, dtype: str = "auto") -> ModelShape:  # noqa: ANN401
        """The shape that a transformers config describes.

        dtype: ``auto`` for the config's, float32 if it names none.

        Raises UnsupportedModel for a model that could not be computed exactly.
        """
        refuse_unsupported(config)
        config = text_config(config)
        if dtype == "auto":
            dtype = str(config.dtype or torch.float32).removeprefix("torch.")
        return cls(
            name=name, dtype=dtype, n_layers=config.num_hidden_layers,
            n_heads=config.num_attention_heads, n_kv_heads=config.num_key_value_heads,
            head_dim=head_dim_of(config), layer_parameters=_layer_parameters(config),
            context_window=context_window_of(config),
        )  # fmt: skip


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


def _layer_parameters(config: Any) -> int:  # noqa: ANN401
    """Counted in a layer that transformers makes, of tensors that take no memory."""
    fields = {**config.to_dict(), "num_hidden_layers": 1}
    for one_a_layer in ("layer_types", "no_rope_layers"):
        if fields.get(one_a_layer):
            fields[one_a_layer] = fields[one_a_layer][:1]
    one_layer = type(config).from_dict(fields)
    with torch.device("meta"):
        auto: Any = AutoModelForCausalLM
        layer = auto.from_config(one_layer).model.layers[0]
    return sum(weight.numel() for weight in layer.parameters())
