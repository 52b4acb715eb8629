"""How many tokens a pass has makes few shapes, whose programs oneDNN keeps, and no difference."""

from __future__ import annotations

import pytest
import torch

from samkv_integrations import Engine
from samkv_integrations.runtimes.transformers.runtime import Model
from tests.support.models import FAMILIES, OTHER_FAMILIES, tiny_model

WORDS = "The ferry leaves the harbour at nine and comes back at noon, every day of the week. " * 8


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
