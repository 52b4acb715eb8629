"""Inspection of one answer: each prompt token in each layer, compared with full prefill."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samkv_integrations.engine import Engine
from samkv_integrations.errors import Given, InvalidOption
from samkv_integrations.methods import Method
from samkv_integrations.methods.eviction import Eviction
from samkv_integrations.options import AnswerSettings
from samkv_integrations.plan.kept_sequences import KeptSequences
from samkv_integrations.prompt.reader import Prompt
from samkv_integrations.prompt.resolve import Resolved
from samkv_integrations.prompt.text import TextStream
from samkv_integrations.report import Report
from samkv_integrations.runtimes.transformers.layout import TensorLayout
from samkv_integrations.runtimes.transformers.passes.blend import ObservedLayer
from samkv_integrations.runtimes.transformers.passes.pass_plan import LayerPlan
from samkv_integrations.runtimes.transformers.passes.prompt import LayerObserver
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.serving.alone import decode_greedily
from samkv_integrations.serving.first_token import first_token

__all__ = ["InspectedChunk", "Inspection", "State", "inspect"]

PAGE = Path(__file__).with_name("page.html")
_UNMEASURED = ("announce_s", "wait_s", "ttft_s", "decode_tokens_per_s")


class State(IntEnum):
    """The state of a prompt token at a layer.

    uncached: the token is computed, and outside chunks. missed: it is computed, in a chunk without
    a usable cache. kept: its stored entry is used. recomputed: it is computed, although it has a
    stored entry. dropped: its stored entry is not used.
    """

    UNCACHED = 0
    MISSED = 1
    KEPT = 2
    RECOMPUTED = 3
    DROPPED = 4


@dataclass(frozen=True, kw_only=True)
class InspectedChunk:
    """A chunk of an inspected prompt. Figures are means over layers, or those of one layer.

    name: source of the chunk. kept, recomputed, dropped: shares of its tokens; all 0 without a
    cache. attention, full_attention: the last prompt token's attention to the whole chunk, in this
    answer and in full prefill.
    """

    name: str
    text: str
    n_tokens: int
    is_cached: bool
    kept: float
    recomputed: float
    dropped: float
    attention: float
    full_attention: float


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Inspection:
    """An answer, and its use of prompt tokens. T: number of prompt tokens. L: number of layers.

    A notebook shows it as the page of `to_html`.

    title: the question, or another title.
    pieces: (T) the text that each token adds to the prompt. A character of several tokens belongs
        to the last of them.
    chunk_of: (T,) index of each token's chunk, -1 outside chunks. names, texts: of the chunks.
    states: (L, T) uint8, values of `State`.
    attention, full_attention: (L, T) the last prompt token's attention to each token, mean over
        heads, in this answer and in full prefill.
    answer, full_answer: the answers of this method and of full prefill.
    report, full_report: their reports. Their times mean little, because they are of single passes
        under observation.
    """

    title: str
    pieces: tuple[str, ...]
    chunk_of: Tensor
    names: tuple[str, ...]
    texts: tuple[str, ...]
    states: Tensor
    attention: Tensor
    full_attention: Tensor
    answer: str
    full_answer: str
    report: Report
    full_report: Report

    def __repr__(self) -> str:
        return (
            f"Inspection({self.title!r}, {self.report.ran}: {self.answer!r}, same={self.is_same})"
        )

    @property
    def n_layers(self) -> int:
        return len(self.states)

    @property
    def is_same(self) -> bool:
        """Whether full prefill gives the same answer."""
        return self.answer == self.full_answer

    def state_at(self, layer: int | None = None) -> list[State]:
        """(T) the state of each token at a layer.

        layer: index from 0; None for all layers together. Then a token counts as recomputed if any
            layer recomputes it, else as kept if any layer keeps it.

        Raises InvalidOption if there is no such layer.
        """
        states = self.states[self._layers(layer)]
        found = states[0].clone()
        for state in (State.DROPPED, State.KEPT, State.RECOMPUTED):
            found[(states == state).any(0)] = state
        return [State(int(state)) for state in found]

    def _layers(self, layer: int | None) -> slice:
        """A layer, or all of them. Raises InvalidOption if there is no such layer."""
        if layer is None:
            return slice(None)
        if not 0 <= layer < self.n_layers:
            raise InvalidOption(
                Given("layer", layer),
                f"; it must be from 0 to {self.n_layers - 1}, a layer of {self.report.model!r}",
            )
        return slice(layer, layer + 1)

    @property
    def chunks(self) -> tuple[InspectedChunk, ...]:
        """The chunks in the order of the prompt, with means over all layers."""
        return self.chunks_at()

    def chunks_at(self, layer: int | None = None) -> tuple[InspectedChunk, ...]:
        """The chunks in the order of the prompt, at a layer; None for means over all layers.

        Raises InvalidOption if there is no such layer.
        """
        layers, found = self._layers(layer), list[InspectedChunk]()
        for index, (name, text) in enumerate(zip(self.names, self.texts, strict=True)):
            own = self.chunk_of == index
            states = self.states[layers, own]
            kept, recomputed, dropped = (
                float((states == state).float().mean())
                for state in (State.KEPT, State.RECOMPUTED, State.DROPPED)
            )
            found.append(InspectedChunk(
                name=name, text=text, n_tokens=int(own.sum()), kept=kept, recomputed=recomputed,
                dropped=dropped, is_cached=not bool((states == State.MISSED).any()),
                attention=float(self.attention[layers, own].sum(1).mean()),
                full_attention=float(self.full_attention[layers, own].sum(1).mean()),
            ))  # fmt: skip
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """The answers, chunks and reports as JSON values, without tensors.

        Reports lack the times that are not measured under observation.
        """
        reports = {
            name: {key: value for key, value in report.to_dict().items() if key not in _UNMEASURED}
            for name, report in (("report", self.report), ("full_report", self.full_report))
        }
        return {
            "title": self.title, "answer": self.answer, "full_answer": self.full_answer,
            "same": self.is_same, "n_layers": self.n_layers,
            "chunks": [asdict(chunk) for chunk in self.chunks],
            **reports,
        }  # fmt: skip

    def to_html(self) -> str:
        """A self-contained HTML page with every token and a slider over layers.

        All texts are data in the page, never markup.
        """
        tokens = {
            "pieces": list(self.pieces),
            "chunk_of": self.chunk_of.tolist(),
            **{n: _packed(getattr(self, n)) for n in ("attention", "full_attention", "states")},
        }
        shown = {"summary": self.to_dict(), "tokens": tokens}
        data = json.dumps(shown, ensure_ascii=False, allow_nan=False)
        # characters of a text that could end the element or begin a comment
        data = re.sub("[<\u2028\u2029]", lambda found: f"\\u{ord(found[0]):04x}", data)
        before, after = PAGE.read_text(encoding="utf-8").split("__DATA__")
        return before + data + after

    def save_html(self, file: str | Path) -> None:
        """Write `to_html` to a file. Raises InvalidOption if that fails."""
        try:
            Path(file).write_text(self.to_html(), encoding="utf-8")
        except OSError as error:
            raise InvalidOption(f"{file} cannot be written ({error}); name another file") from error

    def _repr_html_(self) -> str:
        document = html.escape(self.to_html(), quote=True)
        return (
            f'<iframe srcdoc="{document}" sandbox="allow-scripts" title="What an answer read" '
            f'style="width: 100%; height: 720px; border: 0"></iframe>'
        )


def inspect(
    engine: Engine,
    prompt: Prompt,
    chunks: Sequence[str] | None = None,
    *,
    method: str | Method | None = None,
    eviction: str | Eviction | None = None,
    max_new_tokens: int = 64,
    title: str = "",
    names: Mapping[str, str] | None = None,
) -> Inspection:
    """Answer ``prompt``, record the state of each token, then answer it by full prefill.

    Both answers are greedy. Nothing is stored: a chunk without a cache is computed with the prompt,
    as with ``on_miss="text"``. Entries of earlier prompts with the same beginning are not used.

    prompt, chunks: see `Engine.generate`. method, eviction: None for the engine's.
    max_new_tokens: most tokens of either answer.
    title: a title for the page, such as the question.
    names: text of a chunk -> its name. Other chunks are named by their number.

    Raises what `Engine.generate` raises.
    """
    if not isinstance(engine.model, Model):
        raise InvalidOption(
            f"{engine.model.name!r} runs on {type(engine.model).__name__}, whose attention cannot "
            "be inspected; cache the chunks in another folder, and ask there, with ",
            Given("runtime", "transformers"),
        )
    settings = AnswerSettings.of(
        method=method, eviction=eviction, on_miss="text", max_new_tokens=max_new_tokens
    )
    with engine.resolve(prompt, chunks) as resolved:
        answer, report, states, attention = _observed(engine, resolved, settings)
        pieces = _pieces(engine.model, resolved.token_ids)
        chunk_of = torch.full((len(pieces),), -1)
        is_missed = torch.zeros(len(pieces), dtype=torch.bool)
        for number, chunk in enumerate(resolved.chunks):
            for run in chunk.runs:
                chunk_of[run.span.start : run.span.stop] = number
                is_missed[run.span.start : run.span.stop] = chunk.stored is None
        texts = [
            chunk.text or engine.model.detokenize(chunk.token_ids) for chunk in resolved.chunks
        ]
    with engine.resolve(prompt, chunks) as resolved:
        full = AnswerSettings.of(method="recompute").method
        truth = replace(settings, method=full, eviction="none")
        full_answer, full_report, _, full_attention = _observed(engine, resolved, truth)
    states[:, is_missed] = State.MISSED
    called = names or {}
    return Inspection(
        title=title, pieces=tuple(pieces), chunk_of=chunk_of, texts=tuple(texts), states=states,
        names=tuple(called.get(text, f"chunk {number}") for number, text in enumerate(texts, 1)),
        attention=attention, full_attention=full_attention, answer=answer,
        full_answer=full_answer, report=report, full_report=full_report,
    )  # fmt: skip


def _observed(
    engine: Engine, resolved: Resolved, settings: AnswerSettings
) -> tuple[str, Report, Tensor, Tensor]:
    """An answer and its report; (L, T) the `State` of each token, and the attention to it.

    `State.UNCACHED` stands for all tokens without a stored entry.
    """
    model, most = engine.model, settings.sampling.max_new_tokens
    assert isinstance(model, Model)  # `inspect` has checked it
    seen: dict[int, tuple[LayerPlan, Tensor]] = {}

    def see(layer: ObservedLayer) -> None:
        """Note the last token's attention (S,) to each entry of a layer, mean over heads."""
        last, mask = layer.queries[0, :, -1].float(), layer.mask
        grouped = last.view(model.n_kv_heads, -1, model.head_dim) * layer.scaling
        logits = torch.einsum("grd,sgd->grs", grouped, layer.keys.float()).flatten(0, 1)
        if model.score_cap is not None:
            logits = torch.tanh(logits / model.score_cap) * model.score_cap
        if mask is not None:
            hidden = ~mask[-1] if mask.dtype == torch.bool else mask[-1] < 0
            logits = logits.masked_fill(hidden, -torch.inf)
        if (sinks := model.sinks(layer.number)) is not None:
            logits = torch.cat((logits, sinks.float()[:, None]), -1)
        seen[layer.number] = layer.plan, logits.softmax(-1)[:, : len(layer.keys)].mean(0).cpu()

    request = replace(engine.request(resolved, settings), sequences=KeptSequences(0))

    def answer(pause: Callable[[], None]) -> tuple[str, Report, TensorLayout]:
        first = first_token(request, LayerObserver(see))
        tokens, text = decode_greedily(request, first, most)
        report = replace(
            first.report, completion_tokens=len(tokens), decode_kv_bytes=first.sequence.kv_bytes
        )
        return text, report, TensorLayout(first.layout)

    text, report, layout = engine.scheduler.run(answer)
    shape = model.n_layers, layout.n_tokens
    attention = torch.zeros(shape)
    states = torch.full(shape, State.UNCACHED, dtype=torch.uint8)
    at = layout.context_positions
    for layer, (plan, shares) in seen.items():
        attention[layer, plan.entry_positions] = shares
        context, changed = plan.staying.context.tokens.cpu(), plan.staying.context.changed.cpu()
        states[layer, at] = State.DROPPED
        states[layer, at[context]] = State.KEPT
        states[layer, at[context[changed]]] = State.RECOMPUTED
        states[layer, at[layout.uncached[at]]] = State.RECOMPUTED  # the prompt's last token
    return text, report, states, attention


def _pieces(model: Model, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; for a special token its name."""
    text, special = TextStream(model), {*model.tokenizer.all_special_ids}
    pieces = [
        str(model.tokenizer.convert_ids_to_tokens(token)) if token in special else text.push(token)
        for token in ids
    ]
    if ids and ids[-1] not in special:
        pieces[-1] += text.flush()
    return pieces


def _packed(values: Tensor) -> str:
    """The bytes of a tensor, little-endian and row by row, as base64.

    Floating-point numbers from 0 to 1 become integers from 0 to 65535.
    """
    if values.is_floating_point():
        values = (values.clamp(0, 1) * 65535).round().to(torch.int32).to(torch.uint16)
    array = values.contiguous().numpy()
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()
