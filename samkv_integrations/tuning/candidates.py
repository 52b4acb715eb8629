"""The settings that are tried, cheapest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from samkv_integrations.bench.variants import TRUTH
from samkv_integrations.engine.options import TunedSetting
from samkv_integrations.eviction import NO_EVICTION
from samkv_integrations.methods import Method

FULL = TRUTH
"""Label of full prefill."""

OTHER_BITS = {4: 8, 8: 4, 16: 4}
"""Bits of the collection's caches -> other ones that are tried."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A setting under a name. in_store: whether the collection's own caches serve it."""

    label: str
    setting: TunedSetting
    in_store: bool = True

    @property
    def method(self) -> Method:
        """What answers."""
        return self.setting.to_method()


def grid(model: str, store_bits: int) -> list[Candidate]:
    """The candidates for a model, roughly cheapest first.

    store_bits: of the collection's caches. A few candidates have others: a finer cache is the
    remedy where no method reaches the target.
    """
    own = [_named(_of(model, *words, store_bits=store_bits)) for words in _SETTINGS]
    other = OTHER_BITS[store_bits]
    others = [
        replace(_named(_of(model, *words, store_bits=other), f", {other} bits"), in_store=False)
        for words in _WITH_OTHER_BITS
    ]
    return [*own, *others]


def full_prefill(model: str, store_bits: int) -> Candidate:
    """What everything is compared with, and what is recommended where nothing reaches it."""
    return Candidate(
        label=FULL, setting=TunedSetting(model=model, method=FULL, store_bits=store_bits)
    )


def as_label(setting: TunedSetting) -> str:
    """A setting in few words: ``auto, hits=3.0, quest@0.1``."""
    words = [setting.method]
    for option in setting.set:
        words.append(option.partition(".")[2])
    if setting.eviction != NO_EVICTION:
        budget = "" if setting.eviction_budget is None else f"@{setting.eviction_budget:g}"
        words.append(f"{setting.eviction}{budget}")
    return ", ".join(words)


def _named(setting: TunedSetting, suffix: str = "") -> Candidate:
    return Candidate(label=f"{as_label(setting)}{suffix}", setting=setting)


def _of(
    model: str,
    method: str,
    options: Sequence[str],
    eviction: str,
    budget: float | None,
    *,
    store_bits: int,
) -> TunedSetting:
    return TunedSetting(
        model=model, method=method, set=tuple(options), eviction=eviction, eviction_budget=budget,
        store_bits=store_bits,
    )  # fmt: skip


_Words = tuple[str, tuple[str, ...], str, float | None]

_REUSE: _Words = ("reuse", (), NO_EVICTION, None)
_EPIC: _Words = ("epic", (), NO_EVICTION, None)
_DEFAULT: _Words = ("auto", (), NO_EVICTION, None)
_MOST: _Words = ("auto", ("recompute.first=48", "recompute.matched=192"), NO_EVICTION, None)

# `auto` in place of samkv-guided: it is the same setting, with full prefill where that is faster
_SETTINGS: tuple[_Words, ...] = (
    _REUSE,
    ("reuse", (), "quest", 0.1),
    _EPIC,
    ("epic", ("recompute.first=48",), NO_EVICTION, None),
    ("auto", (), "quest", 0.1),
    ("auto", (), "snapkv", 0.3),
    _DEFAULT,
    ("auto", ("recompute.hits=3.0",), NO_EVICTION, None),
    _MOST,
)
_WITH_OTHER_BITS: tuple[_Words, ...] = (_REUSE, _DEFAULT, _MOST)
