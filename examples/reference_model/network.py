"""A small Llama that trains on a CPU: its forward pass, its start, its Hugging Face folder.

The master weights are float32 and bear the names of ``LlamaForCausalLM``. They are cast once a
step, and everything else is computed in bfloat16, for which current CPUs have instructions.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HIDDEN = -30000.0  # added to a score that must not count; finite, so that no row becomes NaN
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a network.

    vocabulary: rows of the embedding, which may be more than the tokenizer has tokens.
    positions: the longest prompt, in tokens.
    """

    vocabulary: int
    positions: int
    layers: int = 8
    width: int = 256
    heads: int = 8
    kv_heads: int = 4
    head_width: int = 32
    feed_forward: int = 384
    theta: float = 500_000.0
    epsilon: float = 1e-6

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.heads // self.kv_heads

    def frequencies(self) -> Tensor:
        """Angle per position of each of the planes that RoPE turns, shape (head_width / 2,)."""
        planes = torch.arange(0, self.head_width, 2, dtype=torch.float32)
        return 1.0 / self.theta ** (planes / self.head_width)

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every parameter."""
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        found: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocabulary, self.width)}
        for layer in range(self.layers):
            for part, size in {
                "input_layernorm.weight": (self.width,),
                "self_attn.q_proj.weight": (queries, self.width),
                "self_attn.q_proj.bias": (queries,),
                "self_attn.k_proj.weight": (keys, self.width),
                "self_attn.k_proj.bias": (keys,),
                "self_attn.v_proj.weight": (keys, self.width),
                "self_attn.v_proj.bias": (keys,),
                "self_attn.o_proj.weight": (self.width, queries),
                "self_attn.o_proj.bias": (self.width,),
                "post_attention_layernorm.weight": (self.width,),
                "mlp.gate_proj.weight": (self.feed_forward, self.width),
                "mlp.up_proj.weight": (self.feed_forward, self.width),
                "mlp.down_proj.weight": (self.width, self.feed_forward),
            }.items():
                found[named(layer, part)] = size
        return found | {NORM: (self.width,)}


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Neighbouring query rows that are attended together, and the keys that they may meet.

    start, stop: the query rows, counted from the prompt's first token.
    keys: ranges of key rows, counted alike.
    mask: 0 or ``HIDDEN``, shape (stop - start, keys).
    """

    start: int
    stop: int
    keys: tuple[tuple[int, int], ...]
    mask: Tensor

    def select(self, tensor: Tensor) -> Tensor:
        """The key rows, which are the second to last axis."""
        parts = [tensor[..., start:stop, :] for start, stop in self.keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


def named(layer: int, part: str) -> str:
    return f"model.layers.{layer}.{part}"


def padded(tokens: int) -> int:
    """Rows of the embedding for so many tokens: matrices of whole 32s are multiplied faster."""
    return -(-tokens // 32) * 32


class Network:
    """The weights and what they compute."""

    def __init__(
        self,
        shape: Shape,
        parameters: dict[str, Tensor],
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.shape = shape
        self.parameters = {
            name: parameters[name].detach().float().clone().requires_grad_()
            for name in shape.parameters()
        }
        self.dtype = dtype
        self.to("cpu")

    def to(self, device: str) -> Network:
        """Move the weights, in place."""
        for parameter in self.parameters.values():
            parameter.data = parameter.data.to(device)
        positions = torch.arange(self.shape.positions, dtype=torch.float32)
        angles = positions[:, None] * self.shape.frequencies()
        self._cos = torch.cat([angles.cos(), angles.cos()], -1).to(device, self.dtype)
        self._sin = torch.cat([-angles.sin(), angles.sin()], -1).to(device, self.dtype)
        return self

    @classmethod
    def structured(cls, shape: Shape, tokenizer: Tokenizer, seed: int) -> Network:
        """A fresh network whose first layers can already look things up; see ``_structure``."""
        generator = torch.Generator().manual_seed(seed)
        return cls(shape, _structure(shape, tokenizer, generator))

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        layers: int,
        tokenizer: Tokenizer,
        positions: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Network:
        """Go on from a model, with more layers and more tokens if asked.

        The layers that are added copy the last ones, but write nothing at first: the function is
        unchanged, and the copies can learn a second lookup from what the first ones do.

        Raises:
            ValueError: the model has more layers than asked, or not half of them.
        """
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        config: Any = model.config  # typed as if a loaded model could lack its sizes
        have = config.num_hidden_layers
        if not have <= layers <= 2 * have:
            raise ValueError(
                f"{folder} has {have} layers: --layers may be {have} to {2 * have}, not {layers}"
            )
        shape = Shape(
            vocabulary=padded(tokenizer.get_vocab_size()),
            positions=positions,
            layers=layers,
            width=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_width=config.head_dim,
            feed_forward=config.intermediate_size,
            theta=config.rope_parameters["rope_theta"],
            epsilon=config.rms_norm_eps,
        )
        state = model.state_dict()
        for layer in range(have, layers):
            copied = named(layer - (layers - have), "")
            for name in [name for name in state if name.startswith(copied)]:
                value = state[name]
                part = name.removeprefix(copied)
                silent = "o_proj" in part or "down_proj" in part
                state[named(layer, part)] = torch.zeros_like(value) if silent else value
        old = Tokenizer.from_file(str(folder / "tokenizer.json"))
        state[EMBEDDING] = _embedding(state[EMBEDDING], old, tokenizer, shape.vocabulary)
        return cls(shape, state, dtype=dtype)

    def save(self, folder: Path, tokenizer_folder: Path) -> None:
        """Write a folder for ``AutoModelForCausalLM`` and ``AutoTokenizer``, in bfloat16.

        Every file is replaced whole, so that a reader never meets half of one.
        """
        tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
        shape = self.shape
        config = LlamaConfig(
            vocab_size=shape.vocabulary,
            max_position_embeddings=shape.positions,
            num_hidden_layers=shape.layers,
            hidden_size=shape.width,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_width,
            intermediate_size=shape.feed_forward,
            rope_parameters={"rope_type": "default", "rope_theta": shape.theta},
            rms_norm_eps=shape.epsilon,
            attention_bias=True,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.token_to_id("<|bos|>"),
            eos_token_id=tokenizer.token_to_id("<|eos|>"),
            pad_token_id=tokenizer.token_to_id("<|pad|>"),
        )
        model = LlamaForCausalLM(config)
        state = {name: value.detach().cpu() for name, value in self.parameters.items()}
        model.load_state_dict(state | {"lm_head.weight": state[EMBEDDING]})
        written = folder.with_name(folder.name + ".new")
        model.bfloat16().save_pretrained(written)
        for name in TOKENIZER_FILES:
            if (tokenizer_folder / name).exists():
                shutil.copyfile(tokenizer_folder / name, written / name)
        folder.mkdir(parents=True, exist_ok=True)
        for path in written.iterdir():
            os.replace(path, folder / path.name)
        written.rmdir()

    def states(
        self,
        tokens: Tensor,
        positions: Tensor,
        rows: Sequence[Sequence[Rows]],
        after: Sequence[int],
    ) -> dict[int, Tensor]:
        """The hidden states after so many layers, before any norm.

        Args:
            tokens: shape (length,); several prompts may follow each other.
            positions: of the tokens in their prompts, same shape.
            rows: of every prompt, in order, every query row once.
            after: numbers of layers.

        Returns:
            Number of layers to hidden states of shape (length, width).
        """
        shape = self.shape
        turned = shape.heads + shape.kv_heads
        heads = turned + shape.kv_heads
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        hidden = F.embedding(tokens, self._cast(EMBEDDING))
        found = {0: hidden}
        for layer in range(max(after)):

            def weight(part: str, layer: int = layer) -> Tensor:
                return self.parameters[named(layer, part)]

            matrix, bias = self._joint(layer)
            joint = F.linear(Normed.apply(hidden, shape.epsilon), matrix, bias)
            joint = joint.unflatten(-1, (heads, shape.head_width))
            queries_keys, values = joint.split((turned, shape.kv_heads), 1)
            swapped = queries_keys.roll(shape.head_width // 2, -1)
            queries_keys = torch.addcmul(queries_keys * cos, swapped, sin)
            queries, keys = queries_keys.split((shape.heads, shape.kv_heads), 1)
            mixed = attend(queries, keys, values, rows)
            output, bias = (weight(f"self_attn.o_proj.{kind}") for kind in ("weight", "bias"))
            hidden = hidden + F.linear(mixed, output.to(self.dtype), bias.to(self.dtype))
            gate_up = torch.cat([weight("mlp.gate_proj.weight"), weight("mlp.up_proj.weight")])
            gate_up = gate_up * weight("post_attention_layernorm.weight")
            both = F.linear(Normed.apply(hidden, shape.epsilon), gate_up.to(self.dtype))
            gate, up = both.chunk(2, -1)
            down = weight("mlp.down_proj.weight").to(self.dtype)
            hidden = hidden + F.linear(F.silu(gate) * up, down)
            found[layer + 1] = hidden
        return {number: found[number] for number in after}

    def logits(self, norm_hidden: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """What hidden states predict, through the tied embedding.

        Args:
            norm_hidden: pairs of a norm's weight and hidden states of shape (rows, width).

        Returns:
            float32, shape (rows of all, vocabulary).
        """
        normed = [
            Normed.apply(hidden, self.shape.epsilon) * norm.to(self.dtype)
            for norm, hidden in norm_hidden
        ]
        return F.linear(torch.cat(normed), self._cast(EMBEDDING)).float()

    def scores(
        self, layer: int, hidden: Tensor, positions: Tensor, asking: Tensor, start: int, stop: int
    ) -> Tensor:
        """What the first head of a layer gives to keys, before the softmax.

        Args:
            layer: index of the layer.
            hidden: states before it, shape (length, width).
            positions: of the tokens, shape (length,).
            asking: the tokens that attend, shape (count,).
            start, stop: the tokens that are attended to.

        Returns:
            float32, shape (count, stop - start).
        """
        head, turned = self.shape.head_width, self.shape.heads * self.shape.head_width
        matrix, bias = self._joint(layer)

        def turn(rows: slice, tokens: Tensor) -> Tensor:
            normed = Normed.apply(hidden[tokens], self.shape.epsilon)
            found = F.linear(normed, matrix[rows], bias[rows])
            at = positions[tokens]
            return found * self._cos[at] + found.roll(head // 2, -1) * self._sin[at]

        keys = torch.arange(start, stop, device=hidden.device)
        queries = turn(slice(0, head), asking)
        return (queries @ turn(slice(turned, turned + head), keys).T).float()

    def _cast(self, name: str) -> Tensor:
        return self.parameters[name].to(self.dtype)

    def _joint(self, layer: int) -> tuple[Tensor, Tensor]:
        """Queries, keys and values in one product.

        The scale of the scores and the weight of the norm before are in it already: a matrix is
        small, and the states that it multiplies are many.
        """
        scale = self.shape.head_width**-0.5
        both = []
        for kind in ("weight", "bias"):
            q, k, v = (
                self.parameters[named(layer, f"self_attn.{part}_proj.{kind}")] for part in "qkv"
            )
            both.append(torch.cat([q * scale, k, v]))
        weight = both[0] * self.parameters[named(layer, "input_layernorm.weight")]
        return weight.to(self.dtype), both[1].to(self.dtype)


class Normed(torch.autograd.Function):
    """RMS norm without its weight; on a CPU six times as fast as PyTorch's own, and back."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, epsilon: float) -> Tensor:
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32)
        inverse = torch.rsqrt(length.square() / hidden.shape[-1] + epsilon).to(hidden.dtype)
        normed = hidden * inverse
        ctx.save_for_backward(normed, inverse)
        return normed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        normed, inverse = ctx.saved_tensors
        along = torch.linalg.vecdot(gradient, normed)[..., None] / -normed.shape[-1]
        return torch.addcmul(gradient, normed, along).mul_(inverse), None


def attend(queries: Tensor, keys: Tensor, values: Tensor, rows: Sequence[Sequence[Rows]]) -> Tensor:
    """Attention, a few rows at a time, which meet keys of their prompt only and few later ones.

    Plain matrix products, because the backward pass of PyTorch's fused attention is slow on a CPU.
    Query heads that share a key-value head stand below each other in one product.

    Args:
        queries: shape (length, heads, head width), scaled.
        keys: shape (length, kv heads, head width).
        values: as keys.
        rows: of every prompt, in order, every query row once.

    Returns:
        Shape (length, heads x head width).
    """
    _, heads, width = queries.shape
    shared = keys.shape[1]
    group = heads // shared
    lengths = [parts[-1].stop for parts in rows]
    # Splits rather than slices: the backward pass of a slice is as large as what it was cut from.
    queries_of = queries.unflatten(1, (shared, group)).permute(1, 2, 0, 3).split(lengths, 2)
    keys_of = keys.transpose(0, 1).split(lengths, 1)
    values_of = values.transpose(0, 1).split(lengths, 1)
    outputs = []
    for parts, asking, offered, read in zip(rows, queries_of, keys_of, values_of, strict=True):
        counts = [part.stop - part.start for part in parts]
        for part, asked in zip(parts, asking.split(counts, 2), strict=True):
            count = asked.shape[2]
            scores = asked.reshape(shared, -1, width) @ part.select(offered).transpose(1, 2)
            weights = scores.view(shared, group, count, -1).add_(part.mask).softmax(-1)
            output = weights.view(scores.shape) @ part.select(read)
            output = output.view(shared, group, count, width).permute(2, 0, 1, 3)
            outputs.append(output.reshape(count, heads * width))
    return torch.cat(outputs)


def _embedding(old: Tensor, old_tokenizer: Tokenizer, new: Tokenizer, rows: int) -> Tensor:
    """Rows for another tokenizer: a token the old one lacks is the mean of its old pieces."""
    known = old_tokenizer.get_vocab()
    mean = old[: len(known)].mean(0)
    made = (old[-1] if len(old) > len(known) else mean).repeat(rows, 1)  # rows of no token
    for token, row in new.get_vocab().items():
        if token in known:
            made[row] = old[known[token]]
        else:
            text = new.decode([row], skip_special_tokens=False)
            pieces = old_tokenizer.encode(text, add_special_tokens=False).ids
            made[row] = old[pieces].mean(0) if pieces else mean
    return made


def _structure(shape: Shape, tokenizer: Tokenizer, generator: torch.Generator) -> dict[str, Tensor]:
    """Random weights with the circuits of a lookup laid out in them.

    From plain noise a network this small needs hours to find that a question's name can be matched
    with its copy in a document. So layer 0 starts with heads that look 1 to 4 tokens back and at
    the last dozen, and layers 1 to 3 with a head that finds what followed a token (induction) and
    one that finds where the neighbourhood was alike. Training is free to undo all of it.
    """
    if shape.kv_heads < 3:
        raise ValueError(f"a structured start needs 3 kv_heads or more, not {shape.kv_heads}")
    width, head, group = shape.width, shape.head_width, shape.group
    deep = math.sqrt(shape.layers)
    spread = {
        "embed_tokens": 0.05,
        "q_proj": 0.03,
        "k_proj": 0.03,
        "v_proj": 0.05,
        "o_proj": 0.005 / deep,  # a tenth of the usual: the residual stream starts almost clean
        "gate_proj": 0.05,
        "up_proj": 0.05,
        "down_proj": 0.005 / deep,
    }

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    made: dict[str, Tensor] = {}
    for name, size in shape.parameters().items():
        if len(size) == 2:
            made[name] = normal(*size) * spread[name.split(".")[-2]]
        else:
            made[name] = torch.ones(size) if "norm" in name else torch.zeros(size)

    # A word means the same after a space and after a bracket.
    vocabulary = tokenizer.get_vocab()
    for token, row in vocabulary.items():
        if token.startswith("Ġ") and token[1:] in vocabulary:
            made[EMBEDDING][row] = made[EMBEDDING][vocabulary[token[1:]]]

    # Heads that attend by distance: the biases alone make the score sum of cos(f (distance - d)).
    frequencies = shape.frequencies()
    planes = head // 2

    def attend_back(kv: int, distances: tuple[int, ...], strength: float, turned: range) -> None:
        key = made[named(0, "self_attn.k_proj.bias")].view(shape.kv_heads, head)
        query = made[named(0, "self_attn.q_proj.bias")].view(shape.heads, head)
        for plane in turned:
            key[kv, plane] = strength
            for number, distance in zip(range(group), distances, strict=False):
                angle = distance * float(frequencies[plane])
                query[kv * group + number, plane] = strength * math.cos(angle)
                query[kv * group + number, planes + plane] = -strength * math.sin(angle)

    attend_back(0, (1, 2), 6.0, range(planes))
    attend_back(1, (3, 4), 6.0, range(planes))
    attend_back(2, (6,), 4.0, range(2, min(6, planes)))  # few slow planes: a window of about 12

    # Two subspaces of the residual stream that nothing but the heads below writes to.
    basis = torch.linalg.qr(normal(width, 2 * head))[0].T
    before, around = basis[:head], basis[head:]
    made[EMBEDDING] -= made[EMBEDDING] @ basis.T @ basis
    for layer in range(shape.layers):
        for part in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            made[named(layer, part)] -= basis.T @ (basis @ made[named(layer, part)])

    def rows_of(layer: int, part: str, number: int) -> Tensor:
        return made[named(layer, f"self_attn.{part}_proj.weight")].view(-1, head, width)[number]

    def columns_of(layer: int, number: int) -> Tensor:
        output = made[named(layer, "self_attn.o_proj.weight")]
        return output[:, number * head : (number + 1) * head]

    token_before = normal(head, width) / math.sqrt(width)
    rows_of(0, "v", 0).copy_(token_before)
    columns_of(0, 0).copy_(before.T * 0.1)
    rows_of(0, "v", 2).copy_(normal(head, width) / math.sqrt(width))
    columns_of(0, 2 * group).copy_(around.T * 0.3)

    # Planes that hardly turn within 600 tokens compare contents and leave distances alone.
    still = [plane for plane in range(planes) if float(frequencies[plane]) * 600 < 1]
    still += [plane + planes for plane in still]
    for layer in range(1, min(shape.layers, 4)):
        for kv, wanted, offered in ((0, token_before, before), (1, around, around)):
            key, query = rows_of(layer, "k", kv), rows_of(layer, "q", kv * group)
            key *= 0.3
            query *= 0.3
            key[still] = offered[still]
            query[still] = wanted[still] * 2.5
            read = normal(head, width) / math.sqrt(width)
            read -= read @ basis.T @ basis
            rows_of(layer, "v", kv).copy_(read)
            columns_of(layer, kv * group).copy_(read.T * 0.3)
    return made
