"""One thread for the model, many answers at once: the same answers, and no idle waiting."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from samkv_integrations import Engine
from samkv_integrations.errors import Overloaded, TimedOut
from samkv_integrations.methods import METHODS
from samkv_integrations.methods.eviction import EVICTIONS
from samkv_integrations.options import AnswerSettings
from samkv_integrations.plan.request import Request
from samkv_integrations.runtimes.base import Observer, TokenSequence
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.runtimes.transformers.sampling import TransformersSampler
from samkv_integrations.serving import answers
from samkv_integrations.serving.fairness import FairTurns
from samkv_integrations.serving.first_token import FirstToken, first_token
from samkv_integrations.serving.grammar import JsonConstraint
from samkv_integrations.serving.scheduler import Scheduler
from samkv_integrations.serving.stream import AnswerStream, off_loop
from samkv_integrations.serving.turns import AHEAD, Limits
from tests.support.covering import covering
from tests.support.models import FAMILIES, tiny_model
from tests.support.processes import wait_until
from tests.support.records import builtin
from tests.support.served import TEXTS
from tests.support.steps import PATIENCE_S, Steps

ENDLESS = "Documents:\n\n[Dunlux"  # which the built-in model goes on with for long
PROMPTS = [
    "Read.\n\n" + "\n\n".join(TEXTS[place % 3 :]) + f"\n\nQ{place}: what?\nA:" for place in range(8)
]


def engine_of(model: Model, limits: Limits | None = None, **options: object) -> Engine:
    engine = Engine(
        model,
        block_size=8,
        scheduler=Scheduler(model, limits, turns=FairTurns),
        **{"method": "reuse", **options},
    )
    engine.cache_chunks(TEXTS)
    return engine


@pytest.fixture
def engine() -> Engine:
    return engine_of(tiny_model("llama"))


def all_at_once(engine: Engine, prompts: list[str], **options: object) -> list[str]:
    with ThreadPoolExecutor(len(prompts)) as threads:
        asked = [threads.submit(engine.generate, each, **options) for each in prompts]
        return [each.result(PATIENCE_S).text for each in asked]


def eventually(is_so: Callable[[], bool], engine: Engine) -> None:
    """Wait until the scheduler's thread has come so far; it is not idle before."""
    for _ in range(1000):
        was_so = is_so()
        engine.scheduler.run(lambda _: None)  # after the step that is under way
        if was_so:
            return
    raise AssertionError("it never was")


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_of_a_batch_are_those_of_one_by_one(family: str, steps: Steps) -> None:
    engine = engine_of(tiny_model(family))
    alone = [engine.generate(prompt, max_new_tokens=12).text for prompt in PROMPTS]
    assert set(steps.batches) == {1}
    steps.hold()
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(engine.generate, each, max_new_tokens=12) for each in PROMPTS]
        steps.wait_for_answers(engine.scheduler, 8)
        steps.release()
        together = [each.result(PATIENCE_S).text for each in asked]
    assert together == alone
    assert max(steps.batches) == 8


@pytest.mark.parametrize(("method", "rule"), covering(list(METHODS), [None, *EVICTIONS]))
def test_every_method_and_rule(method: str, rule: str | None) -> None:
    options = {"method": method, "eviction": rule, "max_new_tokens": 8}
    one = engine_of(tiny_model("qwen2"), Limits(max_batch=1), store_bits=8)
    many = Engine(one.model, one.store, block_size=8, store_bits=8)
    assert many.scheduler.limits == Limits()
    alone = [one.generate(prompt, **options).text for prompt in PROMPTS[:4]]
    assert all_at_once(many, PROMPTS[:4], **options) == alone


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # a matrix of several rows is multiplied in another order: some rounding steps of the dtype,
    # where logits of this model reach 100
    [(torch.float32, 1e-3), (torch.bfloat16, 100 * 2**-8 * 2)],
)
def test_a_step_of_many_has_the_logits_of_each(dtype: torch.dtype, tolerance: float) -> None:
    engine = engine_of(tiny_model("llama", dtype))
    settings = AnswerSettings.of(method="samkv-guided", eviction="quest", on_miss="text")

    decode = engine.model.decode

    def begin() -> list[TokenSequence]:
        found = []
        for prompt in PROMPTS:
            with engine.resolve(prompt) as resolved:
                request = engine.request(resolved, settings, capacity=8)
                found.append(first_token(request, Observer()).sequence)
        return found

    with torch.inference_mode():
        alone, together = begin(), begin()
        for token in (70, 90, 110):
            tokens = [token + place for place in range(8)]
            expected = torch.cat(
                [decode([one], [[t]])[0] for one, t in zip(alone, tokens, strict=True)]
            )
            found = torch.cat(list(decode(together, [[token] for token in tokens])))
            torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
            assert not torch.equal(found[0], found[1])


