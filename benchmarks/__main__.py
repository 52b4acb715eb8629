"""All benchmarks by one command: ``python -m benchmarks NAME [options]``, from a clone."""

from __future__ import annotations

import sys
from importlib import import_module

from typer import Typer

from samkv_integrations.cli.app import keep_freed_memory

BENCHMARKS = {
    "right_answers": "right answers of every method, of all questions: the judge",
    "right_table": "tables and the picture of runs of right_answers, several models pooled",
    "hesitation": "whether the first token's entropy tells which answers need more work",
    "need": "whether prompts of a user's chunks tell how much a model needs recomputed",
    "conversations": "right answers and seconds of conversations, turn by turn",
    "kvzip": "right answers with the share of KV entries that KVzip keeps",
    "latency": "time, bytes and memory of a first token, over chunks, lengths and methods",
    "ask": "CPU seconds of a `samkv ask` before its model computes, and its memory",
    "ingest": "what caching chunks costs, in plain forwards",
    "serve": "throughput and latencies of a server under load, methods side by side",
    "serve_ray": "conversations with replicas on Ray Serve, of which some are killed",
    "answer_grid": "whole answers against plain transformers' generate, or llama.cpp's loop",
    "decoding": "right answers and seconds with and without drafts",
    "step": "a later token, against llama.cpp's loop, or the sum of its matrix products",
    "count": "lines of code and files of the wheel, by package",
    "finding": "time to find chunks in prompts of 100,000 characters, hostile ones included",
    "hostile_clients": "whether normal clients of a server notice hostile ones",
    "merged_parents": "tokens from caches where LlamaIndex merges retrieved nodes into parents",
    "on_gpu": "first and later tokens, ingest, answers and tests on a GPU",
    "pauses": "how long an answer pauses while a long prompt of somebody else is read",
    "random_gguf": "a GGUF file of an 8 B shape with random weights, to time a model of that size",
    "retrieval": "whether `samkv ask` finds the right paragraphs",
    "query_path": "functions and files that one question passes",
    "inspection_pictures": "pictures of what answers read, for docs/inspect.md",
    "same_answers": "whether a change of code changes any answer or report",
    "same_as_transformers": "whether `recompute` answers as the LLM that it replaces",
    "server_soak": "a server under clients that leave, send nonsense and wrong keys",
    "store_crash_points": "a store killed at every point of every change to its folder",
    "store_drift": "time, memory and open files over many questions to one store",
    "store_kills": "processes over one store, killed at random instants",
    "store_size": "what a store costs with few chunks and with many",
    "store_soak": "processes that ingest, ask and delete in too little room, and are killed",
    "tenant_timing": "whether time tells a tenant that another one has cached a text",
}
"""Name of a module here -> what it measures."""


def main() -> None:
    """Run the benchmark that the first argument names, with the other arguments."""
    keep_freed_memory()  # as the command line does
    name, *arguments = sys.argv[1:] or ["--help"]
    if name not in BENCHMARKS:
        listed = "\n".join(f"  {each:22} {line}" for each, line in BENCHMARKS.items())
        usage = f"usage: python -m benchmarks NAME [options]; most take --help\n\n{listed}\n"
        (sys.stdout if name == "--help" else sys.stderr).write(usage)
        sys.exit(0 if name == "--help" else f"\nunknown benchmark {name!r}")
    program, main = f"python -m benchmarks {name}", import_module(f"benchmarks.{name}").main
    sys.argv = [program, *arguments]
    main(prog_name=program) if isinstance(main, Typer) else main()


if __name__ == "__main__":
    main()
