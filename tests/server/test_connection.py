"""Clients that go away: their answers end, and nobody waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from samkv_integrations.plan.request import Request
from samkv_integrations.server import app as app_module
from samkv_integrations.serving.turns import Limits
from tests.server.conftest import KEYS, App
from tests.support.asgi import PATIENCE_S
from tests.support.served import PROMPT, TEXTS
from tests.support.steps import Steps

PATH = "/v1/completions"
LONG = {"model": "tiny", "prompt": PROMPT, "max_tokens": 400}


@pytest.fixture
def app(make_app: Callable[..., App]) -> App:
    app = make_app(limits=Limits(max_batch=1))
    app.engine().cache_chunks(TEXTS)
    return app


async def idle(app: App) -> None:
    """Wait until nothing runs nor waits."""
    async with asyncio.timeout(PATIENCE_S):
        while (load := app.scheduler.load).running or load.waiting:
            await asyncio.to_thread(app.scheduler.run, lambda _: None)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_who_leaves_in_the_midst_ends_the_answer(
    is_streamed: bool, app: App, steps: Steps
) -> None:
    steps.hold()
    exchange = app.client.post(PATH, LONG | {"stream": is_streamed})
    await asyncio.to_thread(steps.wait_until_held)
    exchange.leave()
    await exchange.end()
    steps.release()
    await idle(app)
    assert steps.n < 50
    assert app.scheduler.load.kv_bytes == 0
    counted = (await app.client.got("/metrics")).text
    assert f'samkv_requests_total{{path="{PATH}",status="499"}} 1.0' in counted


async def test_who_leaves_while_waiting_is_never_begun(
    app: App, steps: Steps, begun: list[Request]
) -> None:
    steps.hold()
    running = app.client.post(PATH, LONG | {"stream": True, "max_tokens": 5})
    await asyncio.to_thread(steps.wait_until_held)
    waiting = [app.client.post(PATH, LONG | {"stream": place % 2 == 0}) for place in range(4)]
    async with asyncio.timeout(PATIENCE_S):
        while app.scheduler.load.waiting < 4:
            await asyncio.sleep(0)
    for exchange in waiting:
        exchange.leave()
        assert not (await exchange.end()).messages or exchange.status == 499
    steps.release()
    await running.end()
    await idle(app)
    assert len(begun) == 1


async def test_a_reader_who_stalls_holds_up_nobody(app: App) -> None:
    """With room for one answer at a time."""
    stalled = app.client.post(PATH, LONG | {"stream": True})
    await stalled.wait_for(1)
    stalled.is_blocked = True
    async with asyncio.timeout(PATIENCE_S):
        reply = await app.client.posted(PATH, LONG | {"max_tokens": 3})
    assert reply.status == 200
    stalled.leave()
    await stalled.end()
    await idle(app)


async def test_a_key_that_is_refused_refuses_no_other(
    make_app: Callable[..., App], steps: Steps
) -> None:
    app = make_app(keys=KEYS, limits=Limits(max_batch=1, max_waiting=1))
    red, blue = app.of("sk-of-the-red-team"), app.of("sk-of-the-blue-team")
    steps.hold()
    asked = [red.post(PATH, LONG | {"max_tokens": 3})]
    await asyncio.to_thread(steps.wait_until_held)
    asked.append(red.post(PATH, LONG | {"max_tokens": 3}))
    while app.scheduler.load.waiting < 1:
        await asyncio.sleep(0)
    assert (await red.posted(PATH, LONG)).status == 429
    asked.append(blue.post(PATH, LONG | {"max_tokens": 3}))
    while app.scheduler.load.waiting < 2:
        await asyncio.sleep(0)
    steps.release()
    assert [(await each.end()).status for each in asked] == [200] * 3


async def test_health_fails_while_the_model_does_not_come_on(
    app: App, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "STUCK_S", 0)
    assert (await app.client.got("/health")).status == 200
    steps.hold()
    asked = app.client.post(PATH, LONG | {"max_tokens": 3})
    await asyncio.to_thread(steps.wait_until_held)
    reply = await app.client.got("/health")
    assert (reply.status, reply.error["code"]) == (503, "stuck")
    steps.release()
    assert (await asked.end()).status == 200
    await idle(app)
    assert (await app.client.got("/health")).status == 200
