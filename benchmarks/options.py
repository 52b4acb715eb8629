"""Options of the benchmarks: names, types and help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.datasets import SETS
from samkv_integrations.evaluation.shapes import shape_names

StoreBits = Annotated[
    int, typer.Option(help="Bits of the numbers in caches: 4, 8, or 16 for the model's own.")
]

# -- of the benches -----------------------------------------------------------------------------
AllMethods = Annotated[str, typer.Option(help="NAME,NAME,... or 'all'.")]
NewTokens = Annotated[int, typer.Option("--max-tokens", help="Longest answer, in tokens.")]
MostQuestions = Annotated[int | None, typer.Option(help="How many to ask; else all.")]
Budgets = Annotated[str, typer.Option(help="Kept ratios for the methods that select: 0.1,0.2,...")]
Evictions = Annotated[
    str, typer.Option(help="NAME,NAME@RATIO,... or none; each with every method.")
]
RunFolder = Annotated[
    Path | None, typer.Option(help="Folder of the run; the same command again goes on with it.")
]
Fresh = Annotated[bool, typer.Option(help="Drop what the folder of the run holds.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write one JSON object there; - for stdout.")
]

BlockSize = Annotated[int | None, typer.Option(help="Tokens a block; else automatic.")]
Data = Annotated[
    list[str] | None,
    typer.Option(help="'builtin' or a JSON Lines file, LongBench's too; may be repeated."),
]
Prefix = Annotated[
    str, typer.Option(help="What chunks are prefilled after: documents, bos, or a file of adapt.")
]
BuiltinSet = Annotated[
    str | None, typer.Option("--set", help=f"Of the built-in questions: {', '.join(SETS)}. [short]")
]
Kinds = Annotated[str, typer.Option(help="Only these kinds or sets: NAME,NAME,...")]
DocumentCounts = Annotated[str, typer.Option(help="Only questions with so many documents: 4,8,...")]
MaxTokens = Annotated[int | None, typer.Option(help="Leave longer prompts out.")]
Answerable = Annotated[bool, typer.Option(help="Only questions that full prefill answers exactly.")]
Prompt = Annotated[
    str, typer.Option(help="auto, rag or longbench; auto: LongBench's for its data sets.")
]
AnswerTokens = Annotated[
    int | None, typer.Option(help="Longest answer; else 16, and LongBench's for its sets.")
]
Methods = Annotated[str, typer.Option(help="NAME,NAME,...; else all.")]
RecomputeRatios = Annotated[
    str, typer.Option(help="Shares for the methods that recompute one: 0.05,0.15,...")
]
Ablation = Annotated[
    bool, typer.Option(help="The grid of the paper's Table 4 instead, at every budget.")
]
Knobs = Annotated[bool, typer.Option(help="The default with one of its decisions changed a row.")]
Table1 = Annotated[bool, typer.Option(help="Print the columns of the paper's Table 1.")]
Table3 = Annotated[bool, typer.Option(help="Print F1 by data set, as its Table 3.")]
Plot = Annotated[Path | None, typer.Option(help="Draw a picture, .png or .svg.")]

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
LatencyPlot = Annotated[
    Path | None, typer.Option(help="Draw first token over chunk length, .png or .svg.")
]

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
LoadPlot = Annotated[
    Path | None, typer.Option(help="Draw times to first token and throughput, .png or .svg.")
]

# -- of the distance from full prefill ---
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="Hub id, folder, GGUF file, smollm2 or builtin; again for more. [builtin]",
    ),
]
FidelityData = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        help="'builtin', a JSON Lines file of questions, or a folder of .txt and .md; again for "
        "more. [builtin]",
    ),
]
Part = Annotated[
    str | None,
    typer.Option(
        help="choose (to choose settings on), report (for figures) or all. [report; of --data, all]"
    ),
]
MostDocuments = Annotated[
    int | None, typer.Option(help="Most documents a question. [all; of a folder, 8]")
]
StoreBitsList = Annotated[
    str,
    typer.Option(help="Bits of the numbers in caches: 4, 8, 16 for its own; or 4,8,16."),
]
ForcedTokens = Annotated[
    int, typer.Option(help="Most tokens of full prefill's answer that are forced on all.")
]
PastEnd = Annotated[
    bool, typer.Option(help="So many tokens whether or not that answer ends before.")
]
Ratios = Annotated[
    str, typer.Option(help="Shares for the methods that recompute one: 0.05,0.1,...")
]
Floor = Annotated[
    bool,
    typer.Option(
        "--floor", help="Measure full prefill in bfloat16 too; in float32 for a bfloat16 model."
    ),
]
