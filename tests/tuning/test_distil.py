"""The student is what an engine computes, and has the gradient that differences say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from samkv_integrations import METHODS, Engine
from samkv_integrations.cache.windows import MemoryIndex
from samkv_integrations.engine.answer_settings import AnswerSettings
from samkv_integrations.engine.decode import force
from samkv_integrations.model.model import Model
from samkv_integrations.model.quoting import RenderedPrompt
from samkv_integrations.prompt.layout import find_runs
from samkv_integrations.tuning.distil import Prompt, chunk_entries, loss, student, teacher
from tests.support.models import FAMILIES, tiny_model

TEXTS = (
    "The mill stands by the river, and its wheel is green.",
    "A baker lives in the third house of the long street.",
    "Nobody has seen the miller since the flood of that year.",
)
ANSWER = (40, 41, 42, 43)
# hundreds of float32 roundings, as in the tests of prefill
CLOSE = {"rtol": 2e-4, "atol": 2e-4}


def prompt_of(model: Model) -> tuple[str, Prompt]:
    text = "Read: " + "\n\n".join(TEXTS) + "\n\nWhose dog is that?"
    index = MemoryIndex(b"test")
    for body in TEXTS:
        index.add(body, model.tokenize(body, special=False))
    ids = model.tokenize_prompt(RenderedPrompt(text))
    return text, Prompt(ids=ids, chunks=find_runs(ids, [index]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("first", [0, 5, 1000])
def test_the_student_is_the_engine(family: str, first: int) -> None:
    """With embeddings of the made-up documents, entries in 16 bits, and ``first`` recomputed."""
    model = tiny_model(family)
    text, prompt = prompt_of(model)
    assert len(prompt.chunks) == len(TEXTS)
    engine = Engine(model, store_bits=16, prefix_bytes=0)
    engine.cache_chunks(TEXTS)
    epic: Any = METHODS["epic"]
    method = replace(epic, recompute=replace(epic.recompute, first=first))
    settings = AnswerSettings.of(method=method, eviction="none")
    with engine.resolve(text, TEXTS) as resolved:
        assert list(resolved.token_ids) == prompt.ids
        request = engine.request(resolved, settings, len(ANSWER))
        expected = engine.scheduler.run(lambda: force(request, ANSWER[:-1])).logits
    with torch.no_grad():
        prefix = engine.chunks.prefix.embedded(model)
        entries = chunk_entries(model, prompt.chunks, prefix)
        mine = student(model, prompt, ANSWER, entries, len(prefix), first)
    torch.testing.assert_close(mine, expected, **CLOSE)


def test_everything_recomputed_is_the_teacher() -> None:
    model = tiny_model("qwen3")
    _, prompt = prompt_of(model)
    truth = teacher(model, prompt, 4)
    prefix = model.embed(torch.tensor([1, 40, 41]))
    with torch.no_grad():
        assert float(loss(model, prompt, truth, prefix, 1000)) < 1e-5
        assert float(loss(model, prompt, truth, prefix, 0)) > 1e-3


def test_the_gradient_is_what_differences_say() -> None:
    model = tiny_model("llama")
    _, prompt = prompt_of(model)
    truth = teacher(model, prompt, 4)
    prefix = torch.nn.Parameter(model.embed(torch.tensor([1, 40, 41, 42])).detach().clone())
    loss(model, prompt, truth, prefix, 3).backward()  # type: ignore[no-untyped-call]
    assert prefix.grad is not None
    direction = prefix.grad / prefix.grad.norm()
    step = 1e-2
    with torch.no_grad():
        above, below = (
            float(loss(model, prompt, truth, prefix + sign * step * direction, 3))
            for sign in (1, -1)
        )
    assert (above - below) / (2 * step) == pytest.approx(float(prefix.grad.norm()), rel=0.05)
