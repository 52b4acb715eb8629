"""Whether normal clients of a server notice hostile ones.

    python -m benchmarks.hostile_clients --minutes 10

``samkv serve`` runs on the built-in model. Eight clients of one key ask about their documents,
first alone and then beside hostile clients of another key, each of which sends one kind of request
over and over: schemas that are slow to read, prompts as long as the window, thousands of texts to
cache, lists of wrong values, streams that nobody reads, bodies that never end. Half of them leave
after two seconds. Every normal answer is compared with that of an engine that answers one by one.
``/health`` is asked every second.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from types import MappingProxyType
from typing import Any

import httpx

from benchmarks.server_soak import (
    KEYS,
    MAX_TOKENS,
    Asked,
    client_of,
    server_figures,
    two_tenants,
)
from samkv_integrations.cli.formatting import commit

N_NORMAL = 8
LEAVES_AFTER_S = 2.0
METHOD = "reuse"
_HOSTILE, _NORMAL = ({"authorization": f"Bearer {KEYS[name]}"} for name in ("red", "blue"))

Body = dict[str, Any]


def _chat(content: str, **options: Any) -> Body:  # noqa: ANN401
    return {"model": "builtin", "messages": [{"role": "user", "content": content}], **options}


def _held_to(schema: Body) -> Body:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return _chat("Answer.", response_format=form, max_tokens=16)


def _patterns(n: int) -> Body:
    """Patterns that must all hold. n: in them, so that no request is an earlier one."""
    return {"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b{n}.*"} for i in range(16)]}


def _nested(depth: int, n: int) -> Body:
    schema: Body = {"type": "string", "const": str(n)}
    for _ in range(depth):
        schema = {"anyOf": [schema, {"type": "object", "properties": {"a": schema}}]}
    return schema


def _object(names: Sequence[str]) -> Body:
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}}


def _turns(content: str, n_turns: int) -> Body:
    turns = [{"role": "user", "content": content}] * n_turns
    return {"model": "builtin", "messages": turns, "max_tokens": 1}


def _cycle(n: int) -> Body:
    names = [f"d{n}x{i}" for i in range(300)]
    after = itertools.pairwise([*names, names[0]])
    defs = {a: {"anyOf": [{"$ref": f"#/$defs/{b}"}] * 8} for a, b in after}
    return {"$defs": defs, "$ref": f"#/$defs/{names[0]}"}


COMPLETIONS, CHAT, CHUNKS = "/v1/completions", "/v1/chat/completions", "/v1/samkv/chunks"


def _pattern(pattern: str) -> Body:
    return _held_to({"type": "string", "pattern": pattern})


def _going_on(prompt: str, max_tokens: int, **options: Any) -> Body:  # noqa: ANN401
    return {"model": "builtin", "prompt": prompt, "max_tokens": max_tokens, **options}


INPUTS: Mapping[str, tuple[str, Callable[[int], Body]]] = MappingProxyType(
    {
        "patterns": (CHAT, lambda n: _held_to(_patterns(n))),
        "more patterns": (CHAT, lambda n: _held_to(_patterns(-n))),
        "backtracking": (CHAT, lambda n: _pattern(f"({'a?' * 900}){'a' * 900}{n}")),
        "counted": (CHAT, lambda n: _pattern(f"((a{{1,99}}){{1,99}}){{1,99}}{n}")),
        "multiples": (CHAT, lambda n: _held_to({"allOf": [{"multipleOf": 1e-300}] * 2300})),
        "nested": (CHAT, lambda n: _held_to(_nested(10, n))),
        "cycle": (CHAT, lambda n: _held_to(_cycle(n))),
        "enum": (CHAT, lambda n: _held_to({"enum": [f"{n}-{i:05}" * 2 for i in range(4000)]})),
        "properties": (CHAT, lambda n: _held_to(_object([f"p{n}x{i}" for i in range(2500)]))),
        "long prompt": (COMPLETIONS, lambda n: _going_on(f"{n} " + "word " * 1_500_000, 1)),
        "one letter": (COMPLETIONS, lambda n: _going_on(str(n) + "a" * 7_000_000, 1)),
        "special tokens": (COMPLETIONS, lambda n: _going_on(f"{n}" + "<|im_start|>" * 30_000, 1)),
        "window": (COMPLETIONS, lambda n: _going_on(f"{n} " + "The sea. " * 600, 1)),
        "many tokens": (COMPLETIONS, lambda n: _going_on(f"{n} The", 1000)),
        "stops": (COMPLETIONS, lambda n: _going_on(f"{n} The", 500, stop=["x" * 1000] * 64)),
        "many turns": (CHAT, lambda n: _turns(f"{n}", 20_000)),
        "wrong turns": (CHAT, lambda n: {"model": "builtin", "messages": [n] * 2_000_000}),
        "unknown fields": (CHAT, lambda n: _chat("Q?", **{f"{n}x{i}": 0 for i in range(500_000)})),
        "many texts": (CHUNKS, lambda n: {"texts": [f"Text {n} {i} of many." for i in range(999)]}),
        "long text": (CHUNKS, lambda n: {"texts": [f"{n} " + "word " * 1_000_000]}),
        "unread": (COMPLETIONS, lambda n: _going_on(f"{n} The", 1000, stream=True)),
        "unended": (COMPLETIONS, lambda n: {}),
    }
)
"""Where each is sent, and its body, which differs from request to request."""


@dataclass
class Seen:
    """What clients saw in each phase.

    seconds: of each answer, by phase and question. health: the same, of /health. memory: bytes,
    every half a minute.
    """

    phase: str = "quiet"
    seconds: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: {"quiet": {}, "attacked": {}}
    )
    health: dict[str, list[float]] = field(default_factory=lambda: {"quiet": [], "attacked": []})
    memory: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    hostile: dict[str, Counter[str]] = field(default_factory=dict)


async def normal(http: httpx.AsyncClient, asked: Sequence[Asked], at: int, seen: Seen) -> None:
    """Ask again and again; the phase may change meanwhile."""
    for one in itertools.islice(itertools.cycle(asked), at, None):
        body = {
            "model": "builtin", "prompt": one.prompt, "max_tokens": MAX_TOKENS,
            "samkv": {"method": METHOD},
        }  # fmt: skip
        phase, began = seen.phase, time.perf_counter()
        reply = await http.post(COMPLETIONS, json=body, headers=_NORMAL)
        seconds = time.perf_counter() - began
        seen.seconds[phase].setdefault(one.prompt, []).append(seconds)
        if reply.status_code != 200:
            seen.wrong.append(f"{reply.status_code}: {reply.text[:200]}")
            continue
        text, samkv = reply.json()["choices"][0]["text"], reply.json()["samkv"]
        if text != (right := one.answers[METHOD]):
            seen.wrong.append(f"{text!r} for {right!r}, {samkv}")


async def hostile(http: httpx.AsyncClient, name: str, leaves: bool, outcomes: Counter[str]) -> None:
    """Send one kind of request over and over."""
    path, made = INPUTS[name]
    for n in itertools.count(1):
        try:
            async with asyncio.timeout(LEAVES_AFTER_S if leaves else None):
                outcomes[await _sent(http, name, path, made(n))] += 1
        except TimeoutError:
            outcomes["left"] += 1
        except httpx.TransportError as error:
            outcomes[type(error).__name__] += 1


async def _sent(http: httpx.AsyncClient, name: str, path: str, body: Body) -> str:
    if name == "unended":

        async def slowly() -> Any:  # noqa: ANN401
            for _ in range(20):
                yield b"["
                await asyncio.sleep(1)

        headers = {**_HOSTILE, "content-type": "application/json"}
        return str((await http.post(path, content=slowly(), headers=headers)).status_code)
    if name == "unread":
        async with http.stream("POST", path, json=body, headers=_HOSTILE) as reply:
            await asyncio.sleep(10)
            return str(reply.status_code)
    content = await asyncio.to_thread(json.dumps, body)
    headers = {**_HOSTILE, "content-type": "application/json"}
    return str((await http.post(path, content=content, headers=headers)).status_code)


async def watch(http: httpx.AsyncClient, seen: Seen) -> None:
    """Ask for /health every second, and for memory every half a minute."""
    for n in itertools.count():
        phase, began = seen.phase, time.perf_counter()
        if (await http.get("/health")).status_code != 200:
            seen.wrong.append("/health")
        seen.health[phase].append(time.perf_counter() - began)
        if n % 30 == 0:
            found = await server_figures(http)
            seen.memory.append(found["process_resident_memory_bytes"])
        await asyncio.sleep(1)


def send_hostile(url: str, names: Sequence[str], seconds: float, sent: Queue[Any]) -> None:
    """All hostile clients, in a process of their own: what came of each, by its name."""
    os.nice(19)  # they would have machines of their own
    outcomes = {name: Counter[str]() for name in names}

    async def run() -> None:
        async with client_of(url) as http:
            tasks = [
                asyncio.create_task(hostile(http, name, at % 2 == 0, outcomes[name]))
                for at, name in enumerate(names)
            ]
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    sent.put(outcomes)


async def measure(url: str, asked: Sequence[Asked], minutes: float, names: Sequence[str]) -> Seen:
    """A quarter of the time alone, and then beside the hostile clients."""
    seen, spawning = Seen(), multiprocessing.get_context("spawn")
    sent: Queue[Any] = spawning.Queue()
    attack_s = minutes * 45
    attackers = spawning.Process(target=send_hostile, args=(url, names, attack_s, sent))
    async with client_of(url) as http:
        tasks = [asyncio.create_task(normal(http, asked, at, seen)) for at in range(N_NORMAL)]
        tasks.append(asyncio.create_task(watch(http, seen)))
        try:
            await asyncio.sleep(minutes * 15)
            attackers.start()
            seen.phase = "attacked"
            done, _ = await asyncio.wait(
                tasks, timeout=attack_s, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in done:
                task.result()  # none ends by itself
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    seen.hostile = sent.get(timeout=60)
    attackers.join()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--inputs", nargs="+", choices=INPUTS, default=list(INPUTS))
    parser.add_argument("--prefix-bytes", default="512MB", help="of the server")
    args = parser.parse_args()
    options = ("--timeout", "60", "--prefix-bytes", args.prefix_bytes)
    with two_tenants(args.questions, *options) as (_, url, asked):
        blue = [one for one in asked if one.tenant == "blue"]
        seen = asyncio.run(measure(url, blue, args.minutes, args.inputs))
    own = {prompt: statistics.median(each) for prompt, each in seen.seconds["quiet"].items()}
    row: dict[str, Any] = {}
    for phase, of_prompt in seen.seconds.items():
        seconds = [one for each in of_prompt.values() for one in each]
        ratios = sorted(one / own[prompt] for prompt, each in of_prompt.items()
                        for one in each if prompt in own)  # fmt: skip
        row[phase] = {
            "answers": len(seconds), "median_s": round(statistics.median(seconds), 3),
            "longest_s": round(max(seconds), 3), "health_s": round(max(seen.health[phase]), 3),
            "of_own_quiet_median": {
                name: round(ratios[int(share * (len(ratios) - 1))], 2)
                for name, share in (("median", 0.5), ("p90", 0.9), ("p99", 0.99), ("most", 1.0))
            },
        }  # fmt: skip
    row["ratio"] = round(row["attacked"]["median_s"] / row["quiet"]["median_s"], 2)
    row |= {
        "wrong": len(seen.wrong), "memory_mb": [round(each / 1e6) for each in seen.memory],
        "hostile": seen.hostile, "commit": commit(),
    }  # fmt: skip
    print(json.dumps(row, indent=2))
    for each in seen.wrong[:10]:
        print(each)
    raise SystemExit(bool(seen.wrong))


if __name__ == "__main__":
    main()
