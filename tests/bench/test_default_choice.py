"""Engines whose chunks were prefilled after other documents."""

from __future__ import annotations

import pytest
import torch

from benchmarks.default_choice import NEIGHBOUR, STRANGER, engine_over
from tests.support.models import tiny_model

DOCUMENTS = ["The ferry leaves at nine.", "The mill is closed.", "The inn has nine rooms."]
PROMPT = f"{DOCUMENTS[0]}\n\n{DOCUMENTS[1]}\n\n{DOCUMENTS[2]}\n\nWhen does it leave?"


@pytest.mark.parametrize("prefix", [NEIGHBOUR, STRANGER])
def test_chunks_after_another_document_are_cached_otherwise(prefix: str) -> None:
    strangers = ["The mountain is high."]
    plain, after = (
        engine_over(tiny_model("llama"), DOCUMENTS, before, strangers) for before in ("bos", prefix)
    )
    found = [engine.logits(PROMPT, DOCUMENTS, method="reuse")[0] for engine in (plain, after)]
    assert all(after.is_cached(text) for text in DOCUMENTS)
    assert not torch.allclose(*found)
