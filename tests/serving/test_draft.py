"""Drafted tokens change the speed of an answer and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch

from samkv_integrations import Engine
from samkv_integrations.errors import InvalidOption
from samkv_integrations.methods.eviction import EVICTIONS
from samkv_integrations.runtimes.base import MOST_ROWS, RowCosts
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.serving import answers
from samkv_integrations.serving.draft import PromptLookup
from samkv_integrations.serving.scheduler import Scheduler
from tests.support.models import byte_tokenizer, hf_model, tiny_model
from tests.support.served import TEXTS

CHEAP = tuple(1 + 0.1 * n for n in range(MOST_ROWS))
PROMPT = "Read.\n\n" + "\n\n".join(TEXTS) + "\n\nQ: what?\nA:"


class Oracle(PromptLookup):
    """Drafts the tokens that an answer of before had, every fifth of them wrong."""

    known: ClassVar[dict[tuple[int, ...], list[int]]] = {}

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        super().__init__(prompt_ids)
        self._told: list[int] = []
        self._before = self.known.setdefault(tuple(prompt_ids), [])
        self._learns = not self._before

    @property
    def has_any(self) -> bool:
        return not self._learns

    def add(self, token: int) -> None:
        self._told.append(token)
        if self._learns:
            self._before.append(token)

    def draft(self, costs: Sequence[float], most: int) -> list[int]:
        if self._learns or len(costs) == 1:
            return []
        at = len(self._told)
        drafted = self._before[at : at + most]
        return [token ^ (place % 5 == 4) for place, token in enumerate(drafted, at)]


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second answer to a prompt is drafted from the first."""
    monkeypatch.setattr(answers, "PromptLookup", Oracle)
    monkeypatch.setattr(Oracle, "known", {})


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def engine(request: pytest.FixtureRequest) -> Engine:
    """As wide as PyTorch's 16-bit products of a vector and of a matrix need to be the same."""
    wide = hf_model("llama", hidden_size=256, intermediate_size=512).to(request.param)
    model = Model(wide, byte_tokenizer(bos=True), "wide")
    return Engine(model, block_size=8, scheduler=Scheduler(model), method="reuse")


@pytest.mark.usefixtures("oracle")
@pytest.mark.parametrize("eviction", ["none", *EVICTIONS])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7, "seed": 3}], ids=["greedy", "sampled"]
)
def test_an_answer_does_not_depend_on_drafts(
    engine: Engine, options: dict[str, float], eviction: str
) -> None:
    engine.cache_chunks(TEXTS)
    given = {"max_new_tokens": 60, "eviction": eviction, **options}
    plain, drafted = (engine.generate(PROMPT, **given) for _ in range(2))  # type: ignore[arg-type]
    assert drafted.text == plain.text == engine.generate(PROMPT, draft=0, **given).text  # type: ignore[arg-type]
    assert drafted.report.completion_tokens == plain.report.completion_tokens
    assert drafted.report.decode_kv_bytes == plain.report.decode_kv_bytes
    assert plain.report.tokens_per_step == 1
    # greedy float32 may repeat a step whose best two logits are close
    assert drafted.report.tokens_per_step >= 1
    drops = eviction in ("streaming-llm", "h2o", "sage-kv")  # during the answer
    is_random_in_float32 = options and engine.model.dtype == torch.float32
    assert (drafted.report.tokens_per_step > 1.5) == (not (drops or is_random_in_float32))


@pytest.mark.usefixtures("oracle")
def test_answers_of_one_batch_are_drafted_too(engine: Engine) -> None:
    prompts = [f"{PROMPT} {place}" for place in range(3)]
    alone = [engine.generate(prompt, max_new_tokens=40).text for prompt in prompts]
    streams = [engine.stream(prompt, max_new_tokens=40) for prompt in prompts]
    assert ["".join(stream) for stream in streams] == alone
    assert max(stream.report.tokens_per_step for stream in streams) > 1.2


@pytest.mark.usefixtures("oracle")
def test_stop_strings_and_lengths_end_an_answer_within_a_draft(engine: Engine) -> None:
    whole = engine.generate(PROMPT, max_new_tokens=60).text
    for most in (1, 2, 5, 17):
        answer = engine.generate(PROMPT, max_new_tokens=most)
        assert answer.text == engine.generate(PROMPT, draft=0, max_new_tokens=most).text
        assert answer.report.completion_tokens == most
    stop = whole[len(whole) // 2 :][:3]
    assert engine.generate(PROMPT, max_new_tokens=60, stop=[stop]).text == whole[: whole.find(stop)]


def test_a_repeating_answer_takes_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "row_costs", lambda model: RowCosts(CHEAP, 0.0))
    engine = Engine.from_pretrained("builtin", dtype="bfloat16")
    prompt = "Documents:\n\n[Dunlux"  # which the built-in model goes on with for long
    drafted = engine.generate(prompt, max_new_tokens=100)
    assert drafted.text == engine.generate(prompt, max_new_tokens=100, draft=0).text
    assert drafted.report.tokens_per_step > 1.2


def test_a_draft_goes_on_as_the_latest_occurrence_did() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 7, 8, 9, 0, 1, 2, 3, 4])
    drafted = lookup.draft(CHEAP, 7)
    assert len(drafted) > 2 and drafted == [7, 8, 9, 0, 1, 2, 3][: len(drafted)]
    lookup.add(7)
    assert lookup.draft(CHEAP, 2) == [8, 9]
    lookup.add(5)
    assert lookup.draft(CHEAP, 7) == []


def test_nothing_is_drafted_where_it_does_not_pay() -> None:
    ids = [1, 2, 3, 4, 1, 2, 3]
    assert PromptLookup(ids).draft((1.0, 2.0, 3.0, 4.0), 7) == []  # no pass is shared
    assert PromptLookup(ids).draft((1.0,), 7) == []  # rows differ
    assert PromptLookup(ids).draft(CHEAP, 0) == []
    wrong = PromptLookup(ids)
    for other in range(20):  # after 1 2 3 never again 4
        for token in (100 + other, 1, 2, 3):
            wrong.add(token)
    assert wrong.draft(CHEAP, 7) == []


def test_a_draft_is_a_number() -> None:
    engine = Engine(tiny_model("llama"))
    with pytest.raises(InvalidOption, match="draft=-1; it must be a whole number, 0 or more"):
        engine.generate("Q", draft=-1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hundreds_of_answers_do_not_depend_on_drafts(dtype: str) -> None:
    # without held prefixes: the second pass over a prompt would compute fewer tokens
    engine = Engine.from_pretrained("builtin", dtype=dtype, prefix_bytes=0)
    words = " ".join(TEXTS).split()
    n_steps_saved = 0
    for place in range(250):
        some = " ".join(words[(place + 3 * at) % len(words)] for at in range(4 + place % 20))
        prompt = f"{some}. {some}\n\nQ: {words[place % len(words)]}?\nA: {some[:20]}"
        drafted = engine.generate(prompt, max_new_tokens=24)
        assert drafted.text == engine.generate(prompt, max_new_tokens=24, draft=0).text, prompt
        n_steps_saved += drafted.report.tokens_per_step > 1
    assert n_steps_saved > 25