def test_options_are_of_one_answer_each(engine: Engine) -> None:
    """Sampling with a seed, stop strings, lengths and schemas, in one batch."""
    options: list[dict[str, object]] = [
        {"temperature": 1.5, "seed": 3, "max_new_tokens": 20},
        {"temperature": 1.5, "seed": 4, "max_new_tokens": 20},
        {"max_new_tokens": 5},
        {"max_new_tokens": 30, "stop": ["a"], "temperature": 2.0, "seed": 1},
        {"max_new_tokens": 9, "repetition_penalty": 1.3},
        {"max_new_tokens": 40, "json_schema": {"type": "integer"}, "temperature": 1.0, "seed": 2},
        {"max_new_tokens": 1},
        {"max_new_tokens": 12, "eviction": "h2o"},
    ]

    def ask(place: int) -> tuple[str, str, int]:
        answer = engine.generate(PROMPTS[place], **options[place])
        return answer.text, answer.finish_reason, answer.report.completion_tokens

    alone = [ask(place) for place in range(8)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(8))) == alone
    assert len(set(alone)) == 8


@pytest.mark.parametrize("max_batch", [1, 3])
def test_no_more_answers_than_the_limit_are_decoded_together(max_batch: int, steps: Steps) -> None:
    engine = engine_of(tiny_model("llama"), Limits(max_batch=max_batch))
    all_at_once(engine, PROMPTS, max_new_tokens=6)
    assert max(steps.batches) <= max_batch


def test_running_answers_have_a_limit(steps: Steps) -> None:
    engine = engine_of(tiny_model("llama"), Limits(max_running=2))
    assert len(all_at_once(engine, PROMPTS, max_new_tokens=6)) == len(PROMPTS)
    assert max(steps.batches) == 2


def test_kv_bytes_have_a_limit(steps: Steps) -> None:
    model = tiny_model("llama")
    n_tokens = engine_of(model).count_tokens(PROMPTS[0]) + 6
    engine = engine_of(model, Limits(max_kv_bytes=2 * n_tokens * model.token_kv_bytes))
    steps.on_step = lambda: seen.append(engine.scheduler.load.kv_bytes)
    seen: list[int] = []
    asked = [PROMPTS[0]] * 6
    assert len(set(all_at_once(engine, asked, max_new_tokens=6))) == 1
    assert max(steps.batches) == 2
    assert max(seen) == 2 * n_tokens * model.token_kv_bytes


def test_an_answer_that_exceeds_the_limit_by_itself_is_computed_alone(steps: Steps) -> None:
    engine = engine_of(tiny_model("llama"), Limits(max_kv_bytes=1))
    assert len(all_at_once(engine, PROMPTS[:3], max_new_tokens=4)) == 3
    assert set(steps.batches) == {1}


def test_too_many_that_wait(steps: Steps) -> None:
    engine = engine_of(tiny_model("llama"), Limits(max_batch=1, max_waiting=1))
    steps.hold()
    running = engine.stream(PROMPTS[0], max_new_tokens=4)
    steps.wait_until_held()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(engine.generate, PROMPTS[1], max_new_tokens=4)
        while engine.scheduler.load.waiting == 0:
            pass
        with pytest.raises(Overloaded, match="1 answers wait already, and max_waiting is 1"):
            engine.generate(PROMPTS[2], max_new_tokens=4)
        assert (engine.scheduler.load.running, engine.scheduler.load.waiting) == (1, 1)
        steps.release()
        assert "".join(running) and waiting.result(PATIENCE_S).text
    assert engine.generate(PROMPTS[2], max_new_tokens=4).text  # it was not lost for good
    eventually(lambda: engine.scheduler.load.running == engine.scheduler.load.waiting == 0, engine)


