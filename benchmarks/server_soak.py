"""A server, many clients, and all that clients do: leave in mid-answer, send nonsense, wrong keys.

    python -m benchmarks.server_soak --minutes 60 --clients 8

``samkv serve`` runs in a process of its own on the built-in model. Two tenants have keys and half
of the documents each. Of the requests a tenth leave at once, after the first event or in the midst,
and a tenth are refused, each in its own way. Some ask for the other tenant's documents, which must
not be found. Some cache texts of their own, ask about them, and delete them; then they must not be
found either. Every other answer is compared with that of an engine that answers one by one over the
same chunk caches. Beside them ``samkv ingest``, ``ask`` and ``remove`` run over and over in the
server's folder. Memory and file descriptors are the server's own figures, every half a minute;
``memory_growth`` is the median of memory's last quarter over that of the quarter before, less one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.datasets import load
from benchmarks.serve import serving
from samkv_integrations import ChunkStore, Engine
from samkv_integrations.cli.formatting import commit
from samkv_integrations.prompt import rag_prompt
from samkv_integrations.prompt.layout import find_runs
from samkv_integrations.prompt.quoting import RenderedPrompt
from samkv_integrations.runtimes.transformers import load_model
from samkv_integrations.store.windows import MemoryIndex

KEYS = {"red": "sk-soak-of-the-red-team", "blue": "sk-soak-of-the-blue-team"}
METHODS = ("reuse", "samkv-guided", "recompute")
"""Not auto, which goes by time and may answer either way."""
MAX_TOKENS = 16
PATIENCE_S = 300.0
LOOK_S = 30.0
PAUSE_S = 5.0
"""Seconds between two rounds of the command line."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A prompt of a tenant.

    answers: by method.
    shared: chunks of the other tenant's own documents that have 16 tokens in a row with it.
    """

    tenant: str
    prompt: str
    documents: tuple[str, ...]
    answers: dict[str, str]
    shared: int


@dataclass
class Tally:
    """What has come of the requests so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    figures: list[dict[str, float]] = field(default_factory=list)


def questions(n: int) -> list[tuple[str, str, tuple[str, ...]]]:
    """Tenant, prompt and documents of ``n`` questions of the shipped set."""
    found = [each for each in load() if len(each.documents) > 1][:n]
    return [
        (("red", "blue")[at % 2], str(rag_prompt(q.question, q.documents)), tuple(q.documents))
        for at, q in enumerate(found)
    ]


def expected(folder: Path, rows: Sequence[tuple[str, str, tuple[str, ...]]]) -> list[Asked]:
    """Each question with its answers, one by one, over the server's caches."""
    torch.set_num_threads(1)
    model = load_model("builtin")
    own = {name: MemoryIndex(b"soak") for name in KEYS}
    for tenant, _, documents in rows:
        for body in documents:
            own[tenant].add(body, model.tokenize(body, special=False))
    engines = {
        name: Engine(model, ChunkStore(folder / "kv", namespace=name), prefix_bytes=0)
        for name in KEYS
    }

    def shared(tenant: str, prompt: str) -> int:
        (other,) = KEYS.keys() - {tenant}
        return len(find_runs(model.tokenize_prompt(RenderedPrompt(prompt)), [own[other]]))

    def answer(tenant: str, prompt: str, method: str) -> str:
        return engines[tenant].generate(prompt, method=method, max_new_tokens=MAX_TOKENS).text

    return [
        Asked(
            tenant=tenant, prompt=prompt, documents=documents,
            answers={method: answer(tenant, prompt, method) for method in METHODS},
            shared=shared(tenant, prompt),
        )
        for tenant, prompt, documents in rows
    ]  # fmt: skip


def refused(rng: random.Random, good: dict[str, Any]) -> tuple[bytes, dict[str, str], set[int]]:
    """A body, headers of its own, and the statuses that it may have."""
    bad: list[tuple[Any, dict[str, str], set[int]]] = [
        (good | {"n": 2}, {}, {400}),
        (good | {"model": "gpt-4"}, {}, {404}),
        (good | {"max_tokens": 100_000}, {}, {400}),
        (good | {"prompt": ["a", "b"]}, {}, {400}),
        (good | {"tools": [1]}, {}, {400}),
        (good | {"temperature": -1}, {}, {400}),
        (good | {"unknown": 1}, {}, {400}),
        (good, {"authorization": "Bearer sk-soak-of-nobody-at-all"}, {401}),
        (good, {"authorization": ""}, {401}),
        (b"{", {}, {400}),
        (b"\xff\x00", {}, {400}),
        (b"[" * 10_000, {}, {400}),
        (b" " * 9_000_000, {}, {413}),
        (good, {"content-type": "text/plain"}, {400}),
    ]
    body, headers, statuses = rng.choice(bad)
    return (body if isinstance(body, bytes) else json.dumps(body).encode()), headers, statuses


