"""Proves on the loaded model and build that chunk caches give what the model itself computes.

A few tokens are decoded. Their state is taken apart and put together again, and must give the same
logits. The rotation of keys is measured and compared with the model's own keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from samkv_integrations.runtimes.llama_cpp.library.binding import NEOX, NORM
from samkv_integrations.runtimes.llama_cpp.library.context import LlamaContext
from samkv_integrations.runtimes.llama_cpp.library.positions import CannotRotate, Rotation
from samkv_integrations.runtimes.llama_cpp.library.state import CannotSplit, StateLayout

MOST_POSITION = 2**13
"""Largest position at which the rotation is measured; larger ones follow from it."""

_OTHERWISE = "; answer with method='recompute', which keeps conversations in memory"


@dataclass(frozen=True, kw_only=True)
class Proven:
    """What the self-test has found: the layout of a state, and the rotation of keys."""

    layout: StateLayout
    rotation: Rotation


def prove(context: LlamaContext) -> Proven | str:
    """Test the model; or why its chunks cannot be cached, and what works instead."""
    if (reason := _known_refusal(context)) is not None:
        return reason + _OTHERWISE
    try:
        layout = _layout(context)
        return Proven(layout=layout, rotation=_rotation(context, layout))
    except (CannotSplit, CannotRotate) as error:
        return f"chunks cannot be cached with this model on {context.binding.build}: {error}" + (
            _OTHERWISE
        )
    finally:
        context.clear()


def _known_refusal(context: LlamaContext) -> str | None:
    if not context.can_crop:
        return "this model is recurrent, in all or in some layers, and cannot go on from a chunk"
    if context.n_window:
        return f"tokens of this model attend to a sliding window of {context.n_window} tokens"
    if context.rope_type not in (NORM, NEOX):
        return "positions of this model are not one number (M-RoPE), or are not rotations"
    if context.stores_otherwise:
        return "chunks are cached only with keys and values in F16; leave out type_k and type_v"
    return None


def _layout(context: LlamaContext) -> StateLayout:
    tokens = [token % context.n_vocabulary for token in (11, 5, 7, 6)]
    n_tokens = len(tokens)
    context.decode(tokens, range(n_tokens), [0] * n_tokens)
    state = context.state(0)
    layout = StateLayout.of(state, n_tokens)
    keys, values = layout.split(state, n_tokens)
    again, of_keys, of_values = layout.joined(np.arange(n_tokens))
    of_keys[...], of_values[...] = keys, values
    context.load(1, again)
    own, loaded = (context.decode([tokens[0]], [n_tokens], [sequence], [0]) for sequence in (0, 1))
    if not np.array_equal(own, loaded):
        raise CannotSplit("a state that was put together gives other logits")
    context.clear()
    return layout


def _rotation(context: LlamaContext, layout: StateLayout) -> Rotation:
    """From the keys of one token, alone in a sequence at each of some positions."""
    positions = [0]
    while (position := max(1, 2 * positions[-1])) <= min(MOST_POSITION, context.n_trained - 1):
        positions.append(position)
    token = 9 % context.n_vocabulary
    n_positions = len(positions)
    context.decode([token] * n_positions, positions, range(n_positions))
    n_heads = context.n_kv_heads
    rows = [layout.split(context.state(number), 1)[0][:, 0] for number in range(n_positions)]
    keys = np.stack(rows, axis=1).view(np.float16).astype(np.float32)
    keys = keys.reshape(layout.n_layers, n_positions, n_heads, -1)
    n_rotated = context.n_rotated or keys.shape[-1]
    return Rotation.measured(context.rope_type, n_rotated, keys, np.array(positions))
