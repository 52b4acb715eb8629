"""Options of the benchmarks: names, types and help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.shapes import shape_names

AllMethods = Annotated[str, typer.Option(help="NAME,NAME,... or 'all'.")]

# -- of the benches of time ---------------------------------------------------------------------
Shape = Annotated[str, typer.Option(help=f"One of {', '.join(shape_names())}.")]
Layers = Annotated[int | None, typer.Option(help="So many of the shape's layers; else all.")]
ShapeDevice = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
Chunks = Annotated[str, typer.Option(help="Chunks in the prompt: 1,4,8,...")]
ChunkTokens = Annotated[str, typer.Option(help="Tokens in a chunk: 256,512,...")]
Repeats = Annotated[int, typer.Option(help="Rounds that count; one more warms up.")]
BenchFolder = Annotated[
    Path | None,
    typer.Option("--dir", help="Where the temporary store goes: the disk that is measured."),
]

Uncached = Annotated[
    str, typer.Option(help="Tokens of text that is of no chunk, after them: 0,150,...")
]
Cached = Annotated[
    str, typer.Option(help="Shares of the chunks that are stored at first: 1.0,0.5,...")
]
PageCache = Annotated[
    str,
    typer.Option(help="Chunk files in the page cache before each question: warm, cold or both."),
]
NewTokens = Annotated[int, typer.Option(help="Tokens of an answer; from 2 on their rate.")]
Memory = Annotated[bool, typer.Option(help="Measure memory, in one more round.")]

# -- of the benches beside llama.cpp --------------------------------------------------------------
OfRuntime = Annotated[
    str, typer.Option("--runtime", help="What runs the model: transformers or llama_cpp.")
]
TimedModel = Annotated[str | None, typer.Option("--model", help="GGUF file or 'smollm2'.")]
TimedQuestions = Annotated[
    list[str] | None,
    typer.Option("--questions", help="FILE[@FORM][:FIRST-LAST], --repeats of each kind."),
]
TimedData = Annotated[
    Path | None,
    typer.Option("--data", help="A folder of hotpotqa.jsonl and the others: standard questions."),
]

# -- of the bench of a server -------------------------------------------------------------------
ServedModel = Annotated[
    str, typer.Option("--model", help="Hub id, folder, GGUF file, 'smollm2' or 'builtin'.")
]
ServedShape = Annotated[
    str | None,
    typer.Option("--shape", help=f"Random weights and words: {', '.join(shape_names())}."),
]
ServedQuestions = Annotated[
    str, typer.Option("--questions", help="short, long or a JSON Lines file.")
]
PromptChunks = Annotated[int, typer.Option("--chunks", help="Of random words: chunks in a prompt.")]
PromptChunkTokens = Annotated[
    int, typer.Option("--chunk-tokens", help="Of random words: tokens in a chunk.")
]
Concurrency = Annotated[
    str, typer.Option(help="Clients that each wait for their answer: 8 or 1,4,8,...")
]
Requests = Annotated[int, typer.Option(help="Of each method in a round.")]
Rounds = Annotated[int, typer.Option(help="Turns in which a method sends them.")]
RequestSeconds = Annotated[float, typer.Option("--timeout", help="Seconds a request may take.")]