def test_an_answer_begins_between_the_steps_of_others(engine: Engine, steps: Steps) -> None:
    steps.hold()
    first = engine.stream(PROMPTS[0], max_new_tokens=20)
    steps.allow(3)
    steps.wait_for(3)
    steps.wait_until_held()
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(engine.stream, PROMPTS[1], max_new_tokens=20)
        while engine.scheduler.load.waiting == 0:
            pass
        steps.allow(1)
        steps.wait_for(4)
        assert second.result(PATIENCE_S).report.ttft_s > 0  # while the first answer goes on
        steps.release()
        assert "".join(first) and "".join(second.result())
    assert steps.batches[:4] == [1] * 4 and steps.batches[4] == 2


def test_work_and_answers_take_turns(engine: Engine) -> None:
    """An ingest that always has one more batch does not keep answers waiting."""
    order: list[str] = []
    is_answered = threading.Event()

    def ingest() -> None:
        while not is_answered.is_set():
            engine.scheduler.run(lambda _: order.append("work"))

    with ThreadPoolExecutor(1) as threads:
        ingesting = threads.submit(ingest)
        try:
            assert engine.generate(PROMPTS[0], max_new_tokens=8).text
        finally:
            is_answered.set()
        ingesting.result(PATIENCE_S)
    assert order


def as_owner(owner: str, threads: ThreadPoolExecutor, *call: Any, **options: Any) -> Future[Any]:
    """A call in a thread, whose work is that of ``owner``."""
    return threads.submit(*call, owner=owner, **options)


def test_who_asks_for_little_does_not_wait_behind_all_that_another_asks_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []  # most tokens of the answers, which tell them apart

    def recorded(request: Request, observer: Observer) -> FirstToken:
        begun.append(request.how.capacity)
        return first_token(request, observer)

    monkeypatch.setattr(answers, "first_token", recorded)
    has_begun, is_over = threading.Event(), threading.Event()

    def hold(pause: Callable[[], None]) -> None:
        has_begun.set()
        is_over.wait(PATIENCE_S)

    with ThreadPoolExecutor(6) as threads:
        asked = [as_owner("many", threads, engine.scheduler.run, hold)]
        has_begun.wait(PATIENCE_S)
        for n, owner in ((1, "many"), (2, "many"), (3, "many"), (4, "few")):
            asked.append(as_owner(owner, threads, engine.generate, PROMPTS[n], max_new_tokens=n))
            wait_until(lambda n=n: of(engine) == (0, n), "they wait")
        is_over.set()
        for each in asked:
            each.result(PATIENCE_S)
    assert begun == [4, 1, 2, 3]


def test_who_comes_when_another_has_all_places_does_not_wait_for_whole_answers(
    steps: Steps,
) -> None:
    engine = engine_of(builtin(), Limits(max_batch=2))
    steps.hold()
    with ThreadPoolExecutor(3) as threads:
        many = [
            as_owner("many", threads, engine.stream, ENDLESS, max_new_tokens=200) for _ in range(2)
        ]
        steps.wait_for_answers(engine.scheduler, 2)
        while len(steps.counts) < 2:  # until both have taken a step
            steps.wait_until_held()
            steps.allow(1)
        steps.wait_until_held()
        few = as_owner("few", threads, engine.generate, ENDLESS, max_new_tokens=3)
        wait_until(lambda: sum(of(engine)) == 3, "it is asked")
        before, (one, other) = steps.n, steps.counts.values()
        while not few.done() and steps.n - before < 10:
            steps.wait_until_held()
            steps.allow(1)
        is_done, (one_now, other_now, *_) = few.done(), steps.counts.values()
        steps.release()
        assert is_done and few.result().text
        # those of the other took turns
        assert one_now > one and other_now > other
        assert abs((one_now - one) - (other_now - other)) <= 2
        for each in many:
            each.result(PATIENCE_S).close()


