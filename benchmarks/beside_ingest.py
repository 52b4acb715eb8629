"""How long an answer takes while the same process caches many short texts, and how long they take.

    OMP_NUM_THREADS=1 python -m benchmarks.beside_ingest --texts 300

Answers are asked for one after another: some alone, and then for as long as the ingest lasts.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from samkv_integrations import Engine
from samkv_integrations.cache.memory import MemoryStore
from samkv_integrations.figures import commit
from samkv_integrations.model import load_model
from samkv_integrations.prompt import rag_prompt

DOCUMENTS = [
    f"The ferry {n} leaves at {n} and comes back at noon, every day but Sunday. " * 4
    for n in range(1, 5)
]
QUESTION = "Tell a long story about the ferry."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--texts", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=24, help="of an answer")
    parser.add_argument("--alone", type=int, default=5, help="answers before the ingest")
    args = parser.parse_args()
    model = load_model(args.model, dtype=args.dtype)
    engine = Engine(model, MemoryStore(), prefix_bytes=0, method="reuse")
    engine.cache_chunks(DOCUMENTS)
    prompt, order = rag_prompt(QUESTION, DOCUMENTS, chat=True), random.Random(0)
    texts = [
        f"Note {n}: the value of gauge {order.randrange(10**6)} was {order.randrange(10**6)}."
        for n in range(args.texts)
    ]

    def answer_s() -> float:
        began = time.perf_counter()
        answer = engine.generate(prompt, max_new_tokens=args.tokens)
        if answer.report.completion_tokens < args.tokens:
            raise SystemExit(f"the answer has fewer tokens than {args.tokens}: {answer.text!r}")
        return time.perf_counter() - began

    def ingest_s(texts: list[str]) -> float:
        began = time.perf_counter()
        engine.cache_chunks(texts)
        return time.perf_counter() - began

    answer_s()  # the first is slower than all others
    alone = [answer_s() for _ in range(args.alone)]
    half = len(texts) // 2  # the other half is cached without answers beside it
    quiet_s, beside = ingest_s(texts[:half]), []
    with ThreadPoolExecutor(1) as pool:
        ingest: Future[float] = pool.submit(ingest_s, texts[half:])
        while not (ingest.done() and beside):
            beside.append(answer_s())
    row = {
        "alone_s": round(statistics.median(alone), 2), "answers": len(beside),
        "beside_s": round(statistics.median(beside), 2), "longest_s": round(max(beside), 2),
        "ingest_alone_s": round(quiet_s, 1), "ingest_beside_s": round(ingest.result(), 1),
        "model": model.name, "threads": torch.get_num_threads(), "commit": commit(),
    }  # fmt: skip
    print(json.dumps(row))


if __name__ == "__main__":
    main()
