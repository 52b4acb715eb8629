"""A real server on a free port of this machine: the built-in model, and the records cached."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.engine.scheduler import Limits, Scheduler
from samkv_integrations.prompt.reader import Prompt
from samkv_integrations.server.app import create_app
from samkv_integrations.server.run import Server, address_of, listen_on
from samkv_integrations.server.service import Settings
from samkv_integrations.server.tenancy import ApiKeys, Tenancy, Tenant
from tests.support.records import CHAT_TEMPLATE, COMPLETION_TEMPLATE, RECORDS, TEXTS, builtin

KEY = "sk-of-the-tests-0001"
METHOD = "epic"
"""Reuses every chunk of prompts as short as those of tests: `auto` may find full prefill faster,
and `samkv-guided` may recompute a chunk that the question names whole."""

MAX_TOKENS = 12
START_S = 60.0

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
def live_server(
    folder: Path, *, keys: str = KEY, limits: Limits | None = None, **settings: Any
) -> Iterator[LiveServer]:
    """Serves the caches of the records from ``folder``, in a thread, while it is entered."""
    scheduler = Scheduler(builtin(), limits)
    tenancy = Tenancy(scheduler, folder, method=METHOD)
    tenancy.engine(Tenant()).cache_chunks(TEXTS)
    api_keys, is_ready = ApiKeys(keys, Tenant()), threading.Event()
    wanted = Settings(**{"model_name": "builtin", "most_tokens": MAX_TOKENS, **settings})
    server = Server(create_app(tenancy, api_keys, wanted), wanted.grace_s, is_ready.set)
    with listen_on("127.0.0.1", 0, api_keys) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            assert is_ready.wait(START_S), "the server did not start"
            beside = Engine(builtin(), ChunkStore(folder / "kv"), method=METHOD, prefix_bytes=0)
            yield LiveServer(url=f"{address_of(listening)}/v1", beside=beside)
        finally:
            server.should_exit = True
            thread.join(START_S)
            assert not thread.is_alive(), "the server did not end"