def test_masks_are_charged_to_the_owner_of_the_answer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged = Counter[str]()
    charge = FairTurns.charge

    def counted(turns: FairTurns, owner: str, seconds: float) -> None:
        charged[owner] += seconds
        charge(turns, owner, seconds)

    monkeypatch.setattr(FairTurns, "charge", counted)
    mask = JsonConstraint.allowed

    def slow(*given: Any) -> Any:
        time.sleep(0.05)
        return mask(*given)

    monkeypatch.setattr(JsonConstraint, "allowed", slow)
    with ThreadPoolExecutor(1) as threads:
        asked = as_owner(
            "masks", threads, engine.generate, PROMPTS[0], json_schema={"const": "a long word"}
        )
        n_tokens = asked.result(PATIENCE_S).report.completion_tokens
    assert charged["masks"] > 0.05 * n_tokens > 0.2


def of(engine: Engine) -> tuple[int, int]:
    load = engine.scheduler.load
    return load.running, load.waiting


def test_an_owner_who_is_refused_refuses_nobody_else(steps: Steps) -> None:
    engine = engine_of(builtin(), Limits(max_batch=1, max_waiting=1))
    steps.hold()
    with ThreadPoolExecutor(4) as threads:
        first = as_owner("many", threads, engine.stream, ENDLESS, max_new_tokens=200)
        steps.wait_for_answers(engine.scheduler, 1)
        waiting = [as_owner("many", threads, engine.generate, ENDLESS, max_new_tokens=2)]
        wait_until(lambda: of(engine) == (1, 1), "one waits")
        refused = as_owner("many", threads, engine.generate, ENDLESS, max_new_tokens=2)
        with pytest.raises(Overloaded, match="1 answers wait already"):
            refused.result(PATIENCE_S)
        waiting.append(as_owner("few", threads, engine.generate, ENDLESS, max_new_tokens=2))
        wait_until(lambda: of(engine) == (1, 2), "both wait")
        first.result(PATIENCE_S).close()
        steps.release()
        assert all(each.result(PATIENCE_S).text for each in waiting)


@pytest.fixture
def talking() -> Engine:
    """An engine whose answers go on and on."""
    return Engine(builtin(), method="reuse", prefix_bytes=0)


def test_an_answer_that_nobody_reads_stands_aside(talking: Engine, steps: Steps) -> None:
    whole = talking.generate(ENDLESS, max_new_tokens=80).text
    before = steps.n
    stream = talking.stream(ENDLESS, max_new_tokens=80)
    eventually(lambda: steps.n - before >= AHEAD - 1, talking)
    assert talking.generate("Documents:", max_new_tokens=8).text
    assert steps.counts[list(steps.counts)[1]] < AHEAD + 8  # pieces may take several tokens
    assert "".join(stream) == whole


def test_a_report_is_of_what_was_read(talking: Engine, steps: Steps) -> None:
    with talking.stream(ENDLESS, max_new_tokens=20) as stream:
        eventually(lambda: steps.n == 19, talking)
        assert stream.report.completion_tokens == 0
        next(stream)
        assert 0 < stream.report.completion_tokens < 20
        assert stream.finish_reason is None
        list(stream)
        assert stream.report.completion_tokens == 20 and stream.finish_reason == "length"
        assert stream.report.decode_tokens_per_s > 0


def test_abandoned_ones_leave_the_batch(engine: Engine, steps: Steps) -> None:
    steps.hold()
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(engine.stream, each, max_new_tokens=50) for each in PROMPTS[:2]]
        steps.wait_for_answers(engine.scheduler, 2)
        one, two = (each.result(PATIENCE_S) for each in asked)
    before = steps.n
    one.close()
    steps.release()
    assert "".join(two)
    assert sum(n == 2 for n in steps.batches[before:]) <= 2  # as many as were under way
    eventually(lambda: engine.scheduler.load.running == 0, engine)


