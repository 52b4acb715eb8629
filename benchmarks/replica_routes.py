"""How often replicas find chunks in folders of their own, by how requests are routed to them.

    python -m benchmarks.replica_routes --repeats 3

Two replicas of the server stand for two machines: each has a folder of its own before one remote
tier, a folder of this machine. Texts of several collections are in the remote tier, and a local
folder has room for some of them. Clients ask for chunks of one collection at a time, the same
requests in the same order for either route. What is counted begins after a warm-up, and is whole
objects that replicas have read from the remote tier.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import httpx
import torch

from benchmarks.models import Words, build
from benchmarks.shapes import BUILTIN
from benchmarks.store_parts import report
from samkv_integrations import ChunkStore, Engine
from samkv_integrations.cache.objects import Objects
from samkv_integrations.cluster.serve import SESSION_HEADER, App, Replicas, Route, serving
from samkv_integrations.engine.options import EngineOptions
from samkv_integrations.server.app import create_app
from samkv_integrations.server.run import ServerSource, listen_on
from samkv_integrations.server.service import Settings
from samkv_integrations.server.tenancy import ApiKeys, Tenant

HOST = "127.0.0.1"
NAME = "builtin"
PATIENCE_S = 180.0
LOG = "log"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request: a prompt that holds some chunks of a collection."""

    collection: str
    prompt: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """One route. Requests and chunks are those that were counted, of all repeats.

    hit_rate: part of the chunks that a replica had in its folder; of each repeat in hit_rate_each.
    misses: chunks without a cache at all. split: collections that each replica was asked about,
    by repeat.
    """

    route: str
    requests: int
    chunks: int
    misses: int
    fetched: int
    fetched_bytes: int
    hit_rate: float
    hit_rate_each: str
    split: str


