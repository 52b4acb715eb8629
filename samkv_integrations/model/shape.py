"""What of a model its sizes follow from: its config, and no weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from samkv_integrations.errors import UnsupportedModel
from samkv_integrations.model.support import refuse_unsupported


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
