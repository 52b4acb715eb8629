"""What is compared: methods at several budgets, with several evictions, and ablations of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from samkv_integrations.errors import InvalidOption
from samkv_integrations.eviction import Eviction, Quest, get_eviction, with_budget
from samkv_integrations.methods import METHODS, Method, get_method
from samkv_integrations.methods.base import overwrite
from samkv_integrations.methods.guided import GuidedRecompute, GuidedSelect
from samkv_integrations.methods.parts import Fusion, RecomputeNone
from samkv_integrations.prompt.layout import Layout

TRUTH = "recompute"
"""Label of full prefill, which everything else is measured against."""

ALL = "all"
"""The ``kind`` of summary rows over every kind."""

AT = " @ "
"""Stands in a label before its kept ratio."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way of answering.

    eviction: the rule while it is decoded, None to keep every KV entry. store_bits: bits of the
        numbers in the caches that it reads; None for those of the run.
    """

    method: Method
    eviction: Eviction | None = None
    store_bits: int | None = None

    @classmethod
    def of(cls, method: Method) -> Variant:
        """The method with its own rule."""
        return cls(method=method, eviction=method.eviction)

    def describe(self) -> str:
        """Every setting as text, which is the same in every process."""
        method = self.method
        update = getattr(method.update, "__name__", repr(method.update))
        parts = (
            method.select, method.recompute, update, method.positions, method.attend, self.eviction,
        )  # fmt: skip
        bits = "" if self.store_bits is None else f"; {self.store_bits} bits"
        return f"{method.name}: {'; '.join(map(str, parts))}{bits}"


def combine(
    names: Sequence[str],
    budgets: Sequence[float] = (),
    recompute_ratios: Sequence[float] = (),
    evictions: Mapping[str, Eviction | None] | None = None,
) -> dict[str, Variant]:
    """Label -> variant, for every method and all that can be set of it.

    budgets: kept ratios for the methods that select. recompute_ratios: for those that recompute a
    share. evictions: word of the label -> rule, None for no eviction; no evictions leave every
    method its own. A label names "no eviction" only for a method that has a rule of its own.
    Full prefill without eviction stays among the variants if ``recompute`` is among the names.

    Raises:
        UnknownOption: an unknown method.
        InvalidOption: a share beyond 0 to 1, or one that no method takes.
    """
    methods = [get_method(name) for name in dict.fromkeys(names)]
    if not methods:
        raise InvalidOption("no method is named; give some, or 'all'")
    check_shares("budgets", budgets)
    check_shares("recompute ratios", recompute_ratios)
    if budgets and not any(_selects(m) for m in methods):
        raise InvalidOption(f"budgets do nothing: none of {', '.join(names)} selects what to keep")
    if recompute_ratios and not any(_recomputes_a_share(m) for m in methods):
        raise InvalidOption(
            f"recompute ratios do nothing: none of {', '.join(names)} recomputes a share"
        )
    chosen = evictions or {}
    variants: dict[str, Variant] = {}
    if TRUTH in names and chosen and None not in chosen.values():
        variants[TRUTH] = Variant(method=METHODS[TRUTH])
    for method in methods:
        for recomputed, label in _at_ratios(method, recompute_ratios):
            for text, eviction in chosen.items():
                is_plain = eviction is None and method.eviction is None
                with_eviction = label if is_plain else f"{label} + {text}"
                for kept, suffix in _at_budgets(recomputed, budgets):
                    variants[with_eviction + suffix] = Variant(method=kept, eviction=eviction)
            if not chosen:
                for kept, suffix in _at_budgets(recomputed, budgets):
                    variants[label + suffix] = Variant.of(kept)
    return variants


def at_store_bits(variants: Mapping[str, Variant], bits: Sequence[int]) -> dict[str, Variant]:
    """Each of ``variants`` with caches in each of ``bits``, named in its label if it reads any.

    One number of bits leaves labels alone: it is then that of the run.
    """
    if len(bits) == 1:
        return dict(variants)
    found: dict[str, Variant] = {}
    for label, variant in variants.items():
        if not variant.method.recompute.uses_caches:
            found[label] = variant
            continue
        for number in bits:
            found[f"{label}, {number} bits"] = replace(variant, store_bits=number)
    return found


def check_shares(what: str, values: Sequence[float]) -> None:
    """Raise InvalidOption unless all ``values`` are between 0 and 1."""
    for value in values:
        if not 0 <= value <= 1:
            raise InvalidOption(f"{what}: {value:g}; each must be between 0 and 1")


def evictions_of(texts: Sequence[str]) -> dict[str, Eviction | None]:
    """``NAME``, ``NAME@RATIO`` or ``none`` -> the rule that it names, None for ``none``.

    Raises:
        UnknownOption: there is no such rule.
        InvalidOption: the ratio is none, is out of range, or there is nothing that it could be for.
    """
    return {text: _named_eviction(text) for text in texts}


def _named_eviction(text: str) -> Eviction | None:
    name, at, ratio = text.partition("@")
    rule = get_eviction(name)
    if not at:
        return rule
    if rule is None:
        raise InvalidOption(f"eviction {text!r}; 'none' has no ratio")
    try:
        share = float(ratio)
    except ValueError as error:
        raise InvalidOption(f"eviction {text!r}; give NAME or NAME@RATIO") from error
    check_shares(f"eviction {text!r}", [share])
    return with_budget(rule, share)


def _selects(method: Method) -> bool:
    return hasattr(method.select, "max_kept_ratio")


def _recomputes_a_share(method: Method) -> bool:
    return hasattr(method.recompute, "ratio")


def _at_budgets(method: Method, budgets: Sequence[float]) -> Iterator[tuple[Method, str]]:
    if not budgets or not _selects(method):
        yield method, ""
        return
    for budget in budgets:
        select: Any = method.select
        yield replace(method, select=replace(select, max_kept_ratio=budget)), f"{AT}{budget:g}"


def _at_ratios(method: Method, ratios: Sequence[float]) -> Iterator[tuple[Method, str]]:
    if not ratios or not _recomputes_a_share(method):
        yield method, method.name
        return
    for ratio in ratios:
        part: Any = method.recompute
        label = f"{method.name}, {100 * ratio:g} % recomputed"
        yield replace(method, recompute=replace(part, ratio=ratio)), label


@dataclass(frozen=True, kw_only=True)
class Table4Row:
    """A row of the paper's Table 4. None where a column does not apply."""

    method: str
    selection: bool | None
    bias: bool | None
    recompute: bool | None


