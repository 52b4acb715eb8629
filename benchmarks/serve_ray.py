"""Replicas on Ray Serve: conversations that stay where they are kept, and replicas that are killed.

    python -m benchmarks serve_ray
    python -m benchmarks serve_ray --model FILE.gguf --runtime llama_cpp --minutes 10

Clients have conversations of five turns, each with an ``x-session-id``, with two replicas of a
thread each, and with one replica of two threads. ``kept`` is the share of follow-ups that had at
least .9 of the turn before from memory.

With ``--minutes`` two replicas then answer for so long, while one is killed in the midst of
answers, and a third is added. A turn that failed is asked again. Each complete answer of
`recompute`, and each first one of `reuse`, is compared with that of an engine which answers one by
one, from the same caches and without memory; a follow-up of `reuse` may recompute other tokens than
a prompt that is new. An answer that differs is ``wrong``, unless it leaves the expected one at a
near-tie (see `near_ties`). Beside them a second tenant has this process cache a text, sessions ask
about it, it is deleted, by this process or over HTTP, and all ask again: an answer that still has
any entry of before counts as ``leaked``.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer

from benchmarks import models
from benchmarks import options as own
from benchmarks.commands import command_line, loaded_model, time_table
from benchmarks.datasets import load
from benchmarks.near_ties import Expected, expected, noise_of
from benchmarks.run_settings import machine
from benchmarks.serve import EMPTY, ask, percentile
from samkv_integrations import ChunkStore, Engine
from samkv_integrations.cli import formatting
from samkv_integrations.cli.formatting import Row
from samkv_integrations.cli.serve import KEYS_VARIABLE
from samkv_integrations.ingest.cluster import WorkerPool

KEYS = {"": "sk-of-the-bench-0001", "other": "sk-of-the-bench-0002"}
"""By namespace. In the second one texts are deleted, which drops its kept conversations."""

N_TURNS, N_CLIENTS, N_DOCUMENTS, PATIENCE_S = 5, 8, 4, 180.0
STARTING_S = 900.0
"""Most seconds until all replicas answer, which may load a model beside others that work."""
METHODS = ("reuse", "recompute")

COLUMNS = ("replicas", "threads", "conversations", "follow_ups", "kept", "turns_per_s",
           "ttft_first_p50_s", "ttft_first_p90_s", "ttft_later_p50_s", "ttft_later_p90_s",
           "errors")  # fmt: skip


def serve_ray(
    model: own.ServedModel = models.BUILTIN, runtime: own.OfRuntime = "transformers",
    conversations: Annotated[int, typer.Option(help="Of each client.")] = 4,
    rounds: own.Rounds = 2, max_tokens: own.NewTokens = 16,
    minutes: Annotated[float, typer.Option(help="Of the run with killed replicas.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:  # fmt: skip
    """Conversations with replicas on Ray Serve, which may be killed."""
    loaded = loaded_model(model, "cpu", "float32", runtime)
    given = {"model": model, "runtime": runtime, "method": "reuse"}
    if runtime == "transformers":
        given["dtype"] = "float32"
    rows = []
    with tempfile.TemporaryDirectory() as name, WorkerPool(n_workers=1).connected():
        engine = Engine(loaded, ChunkStore(Path(name) / "kv"), method="reuse", prefix_bytes=0)
        talks = asked_about(engine)
        server = Server(Path(name), given)
        figures: dict[tuple[int, int], list[Row]] = {(2, 1): [], (1, 2): [], (1, 1): []}
        for n in range(rounds):
            for (n_replicas, n_threads), turns in list(figures.items())[:: -1 if n % 2 else 1]:
                server.deploy(n_replicas, n_threads)
                turns += asyncio.run(measured(server, talks, conversations, max_tokens))
        rows = [row_of(*setting, turns) for setting, turns in figures.items()]
        chaos = None
        if minutes:
            server.deploy(2, 1)
            chaos = asyncio.run(Chaos(server, engine, talks[:4], max_tokens).run(60 * minutes))
        server.end()
    more = {"hardware": machine(), "commit": formatting.commit(), "chaos": chaos}
    if as_json:
        typer.echo(formatting.to_json("benchmarks serve_ray", model, rows, more))
        return
    typer.echo(time_table(COLUMNS, rows))
    if chaos:
        typer.echo(json.dumps(chaos, indent=2))


@dataclass(frozen=True, kw_only=True)
class Talk:
    """A conversation over documents. prompt: its first turn, after a line of its own."""

    prompt: str
    questions: tuple[str, ...]


def asked_about(engine: Engine) -> list[Talk]:
    """Conversations, whose documents are cached."""
    found = load("short")[: 8 * N_TURNS]
    talks = []
    for at in range(0, len(found), N_TURNS):
        some = found[at : at + N_TURNS]
        documents = some[0].documents[:N_DOCUMENTS]
        engine.cache_chunks(list(documents))
        prompt = "Documents:\n\n" + "\n\n".join(documents)
        talks.append(Talk(prompt=prompt, questions=tuple(one.question for one in some)))
    return talks


def turn(question: str) -> str:
    return f"\n\nQuestion: {question}\nAnswer:"


# -- the server -----------------------------------------------------------------------------------


class Server:
    """The server on the cluster that this process has started."""

    def __init__(self, folder: Path, given: dict[str, Any]) -> None:
        import ray

        self.folder, self.given = folder, given
        self.cluster = ray.get_runtime_context().gcs_address
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url, self.name = f"http://127.0.0.1:{self.port}", ""

    def deploy(self, n_replicas: int, n_threads: int) -> None:
        """Change the server to this number of replicas, and wait until all of them answer."""
        from ray import serve

        lines = ";".join(f"{key} '{namespace}'" for namespace, key in KEYS.items())
        config = {
            "proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": self.port},
            "applications": [{
                "name": "samkv", "import_path": "samkv_integrations.cli.ray:app",
                "args": self.given | {"dir": str(self.folder), "n-threads": n_threads},
                "runtime_env": {"env_vars": {KEYS_VARIABLE: lines}},
                "deployments": [{"name": "samkv", "num_replicas": n_replicas,
                                 "ray_actor_options": {"num_cpus": 0.5}}],
            }],
        }  # fmt: skip
        file = self.folder / "serve.json"  # which YAML is, too
        file.write_text(json.dumps(config))
        subprocess.run(
            [sys.executable, "-m", "ray.serve.scripts", "run", "--non-blocking", "--address",
             self.cluster, str(file)],
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + STARTING_S
        while True:
            time.sleep(0.5)
            found = serve.status().applications["samkv"]
            states = [one.replica_states for one in found.deployments.values()]
            if found.status == "RUNNING" and states == [{"RUNNING": n_replicas}]:
                break
            assert time.monotonic() < deadline and found.status != "DEPLOY_FAILED", found
        reply = httpx.get(f"{self.url}/v1/models", headers=key_of(""), timeout=PATIENCE_S)
        self.name = reply.json()["data"][0]["id"]

    def kill_one(self) -> None:
        """What an operating system does that wants the memory."""
        found = [each for each in psutil.Process().children(recursive=True)
                 if each.name().startswith("ray::ServeReplica") or
                 (each.cmdline() or [""])[0].startswith("ray::ServeReplica")]  # fmt: skip
        os.kill(random.choice(found).pid, signal.SIGKILL)

    def end(self) -> None:
        from ray import serve

        serve.shutdown()


def key_of(namespace: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[namespace]}"}


async def ask_session(
    http: httpx.AsyncClient, server: Server, session: str, prompt: str, method: str, most: int
) -> Row:
    body = {"model": server.name, "prompt": prompt, "max_tokens": most,
            "samkv": {"method": method}}  # fmt: skip
    return await ask(http, body, {"x-session-id": session})


def opened(server: Server, namespace: str = "") -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"{server.url}/v1/", headers=key_of(namespace), timeout=PATIENCE_S,
        trust_env=False, limits=httpx.Limits(max_connections=None),
    )  # fmt: skip


# -- conversations that stay ----------------------------------------------------------------------


async def measured(server: Server, talks: Sequence[Talk], n_each: int, most: int) -> list[Row]:
    """All turns of all conversations; a turn has ``turn``, and what `ask` says."""
    numbers = iter(range(10**9))
    began = time.perf_counter()
    async with opened(server) as http:

        async def client() -> list[Row]:
            turns = []
            for _ in range(n_each):
                number = next(numbers)
                # a number of its own, or one conversation would go on from what another has kept
                prompt, before = (
                    f"{random.randbytes(4).hex()} {talks[number % len(talks)].prompt}",
                    0,
                )
                for at, question in enumerate(talks[number % len(talks)].questions):
                    prompt += turn(question)
                    done = await ask_session(http, server, str(number), prompt, "reuse", most)
                    if not done["error"]:
                        done["is_kept"] = done["report"]["prefix_tokens"] >= 0.9 * before
                        prompt, before = prompt + done["text"], done["prompt_tokens"]
                    turns.append(done | {"turn": at})
            return turns

        each = await asyncio.gather(*(client() for _ in range(N_CLIENTS)))
    seconds = time.perf_counter() - began
    return [one | {"seconds": seconds / sum(map(len, each))} for some in each for one in some]


def row_of(n_replicas: int, n_threads: int, turns: Sequence[Row]) -> Row:
    good = [one for one in turns if not one["error"]]
    first = [one for one in good if not one["turn"]]
    later = [one for one in good if one["turn"]]
    row: Row = {
        "replicas": n_replicas, "threads": n_threads, "conversations": len(first),
        "follow_ups": len(later), "kept": sum(one["is_kept"] for one in later) / len(later),
        "turns_per_s": len(good) / sum(one["seconds"] for one in turns),
        "errors": dict(Counter(one["error"] for one in turns if one["error"])),
    }  # fmt: skip
    for name, some in (("first", first), ("later", later)):
        row |= {f"ttft_{name}_p{p}_s": percentile(some, "ttft_s", p) for p in (50, 90)}
    return row


# -- replicas that are killed ---------------------------------------------------------------------


@dataclass
class Chaos:
    """Conversations, a text that is cached and deleted over and over, a killed replica, a new one.

    wrong, near_ties, leaked: what was answered. full_turns: follow-ups with no more than half of
    the turn before from memory. noise: see `noise_of`.
    """

    server: Server
    engine: Engine
    talks: Sequence[Talk]
    most: int
    counted: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    noise: float = 0.0
    wrong: list[str] = field(default_factory=list)
    near_ties: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)

    async def run(self, seconds: float) -> Row:
        rights = {
            (talk.prompt, method): self.right(talk, method, N_TURNS if method == "recompute" else 1)
            for talk in self.talks for method in METHODS
        }  # fmt: skip
        self.end = time.monotonic() + seconds
        async with opened(self.server) as http, opened(self.server, "other") as other:
            talking = [self.talk(http, n, rights) for n in range(N_CLIENTS)]
            await asyncio.gather(*talking, self.delete(other), self.events(seconds))
        return {
            "seconds": seconds, **self.counted, "errors": dict(self.errors),
            "wrong": len(self.wrong), "near_ties": len(self.near_ties),
            "leaked": len(self.leaked), "noise": self.noise,
            "examples": self.wrong[:5] + self.near_ties[:5] + self.leaked[:5],
        }  # fmt: skip

    def right(self, talk: Talk, method: str, n_turns: int) -> list[Expected]:
        """The answers of the first turns, by an engine that has nothing in memory."""
        prompt, prompts, answers = talk.prompt, list[str](), list[Expected]()
        for question in talk.questions[:n_turns]:
            prompt += turn(question)
            prompts.append(prompt)
            answers.append(expected(self.engine, prompt, method, self.most))
            prompt += answers[-1].text
        if method == "recompute":
            self.noise = max(self.noise, noise_of(self.engine, prompts, answers))
        return answers

    async def talk(self, http: httpx.AsyncClient, client: int, answers: Any) -> None:
        dice, number = random.Random(client), 0
        while time.monotonic() < self.end:
            talk, method = dice.choice(self.talks), dice.choice(METHODS)
            prompt, before, number = talk.prompt, 0, number + 1
            rights = iter(answers[talk.prompt, method])
            for question in talk.questions:
                prompt += turn(question)
                while True:
                    done = await ask_session(
                        http, self.server, f"{client}-{number}", prompt, method, self.most
                    )
                    if done["error"] in (None, EMPTY):
                        break
                    self.errors[done["error"][:120]] += 1
                    await asyncio.sleep(1)
                if done["error"]:  # a model may end at once
                    break
                self.counted["answers"] += 1
                self.counted["full_turns"] += done["report"]["prefix_tokens"] < before / 2
                if (right := next(rights, None)) is not None:
                    self.counted["compared"] += 1
                    if done["text"] != right.text:
                        near = right.is_near(done["text"], self.engine, self.noise)
                        said = f"{method}: {done['text']!r} for {right.text!r}, {done['report']}"
                        (self.near_ties if near else self.wrong).append(said)
                prompt += done["text"] if right is None else right.text
                before = done["prompt_tokens"]

    async def delete(self, http: httpx.AsyncClient) -> None:
        """Cache a text, ask, delete it, ask again; by turns in this process and over HTTP."""
        number = 0
        store = ChunkStore(self.server.folder / "kv", namespace="other")
        other = Engine(self.engine.model, store, scheduler=self.engine.scheduler)
        while time.monotonic() < self.end:
            number += 1
            text = " ".join(f"The gate number {random.randrange(10**6)} is red." for _ in range(8))
            await asyncio.to_thread(other.cache_chunks, [text])
            sessions = [f"{number}-{random.randbytes(4).hex()}" for _ in range(6)]

            async def all_ask(text: str = text, sessions: Sequence[str] = sessions) -> list[Row]:
                prompts = [f"{one}\n\n{text}{turn('Which gate?')}" for one in sessions]
                replies = await asyncio.gather(*(
                    http.post("completions", headers={"x-session-id": one}, json={
                        "model": self.server.name, "prompt": prompt, "max_tokens": 2,
                        "samkv": {"method": "reuse"}})
                    for one, prompt in zip(sessions, prompts, strict=True)
                ), return_exceptions=True)  # fmt: skip
                good = [one for one in replies
                        if isinstance(one, httpx.Response) and one.status_code == 200]  # fmt: skip
                self.errors["a question about a text that is deleted"] += len(replies) - len(good)
                return [one.json()["samkv"] for one in good]

            before = await all_ask()
            self.counted["reused_before_deletion"] += sum(one["reused"] for one in before)
            self.counted["asked_before_deletion"] += len(before)
            kept = await all_ask()
            self.counted["kept_before_deletion"] += sum(one["prefix_tokens"] > 32 for one in kept)
            if number % 2:
                await asyncio.to_thread(other.forget, [text])
            else:
                reply = await http.request("DELETE", "samkv/chunks", json={"texts": [text]})
                if reply.status_code != 200:
                    self.errors[f"delete: {reply.status_code}"] += 1
                    continue
            after = await all_ask()
            self.counted["asked_after_deletion"] += len(after)
            self.leaked += [
                json.dumps(one) for one in after
                if one["found"] or one["reused"] or one["prefix_tokens"] > 8
            ]  # fmt: skip
            await asyncio.sleep(1)

    async def events(self, seconds: float) -> None:
        """A replica is killed, then one is added, then one is killed again."""
        await asyncio.sleep(seconds / 4)
        self.server.kill_one()
        self.counted["killed"] += 1
        await asyncio.sleep(seconds / 4)
        await asyncio.to_thread(self.server.deploy, 3, 1)
        self.counted["added"] += 1
        await asyncio.sleep(seconds / 4)
        self.server.kill_one()
        self.counted["killed"] += 1


app = command_line(serve_ray)
main = app
