"""Decoding over static shapes, of which a GPU makes a graph: the logits of any other step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from unittest import mock
from weakref import ref

import pytest
import torch
from torch import Tensor

from samkv_integrations.runtimes.transformers.passes.decode import Decoder, decode
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.serving.static_step import Graphs, StaticStep, captured
from tests.laws import test_device
from tests.support.asking import ask
from tests.support.covering import covering
from tests.support.laws import CHUNKS, PROMPT, TOLERANCE, shared_engine
from tests.support.models import FAMILIES
from tests.support.pretend_device import pretend_device

PROMPTS = [PROMPT, *(f"{PROMPT} {'again' * at}" for at in range(1, 8))]
N_STEPS = 150
"""More than any working cache has room for from the beginning."""


class Replays:
    """Stands for graphs where there is no device: computes what a replay would."""

    def __init__(self) -> None:
        self.n_captured = self.n_replayed = 0

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.n_captured += 1

        def replay() -> Tensor:
            self.n_replayed += 1
            return run()

        return replay


def begun(n_answers: int, family: str = "llama", rule: str = "none") -> list[Decoder]:
    engine = shared_engine(family, 4)
    return [
        ask(engine, prompt, CHUNKS, "epic", eviction=rule, capacity=N_STEPS + 8).decoder()
        for prompt in PROMPTS[:n_answers]
    ]


@pytest.mark.parametrize(
    ("family", "n_answers"), covering([*FAMILIES, "olmo2", "granite"], [1, 3, 8])
)
def test_a_static_step_has_the_logits_of_any_other(family: str, n_answers: int) -> None:
    """Over several sizes of a working cache, and after drafts that were taken back."""
    replays = Replays()
    graphs = Graphs(replays)
    expected, found = begun(n_answers, family), begun(n_answers, family)
    with torch.inference_mode():
        for step in range(N_STEPS):
            is_draft = step % 60 == 40 and n_answers < 8
            tokens = [
                [(7 * step + 31 * at) % 250, *([5] if is_draft else [])] for at in range(n_answers)
            ]
            mine, theirs = graphs.decode(found, tokens), decode(expected, tokens)
            torch.testing.assert_close(torch.cat(mine), torch.cat(theirs), **TOLERANCE)
            for decoder in (*expected, *found) if is_draft else ():
                decoder.rewind(1)
    assert [each.cache.lengths for each in found] == [each.cache.lengths for each in expected]
    assert replays.n_captured >= 2 and replays.n_replayed > N_STEPS // 2


@pytest.mark.parametrize(("family", "rule"), [("llama", "h2o"), ("gemma2", "none")])
def test_a_cache_that_evicts_by_itself_is_left_to_others(family: str, rule: str) -> None:
    replays = Replays()
    with torch.inference_mode():
        graphs, decoders = Graphs(replays), begun(1, family, rule)
        for token in range(20):
            graphs.decode(decoders, [[token]])
    assert replays.n_captured == 0


def test_answers_come_and_go() -> None:
    engine, lengths = shared_engine("llama", 4), (12, 60, 30, 90, 44, 80)

    def answers() -> list[str]:
        with ThreadPoolExecutor(len(lengths)) as pool:
            answer = partial(engine.generate, method="epic", seed=1)
            given = zip(PROMPTS, lengths, strict=False)
            told = [pool.submit(answer, prompt, max_new_tokens=n) for prompt, n in given]
            return [each.result().text for each in told]

    expected, replays = answers(), Replays()
    engine.scheduler.graphs = Graphs(replays)
    try:
        assert answers() == expected
    finally:
        engine.scheduler.graphs = None
    assert replays.n_replayed > 20


def failing(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    raise RuntimeError("operation not permitted when stream is capturing")


def wrong(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """It writes wrong entries, too."""

    def replay() -> Tensor:
        with mock.patch.object(Model, "embed", lambda model, ids: embed(model, ids).roll(1, -1)):
            return run()

    embed = Model.embed
    return replay


def empty(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`captured`, by a driver that records nothing, such as that of another device."""
    names = ("CUDAGraph", "Stream", "device", "stream", "graph")
    with ExitStack() as patches:
        for name in names:
            patches.enter_context(mock.patch.object(torch.cuda, name, mock.MagicMock()))
        return captured(run)


@pytest.mark.parametrize("capture", [failing, wrong, empty])
def test_a_graph_that_fails_or_is_wrong_is_not_used(
    capture: Callable[[Callable[[], Tensor]], Callable[[], Tensor]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    graphs, found, expected = Graphs(capture), begun(1), begun(1)
    with torch.inference_mode():
        for token in range(30):
            mine, theirs = graphs.decode(found, [[token]]), decode(expected, [[token]])
            torch.testing.assert_close(mine, theirs, **TOLERANCE)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "without CUDA graphs" in caplog.text


def test_answers_that_ended_are_not_held() -> None:
    replays = Replays()
    with torch.inference_mode():
        graphs, decoders = Graphs(replays), begun(2)
        for token in range(12):
            graphs.decode(decoders, [[token], [token]])
    assert replays.n_replayed > 1
    caches = [ref(each.cache) for each in decoders]
    decoders.clear()
    assert [cache() for cache in caches] == [None, None]


def test_the_host_waits_for_nothing_and_launches_the_same_for_every_layer() -> None:
    n_operations = {}
    for n_layers in (3, 5):
        on_cpu = test_device.filled(n_layers=n_layers)
        with pretend_device() as device, torch.inference_mode():
            there = test_device.engine(on_cpu.store, n_layers=n_layers)
            decoder = ask(there, test_device.PROMPT, test_device.CHUNKS, "epic").decoder()
            step = StaticStep([decoder], [decoder.cache])
            step.fill([40], [decoder.position], [decoder.cache.static_slot])
            waits, before = device.waits.total(), device.n_operations
            logits = step.run()
            assert device.waits.total() == waits
            n_operations[n_layers] = device.n_operations - before
            torch.testing.assert_close(logits[0], decoder.step(40), **test_device.AS_CLOSE)
    assert (n_operations[5] - n_operations[3]) / 2 <= 90, "of a layer, views included"
