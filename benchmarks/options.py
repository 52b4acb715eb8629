"""Options of the benchmarks: names, types and help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.shapes import shape_names

AllMethods = Annotated[str, typer.Option(help="NAME,NAME,... or 'all'.")]
Fresh = Annotated[bool, typer.Option(help="Drop what the folder of the run holds.")]

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

# -- of the bench of a server -------------------------------------------------------------------
Url = Annotated[
    str | None,
    typer.Option(help="A running server, up to /v1. Default: one of its own, with --model."),
]
ServedModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Hub id, folder, GGUF file, 'smollm2' or 'builtin'; with --url, its name there.",
    ),
]
ServedShape = Annotated[
    str | None,
    typer.Option("--shape", help=f"Random weights and words: {', '.join(shape_names())}."),
]
ServedQuestions = Annotated[
    str | None,
    typer.Option("--questions", help="short, long or a JSON Lines file. Default: short."),
]
PromptChunks = Annotated[
    int | None, typer.Option("--chunks", help="Of random words: chunks in a prompt. [8]")
]
PromptChunkTokens = Annotated[
    int | None, typer.Option("--chunk-tokens", help="Of random words: tokens in a chunk. [512]")
]
WarmShare = Annotated[
    float | None,
    typer.Option(help="Of random words: share of a prompt's chunks that are cached before. [1.0]"),
]
Concurrency = Annotated[
    str, typer.Option(help="Clients that each wait for their answer: 8 or 1,4,8,... [8]")
]
Rate = Annotated[
    str, typer.Option(help="Instead: requests a second that come whether or not: 0.5,2,...")
]
Requests = Annotated[int, typer.Option(help="Of each method, at each concurrency or rate.")]
Rounds = Annotated[int, typer.Option(help="Turns in which a method sends them.")]
RequestSeconds = Annotated[float, typer.Option("--timeout", help="Seconds a request may take.")]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar="SAMKV_API_KEY", help="A key of the server; better in the environment."),
]
LoadFolder = Annotated[
    Path | None, typer.Option(help="Folder to keep every request in, as JSON Lines.")
]
