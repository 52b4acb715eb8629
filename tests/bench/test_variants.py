"""What is compared: methods, budgets, evictions and ablations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import variants
from samkv_integrations import METHODS
from samkv_integrations.eviction import EVICTIONS
from samkv_integrations.methods.cacheblend import CacheblendRecompute
from tests.bench.asking import EVICTION


def test_methods_meet_every_budget_and_eviction() -> None:
    rule = EVICTIONS[EVICTION]
    rules = {f"{EVICTION}@0.3": replace(rule, budget_ratio=0.3), EVICTION: rule}
    made = variants.combine(["recompute", "samkv-fusion"], [0.1, 0.2], evictions=rules)
    assert list(made) == [
        "recompute",  # plain, to compare with
        f"recompute + {EVICTION}@0.3",
        f"recompute + {EVICTION}",
        *(f"samkv-fusion + {EVICTION}{at} @ {b}" for at in ("@0.3", "") for b in (0.1, 0.2)),
    ]
    one = made[f"samkv-fusion + {EVICTION}@0.3 @ 0.1"]
    assert one.method.select.max_kept_ratio == 0.1  # type: ignore[attr-defined]
    assert one.eviction is not None and one.eviction.budget_ratio == 0.3
    assert made[f"recompute + {EVICTION}"].eviction is EVICTIONS[EVICTION]
    assert made["recompute"].eviction is None
    assert list(variants.combine(["reuse", "reuse"], evictions={"none": None})) == ["reuse"]


def test_without_evictions_a_method_has_its_own_and_with_none_it_has_none() -> None:
    assert variants.combine(["samkv-guided"])["samkv-guided"].eviction is None
    made = variants.combine(
        ["samkv-guided"], evictions={"none": None, "snapkv": EVICTIONS["snapkv"]}
    )
    assert list(made) == ["samkv-guided", "samkv-guided + snapkv"]
    assert made["samkv-guided"].eviction is None


def test_recompute_ratios_reach_what_recomputes_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that has none of its own among the shipped ones is made for the test."""
    partial = replace(METHODS["cacheblend"], name="partial")
    monkeypatch.setattr(variants, "get_method", {**METHODS, "partial": partial}.__getitem__)
    made = variants.combine(["reuse", "partial"], recompute_ratios=[0.05, 0.1])
    assert list(made) == ["reuse", "partial, 5 % recomputed", "partial, 10 % recomputed"]
    assert made["partial, 10 % recomputed"].method.recompute == CacheblendRecompute(ratio=0.1)


def test_caches_in_several_bits_are_variants_of_what_reads_them() -> None:
    base = variants.combine(["recompute", "reuse", "samkv-fusion"], budgets=[0.1],
                            evictions={"none": None, "snapkv": EVICTIONS["snapkv"]})  # fmt: skip
    assert variants.at_store_bits(base, [8]) == base
    made = variants.at_store_bits(base, [4, 16])
    assert [label for label in made if label.startswith("re")] == [
        "recompute", "recompute + snapkv", "reuse, 4 bits", "reuse, 16 bits",
        "reuse + snapkv, 4 bits", "reuse + snapkv, 16 bits",
    ]  # fmt: skip
    assert {variant.store_bits for variant in made.values()} == {None, 4, 16}
    assert made["reuse, 4 bits"].method == base["reuse"].method
    assert len({variant.describe() for variant in made.values()}) == len(made)


def test_a_variant_is_described_the_same_in_every_process() -> None:
    texts = [variant.describe() for variant in variants.knobs().values()]
    texts += [v.describe() for v in variants.combine(list(METHODS), evictions=EVICTIONS).values()]
    assert not [text for text in texts if " at 0x" in text]
    assert len(variants.combine(["samkv-fusion"], [0.1, 0.2])) == 2


def test_the_grid_is_the_paper_s_table_4() -> None:
    made, rows = variants.table4([0.3])
    assert list(made) == list(rows)
    columns = [(r.selection, r.bias, r.recompute) for r in rows.values() if r.method != "recompute"]
    fusion = [(False, None, False), (True, False, False), (True, True, False),
              (False, None, True), (True, False, True), (True, True, True)]  # fmt: skip
    assert columns == [*fusion, *fusion[3:]]  # overwrite differs where something is recomputed
    assert len({v.describe() for v in made.values()}) == len(made), "every row must be another"
    assert len(variants.table4([0.2, 0.3])[0]) == 1 + 2 * 9
    whole = made["samkv-fusion: middle, bias, recompute @ 0.3"].method
    assert variants.combine(["samkv-fusion"], [0.3])["samkv-fusion @ 0.3"].method == whole


def test_every_knob_changes_one_thing_of_the_default() -> None:
    path = variants.knobs()
    assert path["samkv-guided"] == variants.Variant.of(METHODS["samkv-guided"])
    assert len({v.describe() for v in path.values()}) == len(path), (
        "every row must change something"
    )
