"""``samkv serve --ray``: what clients see of it, and a cluster that runs already."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.cluster.serve import Replicas, serving
from samkv_integrations.cluster.workers import WorkerPool
from samkv_integrations.engine.options import EngineOptions
from samkv_integrations.errors import InvalidOption
from samkv_integrations.server.run import ServerSource, listen_on
from samkv_integrations.server.service import Settings
from samkv_integrations.server.tenancy import ApiKeys, Tenant
from tests.cli.running import ran
from tests.support.processes import PATIENCE_S, children_of, serving_replicas
from tests.support.records import RECORDS
from tests.support.stores import twin_folders

pytestmark = pytest.mark.slow

KEY = "sk-of-the-red-team"


@contextmanager
def serving_command(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """Two replicas, and a client that has a key; ended in the end."""
    pytest.importorskip("ray.serve", reason="the extra 'ray' is not installed")
    keys = {"SAMKV_API_KEYS": f"{KEY} '' notes"}
    with serving_replicas(*arguments, **keys) as (process, address):
        key = {"authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=address, headers=key, timeout=PATIENCE_S) as client:
            yield process, client


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    folder = tmp_path / "documents"
    folder.mkdir()
    for record in RECORDS:
        (folder / f"{record.name}.txt").write_text(record.text)
    ran("ingest", str(folder), "--collection", "notes", "--dir", str(tmp_path / "samkv"))
    return tmp_path / "samkv"


def asking(place: int, **further: Any) -> dict[str, Any]:
    """A question whose document is cached."""
    record = RECORDS[place % len(RECORDS)]
    prompt = f"Documents:\n\n{record.text}\n\nQuestion: {record.question}\nAnswer:"
    samkv = {"method": "reuse"}
    return {"model": "builtin", "prompt": prompt, "max_tokens": 8, "samkv": samkv} | further


def test_what_clients_see_is_what_one_process_shows_and_the_end_is_quiet(documents: Path) -> None:
    arguments = ("--collection", "notes", "--dir", str(documents))
    with serving_command(*arguments, "--max-body", "4KB") as (process, client):
        named = {"x-request-id": "mine"}
        reply = client.post("/v1/completions", json=asking(0), headers=named)
        assert reply.headers.get_list("x-request-id") == ["mine"]
        assert reply.json()["samkv"]["reused"] == 1, reply.text
        reply = client.post("/v1/completions", json=asking(0), headers={"authorization": "none"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        reply = client.post("/v1/completions", json=asking(0, prompt="a" * 5_000))
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")
        asked = {"collection": "notes", "question": RECORDS[0].question, "max_tokens": 8}
        reply = client.post("/v1/samkv/ask", json=asked, headers=named)
        assert reply.status_code == 200, reply.text
        below = children_of(process.pid)
        endless = asking(0, prompt="Documents:\n\n[Dunlux", max_tokens=300, stream=True)
        with client.stream("POST", "/v1/completions", json=endless) as stream:
            parts = stream.iter_lines()
            assert next(parts).startswith("data: {")
            process.send_signal(signal.SIGTERM)
            rest = [part for part in parts if part]
        assert rest[-1] == "data: [DONE]" and len(rest) > 20
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
        assert len(below) > 4
        assert not [number for number in below if Path(f"/proc/{number}").exists()]


@pytest.mark.usefixtures("cluster")
def test_a_cluster_that_runs_already_stays_and_shares_a_remote_tier(
    tmp_path: Path, tiny: str
) -> None:
    """Its replicas find what another folder has put into the remote tier."""
    import ray

    remote = (tmp_path / "remote").as_uri()
    text = "The ferry takes three hours, and leaves at noon."
    one, _ = twin_folders(tmp_path, "one", "another")
    filled = ChunkStore(one, remote=remote)
    Engine.from_pretrained(tiny, filled, device="cpu").cache_chunks([text])
    source = ServerSource(
        model=tiny, device="cpu", folder=tmp_path / "another", remote=remote,
        options=EngineOptions(method="reuse"), keys=ApiKeys("", Tenant()),
        settings=Settings(model_name="tiny"),
    )  # fmt: skip
    replicas = Replicas(pool=WorkerPool(n_workers=1), grace_s=5)
    with listen_on("127.0.0.1", 0, source.keys) as listening:
        port = listening.getsockname()[1]
    with serving(source.replica, replicas, "127.0.0.1", port, n_threads=1):
        body = {"model": "tiny", "prompt": f"Read: {text} So:", "max_tokens": 4}
        reply = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=PATIENCE_S)
        assert reply.json()["samkv"]["reused"] == 1, reply.text
        another = serving(source.replica, replicas, "127.0.0.1", port, n_threads=1)
        with pytest.raises(InvalidOption, match="runs on this cluster already"), another:
            pytest.fail("it serves twice")
    assert ray.is_initialized()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health")
