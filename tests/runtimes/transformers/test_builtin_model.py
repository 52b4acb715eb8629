"""The built-in model is what its card says, on fewer questions: enough to notice another model."""

from __future__ import annotations

import json
from statistics import fmean

import pytest

from reference_model.evaluate import (
    Cell,
    Item,
    Variant,
    answers,
    draw_form_items,
    draw_items,
    exact_match,
    needle,
    reference,
    single_hop,
    two_hop,
    without_answer,
    without_documents,
)
from reference_model.prompts import PromptForms
from reference_model.world import World
from samkv_integrations.runtimes.transformers.loading import builtin_path
from tests.support.records import builtin

WORLD = World.load()
FORMS = PromptForms.load()
N = 24


def test_its_parameters_are_counted() -> None:
    """All but those of biases and of the last norm, by which methods do not choose."""
    model = builtin()
    n_all = sum(each.numel() for each in model.hf.parameters())
    assert 0.99 * n_all < model.n_parameters <= n_all


def right(items: list[Item], *variants: Variant) -> list[float]:
    """Share of right answers of each variant."""
    found = answers(builtin(), items, variants, "test")
    return [
        fmean(exact_match(text, item.answer) for text, item in zip(texts, items, strict=True))
        for texts in found.values()
    ]


def test_a_standard_llama_small_enough_to_ship() -> None:
    config = json.loads((builtin_path() / "config.json").read_text("utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_attention_heads"] > config["num_key_value_heads"] > 1
    assert config["max_position_embeddings"] >= 2048
    assert "auto_map" not in config
    files = [path for path in builtin_path().iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 32e6
    assert not [path for path in files if path.suffix in {".bin", ".pt", ".py"}]


# Far above a guess, and far enough below the card that N questions do not fall short by chance.
@pytest.mark.parametrize(
    ("cell", "least"),
    [
        # fewer documents of the next one
        pytest.param(single_hop(4), 0.8, marks=pytest.mark.slow),
        (single_hop(8), 0.7),
        (two_hop(6), 0.6),
    ],
    ids=["single-hop 4", "single-hop 8", "two-hop"],
)
def test_it_reads(cell: Cell, least: float) -> None:
    (share,) = right(draw_items(builtin(), WORLD, cell, N, seed=11), Variant())
    assert share >= least


@pytest.mark.slow  # a single fact, as above, in a long prompt
def test_it_finds_a_needle_in_a_thousand_tokens() -> None:
    (share,) = right(draw_items(builtin(), WORLD, needle(1000), 12, seed=11), Variant())
    assert share >= 0.7


def test_it_has_nothing_to_say_without_the_answer() -> None:
    items = draw_items(builtin(), WORLD, single_hop(4), N, seed=11)
    assert right([without_documents(item) for item in items], Variant()) <= [0.1]
    assert right([without_answer(item) for item in items], Variant()) <= [0.15]


def test_a_document_that_continues_another_needs_it() -> None:
    """The gap that recomputation is judged by."""
    items = draw_items(builtin(), WORLD, reference(8), N, seed=11)
    full, reused, local = right(
        items,
        Variant(),
        Variant(method="reuse", prefix="bos"),
        Variant(method="reuse-local", prefix="bos"),
    )
    assert full >= 0.6
    assert full - local > 0.3
    assert full - reused > 0.2


@pytest.mark.parametrize(
    "name",
    [
        "llama-index chat text-qa",
        # pipelines and chains answer in these forms in every run
        pytest.param("llama-index context chat", marks=pytest.mark.slow),
        pytest.param("langchain system", marks=pytest.mark.slow),
    ],
)
def test_it_reads_the_default_prompts_of_frameworks(name: str) -> None:
    items = draw_form_items(WORLD, FORMS, FORMS.named(name), True, N, seed=11)
    (share,) = right(items, Variant())
    assert share >= 0.7
