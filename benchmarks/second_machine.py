"""What the first and the second question cost a machine whose chunks are in a bucket.

    python -m benchmarks.second_machine --layers 6 --dtype bfloat16 --rounds 5

One store computes chunks of random words and puts them into an S3 server on loopback (moto's, in
this process). In each round a machine with an empty folder is asked about them: by full prefill,
with every chunk to fetch, and again with all of them in its folder.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tqdm.auto import tqdm

from benchmarks.models import Words, build
from benchmarks.s3_server import s3_server
from samkv_integrations import ChunkStore, Engine
from samkv_integrations.cli.tables import markdown_table as table
from samkv_integrations.engine.report import Report
from samkv_integrations.figures import size


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of question. first_token_s: median over rounds, the fetching included.

    ratio: median over rounds of its first token over full prefill's. fetched_bytes: of the bucket.
    """

    question: str
    reused: int
    first_token_s: float
    ratio: float
    fetched_bytes: int


def measure(args: argparse.Namespace) -> list[Row]:
    """A row for full prefill, for the first question, and for the second."""
    model = build(
        args.shape, layers=args.layers, dtype=args.dtype, device="auto", seed=0,
        window=args.chunks * args.chunk_tokens + 1024,
    )  # fmt: skip
    words = Words(model, 0)
    chunks = [words.text(args.chunk_tokens) for _ in range(args.chunks)]
    prompt = "\n\n".join([*chunks, words.text(30)])
    secret = secrets.token_bytes(32)
    reports: dict[str, list[tuple[Report, int]]] = {}
    with s3_server() as options, tempfile.TemporaryDirectory() as folder:

        def engine(name: str) -> Engine:
            store = ChunkStore(
                Path(folder) / name, remote="s3://caches/kv", remote_options=options, secret=secret
            )
            return Engine(model, store, prefix_bytes=0)

        engine("first").cache_chunks(chunks)
        for round_ in tqdm(range(args.rounds + 1), desc="rounds"):
            second = engine(f"second{round_}")
            # full prefill last: it opens caches too, to say which there are
            for question in ("first", "second", "full prefill"):
                method = "recompute" if question == "full prefill" else args.method
                before = second.store.stats().bytes
                report = second.generate(
                    prompt, chunks, method=method, max_new_tokens=1, on_miss="text"
                ).report
                fetched = second.store.stats().bytes - before
                if round_ and method == args.method:  # the first round warms up
                    assert report.reused == len(chunks), report
                if round_:
                    reports.setdefault(question, []).append((report, fetched))
    full = [report.ttft_s for report, _ in reports["full prefill"]]
    return [
        Row(
            question=question,
            reused=found[0][0].reused,
            first_token_s=median(report.ttft_s for report, _ in found),
            ratio=median(r.ttft_s / f for (r, _), f in zip(found, full, strict=True)),
            fetched_bytes=found[0][1],
        )
        for question, found in reports.items()
    ]


def main() -> None:
    """The table, on standard output."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.second_machine")
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--method", default="samkv-guided")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    cells = [
        [row.question, str(row.reused), f"{1000 * row.first_token_s:.0f}", f"{row.ratio:.3f}",
         size(row.fetched_bytes)]
        for row in measure(args)
    ]  # fmt: skip
    columns = ("question", "reused", "first token, ms", "of full prefill's", "fetched")
    sys.stdout.write(table(columns, cells) + "\n")


if __name__ == "__main__":
    main()