@dataclass(frozen=True, kw_only=True)
class Replica:
    """Makes the application of a replica, which has a folder of its own and tells what it does.

    source: with a folder under which each has one. max_bytes: of its local tier.
    """

    source: ServerSource
    max_bytes: int

    def __call__(self) -> App:
        log = self.source.folder / LOG
        own = replace(self.source, folder=self.source.folder / f"replica-{os.getpid()}")
        ChunkStore(own.folder / "kv", remote=own.remote, max_bytes=self.max_bytes)
        read = Objects.read

        def told(objects: Objects, path: str, **options: Any) -> bytes:
            data = read(objects, path, **options)
            if path.endswith(".safetensors") and options.get("n_bytes") is None:
                tell(log, f"fetched {len(data)}")
            return data

        Objects.read = told  # type: ignore[assignment, method-assign]
        tenancy = own.tenancy()
        tenancy.engine(Tenant()).store.known_keys()  # learns all texts now
        app = create_app(tenancy, own.keys, own.settings)

        async def counted(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401
            headers = dict(scope.get("headers", ()))
            if name := headers.get(SESSION_HEADER.encode()):
                tell(log, f"asked {os.getpid()} {name.decode()}")
            await app(scope, receive, send)

        return counted


def tell(log: Path, line: str) -> None:
    """Add a line to a file that several processes add to: short ones are written at once."""
    with log.open("a") as out:
        out.write(f"{line}\n")


def lines_of(log: Path) -> list[list[str]]:
    """The words of each line."""
    return [line.split() for line in log.read_text().splitlines()] if log.is_file() else []


def requests_of(
    texts: Sequence[Sequence[str]], n_requests: int, n_chunks: int, seed: int
) -> list[Asked]:
    """Each about ``n_chunks`` of a collection's texts; collections are drawn evenly."""
    draw = random.Random(seed)
    found = []
    for _ in range(n_requests):
        place = draw.randrange(len(texts))
        chosen = draw.sample(list(texts[place]), n_chunks)
        prompt = "Documents:\n\n" + "\n\n".join(chosen) + "\n\nQuestion: what?\nAnswer:"
        found.append(Asked(collection=f"collection-{place}", prompt=prompt))
    return found


def ask(client: httpx.Client, asked: Asked) -> tuple[int, int]:
    """Chunks that were found in the prompt, and those without a cache."""
    body = {"model": NAME, "prompt": asked.prompt, "max_tokens": 1}
    reply = client.post(
        "/v1/completions", json=body, headers={SESSION_HEADER: asked.collection}
    ).raise_for_status()
    samkv = reply.json()["samkv"]
    return samkv["found"], sum(samkv["chunk_misses"].values())


def serve_and_ask(
    replica: Replica, route: Route, requests: Sequence[Asked], arguments: argparse.Namespace
) -> Row:
    """One run: begin replicas with empty folders, warm up, and count."""
    log = replica.source.folder / LOG
    with listen_on(HOST, 0, replica.source.keys) as listening:
        port = listening.getsockname()[1]
    replicas = Replicas(n_replicas=2, route=route, grace_s=5)
    with (
        serving(replica, replicas, HOST, port, n_threads=1),
        httpx.Client(
            base_url=f"http://{HOST}:{port}", timeout=PATIENCE_S, trust_env=False
        ) as client,
        ThreadPoolExecutor(arguments.clients) as pool,
    ):
        n_warm = arguments.warm_up
        list(pool.map(lambda one: ask(client, one), requests[:n_warm]))
        before = len(lines_of(log))
        found = list(pool.map(lambda one: ask(client, one), requests[n_warm:]))
    told = lines_of(log)[before:]
    fetched = [int(line[1]) for line in told if line[0] == "fetched"]
    n_chunks = sum(n for n, _ in found)
    rate = 1 - (len(fetched) + sum(n for _, n in found)) / n_chunks
    by_replica: dict[str, set[str]] = {}
    for line in told:
        if line[0] == "asked":
            by_replica.setdefault(line[1], set()).add(line[2])
    return Row(
        route=route,
        requests=len(found),
        chunks=n_chunks,
        misses=sum(n for _, n in found),
        fetched=len(fetched),
        fetched_bytes=sum(fetched),
        hit_rate=rate,
        hit_rate_each=f"{rate:.3f}",
        split="+".join(str(len(names)) for names in by_replica.values()),
    )


def measure(arguments: argparse.Namespace, folder: Path) -> list[Row]:
    """A row for each route; repeats have other texts, and so other requests."""
    model = build(BUILTIN, layers=None, dtype="float32", device="cpu", seed=0, window=0)
    runs: dict[Route, list[Row]] = {route: [] for route in get_args(Route)}
    for repeat in range(arguments.repeats):
        words = Words(model, repeat)
        texts = [
            [words.text(arguments.tokens) for _ in range(arguments.chunks)]
            for _ in range(arguments.collections)
        ]
        remote = (folder / f"remote-{repeat}").as_uri()
        first = Engine(model, ChunkStore(folder / f"filled-{repeat}", remote=remote))
        first.cache_chunks([text for each in texts for text in each])
        n_bytes = first.store.stats().bytes
        n_requests = arguments.warm_up + arguments.requests
        requests = requests_of(texts, n_requests, arguments.top_k, repeat)
        for route in sorted(runs, reverse=repeat % 2 == 1):
            source = ServerSource(
                model=BUILTIN, device="cpu", dtype="float32", folder=folder / f"{route}-{repeat}",
                remote=remote, options=EngineOptions(method="reuse"),
                keys=ApiKeys("", Tenant()), settings=Settings(model_name=NAME),
            )  # fmt: skip
            source.folder.mkdir()
            replica = Replica(source=source, max_bytes=round(arguments.room * n_bytes))
            runs[route].append(serve_and_ask(replica, route, requests, arguments))
    return [together(found) for found in runs.values()]


def together(runs: Sequence[Row]) -> Row:
    """The runs of one route as one."""
    sums: Counter[str] = Counter()
    for row in runs:
        for name in ("requests", "chunks", "misses", "fetched", "fetched_bytes"):
            sums[name] += getattr(row, name)
    return Row(
        route=runs[0].route,
        **sums,
        hit_rate=1 - (sums["fetched"] + sums["misses"]) / sums["chunks"],
        hit_rate_each=" ".join(row.hit_rate_each for row in runs),
        split=" ".join(row.split for row in runs),
    )


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--collections", type=int, default=6)
    parser.add_argument("--chunks", type=int, default=30, help="of a collection")
    parser.add_argument("--tokens", type=int, default=64, help="of a chunk")
    parser.add_argument("--top-k", type=int, default=4, help="chunks of a request")
    parser.add_argument("--room", type=float, default=0.5, help="of a folder, of all chunks")
    parser.add_argument("--warm-up", type=int, default=200, help="requests that are not counted")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="for stores; else a temporary one")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # replicas inherit it
    os.environ.setdefault("SAMKV_STORE_SECRET", secrets.token_hex(32))
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        rows = [asdict(row) for row in measure(arguments, Path(folder))]
    for row in rows:
        row["hit_rate"] = round(row["hit_rate"], 3)
    report("replica_routes", rows, arguments.json)


if __name__ == "__main__":
    main()
