"""How many tokens a pass has makes few shapes, whose programs oneDNN keeps, and no difference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from samkv_integrations import Engine
from samkv_integrations.model.model import Model
from tests.support.models import FAMILIES, OTHER_FAMILIES, tiny_model

WORDS = "The ferry leaves the harbour at nine and comes back at noon, every day of the week. " * 8


@contextmanager
def rows_of_layers(model: Model) -> Iterator[set[int]]:
    """Rows that the products of the first layer have, of all passes of the block."""
    rows: set[int] = set()

    def note(_: torch.nn.Module, given: tuple[Any, ...]) -> None:
        rows.add(given[0].shape[:-1].numel())

    products = [m for m in model.hf.model.layers[0].modules() if isinstance(m, torch.nn.Linear)]
    hooks = [product.register_forward_pre_hook(note) for product in products]
    yield rows
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_passes_in_16_bits_have_few_shapes(dtype: torch.dtype) -> None:
    engine = Engine(tiny_model("llama", dtype), prefix_bytes=0)
    with rows_of_layers(engine.model) as rows:
        for n_tokens in range(16, 600, 11):  # and BOS
            engine.logits(WORDS[:n_tokens], method="recompute")
    few = {*range(18, 33, 2), *range(36, 65, 4), *range(72, 129, 8), *range(144, 257, 16)}
    assert {64, 512} <= rows <= {*few, *range(288, 513, 32), 576, 640}
    counts = range(1, 10_000)
    assert all(engine.model.n_more_rows(n) <= n / 8 for n in counts)
    assert len({n + engine.model.n_more_rows(n) for n in range(1, 4097)}) == 112


def test_what_compiles_nothing_gets_no_rows_more() -> None:
    engine = Engine(tiny_model("llama"), prefix_bytes=0)
    with rows_of_layers(engine.model) as rows:
        engine.logits(WORDS[:300], method="recompute")
    assert rows == {301}  # with BOS


@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_FAMILIES])
def test_nothing_comes_out_otherwise(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny_model(family, torch.bfloat16), prefix_bytes=0)
    engine.cache_chunks([WORDS[:77], WORDS[20:200]])
    prompt = f"{WORDS[:77]}\n{WORDS[20:200]}\nWhen does it come back?"
    methods = ("recompute", "reuse", "epic")
    found = [engine.logits(prompt, method=method) for method in methods]
    monkeypatch.setattr(Model, "n_more_rows", lambda _, n_rows: 0)
    engine = Engine(engine.model, prefix_bytes=0)
    engine.cache_chunks([WORDS[:77], WORDS[20:200]])
    for method, with_rows in zip(methods, found, strict=True):
        assert torch.equal(with_rows, engine.logits(prompt, method=method)), method
