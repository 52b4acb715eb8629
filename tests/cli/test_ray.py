"""The server on Ray Serve: what it refuses, and two replicas on this machine."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.cli.serve import KEYS_VARIABLE
from samkv_integrations.errors import ClusterError, InvalidOption, MissingExtra, SamkvError
from samkv_integrations.runtimes import RUNTIMES
from samkv_integrations.server import app as app_module
from tests.support.processes import PATIENCE_S, wait_until
from tests.support.records import RECORDS, builtin

KEY = "sk-of-the-tests-0001"


@pytest.fixture
def ray_module() -> Any:
    pytest.importorskip(
        "ray.serve", reason="the extra 'ray' is not installed", exc_type=ImportError
    )
    return importlib.import_module("samkv_integrations.cli.ray")


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, KEY)


@pytest.fixture
def kv(working_folder: Path) -> Path:
    """The store of this folder, which exists before the application."""
    return ChunkStore(working_folder / ".samkv" / "kv").path


# -- without a cluster ----------------------------------------------------------------------------


def test_without_ray_serve_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "samkv_integrations.cli.ray", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"\[ray\]"):
        importlib.import_module("samkv_integrations.cli.ray")


@pytest.mark.usefixtures("keys", "kv")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"host": "0.0.0.0"}, "give http_options"),
        ({"port": 8000}, "give http_options"),
        ({"dir": "/nowhere", "dtype": "float32"}, "/nowhere/kv does not exist"),
        ({"collection": "notes", "dir": "/nowhere"}, "/nowhere does not exist"),
        ({"collection": "notes"}, "holds no Chroma database"),
        ({"api-keys": "/keys.txt"}, "are both given; give only one"),
        ({"dir": ".samkv"}, "dir: '.samkv' is relative"),
        ({"kv-dir": "kv"}, "kv-dir: 'kv' is relative"),
        ({"model": "./nowhere"}, "model: './nowhere' is relative"),
        ({"chroma": ".samkv/kv"}, "chroma: '.samkv/kv' is relative"),
        ({"max-batch": [1, 2]}, "max-batch: [1, 2] is a list"),
        ({"lenient": "yes"}, "lenient: 'yes'; give true or false"),
        ({"max-batch": True}, "Invalid value for '--max-batch'"),
        ({"method": "reus"}, "did you mean 'reuse'?"),
        ({"method": None}, "method: null is no value"),
        ({"help": True}, "No such option: --help"),
        ({"n-threads": -1}, "--n-threads=-1; it must be at least 1"),
        ({"n-ctx": 4096, "dtype": "float32"}, "--n-ctx=4096 is no option of transformers"),
        ({"use-mmap": False, "dtype": "float32"}, "--use-mmap=False is no option of transformers"),
        ({}, "--dtype=auto may choose another dtype in each replica"),
        ({"timeout": 0}, "--timeout=0.0"),
        ({"model": "/nowhere"}, "/nowhere does not exist"),
    ],
)
def test_what_is_refused_before_a_replica_begins(
    given: dict[str, Any], message: str, ray_module: Any
) -> None:
    with pytest.raises(SamkvError) as caught:
        ray_module.app(given)
    assert message in str(caught.value)


@pytest.mark.usefixtures("kv")
def test_names_are_those_of_samkv_serve(ray_module: Any) -> None:
    given = {
        "cors-origin": ["http://a", "http://b"], "lenient": True, "log-prompts": False,
        "max-kv": "1GB", "n-threads": 2, "dtype": "float32", "model": "builtin",
        "embedding": "chroma",
    }  # fmt: skip
    for name in ("builtin", "chroma"):  # which are names, and no paths
        Path(name).mkdir()
    options, keys = ray_module.parsed(given)
    assert not keys
    assert options.serving.cors_origin == ["http://a", "http://b"]
    assert options.serving.lenient and not options.serving.log_prompts
    assert (options.index.model, options.embedded.embedding) == ("builtin", "chroma")
    assert (options.serving.max_kv, options.index.n_threads) == ("1GB", 2)
    with pytest.raises(InvalidOption, match="--colection"):
        ray_module.parsed({"colection": "a"})


@pytest.mark.usefixtures("kv")
def test_there_must_be_keys(ray_module: Any) -> None:
    with pytest.raises(InvalidOption, match="no API keys"):
        ray_module.app({"dtype": "float32"})


@pytest.mark.usefixtures("keys", "kv")
def test_a_runtime_that_is_not_installed(ray_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = replace(RUNTIMES["llama_cpp"], is_installed=lambda: False)
    monkeypatch.setattr(ray_module, "runtime_for", lambda *_: missing)
    with pytest.raises(MissingExtra, match=r"'\.\[llama-cpp\]'"):
        ray_module.app({"runtime": "llama_cpp"})


@pytest.mark.usefixtures("keys")
def test_a_replica_must_reach_the_store_of_the_application(ray_module: Any, kv: Path) -> None:
    options, keys = ray_module.parsed({"n-threads": 1, "dtype": "float32"})
    with pytest.raises(ClusterError, match="is another store; give all machines"):
        ray_module.Replica(options, keys, "of another store")
    mark = ray_module.mark_of(options.index)
    kv.rename(kv.with_name("elsewhere"))
    with pytest.raises(ClusterError, match=r"replica on .* does not exist"):
        ray_module.Replica(options, keys, mark)


@pytest.mark.usefixtures("keys", "kv")
def test_a_stuck_replica_is_not_healthy(ray_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options, keys = ray_module.parsed({"n-threads": 1, "dtype": "float32"})
    replica = ray_module.Replica(options, keys, ray_module.mark_of(options.index))
    replica.check_health()
    monkeypatch.setattr(app_module, "STUCK_S", -1)
    with pytest.raises(ClusterError, match="has taken more than"):
        replica.check_health()


async def test_a_request_without_a_session_may_go_to_every_replica(ray_module: Any) -> None:
    """Of these Ray takes the least busy one."""
    asked = SimpleNamespace(
        metadata=SimpleNamespace(session_id=""), routing_context=SimpleNamespace()
    )
    router = ray_module.Router.__new__(ray_module.Router)
    (rank,) = await router.choose_replicas(["a", "b", "c"], asked)
    assert sorted(rank) == ["a", "b", "c"]


# -- on a cluster ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two replicas over one store."""
    pytest.importorskip(
        "ray.serve", reason="the extra 'ray' is not installed", exc_type=ImportError
    )
    from benchmarks.serve_ray import Server
    from samkv_integrations.ingest.cluster import WorkerPool

    folder = tmp_path_factory.mktemp("served")
    ChunkStore(folder / "kv")
    with WorkerPool(n_workers=1).connected():
        server = Server(folder, {"method": "reuse", "dtype": "float32"})
        server.deploy(2, 1)
        yield server
        server.end()


def ask(server: Any, session: str, prompt: str, **further: Any) -> Any:
    from benchmarks.serve_ray import key_of

    body = {"model": "builtin", "prompt": prompt, "max_tokens": 8, **further}
    headers = {"x-session-id": session, "x-request-id": f"of-{session}", **key_of("")}
    reply = httpx.post(
        f"{server.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S
    )
    assert reply.headers.get_list("x-request-id") == [f"of-{session}"]
    return reply


def prompt_of(number: int, session: str) -> str:
    record = RECORDS[number]
    return f"{session}\n\nDocuments:\n\n{record.text}\n\nQuestion: {record.question}\nAnswer:"


SESSIONS = [f"session-{n}" for n in range(8)]
"""Enough that both replicas have some, whatever their names are: of 128 clusters one has not."""


@pytest.mark.slow  # starts Ray and replicas that load the model: half a minute
def test_sessions_stay_and_what_another_process_does_holds_for_all_replicas(served: Any) -> None:
    from benchmarks.serve_ray import key_of

    text = RECORDS[0].text
    other = Engine(builtin(), ChunkStore(served.folder / "kv"), method="reuse")
    other.cache_chunks([text])  # after the replicas have opened the store
    first = {one: ask(served, one, prompt_of(0, one)).json() for one in SESSIONS}
    assert [one["samkv"] for one in first.values() if one["samkv"]["reused"] != 1] == []
    for name, before in first.items():
        prompt = f"{prompt_of(0, name)}{before['choices'][0]['text']}\n\nQuestion: Who?\nAnswer:"
        report = ask(served, name, prompt).json()["samkv"]
        assert report["prefix_tokens"] >= before["samkv"]["prompt_tokens"]
    other.forget([text])
    for name in SESSIONS:
        report = ask(served, name, prompt_of(0, name)).json()["samkv"]
        assert (report["found"], report["reused"], report["prefix_chunks"]) == (0, 0, 0)
        assert report["prefix_tokens"] < 8, report  # no kept conversation of before
    reply = httpx.get(f"{served.url}/v1/models", timeout=PATIENCE_S)
    assert reply.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{served.url}/v1/models", headers=key_of("other")).status_code == 200


@pytest.mark.slow
def test_a_client_that_leaves_ends_its_answer(served: Any) -> None:
    from benchmarks.serve_ray import key_of

    body = {"model": "builtin", "prompt": "Documents:\n\n[Dunlux", "max_tokens": 3000,
            "stream": True}  # fmt: skip
    headers = {"x-session-id": "leaving", **key_of("")}
    url = f"{served.url}/v1/completions"

    def figures() -> str:
        # the same session, and so the metrics of the same replica
        return httpx.get(f"{served.url}/metrics", headers=headers, timeout=PATIENCE_S).text

    with httpx.stream("POST", url, json=body, headers=headers, timeout=PATIENCE_S) as stream:
        assert next(stream.iter_lines()).startswith("data: {")
    left = 'samkv_requests_total{path="/v1/completions",status="499"} 1.0'
    wait_until(lambda: left in figures(), "the answer has ended")
    assert "samkv_requests_running 0.0" in figures()


@pytest.mark.slow
def test_a_replica_that_is_killed_costs_its_conversations_a_turn(served: Any) -> None:
    prompts = {one: prompt_of(1, one) for one in SESSIONS}
    before = {one: ask(served, one, prompt).json() for one, prompt in prompts.items()}
    served.kill_one()

    def answered(session: str) -> Any:
        found: list[Any] = []

        def is_answered() -> bool:
            reply = ask(served, session, prompts[session])
            if reply.status_code == 200:
                found.append(reply.json())
            return bool(found)

        wait_until(is_answered, "another replica answers")
        return found[0]

    after = {one: answered(one) for one in SESSIONS}
    texts = {one: reply["choices"][0]["text"] for one, reply in before.items()}
    assert {one: reply["choices"][0]["text"] for one, reply in after.items()} == texts