def table4(budgets: Sequence[float] = ()) -> tuple[dict[str, Variant], dict[str, Table4Row]]:
    """The grid of the paper's Table 4, for fusion, as there, and for overwrite: variants and rows.

    budgets: kept ratios, each of them a grid; empty for the methods' own. Without recomputation
    both updates are the same, so those rows occur once.
    """
    variants = {TRUTH: Variant(method=METHODS[TRUTH])}
    rows = {TRUTH: Table4Row(method=TRUTH, selection=None, bias=None, recompute=None)}
    grid = [(middle, bias, again) for again in (False, True)
            for middle, bias in ((False, None), (True, False), (True, True))]  # fmt: skip
    for name in ("samkv-fusion", "samkv-overwrite"):
        for middle, bias, again in grid:
            if not again and name == "samkv-overwrite":
                continue
            base = METHODS[name]
            select: Any = base.select
            method = replace(base, select=replace(select, middle=middle, bias=bool(bias)))
            words = [word for word, on in
                     (("middle", middle), ("bias", bias), ("recompute", again)) if on]  # fmt: skip
            label = f"{name if again else 'samkv'}: {', '.join(words) or 'anchors only'}"
            for kept, suffix in _at_budgets(method if again else without(method), budgets):
                variants[label + suffix] = Variant.of(kept)
                rows[label + suffix] = Table4Row(
                    method=name if again else "samkv", selection=middle, bias=bias, recompute=again
                )
    return variants, rows


def without(method: Method) -> Method:
    """``method`` with nothing recomputed."""
    return replace(method, recompute=RecomputeNone(), update=overwrite)


@dataclass(frozen=True, kw_only=True)
class CompetingSelect(GuidedSelect):
    """Chunks compete, by the attention to the whole context: A3's choice, in the upper layers."""

    def shares(self, logits: Tensor, layout: Layout) -> Tensor:
        return logits.softmax(-1)


def knobs() -> dict[str, Variant]:
    """The default method, and variants of it that change one of its decisions each."""
    ours = METHODS["samkv-guided"]
    select, again = GuidedSelect(), GuidedRecompute()
    selects = {
        "the probe sees all uncached text": replace(select, window=1_000_000),
        "the probe sees the last 16 tokens": replace(select, window=16),
        "hits in short chunks too": replace(select, long=0),
        "chunks compete": CompetingSelect(),
    }
    recomputed = {
        "no first tokens of chunks": replace(again, first=0),
        "the first 8 tokens of chunks": replace(again, first=8),
        "the first 32 tokens of chunks": replace(again, first=32),
        "nothing that matches the question": replace(again, matched=0),
        "192 tokens that match the question": replace(again, matched=192),
        "no hits": replace(again, hits=0.0),
        "2.5 hits a chunk": replace(again, hits=2.5),
    }
    methods = {
        TRUTH: METHODS[TRUTH],
        "samkv-guided": ours,
        "nothing recomputed": replace(ours, recompute=RecomputeNone()),
        **{label: replace(ours, select=part) for label, part in selects.items()},
        **{label: replace(ours, recompute=part) for label, part in recomputed.items()},
        "fusion": replace(ours, update=Fusion()),
        "a step attends to 5 %": replace(ours, eviction=Quest(budget_ratio=0.05)),
        "a step attends to 20 %": replace(ours, eviction=Quest(budget_ratio=0.2)),
    }
    return {label: Variant.of(method) for label, method in methods.items()}
