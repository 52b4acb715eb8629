"""Which models are supported, what each family needs beside decoder layers, and how layers differ.

A family whose layers take hidden states, cos and sin, and attend to everything, is one line of
`FAMILIES`. The limit laws (tests/laws) run over all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from samkv_integrations.errors import UnsupportedModel


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the model around the layers treats embeddings and logits, and how layers differ.

    window: which layers see only the last ``sliding_window`` tokens: the layers for which
        ``layer_types`` says so ("typed"), all layers, or none, whatever the config says.
    embedding_factor: attribute of the model that embeddings are multiplied by. logit_factor: name
        of the config field that logits are divided by.
    logit_cap: name of the config field that bounds logits (Gemma 2, arXiv 2408.00118, section 2).
    score_cap: name of the config field that bounds attention scores.
    has_sinks: whether each head has a learned score in the softmax that belongs to no token.
    logit_scale: attribute of the model with its head that logits are multiplied by.
    rotates: config field with 1, or "sliding_attention", for each layer that has RoPE; all layers
        have it if it is None.
    turns: the order of its cos and sin over the channels of a head: all of them twice in a row
        ("halves"), all once ("half"), or each twice, because neighbouring channels rotate
        together ("pairs").
    may_turn_part: whether RoPE may rotate a part of each head, as the config says.
    """

    window: Literal["typed", "all", "none"] = "none"
    embedding_factor: str | None = None
    logit_factor: str | None = None
    logit_cap: str | None = None
    score_cap: str | None = None
    has_sinks: bool = False
    rotates: str | None = None
    logit_scale: str | None = None
    turns: Literal["halves", "half", "pairs"] = "halves"
    may_turn_part: bool = False

    def embeddings(self, decoder: Any, hidden: Tensor) -> Tensor:  # noqa: ANN401
        """Input of the first layer, from the output ``hidden`` of the embedding."""
        return hidden * getattr(decoder, self.embedding_factor) if self.embedding_factor else hidden

    def logits(self, hf: Any, config: Any, scores: Tensor) -> Tensor:  # noqa: ANN401
        """Logits, from the output ``scores`` of the language-model head of ``hf``."""
        if self.logit_scale:
            scores = scores * getattr(hf, self.logit_scale)
        if self.logit_factor:
            scores = scores / getattr(config, self.logit_factor)
        if self.logit_cap and (cap := getattr(config, self.logit_cap)) is not None:
            scores = torch.tanh(scores / cap) * cap
        return scores


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(window="all"),
    "mixtral": Family(window="all"),
    "qwen2": Family(window="typed"),
    "qwen2_moe": Family(window="typed"),
    "qwen3": Family(window="typed"),
    "qwen3_moe": Family(window="all"),
    "olmo2": Family(),
    "phi3": Family(window="all", may_turn_part=True),  # Phi-4-mini is of this family
    "granite": Family(embedding_factor="embedding_multiplier", logit_factor="logits_scaling"),
    "smollm3": Family(window="typed", rotates="no_rope_layers"),
    "cohere": Family(turns="pairs", logit_scale="logit_scale"),
    "cohere2": Family(
        window="typed", rotates="layer_types", turns="pairs", logit_scale="logit_scale"
    ),
    "gemma2": Family(
        window="typed", logit_cap="final_logit_softcapping", score_cap="attn_logit_softcapping"
    ),
    "gemma3_text": Family(window="typed", logit_cap="final_logit_softcapping"),
    "gemma3": Family(window="typed"),  # it reads images, too; only its text part is used
    "gpt_oss": Family(window="typed", has_sinks=True, turns="half"),
}

SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn", "longrope")


def text_config(config: Any) -> Any:  # noqa: ANN401
    """The part of a config that describes the text model; raises as `refuse_family`."""
    refuse_family(config.model_type)
    return config.get_text_config()


def refuse_family(name: object) -> None:
    """Raises UnsupportedModel unless ``name`` is a family of `FAMILIES`."""
    if name not in FAMILIES:
        raise UnsupportedModel(
            f"model family {name!r} is not supported; supported: {', '.join(sorted(FAMILIES))}; "
            "give a model of one of them (docs/models.md)"
        )


def family_of(config: Any) -> Family:  # noqa: ANN401
    """The family of a config, or of the config of its text part."""
    return FAMILIES[config.model_type]


