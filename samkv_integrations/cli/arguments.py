"""The arguments and options of the commands: names, types and help texts.

Options that several commands share stand first, then those of single groups. A command adds the
default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from samkv_integrations.bench.data import SETS
from samkv_integrations.bench.shapes import shape_names

# -- of several commands ------------------------------------------------------------------------


def _option(help: str, *names: str, **more: Any) -> Any:  # noqa: ANN401
    """An option, its help first. ``hidden`` ones are described in docs/ and left out of --help."""
    return typer.Option(*names, help=help, **more)


_BITS = "Bits of the numbers in caches: 4, 8, or 16 for the model's own."
_METHOD = "See 'samkv methods'. Default: as tuned, else auto."

ModelName = Annotated[
    str, _option("Hub id, local folder, GGUF file, 'smollm2' or 'builtin'.", "--model")
]
Device = Annotated[str, _option("auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, _option("auto, float32 or bfloat16.")]
StoreBits = Annotated[int, _option(_BITS)]
CacheBits = Annotated[int | None, _option(f"{_BITS} Default: as tuned, else 4.", "--store-bits")]
SameBits = Annotated[
    int | None, _option("As ingested. Default: as tuned, else 4.", "--store-bits", hidden=True)
]
# absolute, because Chroma remembers a folder under the name by which it was opened
Folder = Annotated[
    Path, _option("Where collection and caches are kept.", "--dir", resolve_path=True)
]
Collection = Annotated[str, _option("Name of the Chroma collection.")]
ChromaServer = Annotated[
    str | None,
    _option("Records are on this Chroma server, http://HOST:PORT.", "--chroma", metavar="URL"),
]
Namespace = Annotated[str, _option("Whose caches: each namespace has its own.")]
Remote = Annotated[
    str | None,
    _option("Where machines share their caches: s3://BUCKET/PREFIX.", envvar="SAMKV_REMOTE"),
]
Json = Annotated[bool, _option("One JSON object on standard output.", "--json")]
Chat = Annotated[bool, _option("Use the model's chat template.")]
TopK = Annotated[int, _option("Chunks to retrieve.")]
MethodName = Annotated[str | None, _option(_METHOD, "--method")]
Settings = Annotated[
    list[str] | None, _option("An option of the method, NAME=VALUE.", "--set", hidden=True)
]
EvictionName = Annotated[
    str | None,
    _option("KV entries to evict while answering; or none. See 'samkv methods'.", hidden=True),
]
EvictionBudget = Annotated[
    float | None, _option("KV entries to go on with, as a share of the prompt.", hidden=True)
]
MaxNewTokens = Annotated[int, _option("Longest answer, in tokens.")]
RayAddress = Annotated[
    str | None,
    _option("HOST:PORT of a Ray cluster, or auto. Default: this machine alone.", hidden=True),
]

# -- of ingest ----------------------------------------------------------------------------------
Paths = Annotated[list[Path], typer.Argument(help="Files or folders (.txt, .md).")]
IngestBudget = Annotated[
    str | None, _option("What all caches may take on disk from now on: 20GB.", "--max-bytes")
]
ChunkSize = Annotated[int, _option("Longest chunk, in the model's tokens.")]
OnRay = Annotated[bool, _option("Compute by several workers on Ray, each with the model.", "--ray")]
Workers = Annotated[int | None, _option("Workers on Ray. [default: 2]", min=1)]
WorkerCpus = Annotated[int | None, _option("CPUs of each. [default: 1]", min=1, hidden=True)]
WorkerGpus = Annotated[float | None, _option("GPUs of each. [default: 0]", min=0, hidden=True)]

# -- of store -----------------------------------------------------------------------------------
Collections = Annotated[
    list[str] | None, _option("Which; again for more. Default: all.", "--collection")
]
DeletedFiles = Annotated[
    list[Path] | None, typer.Argument(help="Documents: every cached chunk that stands in one goes.")
]
DeletedTexts = Annotated[
    list[str] | None, _option("The text of a chunk; again for more.", "--text")
]
Grace = Annotated[float, _option("Keep unused caches that are younger, in seconds.", "--grace")]
Prune = Annotated[bool, _option("Delete caches that no record uses.")]
Build = Annotated[bool, _option("Cache the chunks that are not.")]
Repair = Annotated[bool, _option("Move damaged caches away.", "--repair")]
Budget = Annotated[
    str | None, _option("A size such as 20GB, or none. Default: show it.", "--max-bytes")
]
BudgetNamespace = Annotated[
    str | None, _option("The quota of this namespace, not that of all.", "--namespace")
]
WarmBytes = Annotated[str | None, _option("Read no more, such as 4GB.", "--bytes")]
NewArchive = Annotated[Path, typer.Argument(help="The file to make.", metavar="FILE")]
Archive = Annotated[Path, typer.Argument(help="What 'samkv store export' wrote.", metavar="FILE")]
OnlyModel = Annotated[
    str | None, typer.Option("--model", help="Take the caches of this model only.")
]

# -- of ask, inspect and methods ----------------------------------------------------------------
AsMarkdown = Annotated[bool, _option("As the table of docs/methods.md.")]
InspectedQuestion = Annotated[str, typer.Argument(help="What to ask.", metavar="QUESTION")]
HtmlPage = Annotated[Path | None, _option("Write it there as a page for a browser too.", "--html")]
ShownLayer = Annotated[
    int | None, _option("What becomes of the tokens there. Default: anywhere.", "--layer")
]
QuestionText = Annotated[str | None, typer.Argument(help="What to ask.")]
QuestionFile = Annotated[Path | None, _option("JSON Lines file of many (question, answers).")]
Compare = Annotated[str, _option("Methods to run side by side: NAME,NAME,...")]

# -- of serve -----------------------------------------------------------------------------------
Served = Annotated[
    list[str] | None, _option("One that may be asked; again for more.", "--collection")
]
ServedName = Annotated[str | None, _option("What clients call the model.", hidden=True)]
Host = Annotated[str, _option("Address to listen on; others than loopback need keys.")]
Port = Annotated[int, _option("Port to listen on; 0 for a free one.")]
ApiKeyFile = Annotated[
    Path | None, _option("Lines of KEY, KEY NAMESPACE, KEY NAMESPACE COLLECTION...", "--api-keys")
]
MaxBatch = Annotated[int, _option("Answers that are decoded together.")]
MaxWaiting = Annotated[int, _option("Answers that may wait.", hidden=True)]
MaxKv = Annotated[str | None, _option("Most KV of all running answers: 8GB.", hidden=True)]
ServedTokens = Annotated[
    int, _option("Of an answer whose client names no number.", "--max-tokens", min=1, hidden=True)
]
MaxBody = Annotated[str, _option("Largest request, such as 8MB.", hidden=True)]
Timeout = Annotated[float | None, _option("Seconds that an answer may take, in all.")]
EndGrace = Annotated[
    int, _option("Seconds of running answers at the end.", "--grace", min=0, hidden=True)
]
LogPrompts = Annotated[bool, _option("Write prompts to the log.", "--log-prompts", hidden=True)]
ServedOnRay = Annotated[
    bool, _option("Answer by several replicas on Ray, each with the model.", "--ray")
]
Replicas = Annotated[int | None, _option("On Ray, at first. [default: 2]", min=1, hidden=True)]
MinReplicas = Annotated[int | None, _option("Scale to no fewer.", min=1, hidden=True)]
MaxReplicas = Annotated[int | None, _option("Scale to no more.", min=1, hidden=True)]
ReplicaCpus = Annotated[int | None, _option("CPUs of each. [default: 1]", min=1, hidden=True)]
ReplicaGpus = Annotated[float | None, _option("GPUs of each. [default: 0]", min=0, hidden=True)]
Route = Annotated[str | None, _option("load, or collection. [default: load]", hidden=True)]

# -- of doctor and quickstart -------------------------------------------------------------------
CostFolder = Annotated[
    Path | None,
    typer.Option("--dir", resolve_path=True, help="Keep the measured times beside its caches."),
]
SampleFolder = Annotated[
    Path | None,
    typer.Option(help="Folder of documents. Default: in examples/, as suits the model."),
]
SampleQuestions = Annotated[
    Path | None, typer.Option(help="Their questions; questions.jsonl in that folder.")
]

# -- of the benches -----------------------------------------------------------------------------
AllMethods = Annotated[str, typer.Option(help="NAME,NAME,... or 'all'.")]
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

# -- of plan ------------------------------------------------------------------------------------
PlannedModels = Annotated[
    list[str],
    typer.Option(
        "--model",
        help=f"Again for more: a hub id, a folder, a GGUF file, or one of "
        f"{', '.join(shape_names())}; 'all' for these but the last.",
    ),
]
PlannedChunks = Annotated[str, typer.Option("--chunks", help="Kept in all: 1000000,...")]
PlannedChunkTokens = Annotated[str, typer.Option("--chunk-tokens", help="Of a chunk: 256,512,...")]
PlannedBits = Annotated[
    str, typer.Option("--store-bits", help="4, 8 or 16 for the dtype's own: 4,8,...")
]
QuestionChunks = Annotated[
    int, typer.Option("--chunks-per-question", help="Chunks in a prompt, all of them cached.")
]
QuestionTokens = Annotated[int, typer.Option(help="Of a prompt, beside its chunks.")]
PlannedAnswer = Annotated[int, typer.Option("--answer-tokens", help="Of an answer.")]
PlannedDevice = Annotated[
    str, typer.Option("--device", help="cpu or cuda: whose proportions are assumed.")
]
PrefillSpeed = Annotated[
    str | None,
    typer.Option(
        "--prefill-tokens-s",
        help="Tokens a second that are cached ('samkv bench ingest'); else assumed.",
    ),
]
DecodeSpeed = Annotated[
    float | None,
    typer.Option("--decode-tokens-s", help="Tokens a second that a replica decodes."),
]
DiskSpeed = Annotated[
    str | None,
    typer.Option("--disk-gb-s", help="Reading files, in GB/s: 0.5,3,...; else from memory."),
]
CheckSpeed = Annotated[
    float, typer.Option("--check-gb-s", help="Checking what was read, in GB/s on one thread.")
]
RemoteSpeed = Annotated[
    str | None, typer.Option("--remote-gb-s", help="The remote tier, in GB/s: 0.1,1.25,...")
]
RemoteLatency = Annotated[
    float, typer.Option("--remote-latency-ms", help="Until its first byte, in ms.")
]
DiskPrice = Annotated[
    float | None, typer.Option("--disk-usd-gb-month", help="What a GB on disk costs a month.")
]
RemotePrice = Annotated[
    float | None, typer.Option("--remote-usd-gb-month", help="And one in the remote tier.")
]
Columns = Annotated[
    str | None, typer.Option(help="A row for each combination, with NAME,NAME,... of --json.")
]
PlanMarkdown = Annotated[bool, typer.Option("--markdown", help="As the tables of docs/scale.md.")]
