"""Between the layers of a long pass other answers go on, and every answer stays the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from samkv_integrations import Engine
from samkv_integrations.methods import METHODS
from samkv_integrations.methods.eviction import EVICTIONS
from samkv_integrations.runtimes.transformers.entries.quantise import EntryFormat
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.serving import answers
from samkv_integrations.serving import scheduler as module
from samkv_integrations.serving.fairness import FairTurns
from samkv_integrations.serving.scheduler import Scheduler
from samkv_integrations.serving.turns import Limits
from tests.serving.test_scheduler import as_owner
from tests.support.covering import covering
from tests.support.models import tiny_model
from tests.support.processes import wait_until
from tests.support.served import TEXTS
from tests.support.steps import PATIENCE_S

PROMPTS = [
    "Read.\n\n" + "\n\n".join(TEXTS[place % 3 :]) + f"\n\nQ{place}: what?\nA:" for place in range(4)
]
LONG = " ".join(f"{number} is a number." for number in range(40))
HALF = LONG[: len(LONG) // 2]
SHORT = "A question of sixty tokens or so, which is in no chunk: what?"
OTHER_TEXTS = [text[::-1] for text in TEXTS]


class Passes:
    """What happens inside passes, which are interrupted before each layer.

    events: the layer of a pass, or ``step``, ``first`` or ``encode``, in their order.
    on_layer: called in a pass of several tokens, before the pause behind it. on_step: before each.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[int | str] = []
        self.on_layer: Callable[[int], None] = lambda layer: None
        self.on_step: Callable[[], None] = lambda: None
        monkeypatch.setattr(module, "LEAST_PART_S", 0.0)
        monkeypatch.setattr(module, "PASS_SHARE", 0)
        decode, first_token, layer = Model.decode, answers.first_token, Model.layer

        def counted_step(*given: Any) -> Any:
            self.events.append("step")
            self.on_step()
            return decode(*given)

        def counted_first(*given: Any) -> Any:
            self.events.append("first")
            return first_token(*given)

        def counted_layer(
            model: Model, index: int, hidden: torch.Tensor, *given: Any, **options: Any
        ) -> torch.Tensor:
            if hidden.shape[1] > 1:
                self.events.append(index)
                self.on_layer(index)
            return layer(model, index, hidden, *given, **options)

        monkeypatch.setattr(Model, "decode", counted_step)
        monkeypatch.setattr(answers, "first_token", counted_first)
        monkeypatch.setattr(module, "MOST_ROWS", 1)  # a step is a token
        monkeypatch.setattr(Model, "layer", counted_layer)
        encode = EntryFormat.encode_chunks

        def counted_encode(*given: Any) -> Any:
            self.events.append("encode")
            return encode(*given)

        monkeypatch.setattr(EntryFormat, "encode_chunks", counted_encode)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    return Passes(monkeypatch)


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """A block in which the model's thread begins nothing."""
    is_held, go_on = threading.Event(), threading.Event()

    def hold(pause: Callable[[], None]) -> None:
        is_held.set()
        go_on.wait(PATIENCE_S)

    with ThreadPoolExecutor(1) as threads:
        threads.submit(engine.scheduler.run, hold)
        is_held.wait(PATIENCE_S)
        yield
        go_on.set()


def all_at_once(engine: Engine, **options: Any) -> list[str]:
    """The answers to `PROMPTS`, all of which wait before the first one begins."""
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        with held(engine):
            asked = [threads.submit(engine.generate, each, **options) for each in PROMPTS]
            wait_until(lambda: engine.scheduler.load.waiting == len(PROMPTS), "they wait")
        return [each.result(PATIENCE_S).text for each in asked]


@pytest.mark.parametrize(("method", "rule"), covering(list(METHODS), [None, *EVICTIONS]))
def test_answers_are_those_of_one_by_one(method: str, rule: str | None, passes: Passes) -> None:
    options = {"method": method, "eviction": rule, "max_new_tokens": 16}
    one = Engine(
        tiny_model("qwen2"), block_size=8, store_bits=8,
        scheduler=Scheduler(tiny_model("qwen2"), Limits(max_batch=1)),
    )  # fmt: skip
    one.cache_chunks(TEXTS)
    alone = [one.generate(prompt, **options).text for prompt in PROMPTS]
    many = Engine(one.model, one.store, block_size=8, store_bits=8)
    passes.events.clear()
    assert all_at_once(many, **options) == alone
    events = passes.events
    seconds = [at for at, event in enumerate(events) if event == 1]
    behind = [events[at : events.index(2, at)] for at in seconds]
    assert any("step" in between for between in behind)  # inside a pass, not behind its last layer


def test_steps_go_on_while_chunks_are_cached(passes: Passes) -> None:
    engine = Engine(tiny_model("llama"), block_size=8, method="reuse", prefix_bytes=0)
    engine.cache_chunks(TEXTS)
    alone = engine.generate(PROMPTS[0], max_new_tokens=100).text
    with ThreadPoolExecutor(2) as threads:
        with held(engine):
            asked = threads.submit(engine.generate, PROMPTS[0], max_new_tokens=100)
            wait_until(lambda: engine.scheduler.load.waiting == 1, "it waits")
            passes.events.clear()
            cached = threads.submit(engine.cache_chunks, OTHER_TEXTS)
            thread = engine.scheduler._running_thread()  # noqa: SLF001
            wait_until(lambda: thread.arriving.qsize() == 2, "both wait")

            def is_asked_for() -> bool:  # the pass over chunks, which waits or has begun
                waits = not thread.arriving.empty() or len(thread._waiting) > 0  # noqa: SLF001
                return waits or thread._paused is not None or passes.events.count(0) > 1  # noqa: SLF001

            passes.on_step = lambda: wait_until(is_asked_for, "chunks are to be computed")
        assert asked.result(PATIENCE_S).text == alone
        cached.result(PATIENCE_S)
    of_chunks = passes.events.index(0, passes.events.index("step"))
    assert "step" in passes.events[of_chunks : passes.events.index(1, of_chunks)]
    encoding = passes.events.index("encode")
    assert "step" in passes.events[encoding : passes.events.index("encode", encoding + 1)]
    assert all(map(engine.is_cached, OTHER_TEXTS))


@pytest.mark.parametrize(
    ("owner", "outer", "prompt", "is_inside"),
    [
        ("few", LONG, PROMPTS[1], True),
        ("many", LONG, PROMPTS[1], False),
        ("few", LONG, LONG, False),
        ("few", HALF, PROMPTS[1], True),  # long, and most of it is cached
        ("few", PROMPTS[0], SHORT, False),  # nearly all of which is cached
        ("few", PROMPTS[0], "What?", True),
    ],
)
def test_an_owner_of_less_time_does_not_wait_for_a_longer_pass_of_another(
    owner: str, outer: str, prompt: str, is_inside: bool, passes: Passes
) -> None:
    model = tiny_model("llama")
    engine = Engine(
        model, block_size=8, method="reuse", prefix_bytes=0,
        scheduler=Scheduler(model, turns=FairTurns),
    )  # fmt: skip
    engine.cache_chunks(TEXTS)
    alone = [engine.generate(each, max_new_tokens=4).text for each in (outer, prompt)]
    passes.events.clear()
    second: list[Future[Any]] = []

    def ask(layer: int) -> None:
        if layer == 1 and not second:
            asked = as_owner(owner, threads, engine.generate, prompt, max_new_tokens=4)
            second.append(asked)
            wait_until(lambda: engine.scheduler.load.waiting == 2, "it waits")

    passes.on_layer = ask
    with ThreadPoolExecutor(2) as threads:
        first = as_owner("many", threads, engine.generate, outer, max_new_tokens=4)
        answers = [first.result(PATIENCE_S).text, second[0].result(PATIENCE_S).text]
    assert answers == alone
    n_layers = engine.model.n_layers
    of_first = [0, 1, "first"] if is_inside else [0, 1, *range(2, n_layers)]
    assert passes.events[1 : len(of_first) + 1] == of_first


def test_both_passes_count_for_the_limit_of_memory(passes: Passes) -> None:
    model = tiny_model("llama")
    n_tokens = len(model.tokenize(LONG, special=True)) + 8
    limits = Limits(max_kv_bytes=n_tokens * model.token_kv_bytes)
    engine = Engine(
        model, block_size=8, method="reuse", scheduler=Scheduler(model, limits, turns=FairTurns)
    )
    engine.cache_chunks(TEXTS)
    passes.events.clear()

    def ask(layer: int) -> None:
        if layer == 1 and len(asked) == 1:
            asked.append(as_owner("few", threads, engine.generate, PROMPTS[2], max_new_tokens=4))
            wait_until(lambda: engine.scheduler.load.waiting == 2, "it waits")

    passes.on_layer = ask
    asked: list[Any] = []
    with ThreadPoolExecutor(2) as threads:
        asked.append(as_owner("many", threads, engine.generate, LONG, max_new_tokens=4))
        assert asked[0].result(PATIENCE_S).text and asked[1].result(PATIENCE_S).text
    assert "first" not in passes.events[1 : engine.model.n_layers]


def test_choosing_a_token_is_a_part_of_the_step(
    passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or an answer that is held to a schema would interrupt every layer of a pass."""
    advance = answers.RunningAnswer.advance

    def slow(*given: Any) -> None:
        time.sleep(0.05)
        advance(*given)

    monkeypatch.setattr(answers.RunningAnswer, "advance", slow)
    monkeypatch.setattr(module, "PASS_SHARE", 10**6)
    engine = Engine(tiny_model("llama"), block_size=8, method="reuse")
    engine.cache_chunks(TEXTS)
    with ThreadPoolExecutor(2) as threads:
        with held(engine):
            asked = [
                threads.submit(engine.generate, each, max_new_tokens=4) for each in PROMPTS[:2]
            ]
            wait_until(lambda: engine.scheduler.load.waiting == 2, "they wait")
            passes.events.clear()
        assert all(each.result(PATIENCE_S).text for each in asked)
    thread = engine.scheduler._running_thread()  # noqa: SLF001
    assert thread._step_s >= 0.05  # noqa: SLF001
    second = passes.events.index("first", 1)
    layers = list(range(engine.model.n_layers))
    assert passes.events[second + 1 :][: len(layers)] == layers