def test_one_that_waits_never_begins_if_nobody_wants_it(steps: Steps, begun: list[Request]) -> None:
    engine = engine_of(tiny_model("llama"), Limits(max_batch=1))

    async def ask() -> None:
        steps.hold()
        running = engine.stream(PROMPTS[0], max_new_tokens=4)
        waiting = asyncio.create_task(engine.agenerate(PROMPTS[1], max_new_tokens=4))
        while engine.scheduler.load.waiting == 0:
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        steps.release()
        assert "".join(running)

    asyncio.run(ask())
    assert engine.generate(PROMPTS[2], max_new_tokens=2).text
    assert len(begun) == 2
    assert engine.scheduler.load.waiting == 0


def test_a_first_pass_ends_where_its_reader_leaves(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_layers: list[int] = []
    task: asyncio.Task[object]
    layer = Model.layer

    def left_at_the_second(self: Model, index: int, *given: Any, **options: Any) -> torch.Tensor:
        n_layers.append(index)
        if len(n_layers) == 2:
            loop.call_soon_threadsafe(task.cancel)
            assert left.wait(PATIENCE_S)
        return layer(self, index, *given, **options)

    left = threading.Event()

    async def ask() -> None:
        nonlocal task, loop
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(Model, "layer", left_at_the_second)
        task = asyncio.create_task(engine.agenerate(PROMPTS[0], max_new_tokens=4))
        with pytest.raises(asyncio.CancelledError):
            await task
        left.set()

    loop: asyncio.AbstractEventLoop
    asyncio.run(ask())
    engine.scheduler.run(lambda _: None)
    assert len(n_layers) == 2
    monkeypatch.undo()
    assert engine.generate(PROMPTS[0], max_new_tokens=4).text


def test_time_runs_out_while_it_waits(steps: Steps, begun: list[Request]) -> None:
    engine = engine_of(tiny_model("llama"), Limits(max_batch=1))
    steps.hold()
    running = engine.stream(PROMPTS[0], max_new_tokens=4)
    with pytest.raises(TimedOut, match="timeout=0.05: the answer was not complete"):
        engine.generate(PROMPTS[1], max_new_tokens=4, timeout=0.05)
    with pytest.raises(TimedOut, match="timeout=0.05"):
        asyncio.run(engine.agenerate(PROMPTS[1], max_new_tokens=4, timeout=0.05))
    with pytest.raises(TimedOut), asyncio.Runner(loop_factory=_EarlyLoop) as runner:
        runner.run(engine.agenerate(PROMPTS[1], max_new_tokens=4, timeout=0.05))
    steps.release()
    assert "".join(running) and len(begun) == 1


class _EarlyLoop(asyncio.SelectorEventLoop):
    """Its timers ring a little too early, as uvloop's do."""

    def call_at(self, when: float, *given: Any, **more: Any) -> asyncio.TimerHandle:
        return super().call_at(when - 0.005, *given, **more)


async def test_threads_of_many_owners_end() -> None:
    for n in range(40):
        await off_loop(time.sleep, 0, owner=f"owner {n}")

    def n_threads() -> int:
        return sum(each.name.startswith("samkv-off-loop") for each in threading.enumerate())

    await asyncio.to_thread(wait_until, lambda: n_threads() < 20, "those of the first have ended")
    assert n_threads() >= 1  # the last ones wait for work


def test_time_runs_out_between_pieces(talking: Engine, steps: Steps) -> None:
    steps.hold()
    stream = talking.stream(ENDLESS, max_new_tokens=40, timeout=1)
    with pytest.raises(TimedOut):
        list(stream)
    steps.release()
    assert list(stream) == []


def test_an_answer_that_is_complete_may_be_read_when_time_is_over(
    talking: Engine, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = talking.stream(ENDLESS, max_new_tokens=10, timeout=PATIENCE_S)
    eventually(lambda: steps.n == 9, talking)
    monkeypatch.setattr("time.perf_counter", lambda: 1e12)
    assert "".join(stream)
    assert stream.finish_reason == "length"


def test_a_dropped_stream_frees_its_cache(talking: Engine, steps: Steps) -> None:
    stream = talking.stream(ENDLESS, max_new_tokens=100)
    eventually(lambda: len(steps.counts) == 1, talking)
    cache = weakref.ref(next(iter(steps.counts)).cache)
    steps.counts.clear()
    del stream
    gc.collect()
    eventually(lambda: cache() is None, talking)
    assert talking.scheduler.load.running == 0


def test_a_failure_of_one_is_of_no_other(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = engine.generate(PROMPTS[1], max_new_tokens=8).text
    sample = TransformersSampler.next_if_sure

    def fails(self: TransformersSampler, logits: torch.Tensor, tolerance: float) -> int | None:
        if self in broken:
            raise RuntimeError("no token")
        if not broken:
            broken.append(self)
        return sample(self, logits, tolerance)

    broken: list[TransformersSampler] = []
    monkeypatch.setattr(TransformersSampler, "next_if_sure", fails)
    streams = [engine.stream(prompt, max_new_tokens=8) for prompt in PROMPTS[:2]]
    with pytest.raises(RuntimeError, match="no token"):
        list(streams[0])
    assert "".join(streams[1]) == expected


def test_a_failed_step_ends_its_answers_alone(engine: Engine, steps: Steps) -> None:
    def fail() -> None:
        raise MemoryError("no room")

    steps.on_step = fail
    streams = [engine.stream(prompt, max_new_tokens=8) for prompt in PROMPTS[:3]]
    for stream in streams:
        with pytest.raises(MemoryError, match="no room"):
            list(stream)
    steps.on_step = lambda: None
    assert engine.generate(PROMPTS[0], max_new_tokens=8).text


def test_a_stream_for_tasks(talking: Engine) -> None:
    async def ask() -> tuple[str, AnswerStream]:
        async with await talking.astream(ENDLESS, max_new_tokens=30) as stream:
            return "".join([piece async for piece in stream]), stream

    text, stream = asyncio.run(ask())
    whole = talking.generate(ENDLESS, max_new_tokens=30)
    assert text == whole.text
    assert stream.report.completion_tokens == whole.report.completion_tokens == 30
    assert stream.finish_reason == whole.finish_reason


def test_the_loop_runs_while_answers_are_computed(engine: Engine, steps: Steps) -> None:
    async def ask() -> str:
        steps.hold()
        answer = asyncio.create_task(engine.agenerate(PROMPTS[0], max_new_tokens=4))
        await asyncio.to_thread(steps.wait_until_held)
        n_turns = 0
        while n_turns < 100:  # of the loop, with the model's thread in a step
            await asyncio.sleep(0)
            n_turns += 1
        assert not answer.done()
        steps.release()
        return (await answer).text

    assert asyncio.run(ask())


def model_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "samkv-model"]


@pytest.fixture
def others() -> Iterator[list[threading.Thread]]:
    gc.collect()
    yield model_threads()


def test_it_starts_when_there_is_something_to_do_and_ends_with_the_engine(
    others: list[threading.Thread],
) -> None:
    model = tiny_model("llama")
    engine = Engine(model, block_size=8)
    assert not set(model_threads()) - set(others)  # of which some may end meanwhile
    engine.generate("Hello", max_new_tokens=2)
    (thread,) = set(model_threads()) - set(others)
    engine.scheduler.run(lambda _: None)  # it holds nothing of the answer any more
    del engine
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


IN_A_PROCESS = """
import os, sys
from samkv_integrations import Engine
from tests.support.models import tiny_model
engine = Engine(tiny_model("llama"), block_size=8)
expected = engine.generate("Hello", max_new_tokens=400).text

def exit_code(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

if (child := os.fork()) == 0:
    os._exit(0 if engine.generate("Hello", max_new_tokens=400).text == expected else 1)
assert exit_code(child) == 0
stream = engine.stream("Hello", max_new_tokens=400)
if (child := os.fork()) == 0:  # while an answer is under way, which it leaves to its parent
    sys.exit(3)
assert exit_code(child) == 3
assert "".join(stream) == expected
stream = engine.stream("Hello", max_new_tokens=4000)  # which is under way when the process ends
"""


@pytest.mark.slow  # a process; one that ends while an answer runs is in tests/cli/test_serve.py
def test_processes_fork_and_end() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS],
        cwd=Path(__file__).parents[2], timeout=5 * PATIENCE_S, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
