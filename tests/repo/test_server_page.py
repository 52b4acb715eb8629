"""The page about the server names what there is: fields, errors, options and metrics."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from samkv_integrations.cli.app import app
from samkv_integrations.server.bodies import Asked, ChatRequest, CompletionRequest, Samkv
from samkv_integrations.server.service import Metrics
from samkv_integrations.server.tenancy import ApiKeys, Tenant
from samkv_integrations.serving.scheduler import Scheduler
from tests.support.models import tiny_model

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
SERVER = "\n".join(
    path.read_text(encoding="utf-8") for path in (ROOT / "samkv_integrations/server").glob("*.py")
)


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def table(text: str, header: str) -> list[list[str]]:
    """The rows under a header, as cells."""
    (rows,) = re.findall(rf"^\| {re.escape(header)} \|.*\n\|[ :|-]+\|\n((?:\|.*\n)+)", text, re.M)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()]


def named(cells: list[str]) -> set[str]:
    return {name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)}


@pytest.mark.parametrize(
    ("header", "fields"),
    [
        ("field", set(Asked.model_fields)),
        ("`/v1/chat/completions`", set(ChatRequest.model_fields) - set(Asked.model_fields)),
        ("`/v1/completions`", set(CompletionRequest.model_fields) - set(Asked.model_fields)),
    ],
)
def test_every_field_has_a_row_and_no_other(header: str, fields: set[str]) -> None:
    rows = table(section("What is taken, and what is refused"), header)
    assert named([row[0] for row in rows]) == fields


def test_our_own_fields_are_named() -> None:
    rows = table(section("What is taken, and what is refused"), "field")
    (own,) = [row[1] for row in rows if row[0] == "`samkv`"]
    assert set(Samkv.model_fields) <= named([own])


def test_every_code_of_an_error_has_a_row() -> None:
    codes = {row[1].strip("`") for row in table(section("Errors"), "status")} - {"null"}
    written = set(re.findall(r'code="(\w+)"', SERVER))
    written |= set(re.findall(r'\d{3}, "\w+", "(\w+)"\)', SERVER))
    assert written - {"client_gone"} <= codes  # that one is read by nobody
    assert {code for code in codes if f'"{code}"' not in SERVER} == set()


def options_of_serve() -> dict[str, Any]:
    """Option of the command -> its default."""
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return {parameter.opts[0]: parameter.default for parameter in command.params}


def test_the_limits_have_their_defaults() -> None:
    options = options_of_serve()
    for option, default, _ in table(section("Limits"), "option"):
        given = options[option.strip("`")]
        assert default == ("none" if given is None else str(given)), option


def test_options_that_are_named_exist() -> None:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    served = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    # of every command, of python -m benchmarks serve, and of docker
    elsewhere = {"--help", "--url", "--build-arg", "--rm"}
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", PAGE)) - elsewhere <= served


def test_every_metric_has_a_row_and_no_other() -> None:
    metrics = Metrics(Scheduler(tiny_model("llama"))).text.decode()
    there = set(re.findall(r"^# TYPE (\w+) (?:counter|gauge|histogram)$", metrics, re.M))
    there = {name for name in there if not name.endswith("_created")}
    assert named([row[0] for row in table(section("Metrics"), "name")]) == there


def test_its_keys_are_such() -> None:
    (sample,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    everybody = Tenant(collections=("town",))
    keys = ApiKeys(sample, everybody)
    found = [
        keys.tenant_of(f"Bearer {line.split()[0]}")
        for line in sample.splitlines()
        if not line.startswith("#")
    ]
    assert found == [
        everybody,
        Tenant(namespace="tenant-7"),
        Tenant(namespace="tenant-8", collections=("letters",)),
        Tenant(collections=("letters",)),
    ]
