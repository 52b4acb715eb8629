"""Full prefill as the teacher, and reuse of chunk caches made with a prefix as the student.

Shapes are those of `samkv_integrations.prompt.layout`; P tokens of the prefix, n of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from samkv_integrations.model.families import Rotation
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.layout import Occurrence


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Token ids of a prompt, and the chunks that it holds."""

    ids: Sequence[int]
    chunks: Sequence[Occurrence]


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What full prefill answers: token ids, and the logits (n, vocabulary) before each."""

    answer: Sequence[int]
    logits: Tensor


@torch.inference_mode()
def teacher(model: Model, prompt: Prompt, most_tokens: int) -> Truth:
    """Full prefill's greedy answer, by the model itself."""
    past, fed, logits = None, list(prompt.ids), list[Tensor]()
    answer: list[int] = []
    while len(answer) < most_tokens and not (answer and answer[-1] in model.eos_ids):
        out = model.hf(
            input_ids=torch.tensor([fed], device=model.device), past_key_values=past,
            use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        past, best = out.past_key_values, int(out.logits[0, -1].argmax())
        logits.append(out.logits[0, -1].float())
        answer.append(best)
        fed = [best]
    return Truth(answer=answer, logits=torch.stack(logits))


def loss(model: Model, prompt: Prompt, truth: Truth, prefix: Tensor, first: int) -> Tensor:
    """Mean KL(teacher || student) in nats along the teacher's answer; has a gradient by ``prefix``.

    prefix: (P, hidden) embeddings that chunks are prefilled after. first: tokens of each chunk
    that are recomputed.
    """
    entries = chunk_entries(model, prompt.chunks, prefix)
    return _kl(truth, student(model, prompt, truth.answer, entries, len(prefix), first))


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How far the student is from the teacher on one prompt.

    kl: mean along the teacher's answer, in nats. top1: share of its tokens that are the student's
    likeliest, too.
    """

    kl: float
    top1: float

    @property
    def is_same(self) -> bool:
        """Whether the student gives the teacher's answer, token by token."""
        return self.top1 == 1


@torch.no_grad()
def distances(
    model: Model, prompt: Prompt, truth: Truth, prefix: Tensor, firsts: Sequence[int]
) -> list[Distance]:
    """For each of ``firsts``: what `loss` would be, and how many tokens are the same."""
    entries = chunk_entries(model, prompt.chunks, prefix)
    found = []
    for first in firsts:
        logits = student(model, prompt, truth.answer, entries, len(prefix), first)
        same = logits.argmax(-1) == truth.logits.argmax(-1)
        found.append(Distance(kl=float(_kl(truth, logits)), top1=float(same.float().mean())))
    return found


def _kl(truth: Truth, logits: Tensor) -> Tensor:
    mine, theirs = logits.float().log_softmax(-1), truth.logits.log_softmax(-1)
    return (theirs.exp() * (theirs - mine)).sum(-1).mean()


def student(
    model: Model, prompt: Prompt, answer: Sequence[int], entries: Sequence[tuple[Tensor, Tensor]],
    n_prefix: int, first: int,
) -> Tensor:  # fmt: skip
    """(n, vocabulary) logits along ``answer``, over chunk caches in the model's own dtype.

    entries: of `chunk_entries`, made after ``n_prefix`` embeddings.

    What an engine computes with the method ``epic`` and caches of 16 bits, but in one pass, and
    differentiable. Layers are computed again for the gradient, so memory holds one at a time.
    """
    sequence = torch.tensor([*prompt.ids, *answer[:-1]])
    row, offset = torch.zeros_like(sequence), torch.zeros_like(sequence)
    is_cached = torch.zeros(len(sequence), dtype=torch.bool)
    for number, chunk in enumerate(prompt.chunks):
        for run in chunk.runs:
            at = slice(run.position, run.span.stop)
            row[at], offset[at] = number, torch.arange(run.start, run.stop)
            is_cached[at] = offset[at] >= first
    is_cached[len(prompt.ids) - 1 :] = False  # the last token gives the first logits
    cached, computed = is_cached.nonzero()[:, 0], (~is_cached).nonzero()[:, 0]
    # of each position: where its entry is, once the computed ones follow the cached ones
    entry = torch.cat((cached, computed)).argsort()
    row, offset = row[cached], offset[cached]
    rotation, here = model.rotation(computed), model.rotation(cached)
    there = model.rotation(offset + n_prefix)
    behind = computed[:, None] - torch.arange(len(sequence))[None]
    of_device = {
        device: tuple(index.to(device) for index in (entry, row, offset, behind))
        for device in set(model.layer_devices)
    }

    def blended(layer: int, hidden: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        entry, row, offset, behind = of_device[model.layer_devices[layer]]
        cos, sin = there.of(layer)
        bare = _turn(_picked(keys, row, offset), cos, -sin) / (cos.square() + sin.square())
        placed = _turn(bare, *here.of(layer))
        mask, window = behind >= 0, model.windows[layer]
        if window is not None:
            mask &= behind < window
        stored = _picked(values, row, offset)

        def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            every_key = torch.cat((placed, key), 2)[:, :, entry]
            every_value = torch.cat((stored, value), 2)[:, :, entry]
            return model.attention(layer, query, every_key, every_value, scaling, mask, False)

        return _layer(model, layer, hidden, rotation, attend)[0]

    hidden = model.embed(sequence[computed])[None]
    for layer in range(model.n_layers):
        hidden = checkpoint(blended, layer, hidden, *entries[layer], use_reentrant=False)
    return model.logits(hidden[0, -len(answer) :])


def chunk_entries(
    model: Model, chunks: Sequence[Occurrence], prefix: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Of each layer: keys and values (C, G, T, D), keys rotated to P, P + 1, ..."""
    n, longest = len(prefix), max((len(chunk.token_ids) for chunk in chunks), default=0)
    ids = torch.zeros(len(chunks), longest, dtype=torch.long)
    for row, chunk in zip(ids, chunks, strict=True):
        row[: len(chunk.token_ids)] = torch.tensor(chunk.token_ids)
    before = prefix.to(model.dtype).expand(len(chunks), -1, -1)
    hidden = torch.cat((before, model.embed(ids)), 1)
    rotation = model.rotation(torch.arange(n + longest))

    def alone(layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mask = model.window_mask(layer, n + longest)

        def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            return model.attention(layer, query, key, value, scaling, mask, mask is None)

        return _layer(model, layer, hidden, rotation, attend)

    entries = []
    for layer in range(model.n_layers):
        hidden, keys, values = checkpoint(alone, layer, hidden, use_reentrant=False)
        entries.append((keys[:, :, n:], values[:, :, n:]))
    return entries


def _layer(
    model: Model, layer: int, hidden: Tensor, rotation: Rotation,
    attend: Callable[[Tensor, Tensor, Tensor, float], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """A layer's output, and the keys and values that it computed on the way."""
    seen: list[Tensor] = []

    def watched(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        seen.extend((key, value))
        return attend(query, key, value, scaling)

    output = model.layer(layer, hidden, *rotation.of(layer), watched)
    return output, seen[0], seen[1]


def _picked(entries: Tensor, row: Tensor, offset: Tensor) -> Tensor:
    """(1, G, S, D): of (C, G, T, D), those of chunk ``row`` and token ``offset``, (S,) each."""
    return entries[row, :, offset].transpose(0, 1)[None]


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`cache.quantise.rotate` of (..., T, D), with a gradient."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin
