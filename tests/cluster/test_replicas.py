"""Replicas of the server: what Ray is told, and what each of them answers. No cluster is begun."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from samkv_integrations.cluster.serve import without_request_id
from samkv_integrations.engine.options import EngineOptions
from samkv_integrations.engine.scheduler import Limits
from samkv_integrations.errors import InvalidOption
from samkv_integrations.methods import get_method
from samkv_integrations.server.app import create_app
from samkv_integrations.server.run import ServerSource
from samkv_integrations.server.service import Settings
from samkv_integrations.server.tenancy import ApiKeys, Tenant
from tests.cli.running import error_of
from tests.support.asgi import Client

KEY = "sk-of-the-red-team"
ASKED = {"model": "tiny", "prompt": "abc def", "max_tokens": 6}


def source_in(folder: Path, model: str) -> ServerSource:
    return ServerSource(
        model=model,
        device="cpu",
        folder=folder,
        options=EngineOptions(method=get_method("samkv-guided"), eviction="snapkv", block_size=8),
        limits=Limits(max_batch=2, max_waiting=3),
        keys=ApiKeys(f"{KEY} red", Tenant()),
        settings=Settings(model_name="tiny", most_tokens=6, max_body_bytes=2_000),
    )


async def asked(app: Any, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
    """Status, and what of the answer depends on no time."""
    client = Client(app, authorization=f"Bearer {KEY}")
    found = await client.posted("/v1/completions", body, **headers)
    if body.get("stream"):
        return found.status, [each.get("choices") for each in found.events]
    return found.status, found.body.get("choices") or found.error


async def test_a_replica_is_made_of_what_is_sent_and_answers_like_one_process(
    tmp_path: Path, tiny: str
) -> None:
    source = source_in(tmp_path, tiny)
    alone = create_app(source.tenancy(), source.keys, source.settings)
    sent = pickle.dumps(source.replica)
    assert KEY.encode() not in sent
    replica = without_request_id(pickle.loads(sent)())
    statuses = []
    for body in (
        ASKED,
        ASKED | {"stream": True},
        ASKED | {"model": "another"},
        ASKED | {"surprise": 1},
        ASKED | {"prompt": "a" * 3_000},
    ):
        expected, found = await asked(alone, body), await asked(replica, body)
        assert found == expected
        statuses.append(found[0])
    assert statuses == [200, 200, 404, 400, 413]
    assert (await asked(replica, ASKED, authorization="Bearer wrong"))[0] == 401


async def test_the_header_of_the_id_is_left_to_the_proxy(tmp_path: Path, tiny: str) -> None:
    """Ray's proxies add it to every response: a client saw it twice."""
    source = source_in(tmp_path, tiny)
    app = create_app(source.tenancy(), source.keys, source.settings)
    found = await Client(app).got("/health", x_request_id="mine")
    assert found.headers["x-request-id"] == "mine"
    found = await Client(without_request_id(app)).got("/health", x_request_id="mine")
    assert found.status == 200 and "content-type" in found.headers
    assert "x-request-id" not in found.headers


def test_a_folder_that_is_not_on_the_machine_of_a_replica(tmp_path: Path, tiny: str) -> None:
    with pytest.raises(InvalidOption, match="does not exist here"):
        source_in(tmp_path / "elsewhere", tiny).replica()
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--replicas", "2"), "--replicas 2 has no effect without --ray"),
        (("--route", "load"), "'--route' was removed; put a proxy"),
        (("--ray", "--max-replicas=2"), "'--max-replicas' was removed; the number of replicas"),
        (("--ray-address", "auto"), "--ray-address auto has no effect without --ray"),
        (("--ray", "--device", "cuda"), "--device cuda for replicas without a GPU"),
        (("--ray", "--ray-address", "nowhere"), "address='nowhere'"),
        (("--ray", "--host", "0.0.0.0"), "--host 0.0.0.0 without API keys"),
        (("--ray", "--port", "0", "--model", "nowhere/at-all"), "nowhere/at-all"),
    ],
)
def test_what_the_command_refuses(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    assert message in error_of("serve", "--dir", str(tmp_path), *arguments)
