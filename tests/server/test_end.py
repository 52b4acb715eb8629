"""The end of a server: who is cut off is told so, over the connection that was there."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from samkv_integrations.engine.scheduler import Limits, Scheduler
from samkv_integrations.server.keys import ApiKeys, Tenant
from samkv_integrations.server.listen import listen_on
from samkv_integrations.server.run import Settings, address_of, server_of
from samkv_integrations.server.tenancy import Tenancy
from tests.support.asgi import PATIENCE_S
from tests.support.models import tiny_model
from tests.support.steps import Steps

ASKED = {"model": "tiny", "prompt": "What is it?", "max_tokens": 50}


@pytest.mark.parametrize("is_second_signal", [False, True])
def test_who_is_cut_off_is_told_so(
    is_second_signal: bool, tmp_path: Path, steps: Steps, caplog: pytest.LogCaptureFixture
) -> None:
    """One stream runs and one answer waits: the connection ended without a word of the error."""
    keys = ApiKeys("", Tenant())
    scheduler = Scheduler(tiny_model("llama"), Limits(max_batch=1))
    grace_s = None if is_second_signal else 0
    settings = Settings(model_name="tiny", grace_s=grace_s)
    server = server_of(Tenancy(scheduler, tmp_path), keys, settings, lambda: None)
    steps.hold()
    with listen_on("127.0.0.1", 0, keys) as listening:
        url = f"{address_of(listening)}/v1/completions"
        serving = Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        serving.start()
        waited: list[httpx.Response] = []
        with httpx.stream("POST", url, json=ASKED | {"stream": True}, timeout=PATIENCE_S) as stream:
            steps.wait_until_held()
            waiting = Thread(
                target=lambda: waited.append(httpx.post(url, json=ASKED, timeout=PATIENCE_S))
            )
            waiting.start()
            while not scheduler.load.waiting:
                assert waiting.is_alive()
            server.should_exit, server.force_exit = True, is_second_signal
            events = [line for line in stream.iter_lines() if line]
        waiting.join(PATIENCE_S)
        serving.join(PATIENCE_S)
        steps.release()
    assert not serving.is_alive()
    require_told(json.loads(events[-1].removeprefix("data: ")))
    (response,) = waited
    assert response.status_code == 503
    require_told(response.json())
    assert "Traceback" not in caplog.text


def require_told(body: dict[str, Any]) -> None:
    assert body["error"]["code"] == "shutting_down"
    assert body["error"]["type"] == "server_error"
