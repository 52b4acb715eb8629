"""What stands before every route."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from samkv_integrations.engine import Engine
from samkv_integrations.server.app import create_app
from samkv_integrations.server.service import Settings
from tests.server.conftest import KEYS, App
from tests.support.asgi import Client
from tests.support.served import PROMPT, TEXTS

ASKED = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3}
SECRET = "zebra crossing at midnight"
PATHS = ["/v1/models", "/metrics", "/openapi.json", "/v1/nothing", "/docs"]


# -- keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("header", [{}, {"authorization": "Bearer sk-of-the-red-tean"}])
async def test_nothing_without_a_key(
    path: str, header: dict[str, str], make_app: Callable[..., App]
) -> None:
    reply = await make_app(keys=KEYS).client.got(path, **header)
    assert reply.status == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.error["code"] == "invalid_api_key"


async def test_health_needs_none(make_app: Callable[..., App]) -> None:
    reply = await make_app(keys=KEYS).client.got("/health")
    assert (reply.status, reply.body) == (200, {"status": "ok"})


async def test_a_key_sees_the_caches_of_its_namespace_only(make_app: Callable[..., App]) -> None:
    app = make_app(keys=KEYS)
    app.engine("red").cache_chunks(TEXTS)
    red = (await app.of("sk-of-the-red-team").posted("/v1/completions", ASKED)).body
    for key in ("sk-of-the-blue-team", "sk-of-nobody-else-1"):
        other = (await app.of(key).posted("/v1/completions", ASKED)).body
        assert other["samkv"]["found"] == 0
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert red["samkv"]["reused"] == 3
    assert red["usage"]["prompt_tokens_details"]["cached_tokens"] > 100


# -- hosts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000"])
async def test_loopback_names(host: str, app: App) -> None:
    assert (await app.client.got("/v1/models", host=host)).status == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io", ""])
async def test_another_name_may_be_a_page_in_a_browser(host: str, app: App) -> None:
    reply = await app.client.got("/v1/models", host=host)
    assert (reply.status, reply.error["code"]) == (403, "wrong_host")


async def test_with_keys_any_name_will_do(make_app: Callable[..., App]) -> None:
    client = make_app(keys=KEYS).of("sk-of-the-red-team")
    assert (await client.got("/v1/models", host="models.example")).status == 200


async def test_a_form_of_another_page_is_no_request(app: App) -> None:
    """A browser sends these without asking first; JSON it does not."""
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        reply = await app.client.posted("/v1/completions", ASKED, content_type=kind)
        assert reply.status == 400
        assert "content-type: application/json" in reply.error["message"]


# -- sizes --------------------------------------------------------------------------------------


async def test_a_body_that_says_that_it_is_too_large(app: App) -> None:
    reply = await app.client.begin(
        "POST", "/v1/completions", [b"{"], is_whole=False, content_length="100001"
    ).end()
    assert (reply.status, reply.error["code"]) == (413, "body_too_large")


async def test_a_body_that_turns_out_to_be(app: App) -> None:
    parts = [b" " * 60_000, b" " * 60_000]
    reply = await app.client.begin("POST", "/v1/completions", parts, is_whole=False).end()
    assert reply.status == 413


async def test_the_largest_body_is_read(app: App) -> None:
    padded = b'{"model": "tiny", "prompt": "Q:", "max_tokens": 1}'.ljust(100_000)
    assert (await app.client.posted("/v1/completions", padded)).status == 200


# -- ids, logs, metrics -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "is_kept"), [("r-1.2:3_x", True), ("x" * 129, False), ("a b", False), ("", False)]
)
async def test_request_ids(given: str, is_kept: bool, app: App) -> None:
    found = (await app.client.got("/health", x_request_id=given)).headers["x-request-id"]
    assert (found == given) == is_kept
    assert found


async def test_an_id_stands_on_errors_too(app: App) -> None:
    for reply in (await app.client.got("/nothing"), await app.client.posted("/v1/completions", {})):
        assert reply.headers["x-request-id"]
        assert reply.error["type"] == "invalid_request_error"


async def test_what_fails_by_surprise_tells_nothing(
    app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise RuntimeError(SECRET)

    monkeypatch.setattr(Engine, "astream", fail)
    reply = await app.client.posted("/v1/completions", ASKED, x_request_id="id-7")
    assert (reply.status, reply.error["type"]) == (500, "server_error")
    assert SECRET not in reply.text
    assert "id-7" in caplog.text
    assert "RuntimeError" in caplog.text
    assert "service.py" in caplog.text
    assert SECRET not in caplog.text


async def test_where_the_store_lies_goes_to_the_log_alone(
    make_app: Callable[..., App], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kv").write_text("no folder")
    app = make_app()
    for path, body in (("/v1/completions", ASKED), ("/v1/samkv/chunks", {"texts": ["a"]})):
        reply = await app.client.posted(path, body, x_request_id="id-8")
        assert (reply.status, reply.error["code"]) == (500, "store_error")
        assert str(tmp_path) not in reply.text
        assert f"request id-8: {tmp_path / 'kv'} is not a folder" in caplog.text
        caplog.clear()


TURNS = {"model": "tiny", "messages": [{"role": "user", "content": "Q?"}]}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", ASKED | {"prompt": "word " * 9_000}),
        ("/v1/completions", ASKED | {"max_tokens": 90_000}),
        ("/v1/completions", {"model": "tiny", "prompt": "word " * 9_000, "stream": True}),
        ("/v1/completions", ASKED | {"model": "/srv"}),
        ("/v1/chat/completions", TURNS | {"tools": [TOOL]}),
        ("/v1/responses", {"model": "tiny", "input": "word " * 9_000}),
        ("/v1/samkv/chunks", {"texts": ["word " * 9_000]}),
    ],
)
async def test_errors_name_the_model_as_clients_do(
    path: str, body: dict[str, object], app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They told the folder of the model."""
    monkeypatch.setattr(app.scheduler.model, "name", "/srv/models/of-ours")
    reply = await app.client.posted(path, body)
    assert reply.status in (400, 404), reply.text
    assert "'tiny'" in reply.error["message"] and "/srv/models" not in reply.text


