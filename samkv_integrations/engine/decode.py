"""The tokens of answers after their first ones, those of several answers in one step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from samkv_integrations.engine.first_token import first_token
from samkv_integrations.engine.report import Report
from samkv_integrations.engine.request import FirstToken, Request
from samkv_integrations.engine.working_cache import WorkingCache
from samkv_integrations.model.attention import for_single_token
from samkv_integrations.model.model import Model
from samkv_integrations.model.sampling import Sampler, Sampling


@dataclass(eq=False)
class Decoder:
    """Computes one answer token after another over a working cache.

    ``position`` is the next token's place in the logical prompt, which counts all tokens of all
    chunks although entries are missing from the cache.
    """

    model: Model
    cache: WorkingCache
    position: int

    def step(self, token: int) -> Tensor:
        """Logits (vocabulary,) after ``token``."""
        return decode([self], [token])[0]


def decode(decoders: Sequence[Decoder], tokens: Sequence[int]) -> Tensor:
    """Logits (answers, vocabulary) after the next token of each answer, from one step of the model.

    The weights are read once for all answers, each of which attends to its own working cache. The
    decoders are of one model.
    """
    model = decoders[0].model
    rotation = model.rotation(torch.tensor([decoder.position for decoder in decoders]))

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        outputs = []
        for at, decoder in enumerate(decoders):
            q, k, v = query[:, :, at, None], key[:, :, at, None], value[:, :, at, None]
            outputs.append(decoder.cache.attend(layer, q, k, v, scaling))
        return torch.cat(outputs, 2)

    # The layers see answers as tokens of one sequence: they meet nowhere but in attention.
    with for_single_token(model.device, model.dtype) if len(tokens) == 1 else nullcontext():
        hidden = model.embed(torch.tensor([list(tokens)]))
        for layer in range(model.n_layers):
            hidden = model.layer(layer, hidden, *rotation.of(layer), attend)
        logits = model.logits(hidden[0])
    for decoder in decoders:
        decoder.position += 1
    return logits


class TextStream:
    """Tokens in, pieces of text out; ends at a stop string, which is never part of the text.

    A piece is held back while it ends in half a character, or in what may become a stop string.
    """

    def __init__(self, model: Model, stop: Sequence[str] = ()) -> None:
        self._model = model
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._sent = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that ``token`` decides; empty while undecided."""
        self._ids.append(token)
        text = self._model.detokenize(self._ids)
        end = len(text)
        for stop in self._stop:
            if (at := text.find(stop, max(0, self._sent - len(stop)))) >= 0:
                self.stopped, end = True, min(end, at)
        if not self.stopped:
            end = len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
            tail = text[self._sent : end]  # what was sent is decided, however long a stop string is
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
        """What was held back, when no token follows."""
        return "" if self.stopped else self._model.detokenize(self._ids)[self._sent :]


# -- for who compares answers -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Greedy:
    """One answer.

    tokens: (n,) ids, the one that ends the answer included if it came. shown: without that one;
    text: of these. logits: (n, vocabulary) float32 on the CPU, the model's own before each token.
    """

    tokens: tuple[int, ...]
    shown: tuple[int, ...]
    text: str
    logits: Tensor


def decode_greedily(model: Model, begun: FirstToken, most_tokens: int) -> Greedy:
    """The tokens that `Engine.generate` takes by default, at most ``most_tokens``.

    So with the repetition penalty of the model's own configuration, if it has one. On the model's
    thread; the request needs room for the tokens.
    """
    sampler = Sampler(model, begun.layout.token_ids.tolist(), Sampling())
    decoder = Decoder(model, begun.cache, begun.layout.n_tokens)
    end_ids = model.end_ids(())
    logits = [begun.logits.float().cpu()]
    tokens = [sampler.next(begun.logits)]
    while len(tokens) < most_tokens and tokens[-1] not in end_ids:
        found = decoder.step(tokens[-1])
        logits.append(found.float().cpu())
        tokens.append(sampler.next(found))
    shown = tokens[:-1] if tokens[-1] in end_ids else tokens
    return Greedy(
        tokens=tuple(tokens),
        shown=tuple(shown),
        text=model.detokenize(shown).strip(),
        logits=torch.stack(logits),
    )


@dataclass(frozen=True, kw_only=True)
class ForcedTokens:
    """What a prompt and given tokens after it come to.

    logits: (1 + n, vocabulary) float32 on the CPU, of the first token and after each of the n
    given ones. report: of the first token.
    """

    logits: Tensor
    report: Report


def force(request: Request, follow: Sequence[int]) -> ForcedTokens:
    """The answer to a request forced along the tokens ``follow``, on the model's thread.

    The request needs room for them. Errors are those of `first_token`.
    """
    begun = first_token(request)
    decoder = Decoder(request.model, begun.cache, begun.layout.n_tokens)
    logits = torch.stack([begun.logits, *map(decoder.step, follow)]).float().cpu()
    return ForcedTokens(logits=logits, report=begun.report)
