"""CPU seconds of a decoded token against plain transformers' ``generate``.

    OMP_NUM_THREADS=1 python -m benchmarks.decode_step

A step is the time of an answer of 65 tokens less that of one of one token, over 64, by each way in
turns. The answers are greedy, and the prompt is four chunks that are cached.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median

from benchmarks.answer_grid import Texts, Ways
from samkv_integrations.cli.tables import markdown_table as table
from samkv_integrations.figures import commit
from samkv_integrations.model.loading import load_model
from samkv_integrations.prompt import rag_prompt

N_CHUNKS, N_STEPS = 4, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, nargs="+", default=[400, 2500])
    parser.add_argument("--ways", nargs="+", default=["recompute", "samkv-guided"])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    model = load_model(args.model, device="cpu", dtype=args.dtype)
    ways, texts = Ways(model, calibrated=False, clock=time.process_time), Texts(model)
    cells = []
    for n_tokens in args.tokens:
        chunks = [texts.next(n_tokens // N_CHUNKS) for _ in range(N_CHUNKS)]
        ways.engine.cache_chunks(chunks)
        prompt = rag_prompt("What is this about?", chunks, chat=True)

        def step(way: str, prompt: object = prompt, chunks: list[str] = chunks) -> float:
            def seconds(n: int) -> float:
                if way == "plain":
                    return ways.plain(prompt, n).seconds
                return ways.ours(prompt, n, chunks, way).seconds

            return (seconds(N_STEPS + 1) - seconds(1)) / N_STEPS

        rounds = [{way: step(way) for way in ("plain", *args.ways)} for _ in range(args.rounds)]
        cells.append(
            [
                str(n_tokens), f"{1000 * median(each['plain'] for each in rounds):.1f}",
                *(f"{median(each[way] / each['plain'] for each in rounds):.2f}"
                  for way in args.ways),
            ]
        )  # fmt: skip
    titles = ("tokens", "generate, ms a token", *args.ways)
    sys.stdout.write(f"{table(titles, cells, left=0)}\n\ncommit {commit()}\n")


if __name__ == "__main__":
    main()
