"""Decoding: the tokens of answers after the first one, for several answers in one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from samkv_integrations.runtimes.base import FirstEntries
from samkv_integrations.runtimes.transformers.model.model import LayeredModel
from samkv_integrations.runtimes.transformers.passes.working_cache import WorkingCache


@dataclass(eq=False)
class Decoder:
    """The decoding of one answer over its working cache, see `TokenSequence`."""

    model: LayeredModel
    cache: WorkingCache
    n_tokens: int
    entries: FirstEntries | None = None

    @property
    def prompt_bytes(self) -> int:
        return self.cache.prompt_bytes

    @property
    def kv_bytes(self) -> int:
        return self.cache.kv_bytes

    @property
    def can_rewind(self) -> bool:
        return self.cache.can_rewind

    def rewind(self, n_tokens: int) -> None:
        self.n_tokens -= n_tokens
        self.cache.rewind(n_tokens)

    def put_back(self) -> None:
        self.cache.put_back()

    def close(self) -> None:
        """Nothing to do: tensors are freed with the last reference."""


def decode(decoders: Sequence[Decoder], tokens: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    """One step of the model: logits (n, vocabulary) after each of the n next tokens of each answer.

    The weights are read once for all tokens; each answer attends to its own working cache. All
    decoders must have the same model. If the device runs out of memory, working caches that can
    rewind stay as they were.
    """
    model, lengths = decoders[0].model, [len(each) for each in tokens]
    positions, rows = list[int](), list[WorkingCache]()
    for decoder, n_tokens in zip(decoders, lengths, strict=True):
        positions += range(decoder.n_tokens, decoder.n_tokens + n_tokens)
        rows += [decoder.cache] * n_tokens
    before = [decoder.cache.lengths[:] for decoder in decoders]
    rotation = model.rotation(torch.tensor(positions))

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        if len(rows) == 1:
            return rows[0].attend(layer, query, key, value, scaling)
        # one token after the other, because several together would be rounded differently
        outputs = []
        for at, cache in enumerate(rows):
            q, k, v = query[:, :, at, None], key[:, :, at, None], value[:, :, at, None]
            outputs.append(cache.attend(layer, q, k, v, scaling))
        return torch.cat(outputs, 2)

    # Layers see all tokens as one sequence: tokens interact in attention only.
    try:
        with model.decoding(len(rows)):
            hidden = model.embed(torch.tensor([[token for each in tokens for token in each]]))
            for layer in range(model.n_layers):
                hidden = model.layer(layer, hidden, *rotation.of(layer), attend)
            logits = model.logits(hidden[0])
    except torch.OutOfMemoryError:
        for decoder, of_layers in zip(decoders, before, strict=True):
            decoder.cache.lengths = of_layers
        raise
    for decoder, n_tokens in zip(decoders, lengths, strict=True):
        decoder.n_tokens += n_tokens
    return torch.split(logits, lengths)
