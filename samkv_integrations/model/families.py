"""What each family of models needs beside decoder layers, and how its layers differ.

A family whose layers take hidden states, cos and sin, and attend to everything, is one line of
`FAMILIES`. The limit laws (tests/laws) run over all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samkv_integrations.errors import UnsupportedModel


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the model around the layers treats embeddings and logits, and what layers know.

    embedding_factor, logit_factor: names of config fields that embeddings are multiplied by, and
        logits divided by.
    logit_cap: name of the config field that bounds logits (Gemma 2, arXiv 2408.00118, section 2).
    score_cap: the same of attention scores.
    has_sinks: whether each head has a learned attention score that no token takes.
    rotates: config field with 1 for each layer that has RoPE; all layers have it if it is None.
    turns_half: whether its cos and sin are of half a head, and not repeated for the other half.
    may_turn_part: whether RoPE may rotate a part of each head, as the config says.
    """

    embedding_factor: str | None = None
    logit_factor: str | None = None
    logit_cap: str | None = None
    score_cap: str | None = None
    has_sinks: bool = False
    rotates: str | None = None
    turns_half: bool = False
    may_turn_part: bool = False

    def embeddings(self, config: Any, hidden: Tensor) -> Tensor:  # noqa: ANN401
        """What enters the first layer, of what the embedding gives."""
        return hidden * getattr(config, self.embedding_factor) if self.embedding_factor else hidden

    def logits(self, config: Any, scores: Tensor) -> Tensor:  # noqa: ANN401
        """Logits, of what the head gives."""
        if self.logit_factor:
            scores = scores / getattr(config, self.logit_factor)
        if self.logit_cap and (cap := getattr(config, self.logit_cap)) is not None:
            scores = torch.tanh(scores / cap) * cap
        return scores


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(),
    "qwen2": Family(),
    "qwen2_moe": Family(),
    "qwen3": Family(),
    "qwen3_moe": Family(),
    "olmo2": Family(),
    "phi3": Family(may_turn_part=True),  # Phi-4-mini is of this family
    "granite": Family(embedding_factor="embedding_multiplier", logit_factor="logits_scaling"),
    "smollm3": Family(rotates="no_rope_layers"),
    "gemma2": Family(logit_cap="final_logit_softcapping", score_cap="attn_logit_softcapping"),
    "gemma3_text": Family(logit_cap="final_logit_softcapping"),
    "gemma3": Family(),  # reads images too; its text part is used
    "gpt_oss": Family(has_sinks=True, turns_half=True),
}

SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn", "longrope")


def text_config(config: Any) -> Any:  # noqa: ANN401
    """The part of a config that describes the text model.

    Raises UnsupportedModel for a family that is not there.
    """
    if config.model_type not in FAMILIES:
        raise UnsupportedModel(
            f"model family {config.model_type!r} is not supported; supported: "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return config.get_text_config()


def family_of(config: Any) -> Family:  # noqa: ANN401
    """Of a model's config, or of its text part's."""
    return FAMILIES[config.model_type]


def windows_of(config: Any) -> tuple[int | None, ...]:  # noqa: ANN401
    """Of each layer: how many last tokens a token sees, itself included; None for all of them."""
    window = getattr(config, "sliding_window", None) or None
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    is_used = getattr(config, "use_sliding_window", True)
    return (window if is_used else None,) * int(config.num_hidden_layers)


def ropes_of(config: Any) -> Mapping[str | None, Mapping[str, Any]]:  # noqa: ANN401
    """The RoPE of each kind of layer, under the name of the kind; under None if it is one."""
    found = getattr(config, "rope_parameters", None) or {}
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds & found.keys():
        return {kind: found[kind] for kind in sorted(kinds)}
    return {None: found}


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """The cos and sin of R positions, in the model's dtype.

    turns: for each kind of layer (R, D) cos and sin, the second half of the channels as the first.
    kinds: of each layer, which of them is its.
    """

    turns: Sequence[tuple[Tensor, Tensor]]
    kinds: Sequence[int]

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Those of a layer."""
        return self.turns[self.kinds[layer]]

    def float(self) -> Rotation:
        """The same numbers in float32."""
        return Rotation(turns=[(c.float(), s.float()) for c, s in self.turns], kinds=self.kinds)


def layer_ropes(config: Any) -> tuple[tuple[str | None, bool], ...]:  # noqa: ANN401
    """Of each layer: the name of its RoPE in `ropes_of`, and whether it rotates at all."""
    n_layers, flags = int(config.num_hidden_layers), family_of(config).rotates
    rotates = getattr(config, flags) if flags else [True] * n_layers
    kinds = [None] * n_layers if None in ropes_of(config) else config.layer_types
    return tuple((kind, bool(turns)) for kind, turns in zip(kinds, rotates, strict=True))


def rotated_channels(config: Any, head_dim: int) -> int:  # noqa: ANN401
    """Channels of a head that RoPE rotates: its first ones."""
    rope = next(iter(ropes_of(config).values()))
    return int(head_dim * rope.get("partial_rotary_factor", 1.0))
