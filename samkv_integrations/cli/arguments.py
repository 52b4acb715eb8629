"""The arguments and options of the commands: names, types and help texts.

Options that several commands share stand first, then those of single groups. A command adds the
default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# -- of several commands ------------------------------------------------------------------------

ModelName = Annotated[
    str,
    typer.Option("--model", help="Hub id, local folder, GGUF file, 'smollm2' or 'builtin'."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]
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
Repair = Annotated[bool, typer.Option("--repair", help="Move damaged caches away.")]
Budget = Annotated[
    str | None, typer.Option("--max-bytes", help="A size such as 20GB, or none. Default: show it.")
]
BudgetNamespace = Annotated[
    str | None, typer.Option("--namespace", help="The quota of this namespace, not that of all.")
]
WarmBytes = Annotated[str | None, typer.Option("--bytes", help="Read no more, such as 4GB.")]
NewArchive = Annotated[Path, typer.Argument(help="The file to make.", metavar="FILE")]
Archive = Annotated[Path, typer.Argument(help="What 'samkv store export' wrote.", metavar="FILE")]
OnlyModel = Annotated[
    str | None, typer.Option("--model", help="Take the caches of this model only.")
]

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
