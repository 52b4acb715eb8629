"""llama.cpp as a process that answers, for `benchmarks.answer_grid`; needs llama-cpp-python alone.

    python benchmarks/llama_peer.py FILE.gguf THREADS

Reads lines of JSON, ``{"ids": [...], "new_tokens": N}``, and writes ``{"seconds": S, "cpu_s": S,
"later_cpu_s": S}`` for each: until the last token, CPU seconds in all, and CPU seconds after the
first token. Greedy, and nothing is kept from one prompt to the next.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import islice

from llama_cpp import Llama  # type: ignore[import-not-found]


def answer_lines() -> None:
    """Answer until standard input ends."""
    file, n_threads = sys.argv[1], int(sys.argv[2])
    llm = Llama(
        file, n_ctx=8192, n_threads=n_threads, n_threads_batch=n_threads, verbose=False, seed=0
    )
    for line in sys.stdin:
        asked = json.loads(line)
        llm.reset()
        began, cpu, first = time.perf_counter(), time.process_time(), 0.0
        tokens = llm.generate(asked["ids"], temp=0.0, repeat_penalty=1.0, reset=True)
        for _ in islice(tokens, asked["new_tokens"]):
            first = first or time.process_time()
        ended = time.process_time()
        told = {"seconds": time.perf_counter() - began, "cpu_s": ended - cpu}
        sys.stdout.write(json.dumps(told | {"later_cpu_s": ended - first}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    answer_lines()