class Soak:
    """The clients. asked: what they ask; tally: what has come of it."""

    def __init__(self, http: httpx.AsyncClient, asked: Sequence[Asked], seed: int) -> None:
        self._http, self._asked, self._rng = http, asked, random.Random(seed)
        self.tally = Tally()
        self._began = 0.0

    async def run(self, minutes: float, n_clients: int, folder: Path) -> None:
        """Send requests for so long, and look at the server every half a minute.

        folder: the server's, for the command line.
        """
        self._began = time.monotonic()
        ends = self._began + 60 * minutes

        async def client() -> None:
            while time.monotonic() < ends:
                await self._one()

        async def look() -> None:
            while time.monotonic() < ends:
                await self.look()
                await asyncio.sleep(min(LOOK_S, max(0.0, ends - time.monotonic())))

        async with asyncio.TaskGroup() as group:
            group.create_task(look())
            group.create_task(self._command_line(folder, ends))
            for _ in range(n_clients):
                group.create_task(client())
        await self.look()

    async def look(self) -> None:
        """Note the server's figures."""
        found = await server_figures(self._http)
        names = ("process_resident_memory_bytes", "process_open_fds", "samkv_requests_running",
                 "samkv_requests_waiting", "samkv_kv_bytes")  # fmt: skip
        at = {"minute": round((time.monotonic() - self._began) / 60, 1)}
        self.tally.figures.append(at | {name: found[name] for name in names})

    async def _command_line(self, folder: Path, ends: float) -> None:
        """Ingest a document, ask about it and remove it, over and over."""
        document, answers = folder / "beside.txt", set[str]()
        document.write_text("The night ferry to Halmar takes forty minutes.\n" * 5)
        options = ("--dir", str(folder), "--collection", "beside", "--namespace", "red", "--json")
        asking = ("ask", "How long does the night ferry take?", "--method", "reuse")
        while time.monotonic() < ends:
            for command in (("ingest", str(document)), asking, ("remove", str(document))):
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "samkv_integrations", *command, *options,
                    stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                )  # fmt: skip
                said, complaint = await process.communicate()
                if process.returncode:
                    self.tally.wrong.append(f"samkv {command[0]}: {complaint.decode()[-200:]}")
                elif command is asking:
                    (row,) = json.loads(said)["rows"]
                    answers.add(row["answer"])
                    if row["reused"] != 1 or len(answers) != 1:
                        self.tally.wrong.append(f"samkv ask: {row['reused']} reused, {answers}")
            self.tally.outcomes["command line"] += 1
            await asyncio.sleep(PAUSE_S)

    async def _one(self) -> None:
        rng, asked = self._rng, self._rng.choice(self._asked)
        method, kind = rng.choice(METHODS), rng.random()
        body = {
            "model": "builtin", "prompt": asked.prompt, "max_tokens": MAX_TOKENS,
            "samkv": {"method": method}, "stream": rng.random() < 0.5,
        }  # fmt: skip
        began = time.perf_counter()
        async with asyncio.timeout(PATIENCE_S):  # one that passes ends the soak: it hangs
            if kind < 0.1:
                await self._leave(asked, body | {"stream": True, "max_tokens": 200})
                return
            if kind < 0.2:
                await self._be_refused(asked, body)
                return
            if kind < 0.25:
                await self._spy(asked, body | {"stream": False})
                return
            if kind < 0.3:
                await self._cache_and_delete(asked.tenant, body | {"stream": False})
                return
            await self._ask(asked, body, method)
        self.tally.seconds.append(time.perf_counter() - began)

    async def _ask(self, asked: Asked, body: dict[str, Any], method: str) -> None:
        reply = await self._http.post("/v1/completions", json=body, headers=_of(asked.tenant))
        if reply.status_code != 200:
            self.tally.wrong.append(f"{reply.status_code}: {reply.text[:200]}")
            return
        if body["stream"]:
            data = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
            is_whole = data.pop() == "[DONE]"
            events = [json.loads(each) for each in data]
            text = "".join(event["choices"][0]["text"] for event in events)
            samkv = events[-1]["samkv"]
        else:
            is_whole, (choice,) = True, reply.json()["choices"]
            text, samkv = choice["text"], reply.json()["samkv"]
        self.tally.outcomes["streamed" if body["stream"] else "whole"] += 1
        right = asked.answers[method]
        if not is_whole or text != right or samkv["found"] != len(asked.documents):
            self.tally.wrong.append(f"{method}: {text!r} for {right!r}, {samkv}")

    async def _leave(self, asked: Asked, body: dict[str, Any]) -> None:
        n_events = self._rng.choice((0, 1, 5))
        if n_events == 0:
            task = asyncio.create_task(
                self._http.post("/v1/completions", json=body, headers=_of(asked.tenant))
            )
            await asyncio.sleep(self._rng.random() / 10)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            async with self._http.stream(
                "POST", "/v1/completions", json=body, headers=_of(asked.tenant)
            ) as reply:
                async for line in reply.aiter_lines():
                    n_events -= line.startswith("data: ")
                    if not n_events:
                        break
        self.tally.outcomes["left"] += 1

    async def _be_refused(self, asked: Asked, body: dict[str, Any]) -> None:
        content, headers, statuses = refused(self._rng, body)
        own = {"content-type": "application/json", **_of(asked.tenant), **headers}
        reply = await self._http.post("/v1/completions", content=content, headers=own)
        self.tally.outcomes["refused"] += 1
        is_shaped = "message" in reply.json().get("error", {})
        if reply.status_code not in statuses or not is_shaped:
            self.tally.wrong.append(f"{statuses}: {reply.status_code} {reply.text[:200]}")

    async def _spy(self, asked: Asked, body: dict[str, Any]) -> None:
        """Ask with the other tenant's key."""
        other = next(name for name in KEYS if name != asked.tenant)
        own = body | {"samkv": {"method": "reuse", "on_miss": "text"}}
        reply = await self._http.post("/v1/completions", json=own, headers=_of(other))
        self.tally.outcomes["spied"] += 1
        if reply.status_code != 200 or reply.json()["samkv"]["found"] > asked.shared:
            self.tally.wrong.append(f"leak: {reply.text[:300]}")

    async def _cache_and_delete(self, tenant: str, body: dict[str, Any]) -> None:
        """Texts that nobody else has: cached, found in a prompt, deleted, found no more."""
        texts = [
            "Readings: " + " ".join(str(self._rng.randrange(10**6)) for _ in range(40))
            for _ in range(3)
        ]
        own = body | {"prompt": str(rag_prompt("What was read?", texts))}
        own["samkv"] = {"method": "reuse", "on_miss": "text"}
        found = []
        for method in ("POST", "DELETE"):
            changed = await self._http.request(
                method, "/v1/samkv/chunks", json={"texts": texts}, headers=_of(tenant)
            )
            reply = await self._http.post("/v1/completions", json=own, headers=_of(tenant))
            if {changed.status_code, reply.status_code} != {200}:
                self.tally.wrong.append(f"{method}: {changed.text[:200]} {reply.text[:200]}")
                return
            found.append(reply.json()["samkv"]["found"])
        self.tally.outcomes["cached and deleted"] += 1
        if found != [len(texts), 0]:
            self.tally.wrong.append(f"found {found} of {len(texts)} texts, before and after")


