"""Which models are supported, and their sizes, from the config alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

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
    """Most tokens of prompt and answer together."""
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        return int(min(config.max_position_embeddings, window))
    return int(config.max_position_embeddings)


def _layer_parameters(config: Any) -> int:  # noqa: ANN401
    """Counted in a layer that transformers makes, of tensors that take no memory."""
    fields = {**config.to_dict(), "num_hidden_layers": 1}
    fields.pop("layer_types", None)  # one a layer, and they are as long as it was
    one_layer = type(config).from_dict(fields)
    with torch.device("meta"):
        auto: Any = AutoModelForCausalLM
        layer = auto.from_config(one_layer).model.layers[0]
    return sum(weight.numel() for weight in layer.parameters())
