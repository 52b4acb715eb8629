"""Memory that prompts of ever new lengths leave in a process: compiled shapes and freed memory.

    OMP_NUM_THREADS=1 python -m benchmarks.shape_memory --rounds 400

A round answers one prompt of a random length; with --life it caches some texts, asks about them by
four methods, and deletes them. Rows say what the process has grown by since the first round,
once malloc has given back what is free.
"""

from __future__ import annotations

import argparse
import json
import random
import time

import torch

from benchmarks.store_parts import resident_bytes
from samkv_integrations import Engine
from samkv_integrations.cache.memory import MemoryStore
from samkv_integrations.figures import commit
from samkv_integrations.model import load_model
from samkv_integrations.prompt import rag_prompt
from samkv_integrations.server.run import return_memory

METHODS = ("reuse", "samkv-guided", "epic", "recompute")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--life", action="store_true", help="cache, ask and delete in each round")
    args = parser.parse_args()
    model = load_model(args.model, dtype=args.dtype)
    engine, order = Engine(model, MemoryStore(), prefix_bytes=0), random.Random(0)

    def text(fewest: int, most: int) -> str:
        return " ".join(str(order.randrange(10)) for _ in range(order.randrange(fewest, most)))

    before, began = 0, time.process_time()
    for n in range(args.rounds + 1):
        if args.life:
            chunks = [text(10, 200) for _ in range(order.randrange(2, 6))]
            engine.cache_chunks(chunks)
            for method in METHODS:
                engine.generate(rag_prompt(text(5, 30), chunks), max_new_tokens=4, method=method)
            engine.forget(chunks)
        else:
            engine.generate(text(10, 750), max_new_tokens=1, method="recompute")
        if n % max(1, args.rounds // 8) == 0:
            return_memory()
            resident = resident_bytes()
            before = before or resident
            row = {
                "rounds": n, "grown_mb": round((resident - before) / 1e6, 1),
                "cpu_s": round(time.process_time() - began, 1), "dtype": str(model.dtype),
                "threads": torch.get_num_threads(), "commit": commit(),
            }  # fmt: skip
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
