"""A real server on a free port of this machine: the built-in model, and the records cached."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from typer.testing import CliRunner

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.cli.app import app as cli
from samkv_integrations.prompt.reader import Prompt
from samkv_integrations.runtimes.transformers.loading import load_model
from samkv_integrations.server.app import create_app
from samkv_integrations.server.run import Server, address_of, listen_on
from samkv_integrations.server.service import Settings
from samkv_integrations.server.tenancy import ApiKeys, Tenancy, Tenant
from samkv_integrations.serving.fairness import FairTurns
from samkv_integrations.serving.scheduler import Scheduler
from samkv_integrations.serving.turns import Limits
from tests.support.records import CHAT_TEMPLATE, COMPLETION_TEMPLATE, RECORDS, TEXTS, builtin

KEY = "sk-of-the-tests-0001"
METHOD = "epic"
"""Reuses every chunk of prompts as short as those of tests: `auto` may find full prefill faster,
and `samkv-guided` may recompute a chunk that the question names whole."""

MAX_TOKENS = 12
PATIENCE_S = 120.0
ROOT = Path(__file__).parents[2]

ASKED = RECORDS[2]
COMPLETION = COMPLETION_TEMPLATE.format(context_str="\n\n".join(TEXTS), query_str=ASKED.question)
QUESTION = CHAT_TEMPLATE.format(context_str="\n\n".join(TEXTS), query_str=ASKED.question)
CHAT: list[dict[str, str]] = [{"role": "user", "content": QUESTION}]


@dataclass(frozen=True, kw_only=True)
class LiveServer:
    """A server that runs.

    url: with ``/v1``. beside: an engine on the server's folder that shares nothing else with it but
    the model, and has none of the prompts in memory that the server was asked before.
    """

    url: str
    beside: Engine

    def answer(self, prompt: Prompt, **options: Any) -> str:
        """What the engine beside the server answers from the caches of all records."""
        answer = self.beside.generate(prompt, **{"max_new_tokens": MAX_TOKENS, **options})
        assert answer.report.reused == len(TEXTS)
        return answer.text


@contextmanager
def answering(app: FastAPI, keys: ApiKeys) -> Iterator[str]:
    """The address of an application while it runs, in a thread."""
    is_ready = threading.Event()
    server = Server(app, 30, is_ready.set)
    with listen_on("127.0.0.1", 0, keys) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            assert is_ready.wait(PATIENCE_S), "the server did not start"
            yield address_of(listening)
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "the server did not end"


@contextmanager
def live_server(
    folder: Path, *, keys: str = KEY, limits: Limits | None = None, **settings: Any
) -> Iterator[LiveServer]:
    """Serves the caches of the records from ``folder`` while it is entered."""
    tenancy = Tenancy(Scheduler(builtin(), limits, turns=FairTurns), folder, method=METHOD)
    tenancy.engine(Tenant()).cache_chunks(TEXTS)
    api_keys = ApiKeys(keys, Tenant())
    wanted = Settings(**{"model_name": "builtin", "most_tokens": MAX_TOKENS, **settings})
    with answering(create_app(tenancy, api_keys, wanted), api_keys) as address:
        beside = Engine(builtin(), ChunkStore(folder / "kv"), method=METHOD, prefix_bytes=0)
        yield LiveServer(url=f"{address}/v1", beside=beside)


@contextmanager
def serving_town(folder: Path) -> Iterator[str]:
    """Where collection ``notes`` of the sample documents is served, as the README has it.

    In this process: ``samkv serve`` as a process has its own tests.
    """
    ingested = CliRunner().invoke(
        cli, ["ingest", str(ROOT / "examples/town_records"), "--collection", "notes",
              "--dir", str(folder)],
    )  # fmt: skip
    assert ingested.exit_code == 0, ingested.output
    keys = ApiKeys("", Tenant(collections=("notes",)))
    settings = Settings(model_name="builtin")
    tenancy = Tenancy(Scheduler(load_model("builtin"), turns=FairTurns), folder)
    with answering(create_app(tenancy, keys, settings), keys) as address:
        yield address
