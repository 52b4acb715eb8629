"""``/openapi.json``: valid, complete, and true of what the server sends."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.routing import APIRoute
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from samkv_integrations.server.app import OPEN_PATHS
from tests.support.records import RECORDS, TEXTS
from tests.support.served_town import KEYS, RED, Town, fill


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Town:
    folder = tmp_path_factory.mktemp("town")
    fill(folder, "red-town", "red")
    return Town(folder, keys=KEYS)


@pytest.fixture
async def document(town: Town) -> dict[str, Any]:
    return await town.json("GET", "/openapi.json", key=RED)


def schema_of(
    document: dict[str, Any], method: str, path: str, status: int | str
) -> dict[str, Any]:
    response = document["paths"][path][method]["responses"][str(status)]
    schema: dict[str, Any] = response["content"]["application/json"]["schema"]
    return schema


def check(document: dict[str, Any], schema: dict[str, Any], body: object) -> None:
    whole = {**schema, "components": document["components"]}
    Draft202012Validator(whole).validate(body)


def test_it_is_valid_and_holds_every_route(town: Town, document: dict[str, Any]) -> None:
    validate(document)
    described = {
        (method, path) for path, methods in document["paths"].items() for method in methods
    }
    served = {
        (method.lower(), route.path_format)
        for route in town.asgi.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in route.methods
    }
    assert served <= described


def test_only_health_and_the_page_are_open(document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert operation.get("security") == (
                None if path in OPEN_PATHS else [{"HTTPBearer": []}]
            )


def test_errors_are_in_openais_shape_everywhere(document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert "422" not in operation["responses"]  # the server has none
            if path not in OPEN_PATHS:
                assert "default" in operation["responses"]
    error = schema_of(document, "post", "/v1/samkv/ask", "default")
    assert error["$ref"].endswith("/ErrorBody")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("post", "/v1/samkv/chunks", {"texts": TEXTS[:2]}),
        ("get", "/v1/samkv/chunks", None),
        ("delete", "/v1/samkv/chunks", {"texts": ["never seen"]}),
        (
            "post",
            "/v1/samkv/ask",
            {"question": RECORDS[0].question, "collection": "red-town", "max_tokens": 2},
        ),
        ("get", "/v1/samkv/collections", None),
        ("get", "/v1/samkv/methods", None),
        ("post", "/v1/completions", {"model": "town-model", "prompt": "a", "max_tokens": 2}),
        ("post", "/v1/responses", {"model": "town-model", "input": "a", "max_output_tokens": 2}),
        (
            "post",
            "/v1/chat/completions",
            {
                "model": "town-model",
                "messages": [{"role": "user", "content": "a"}],
                "max_tokens": 2,
            },
        ),
    ],
)
async def test_responses_are_as_described(
    town: Town, document: dict[str, Any], method: str, path: str, body: object
) -> None:
    found = await town.json(method.upper(), path, body, key=RED)
    check(document, schema_of(document, method, path, 200), found)
    refused = await town.json(method.upper(), path, body, status=401)
    check(document, schema_of(document, method, path, "default"), refused)


def test_examples_are_bodies_that_are_described(document: dict[str, Any]) -> None:
    for name in ("Texts", "Question"):
        schema = document["components"]["schemas"][name]
        (example,) = schema["examples"]
        check(document, schema, example)


def test_streams_are_described(document: dict[str, Any]) -> None:
    for path in ("/v1/samkv/ask", "/v1/completions", "/v1/chat/completions", "/v1/responses"):
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert "[DONE]" in content["text/event-stream"]["schema"]["description"]