def _of(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[tenant]}"}


def client_of(url: str) -> httpx.AsyncClient:
    """A client without a limit of connections. url: the server's, which ends with ``/v1``."""
    return httpx.AsyncClient(
        base_url=url.removesuffix("/v1"), timeout=PATIENCE_S, trust_env=False,
        limits=httpx.Limits(max_connections=None),
    )  # fmt: skip


async def soak(folder: Path, url: str, asked: Sequence[Asked], args: argparse.Namespace) -> Tally:
    """All clients; the figures end with those of a server that has nothing to do."""
    async with client_of(url) as http:
        clients = Soak(http, asked, args.seed)
        await clients.run(args.minutes, args.clients, folder)
        while clients.tally.figures[-1]["samkv_requests_running"]:
            await clients.look()
        return clients.tally


async def fill(url: str, rows: Sequence[tuple[str, str, tuple[str, ...]]]) -> None:
    """Have each tenant's documents cached."""
    async with client_of(url) as http:
        for tenant in KEYS:
            texts = list(dict.fromkeys(t for name, _, of in rows if name == tenant for t in of))
            for at in range(0, len(texts), 32):
                body = {"texts": texts[at : at + 32]}
                reply = await http.post("/v1/samkv/chunks", json=body, headers=_of(tenant))
                reply.raise_for_status()


async def server_figures(http: httpx.AsyncClient) -> dict[str, float]:
    """The server's metrics by name; of one with labels, any."""
    reply = await http.get("/metrics", headers=_of("red"))
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }


@contextmanager
def two_tenants(n_questions: int, *options: str) -> Iterator[tuple[Path, str, list[Asked]]]:
    """A server with the documents of both: its folder, its URL, and what they ask.

    options: of the server.
    """
    rows = questions(n_questions)
    with tempfile.TemporaryDirectory() as name:
        keys = Path(name) / "keys"
        keys.write_text("".join(f"{key} {tenant}\n" for tenant, key in KEYS.items()))
        with serving(["--dir", name, "--api-keys", str(keys), *options]) as url:
            asyncio.run(fill(url, rows))
            yield Path(name), url, expected(Path(name), rows)


def growth(values: Sequence[float]) -> float | None:
    """The median of the last quarter over that of the quarter before, less one; None for few."""
    quarter = len(values) // 4
    if not quarter:
        return None
    before, last = values[-2 * quarter : -quarter], values[-quarter:]
    return round(statistics.median(last) / statistics.median(before) - 1, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with two_tenants(args.questions, "--max-waiting", "1000") as server:
        tally = asyncio.run(soak(*server, args))
    row = {
        "minutes": args.minutes, "clients": args.clients, **tally.outcomes,
        "wrong": len(tally.wrong),
        "median_s": round(statistics.median(tally.seconds), 3),
        "longest_s": round(max(tally.seconds), 3),
        "memory_growth": growth([each["process_resident_memory_bytes"] for each in tally.figures]),
        "figures": tally.figures, "commit": commit(),
    }  # fmt: skip
    print(json.dumps(row, indent=2))
    for each in tally.wrong[:10]:
        print(each)
    raise SystemExit(bool(tally.wrong))


if __name__ == "__main__":
    main()
