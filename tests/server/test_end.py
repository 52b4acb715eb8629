"""The end of a server: answers that take longer than its grace do not hold it up."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import httpx
import pytest

from samkv_integrations.server.app import create_app
from samkv_integrations.server.run import Server, address_of, listen_on
from samkv_integrations.server.service import Settings
from samkv_integrations.server.tenancy import ApiKeys, Tenancy, Tenant
from samkv_integrations.serving.fairness import FairTurns
from samkv_integrations.serving.scheduler import Scheduler
from samkv_integrations.serving.turns import Limits
from tests.support.asgi import PATIENCE_S
from tests.support.models import tiny_model
from tests.support.steps import Steps

ASKED = {"model": "tiny", "prompt": "What is it?", "max_tokens": 50, "stream": True}


@pytest.mark.parametrize("is_second_signal", [False, True])
def test_it_ends_though_an_answer_runs(
    is_second_signal: bool, tmp_path: Path, steps: Steps
) -> None:
    keys = ApiKeys("", Tenant())
    scheduler = Scheduler(tiny_model("llama"), Limits(max_batch=1), turns=FairTurns)
    app = create_app(Tenancy(scheduler, tmp_path), keys, Settings(model_name="tiny"))
    server = Server(app, None if is_second_signal else 0, lambda: None)
    steps.hold()
    with listen_on("127.0.0.1", 0, keys) as listening:
        url = f"{address_of(listening)}/v1/completions"
        serving = Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        serving.start()
        with httpx.stream("POST", url, json=ASKED, timeout=PATIENCE_S) as stream:
            steps.wait_until_held()
            server.should_exit, server.force_exit = True, is_second_signal
            with pytest.raises(httpx.RemoteProtocolError):
                stream.read()
        serving.join(PATIENCE_S)
        steps.release()
    assert not serving.is_alive()
