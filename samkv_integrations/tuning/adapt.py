"""Learning the embeddings: steps, held-out prompts, and what is kept."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from samkv_integrations.cache.files import write_file
from samkv_integrations.cache.windows import MIN_RUN
from samkv_integrations.engine.chunk_prefix import DOCUMENTS_BEFORE, LearnedPrefix
from samkv_integrations.errors import EmptyInput, InvalidOption
from samkv_integrations.evaluation.measures import ratio_interval
from samkv_integrations.model.loading import NO_MEMORY
from samkv_integrations.model.model import Model
from samkv_integrations.tuning.distil import Distance, Prompt, Truth, distances, loss, teacher
from samkv_integrations.tuning.mixed_prompts import Part, Source

CHOOSING, JUDGING = 12, 24
"""Held-out prompts that choose among the stages of learning, and others that judge the choice."""

_DIGEST_BYTES = 16

FIRSTS = (0, 16)
"""First tokens of each chunk that are recomputed where a prefix is judged."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a prefix is learned. Equal recipes over equal prompts give equal prefixes.

    steps: prompts that are learned from, one a step. n: embeddings; None for as many as the
    made-up documents have, which they begin as. learning_rate: of Adam, at its highest. tokens: of
    a teacher's answer. firsts: first tokens of each chunk that are recomputed, in turns.
    """

    steps: int = 160
    n: int | None = None
    learning_rate: float = 3.3e-3
    tokens: int = 12
    firsts: tuple[int, ...] = (0, 16)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "tokens", "n"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InvalidOption(f"{name}={value}; give at least 1")


def identity_of(model: Model, source: Source, recipe: Recipe) -> str:
    """16 hex digits that name a run: equal ones learn the same."""
    named = repr((model.weights_digest, source, recipe)).encode()
    return hashlib.blake2b(named, digest_size=8).hexdigest()


_Distances = dict[int, tuple[Distance, ...]]  # for each of FIRSTS, one of each prompt


@dataclass(frozen=True, kw_only=True)
class Mean:
    """Means over prompts: of `Distance`, and the share of them with the teacher's answer."""

    kl: float
    top1: float
    same: float

    @classmethod
    def of(cls, found: Sequence[Distance]) -> Mean:
        return cls(
            kl=fmean(one.kl for one in found), top1=fmean(one.top1 for one in found),
            same=fmean(one.is_same for one in found),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What a prefix does on prompts that nothing was chosen by.

    first: tokens of each chunk that were recomputed. before, after: with the made-up documents,
    and with what was learned. ratio: 95 % interval of the ratio of their KL; None where nothing was
    lost before.
    """

    first: int
    before: Mean
    after: Mean
    ratio: tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What came of it.

    figures: for each of `FIRSTS`. steps: how many there were time for.
    """

    prefix: LearnedPrefix
    figures: Sequence[Judged]
    steps: int

    @property
    def is_better(self) -> bool:
        """Whether the interval of each ratio ends below 1."""
        return all(one.ratio is not None and one.ratio[1] < 1 for one in self.figures)


def learn(
    model: Model,
    source: Source,
    recipe: Recipe,
    *,
    partial: Path,
    minutes: float = math.inf,
    told: Callable[[str, int, int, float | None], object] = lambda stage, done, of, kl: None,
) -> Learned:
    """Learn a prefix for ``model``, which is left as it is.

    partial: where the state is kept after every step, so that the same run goes on if it was
        interrupted, had too few minutes, or its prefix could not be written. Delete it then.
    minutes: take no further step after so many, preparing and judging left out.
    told: called with the stage, how much of it is done, how much there is, and the KL of the last
        step; None before the first.

    Raises:
        EmptyInput: no prompt holds a chunk of `MIN_RUN` tokens.
        InvalidOption: a prompt does not fit into memory with its gradients, ``partial`` cannot be
            written, or there is no time for a step.
    """
    kl: float | None = None
    told("preparing", 0, CHOOSING + JUDGING, kl)
    for weight in model.hf.parameters():
        weight.requires_grad_(False)
    bos = model.embed(torch.tensor(() if model.bos_id is None else (model.bos_id,),
                                   dtype=torch.long)).float()  # fmt: skip
    base = model.embed(torch.tensor(model.tokenize(DOCUMENTS_BEFORE, special=False))).float()
    n = recipe.n or len(base)
    learned = torch.nn.Parameter(base.repeat(-(-n // len(base)), 1)[:n].clone())
    optimiser = torch.optim.Adam([learned], lr=recipe.learning_rate)
    identity = identity_of(model, source, recipe)
    state = _resumed(partial, identity, model) or {"step": 0, "best": None, "best_kl": math.inf}
    if "optimiser" in state:
        optimiser.load_state_dict(state.pop("optimiser"))
        learned.data.copy_(state.pop("learned"))

    def prompts(part: Part, place: int) -> list[tuple[Prompt, Truth]]:
        made = source.prompt(model, f"{recipe.seed} {place}", part)
        return [(made, teacher(model, made, recipe.tokens))] if made.chunks else []

    def far(prompts: Sequence[tuple[Prompt, Truth]], prefix: Tensor, stage: str) -> _Distances:
        each = []
        for number, (prompt, truth) in enumerate(prompts, start=1):
            each.append(distances(model, prompt, truth, torch.cat((bos, prefix)), FIRSTS))
            told(stage, number, len(prompts), kl)
        return dict(zip(FIRSTS, zip(*each, strict=True), strict=True))

    held_out: dict[Part, list[tuple[Prompt, Truth]]] = {"choose": [], "judge": []}
    counts: dict[Part, int] = {"choose": CHOOSING, "judge": JUDGING}
    places = [(part, place) for part, most in counts.items() for place in range(most)]
    for number, (part, place) in enumerate(places, start=1):
        held_out[part] += prompts(part, place)
        told("preparing", number, len(places), kl)
    choosing, judging = held_out.values()
    if not choosing or not judging:
        raise EmptyInput(
            f"no prompt holds a chunk of {MIN_RUN} tokens or more; give longer documents"
        )
    if state["best"] is None:
        state["best_kl"] = _mean_kl(far(choosing, base, "choosing"))
    every = max(1, recipe.steps // 4)
    began = time.monotonic()
    while state["step"] < recipe.steps and time.monotonic() - began < 60 * minutes:
        step = state["step"]
        for prompt, truth in prompts("learn", step):  # none, if it holds no chunk
            share = min(1.0, (step + 1) / 10) * max(0.05, 1 - step / recipe.steps)
            optimiser.param_groups[0]["lr"] = recipe.learning_rate * share
            first = recipe.firsts[step % len(recipe.firsts)]
            optimiser.zero_grad()
            try:
                lost = loss(model, prompt, truth, torch.cat((bos, learned)), first)
                lost.backward()  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                if not isinstance(error, torch.OutOfMemoryError) and NO_MEMORY not in str(error):
                    raise
                raise InvalidOption(
                    f"a prompt of {len(prompt.ids)} tokens does not fit into memory with its "
                    "gradients; allow fewer with --most-tokens"
                ) from error
            torch.nn.utils.clip_grad_norm_([learned], 1.0)
            optimiser.step()
            kl = float(lost.detach())
        state["step"] = step + 1
        if state["step"] % every == 0 or state["step"] == recipe.steps:
            found = _mean_kl(far(choosing, learned.detach(), "choosing"))
            if found < state["best_kl"]:
                state |= {"best": learned.detach().clone(), "best_kl": found}
        kept = {"learned": learned.detach(), "optimiser": optimiser.state_dict()}
        _keep(partial, identity, state | kept)
        told("learning", state["step"], recipe.steps, kl)
    if not state["step"]:
        raise InvalidOption(f"no step fits into {minutes:g} minutes; give more")
    best = learned.detach() if state["best"] is None else state["best"]
    before = far(judging, base, "judging the documents")
    figures = _judged(before, far(judging, best, "judging what was learned"))
    prefix = LearnedPrefix(
        embeddings=best.cpu().float(), weights=(model.weights_digest,),
        recipe=asdict(recipe) | {"steps": state["step"]},
        figures={"judged": [asdict(one) for one in figures]},
    )  # fmt: skip
    return Learned(prefix=prefix, figures=figures, steps=state["step"])


def _mean_kl(found: _Distances) -> float:
    return fmean(one.kl for each in found.values() for one in each)


def _judged(before: _Distances, after: _Distances) -> list[Judged]:
    return [
        Judged(
            first=first, before=Mean.of(before[first]), after=Mean.of(after[first]),
            ratio=ratio_interval(
                [one.kl for one in after[first]], [one.kl for one in before[first]]
            ),
        )
        for first in FIRSTS
    ]  # fmt: skip


def _keep(partial: Path, identity: str, state: dict[str, Any]) -> None:
    made = BytesIO()
    torch.save(state, made)
    body = made.getbuffer()
    try:
        write_file(partial, [_digest(identity, body), body])
    except OSError as error:
        raise InvalidOption(
            f"{partial} cannot be written ({error}); make room, or give another folder, and the "
            "same command goes on"
        ) from error


def _resumed(partial: Path, identity: str, model: Model) -> dict[str, Any] | None:
    """The state that this run has left; None for another's, a damaged one, or none."""
    try:
        found = partial.read_bytes() if partial.is_file() else b""
    except OSError:
        return None
    digest, body = found[:_DIGEST_BYTES], found[_DIGEST_BYTES:]
    if digest != _digest(identity, body):
        return None
    state: dict[str, Any] = torch.load(BytesIO(body), weights_only=True, map_location=model.device)
    return state


def _digest(identity: str, body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, key=identity.encode(), digest_size=_DIGEST_BYTES).digest()