@pytest.mark.parametrize("is_asked_for", [False, True])
async def test_prompts_are_logged_only_if_asked_for(
    is_asked_for: bool, make_app: Callable[..., App], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    app = make_app(logs_prompts=is_asked_for)
    client: Client = app.client
    await client.posted("/v1/completions", ASKED | {"prompt": SECRET})
    await client.posted("/v1/completions", ASKED | {"prompt": SECRET * 1000})  # too long
    await client.posted("/v1/completions", ASKED | {"prompt": SECRET, "n": 2})
    await client.posted("/v1/completions", {SECRET: SECRET})
    turn = {"role": "user", "content": SECRET}
    await client.posted("/v1/chat/completions", {"model": "tiny", "messages": [turn]})
    assert (SECRET in caplog.text) == is_asked_for
    assert "POST /v1/completions 200" in caplog.text


async def metrics(app: App) -> str:
    return (await app.client.got("/metrics")).text


async def test_metrics_of_answers(app: App) -> None:
    app.engine().cache_chunks(TEXTS)
    report = (await app.client.posted("/v1/completions", ASKED)).body["samkv"]
    await app.client.posted("/v1/completions", ASKED | {"prompt": 3})
    app.scheduler.run(lambda _: None)  # after what it was at when the answer was read
    text = await metrics(app)
    for line in (
        'samkv_requests_total{path="/v1/completions",status="200"} 1.0',
        'samkv_requests_total{path="/v1/completions",status="400"} 1.0',
        'samkv_chunks_total{outcome="reused"} 3.0',
        "samkv_time_to_first_token_seconds_count 1.0",
        "samkv_requests_running 0.0",
        f"samkv_generated_tokens_total {report['completion_tokens']:.1f}",
        f"samkv_read_bytes_total {float(report['bytes_read'])}",
    ):
        assert line in text
    sums = [line for line in text.splitlines() if line.startswith("samkv_prompt_tokens_total")]
    assert sum(float(line.split()[-1]) for line in sums) == report["prompt_tokens"]


async def test_clients_cannot_make_up_labels(app: App) -> None:
    for number in range(20):
        await app.client.got(f"/made/up/{number}")
        await app.client.got(f"/v1/models/{number}")
    text = await metrics(app)
    assert 'path="other",status="404"} 20.0' in text
    assert text.count('samkv_requests_total{path="') == 2


async def test_answers_of_engines_are_counted_whenever_they_were_opened(app: App) -> None:
    before = app.engine()
    again = create_app(app.tenancy, app.keys, Settings(model_name="tiny"))
    for engine in (before, app.engine("later")):
        engine.generate("Who?", max_new_tokens=1)
    text = (await Client(again).got("/metrics")).text
    assert "samkv_generated_tokens_total 2.0" in text


async def test_clients_cannot_say_who_asks(app: App) -> None:
    reply = await app.client.posted("/v1/completions", ASKED | {"samkv": {"owner": "another"}})
    assert reply.status == 400 and "owner" in reply.error["message"]


async def test_web_pages_of_named_origins_only(make_app: Callable[..., App]) -> None:
    page, asks = "https://chat.example.org", {"access_control_request_method": "POST"}
    asks["access_control_request_headers"] = "authorization,content-type,x-stainless-arch"
    app = make_app(keys="sk-of-the-red-team", cors_origins=[page])
    for origin, is_allowed in ((page, True), ("https://other.example.org", False)):
        asked = app.client.begin("OPTIONS", "/v1/chat/completions", [b""], origin=origin, **asks)
        first = await asked.end()
        got = await app.of("sk-of-the-red-team").got("/v1/models", origin=origin)
        assert (first.status == 200, got.status) == (is_allowed, 200)
        for reply in (first, got):
            allowed = reply.headers.get("access-control-allow-origin")
            assert allowed == (page if is_allowed else None)
    plain = make_app(keys="sk-of-the-red-team")
    asked = plain.client.begin("OPTIONS", "/v1/chat/completions", [b""], origin=page, **asks)
    assert (await asked.end()).status == 401
