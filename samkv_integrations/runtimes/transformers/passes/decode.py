"""Decoding: the tokens of answers after the first one, for several answers in one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from samkv_integrations.options import Sampling
from samkv_integrations.plan.first_token import first_token
from samkv_integrations.plan.request import FirstToken, Request
from samkv_integrations.report import Report
from samkv_integrations.runtimes.transformers.model.model import Model
from samkv_integrations.runtimes.transformers.passes.working_cache import WorkingCache
from samkv_integrations.runtimes.transformers.sampling import Sampler


@dataclass(eq=False)
class Decoder:
    """Computes the tokens of one answer over a working cache.

    position: of the next token. It counts all tokens of the prompt, although the cache may lack
    entries of some.
    """

    model: Model
    cache: WorkingCache
    position: int

    def step(self, token: int) -> Tensor:
        """Logits (vocabulary,) after ``token``."""
        return decode([self], [[token]])[0][0]

    def rewind(self, n_tokens: int) -> None:
        """Take back the last ``n_tokens``. Only where the working cache can, see `WorkingCache`."""
        self.position -= n_tokens
        self.cache.rewind(n_tokens)


def decode(decoders: Sequence[Decoder], tokens: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    """One step of the model: logits (n, vocabulary) after each of the n next tokens of each answer.

    The weights are read once for all tokens; each answer attends to its own working cache. All
    decoders are of one model. A device that runs out of memory leaves the working caches as they
    were, if they can take tokens back.
    """
    model, lengths = decoders[0].model, [len(each) for each in tokens]
    positions, rows = list[int](), list[WorkingCache]()
    for decoder, n_tokens in zip(decoders, lengths, strict=True):
        positions += range(decoder.position, decoder.position + n_tokens)
        rows += [decoder.cache] * n_tokens
    before = [decoder.cache.lengths[:] for decoder in decoders]
    rotation = model.rotation(torch.tensor(positions))

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        if len(rows) == 1:
            return rows[0].attend(layer, query, key, value, scaling)
        # one token after the other: several at once would be rounded differently
        outputs = []
        for at, cache in enumerate(rows):
            q, k, v = query[:, :, at, None], key[:, :, at, None], value[:, :, at, None]
            outputs.append(cache.attend(layer, q, k, v, scaling))
        return torch.cat(outputs, 2)

    # To the layers all tokens are of one sequence, which interact in attention only.
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
        decoder.position += n_tokens
    return torch.split(logits, lengths)


class TextStream:
    """Turns tokens into pieces of text, up to a stop string, which is not part of the text.

    Text that ends in half a character, or may be the beginning of a stop string, is held back.
    """

    def __init__(self, model: Model, stop: Sequence[str] = ()) -> None:
        self._model = model
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._sent = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is final after ``token``; may be empty."""
        self._ids.append(token)
        text = self._model.detokenize(self._ids)
        end = len(text)
        for stop in self._stop:
            if (at := text.find(stop, max(0, self._sent - len(stop)))) >= 0:
                self.stopped, end = True, min(end, at)
        if not self.stopped:
            end = len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
            tail = text[self._sent : end]  # what was sent stays, however long a stop string is
            held_back = 0
            for stop in self._stop:
                begun = min(len(stop) - 1, len(tail))
                while not tail.endswith(stop[:begun]):
                    begun -= 1
                held_back = max(held_back, begun)
            end -= held_back
        piece = text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def flush(self) -> str:
        """The text that was held back, after the last token."""
        return "" if self.stopped else self._model.detokenize(self._ids)[self._sent :]


# -- one request by itself, in the model's thread ---------------------------------------------


def decode_greedily(model: Model, begun: FirstToken, most_tokens: int) -> tuple[list[int], str]:
    """The answer of `Engine.generate` with its default options, of at most ``most_tokens``.

    Returns its tokens, with the end token if the model chose it, and its text. The default options
    include the repetition penalty of the model's generation config, if it has one. To be called in
    the model's thread; the request needs room for the tokens.
    """
    sampler = Sampler(model, begun.layout.token_ids.tolist(), Sampling.of())
    decoder = Decoder(model, begun.cache, begun.layout.n_tokens)
    end_ids = model.end_ids(())
    tokens = [sampler.next(begun.logits)]
    while len(tokens) < most_tokens and tokens[-1] not in end_ids:
        tokens.append(sampler.next(decoder.step(tokens[-1])))
    shown = tokens[:-1] if tokens[-1] in end_ids else tokens
    return tokens, model.detokenize(shown).strip()


def force(request: Request, follow: Sequence[int]) -> tuple[Tensor, Report]:
    """Answer a request with the tokens ``follow``, whatever the model would choose.

    Returns logits (1 + n, vocabulary) float32 on the CPU, of the first token and after each of the
    n given ones, and the first token's report. To be called in the model's thread; the request
    needs room for the tokens. Errors are those of `first_token`.
    """
    begun = first_token(request)
    decoder = Decoder(request.model, begun.cache, begun.layout.n_tokens)
    if begun.kept is not None and follow:
        request.drop(begun.kept)  # its tensors grow
    logits = torch.stack([begun.logits, *map(decoder.step, follow)]).float().cpu()
    return logits, begun.report
