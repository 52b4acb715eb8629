"""The arguments and options of the commands: names, types and help texts.

Options that several commands share stand first, then those of single groups. A command adds the
default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from samkv_integrations.bench.data import SETS
from samkv_integrations.bench.shapes import shape_names

# -- of several commands ------------------------------------------------------------------------

ModelName = Annotated[
    str,
    typer.Option("--model", help="Hub id, local folder, GGUF file, 'smollm2' or 'builtin'."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]
StoreBits = Annotated[
    int, typer.Option(help="Bits of the numbers in caches: 4, 8, or 16 for the model's own.")
]
CacheBits = Annotated[
    int | None,
    typer.Option(
        "--store-bits",
        help="Bits of the numbers in caches: 4, 8, or 16 for the model's own. "
        "Default: as tuned, else 4.",
    ),
]
# absolute, because Chroma remembers a folder under the name by which it was opened
Folder = Annotated[
    Path, typer.Option("--dir", resolve_path=True, help="Where collection and caches are kept.")
]
Collection = Annotated[str, typer.Option(help="Name of the Chroma collection.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Chat = Annotated[bool, typer.Option(help="Use the model's chat template.")]
# -- of single commands -------------------------------------------------------------------------
AsMarkdown = Annotated[bool, typer.Option(help="As the table of docs/methods.md.")]
CostFolder = Annotated[
    Path | None,
    typer.Option("--dir", resolve_path=True, help="Keep the measured times beside its caches."),
]

Paths = Annotated[list[Path], typer.Argument(help="Files or folders (.txt, .md).")]
IngestBudget = Annotated[
    str | None,
    typer.Option("--max-bytes", help="What all caches may take on disk from now on: 20GB."),
]
ChromaServer = Annotated[
    str | None,
    typer.Option(
        "--chroma", metavar="URL", help="Records are on this Chroma server, http://HOST:PORT."
    ),
]
OnRay = Annotated[
    bool, typer.Option("--ray", help="Compute by several workers on Ray, each with the model.")
]
RayAddress = Annotated[
    str | None,
    typer.Option(help="HOST:PORT of a Ray cluster, or auto. Default: this machine alone."),
]
Workers = Annotated[int | None, typer.Option(help="Workers on Ray. [default: 2]")]
WorkerCpus = Annotated[
    int | None, typer.Option(help="CPUs, and threads, of each worker. [default: 1]")
]
WorkerGpus = Annotated[
    float | None, typer.Option(help="GPUs of each worker, such as 1 or 0.5. [default: 0]")
]
ChunkSize = Annotated[int, typer.Option(help="Longest chunk, in the model's tokens.")]

Collections = Annotated[
    list[str] | None, typer.Option("--collection", help="Which; again for more. Default: all.")
]
DeletedFiles = Annotated[
    list[Path] | None, typer.Argument(help="Documents: every cached chunk that stands in one goes.")
]
DeletedTexts = Annotated[
    list[str] | None, typer.Option("--text", help="The text of a chunk; again for more.")
]
Namespace = Annotated[str, typer.Option(help="Whose caches: each namespace has its own.")]
Remote = Annotated[
    str | None,
    typer.Option(
        envvar="SAMKV_REMOTE", help="Where machines share their caches: s3://BUCKET/PREFIX."
    ),
]
Grace = Annotated[
    float, typer.Option("--grace", help="Keep unused caches that are younger, in seconds.")
]
Prune = Annotated[bool, typer.Option(help="Delete caches that no record uses.")]
Build = Annotated[bool, typer.Option(help="Cache the chunks that are not.")]
Repair = Annotated[bool, typer.Option("--repair", help="Delete damaged caches.")]
Budget = Annotated[
    str | None, typer.Option("--max-bytes", help="A size such as 20GB, or none. Default: show it.")
]
BudgetNamespace = Annotated[
    str | None, typer.Option("--namespace", help="The quota of this namespace, not that of all.")
]
WarmBytes = Annotated[str | None, typer.Option("--bytes", help="Read no more, such as 4GB.")]

InspectedQuestion = Annotated[str, typer.Argument(help="What to ask.", metavar="QUESTION")]
HtmlPage = Annotated[
    Path | None, typer.Option("--html", help="Write it there as a page for a browser too.")
]
ShownLayer = Annotated[
    int | None, typer.Option("--layer", help="What becomes of the tokens there. Default: anywhere.")
]
QuestionText = Annotated[str | None, typer.Argument(help="What to ask.")]
QuestionFile = Annotated[
    Path | None, typer.Option(help="JSON Lines file of many (question, answers).")
]
TopK = Annotated[int, typer.Option(help="Chunks to retrieve.")]
MethodName = Annotated[
    str | None,
    typer.Option("--method", help="See 'samkv methods'. Default: as tuned, else auto."),
]
Compare = Annotated[str, typer.Option(help="Methods to run side by side: NAME,NAME,...")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="An option of the method, NAME=VALUE.")
]
EvictionName = Annotated[
    str | None,
    typer.Option(
        help="KV entries to evict while answering, see 'samkv methods'; or none. "
        "Default: the method's own."
    ),
]
EvictionBudget = Annotated[
    float | None, typer.Option(help="KV entries to go on with, as a share of the prompt.")
]
MaxNewTokens = Annotated[int, typer.Option(help="Longest answer, in tokens.")]

Served = Annotated[
    list[str] | None, typer.Option("--collection", help="One that may be asked; again for more.")
]
ServedName = Annotated[str | None, typer.Option(help="What clients call the model; else its own.")]
Host = Annotated[str, typer.Option(help="Address to listen on; others than loopback need keys.")]
Port = Annotated[int, typer.Option(help="Port to listen on; 0 for a free one.")]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option("--api-keys", help="Lines of KEY, KEY NAMESPACE, KEY NAMESPACE COLLECTION..."),
]
ServedMethod = Annotated[
    str | None,
    typer.Option(
        "--method",
        help="Of answers that ask for no other; see 'samkv methods'. Default: as tuned, else auto.",
    ),
]
MaxBatch = Annotated[int, typer.Option(help="Answers that are decoded together.")]
MaxWaiting = Annotated[int, typer.Option(help="Answers that may wait; more are told to come back.")]
MaxKv = Annotated[str | None, typer.Option(help="Most KV of all running answers, such as 8GB.")]
ServedTokens = Annotated[
    int, typer.Option("--max-tokens", help="Of an answer whose client names no number.")
]
MaxBody = Annotated[str, typer.Option(help="Largest request, such as 8MB.")]
Timeout = Annotated[float | None, typer.Option(help="Seconds that an answer may take, in all.")]
EndGrace = Annotated[
    int, typer.Option("--grace", help="Seconds that running answers have when the server ends.")
]
LogPrompts = Annotated[bool, typer.Option("--log-prompts", help="Write prompts to the log.")]
ServedOnRay = Annotated[
    bool, typer.Option("--ray", help="Answer by several replicas on Ray, each with the model.")
]
Replicas = Annotated[int | None, typer.Option(help="Replicas on Ray, at first. [default: 2]")]
MinReplicas = Annotated[
    int | None, typer.Option(help="With --max-replicas: scale by load, to no fewer. [default: 1]")
]
MaxReplicas = Annotated[
    int | None, typer.Option(help="Scale by load, to no more. Default: always as many.")
]
ReplicaCpus = Annotated[
    int | None, typer.Option(help="CPUs, and threads, of each replica. [default: 1]")
]
ReplicaGpus = Annotated[
    float | None, typer.Option(help="GPUs of each replica, such as 1 or 0.5. [default: 0]")
]
Route = Annotated[
    str | None,
    typer.Option(help="To which replica: load, or collection (by the header x-session-id). [load]"),
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
