"""Decoding with CUDA graphs: the host launches a step of the same answers as a whole.

Off by default, as it was never measured: ``engine.scheduler.graphs = Graphs()`` turns it on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from samkv_integrations.runtimes.transformers.passes.decode import Decoder, decode
from samkv_integrations.runtimes.transformers.passes.working_cache import DenseCache, as_heads

_log = logging.getLogger(__name__)

_PATIENCE = 4
"""Steps of the same answers, one token each, before a graph is made of the next one."""

_MOST_ROWS = 8
_TOLERANCE = 0.25
"""By how much a logit of the first replay may be off, in standard deviations. Of a wrong step the
largest is off by several."""


class StaticStep:
    """One token of each of some answers, with the same shapes and addresses at every step.

    Answers attend to the whole room of their working caches; a mask hides what is not written yet.

    slots: the entry of each answer's cache that the step writes, of all layers.
    """

    def __init__(self, decoders: Sequence[Decoder], caches: Sequence[DenseCache]) -> None:
        self._model, self._caches = decoders[0].model, [ref(cache) for cache in caches]
        self._inputs = torch.zeros(3, len(caches), dtype=torch.long, device=self._model.device)
        for cache in caches:
            for entries in (*cache.keys, *cache.values):
                entries[cache.lengths[0] :] = 0  # what is masked must be finite

    def fill(self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int]) -> None:
        """Set what the next step computes."""
        self._inputs[:] = torch.tensor([tokens, positions, slots])

    def run(self) -> Tensor:
        """Logits (n, vocabulary). The host neither waits nor reads anything of the device."""
        model = self._model
        tokens, positions, slots = self._inputs
        of_group = model.n_heads // model.n_kv_heads
        caches = [cache for each in self._caches if (cache := each()) is not None]
        masks = []
        for at, cache in enumerate(caches):
            is_seen = torch.arange(len(cache.keys[0]), device=slots.device) <= slots[at]
            mask = torch.zeros(is_seen.shape, dtype=model.dtype, device=slots.device)
            masks.append(mask.masked_fill_(~is_seen, -torch.inf).repeat(of_group, 1))

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            outputs = []
            for at, cache in enumerate(caches):
                row = slice(at, at + 1)
                keys, values = cache.keys[layer], cache.values[layer]
                keys.index_copy_(0, slots[row], key[0, :, row].transpose(0, 1))
                values.index_copy_(0, slots[row], value[0, :, row].transpose(0, 1))
                outputs.append(model.attention(
                    layer, query[:, :, row], as_heads(keys), as_heads(values), scaling, masks[at],
                    False,
                ))  # fmt: skip
            return torch.cat(outputs, 2)

        rotation, hidden = model.rotation(positions), model.embed(tokens[None])
        for layer in range(model.n_layers):
            hidden = model.layer(layer, hidden, *rotation.of(layer), attend)
        return model.logits(hidden[0])


def captured(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """What ``run`` does on the device, as a CUDA graph; calling it replays the graph."""
    device = run().device  # a capture must not be the first to call a kernel
    graph = torch.cuda.CUDAGraph()
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # A capture that fails leaves its stream the current one: `stream` brings back the other.
    # Threads that read for other questions go on allocating pinned memory.
    with torch.cuda.device(device), torch.cuda.stream(stream), torch.cuda.graph(
        graph, stream=stream, capture_error_mode="thread_local"
    ):  # fmt: skip
        logits = run()
    logits.zero_()  # so that a replay which computes nothing is seen

    def replay() -> Tensor:
        graph.replay()
        return logits.clone()

    return replay


Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


class Graphs:
    """`decode`, with a graph once the same answers have been decoded for some steps.

    What a graph cannot do is left to `decode`: drafts, working caches of which an eviction rule or
    a window takes entries, layers on several devices, and a step that needs a larger cache, after
    which another graph is made.

    is_off: a graph could not be made, or came to other logits.
    """

    def __init__(self, capture: Capture = captured) -> None:
        self._capture = capture
        self._places: list[object] = []  # what the steps so far had in common
        self._n_steps = 0
        self._step: StaticStep | None = None
        self._replay: Callable[[], Tensor] | None = None
        self.is_off = False

    def decode(
        self, decoders: Sequence[Decoder], tokens: Sequence[Sequence[int]]
    ) -> tuple[Tensor, ...]:
        """See `decode.decode`."""
        caches = [each.cache for each in decoders if isinstance(each.cache, DenseCache)]
        slots = [slot for cache in caches if (slot := cache.static_slot) is not None]
        is_single = len(tokens) == sum(map(len, tokens)) <= _MOST_ROWS
        model = decoders[0].model
        is_spread = len(set(model.layer_devices)) > 1
        if self.is_off or is_spread or not is_single or len(slots) < len(decoders):
            return decode(decoders, tokens)
        places: list[object] = [(ref(cache), cache.keys[0].data_ptr()) for cache in caches]
        places.append(model.identity.generation)  # weights may be elsewhere
        if places != self._places:
            self._places, self._n_steps, self._step, self._replay = places, 0, None, None
        self._n_steps += 1
        if self._n_steps <= _PATIENCE:
            return decode(decoders, tokens)
        positions = [each.position for each in decoders]
        if self._step is None:
            self._step = StaticStep(decoders, caches)
        self._step.fill([token for (token,) in tokens], positions, slots)
        if self._replay is None:
            return self._begin(decoders, tokens)
        logits = self._replay()
        for decoder, cache in zip(decoders, caches, strict=True):
            decoder.position += 1
            cache.lengths = [length + 1 for length in cache.lengths]
        return torch.split(logits, 1)

    def _begin(
        self, decoders: Sequence[Decoder], tokens: Sequence[Sequence[int]]
    ) -> tuple[Tensor, ...]:
        """A graph of a step, and `decode` of the same step, which must come to the same logits."""
        assert self._step is not None
        found, failure = torch.empty(0), "its logits are wrong"
        try:
            replay = self._capture(self._step.run)
            found = replay().float()
        except Exception as error:
            failure = str(error)
        # last, so that its entries are those that stay, whatever the graph has written
        expected = decode(decoders, tokens)
        wanted = torch.cat(expected).float()
        if len(found) and (found - wanted).abs().max() < _TOLERANCE * wanted.std():
            self._replay = replay
        else:
            self.is_off, self._step = True, None
            _log.warning("answers are decoded without CUDA graphs, which is slower: %s", failure)
        return expected