def windows_of(config: Any) -> tuple[int | None, ...]:  # noqa: ANN401
    """For each layer, how many last tokens a token sees, itself included; None for all of them.

    Raises UnsupportedModel for a window of no token.
    """
    n_layers, family = int(config.num_hidden_layers), family_of(config)
    window = getattr(config, "sliding_window", None)
    if family.window == "none" or (family.window == "all" and window is None):
        return (None,) * n_layers
    has_one = [True] * n_layers
    if family.window == "typed":
        has_one = [kind == "sliding_attention" for kind in config.layer_types]
    if any(has_one) and not window:
        raise UnsupportedModel(
            f"sliding_window={window!r}; it must be a number above 0 for layers with a sliding "
            "window; fetch the model's config again, it is damaged"
        )
    return tuple(window if sees_less else None for sees_less in has_one)


def ropes_of(config: Any) -> Mapping[str | None, Mapping[str, Any]]:  # noqa: ANN401
    """The RoPE of each kind of layer, by the name of the kind; by None if all layers share one."""
    found = getattr(config, "rope_parameters", None) or {}
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds & found.keys():
        return {kind: found[kind] for kind in sorted(kinds)}
    return {None: found}


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """The cos and sin of R positions, in the model's dtype.

    turns: (R, D) cos and sin for each kind of layer; the second half of the channels repeats the
    first. kinds: for each layer, the index of its kind.
    """

    turns: Sequence[tuple[Tensor, Tensor]]
    kinds: Sequence[int]

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """The cos and sin of a layer."""
        return self.turns[self.kinds[layer]]


def layer_ropes(config: Any) -> tuple[tuple[str | None, bool], ...]:  # noqa: ANN401
    """For each layer, the name of its RoPE in `ropes_of`, and whether the layer rotates at all."""
    n_layers, flags = int(config.num_hidden_layers), family_of(config).rotates
    rotates = getattr(config, flags) if flags else [True] * n_layers
    turns = [flag in (1, "sliding_attention") for flag in rotates[:n_layers]]
    kinds = [None] * n_layers if None in ropes_of(config) else config.layer_types
    return tuple(zip(kinds, turns, strict=True))


def rotated_channels(config: Any, head_dim: int) -> int:  # noqa: ANN401
    """Number of channels of a head that RoPE rotates: the first ones, an even number."""
    rope = next(iter(ropes_of(config).values()))
    n = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    return n + n % 2


def refuse_unsupported(config: Any) -> None:  # noqa: ANN401
    """Raise UnsupportedModel, before anything is cached, for a model that could not be exact."""
    text = text_config(config)
    for rope in ropes_of(text).values():
        kind = rope.get("rope_type", "default")
        if kind not in SUPPORTED_ROPE:
            reason = "its rotation is not known to be exact here"
            if kind == "dynamic":
                reason = "its frequencies change with the prompt length"
            raise UnsupportedModel(
                f"RoPE type {kind!r} cannot be re-aligned exactly: {reason}; "
                f"supported: {', '.join(SUPPORTED_ROPE)}; give a model with one of them"
            )
        part = rope.get("partial_rotary_factor", 1.0)
        if part != 1.0 and not family_of(text).may_turn_part:
            raise UnsupportedModel(
                f"partial_rotary_factor={part}: models of family {text.model_type!r} are supported "
                "if they rotate the whole head; give another model"
            )
    layers = set(getattr(text, "layer_types", None) or ["full_attention"])
    if unknown := sorted(layers - {"full_attention", "sliding_attention"}):
        raise UnsupportedModel(
            f"layer types {unknown}: every layer must attend to all tokens or to a sliding window; "
            "give another model"
        )
    windows_of(text)  # raises for a window of no token
    if getattr(text, "use_bidirectional_attention", None):
        raise UnsupportedModel(
            "tokens of this model attend to later tokens, and chunk caches need causal attention; "
            "give another model"
        )


def refuse_adapters(hf: Any, name: str) -> None:  # noqa: ANN401
    """Raise UnsupportedModel for an unmerged adapter, which could be switched off unnoticed."""
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

    With longrope, the tokens of its first range: longer prompts have other frequencies (LongRoPE,
    arXiv 2402.13753, section 3.3).
    """
    first_ranges = [
        int(rope["original_max_position_embeddings"])
        for rope in ropes_of(config).values() if rope.get("rope_type") == "longrope"
    ]  # fmt: skip
    return min([int(config.max_position_embeddings), *first_ranges])
