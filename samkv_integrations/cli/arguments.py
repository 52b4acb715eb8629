"""The arguments and options of the commands: names, types and help texts.

Options that several commands share stand first, then those of single groups. A command adds the
default. What is an option of the engine too is described in `samkv_integrations.engine.options`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, is_typeddict

import typer
import typer.core

from samkv_integrations.engine.options import (
    CacheOptions,
    ModelOptions,
    OwnAnswerOptions,
)
from samkv_integrations.errors import InvalidOption, SamkvError
from samkv_integrations.option import declared

REMOVED = {
    "samkv adapt": "ingest as usual, with the default prefix='documents'",
    "samkv bench": "run 'python -m benchmarks' in a clone",
    "samkv store export": "give --remote, or run 'samkv store push', also to file://FOLDER",
    "samkv store import": "run 'samkv store pull --remote URL', with the same SAMKV_STORE_SECRET",
    "samkv store warm": "read the files: 'cat .samkv/kv/*/*/*.safetensors > /dev/null'",
    "samkv plan": "docs/scale.md has the sizes and times that it worked out",
    "ask --questions": "run 'samkv tune --questions FILE', which counts right answers",
    "doctor --questions": "run 'samkv tune --questions FILE', which counts right answers",
    "quickstart --questions": "put questions.jsonl into the folder that --documents names",
    "methods --markdown": "docs/methods.md has the table",
    "pull --collection": "it fetches the caches of the whole namespace",
    "sync --no-build": "call ChromaLink.sync(build_missing=False)",
    "sync --no-prune": "call ChromaLink.sync(prune=False)",
    "tune --agree": "give --lose POINTS: right answers are what counts",
    "tune --asked-by": "give --questions FILE, with gold answers",
    "tune --by": "right answers are what counts; --lose POINTS may be lost",
    "tune --fresh": "every run asks all questions anew",
    "tune --most": "give a shorter file of questions",
    "tune --output": "redirect the output of --json to a file",
    "--check": "run 'samkv tune --no-write' with questions that are new",
    "--fall-back": "give --method recompute to a command, or write it into samkv.toml",
    "--seed": "answers are greedy, and questions come in the order of their file",
    **dict.fromkeys(
        (
            "serve --ray",
            "serve --ray-address",
            "--replicas",
            "--replica-cpus",
            "--replica-gpus",
            "--min-replicas",
            "--max-replicas",
        ),
        "start several servers behind a load balancer, on one --dir or --remote",
    ),
    "--route": "put a proxy that hashes 'x-session-id' before several servers",
}
"""Removed command or option, of one command or of any -> what takes its place."""

IN_PYTHON = {"eviction_budget": "budget_ratio", "model": "model_name"}
"""Parameter of a command -> what the library calls it, if it has another name there."""


def refuse_removed(names: Iterable[str]) -> None:
    """Raises InvalidOption for a command or an option that was removed."""
    for name in names:
        if name in REMOVED:
            raise InvalidOption(f"{name!r} was removed; {REMOVED[name]}")


class Command(typer.core.TyperCommand):
    """A command whose errors name its flags, where the library names arguments."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        flags = [word.partition("=")[0] for word in args if word.startswith("--")]
        refuse_removed(chain(flags, (f"{self.name} {flag}" for flag in flags)))
        return super().parse_args(ctx, args)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # noqa: ANN401
        try:
            return super().invoke(ctx)
        except SamkvError as error:
            told = str(error)
            for option in self.params:
                name, flag = option.name or "", option.opts[0]
                if not flag.startswith("--"):
                    continue
                argument = IN_PYTHON.get(name, name)
                source = ctx.get_parameter_source(name)
                if source is not None and source.name == "COMMANDLINE":
                    told = re.sub(f"^{argument}=", f"{flag} ", told)
                # an advice, and no value that a file named before the colon holds
                told = re.sub(rf"(?<!:) {argument}='?([\w.]+)'?", rf" {flag} \1", told)
            error.args = (told,)
            raise


# -- groups of options --------------------------------------------------------------------------


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command for typer, with the groups among its parameters as flags.

    A group is a dataclass, with a flag for each field, or a TypedDict of declared options, with a
    flag for each that has one. A flag that the command declares itself takes precedence.
    """
    parameters = inspect.signature(command, eval_str=True).parameters
    groups = {
        name: each.annotation for name, each in parameters.items()
        if is_dataclass(each.annotation) or is_typeddict(each.annotation)
    }  # fmt: skip
    of_groups = {name: _flags_of(group) for name, group in groups.items()}
    flags = {name: each for name, each in parameters.items() if name not in groups}
    for each in chain(*of_groups.values()):
        flags.setdefault(each.name, each)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        own = {name: given[name] for name in parameters if name in given}
        filled = {
            name: group(**{each.name: given[each.name] for each in of_groups[name]})
            for name, group in groups.items()
        }
        command(**own, **filled)

    by_name = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in flags.values()]
    run.__signature__ = inspect.Signature(by_name)  # type: ignore[attr-defined]
    run.__annotations__ = {name: each.annotation for name, each in flags.items()}
    return run


_OF_FLAGS: dict[Any, Any] = {int | str | None: str | None}
"""Type of an option -> of its flag; typer knows no unions."""


def _flags_of(group: Any) -> list[inspect.Parameter]:  # noqa: ANN401
    if not is_typeddict(group):
        return [*inspect.signature(group, eval_str=True).parameters.values()]
    annotated: Any = Annotated  # type checkers refuse a type that is computed
    return [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=option.default,
            annotation=annotated[_OF_FLAGS.get(kind, kind), _option(option.description)],
        )
        for name, (kind, option) in declared(group).items() if option.flag
    ]  # fmt: skip


# -- of several commands ------------------------------------------------------------------------


def _option(help: str, *names: str, **more: Any) -> Any:  # noqa: ANN401
    """An option and its help. ``hidden`` options are described in docs/, and not in --help."""
    return typer.Option(*names, help=help, **more)


def _described(options: type, name: str, unset: str = "") -> str:
    """The description of an option of the library. unset: another default than its own."""
    option = declared(options)[name][1]
    return f"{option.description} Default: {unset or option.unset}."


ModelName = Annotated[str, _option(declared(ModelOptions)["model_name"][1].description, "--model")]
SameModel = Annotated[
    str | None,
    _option(_described(ModelOptions, "model_name", "as ingested, else builtin"), "--model"),
]
SameDtype = Annotated[
    str | None,
    _option("auto, float32, bfloat16, float16. Default: as ingested, else auto.", "--dtype"),
]
Device = Annotated[str, _option("auto, cpu, cuda, cuda:N or mps.")]
Dtype = Annotated[str, _option("auto, float32, bfloat16, float16.")]
Weights = Annotated[
    Literal["auto", "packed", "unpacked", "int8"],
    _option(declared(ModelOptions)["weights"][1].description),
]
StoreBits = Annotated[
    int | None,
    _option(
        _described(CacheOptions, "store_bits", "as ingested, else as tuned, else 4"), "--store-bits"
    ),
]
# absolute, because Chroma remembers a folder under the name by which it was opened
Folder = Annotated[
    Path, _option("Folder of the collections and the chunk caches.", "--dir", resolve_path=True)
]
Collection = Annotated[str, _option("Name of the Chroma collection.")]
ChromaServer = Annotated[
    str | None,
    _option("Chroma server with the records, http://HOST:PORT.", "--chroma", metavar="URL"),
]
Namespace = Annotated[
    str, _option("Namespace of the caches. Records have none: use another --collection as well.")
]
Remote = Annotated[
    str | None,
    _option("Where machines share chunk caches: s3://BUCKET/PREFIX.", envvar="SAMKV_REMOTE"),
]
Json = Annotated[bool, _option("One JSON object on standard output.", "--json")]
Chat = Annotated[
    bool | None,
    _option(
        "Use the model's chat template. Default: yes, except for 'builtin'.", "--chat/--no-chat"
    ),
]
TopK = Annotated[int, _option("Chunks to retrieve.", min=1)]
MethodName = Annotated[
    str | None, _option("See 'samkv methods'. Default: as tuned, else auto.", "--method")
]
Settings = Annotated[list[str] | None, _option("An option of the method, NAME=VALUE.", "--set")]
EvictionName = Annotated[
    str | None,
    _option("How an answer evicts KV entries, or none. See 'samkv methods'."),
]
EvictionBudget = Annotated[
    float | None, _option("Share of the prompt's KV entries that eviction keeps.")
]
MaxNewTokens = Annotated[
    int, _option("Most tokens of the answer.", "--max-new-tokens", "--max-tokens", min=1)
]

# -- of ingest and remove ------------------------------------------------------------------------
Paths = Annotated[
    list[Path],
    typer.Argument(help="Files or folders of text, Markdown, PDF, HTML, DOCX, PPTX, CSV."),
]
RemovedPaths = Annotated[
    list[Path],
    typer.Argument(
        help="Ingested files, or folders for all files below. They need not exist any more."
    ),
]
IngestBudget = Annotated[
    str | None, _option("Most bytes of all caches on disk from now on: 20GB.", "--max-bytes")
]
ChunkSize = Annotated[int, _option("Most tokens of a chunk.", min=1)]
OnRay = Annotated[
    bool, _option("Use several workers on Ray, each of which loads the model.", "--ray")
]
RayAddress = Annotated[
    str | None,
    _option("HOST:PORT of a Ray cluster, or auto. Default: this machine only.", hidden=True),
]
Workers = Annotated[int | None, _option("Workers on Ray. [default: 2]", min=1)]
WorkerCpus = Annotated[int | None, _option("CPUs of each. [default: 1]", min=1, hidden=True)]
WorkerGpus = Annotated[float | None, _option("GPUs of each. [default: 0]", min=0, hidden=True)]

# -- of store -----------------------------------------------------------------------------------
Collections = Annotated[
    list[str] | None, _option("A collection; repeat for more. Default: all.", "--collection")
]
DeletedFiles = Annotated[
    list[Path] | None, typer.Argument(help="Documents whose cached chunks are deleted.")
]
DeletedTexts = Annotated[
    list[str] | None, _option("The text of a chunk; repeat for more.", "--text")
]
ForgetBeginnings = Annotated[
    bool, _option("Delete the exact beginnings of the namespace; questions make new ones.")
]
Grace = Annotated[float, _option("Keep unused caches younger than this many seconds.", "--grace")]
Repair = Annotated[bool, _option("Delete damaged caches.", "--repair")]
Budget = Annotated[
    str | None, _option("A size such as 20GB, or none. Default: show the limit.", "--max-bytes")
]
BudgetNamespace = Annotated[str | None, _option("Limit this namespace only.", "--namespace")]
PullBytes = Annotated[str | None, _option("Most bytes to fetch, such as 4GB.", "--bytes")]

# -- of ask, inspect and methods ----------------------------------------------------------------
QuestionText = Annotated[str, typer.Argument(help="What to ask.", metavar="QUESTION")]
HtmlPage = Annotated[Path | None, _option("Also write a web page to this file.", "--html")]
ShownLayer = Annotated[
    int | None, _option("Show the tokens of this layer. Default: of any layer.", "--layer")
]
Compare = Annotated[str, _option("Methods to compare: NAME,NAME,...")]

# -- of serve -----------------------------------------------------------------------------------
Served = Annotated[
    list[str] | None, _option("A collection that clients may ask; repeat for more.", "--collection")
]
ServedName = Annotated[str | None, _option("The model's name for clients.", hidden=True)]
Host = Annotated[str, _option("Address to listen on; other machines need API keys.")]
Port = Annotated[int, _option("Port to listen on; 0 for a free one.")]
ApiKeyFile = Annotated[
    Path | None, _option("Lines of KEY, KEY NAMESPACE, KEY NAMESPACE COLLECTION...", "--api-keys")
]
MaxBatch = Annotated[int, _option("Most answers that are decoded together.")]
MaxWaiting = Annotated[int, _option("Most answers that wait.", hidden=True)]
MaxKv = Annotated[str | None, _option("Most KV bytes of all running answers: 8GB.", hidden=True)]
PrefixBytes = Annotated[
    str, _option("Memory for prompts' beginnings, all namespaces together: 512MB.", hidden=True)
]
ServedTokens = Annotated[
    int,
    _option(
        "Most tokens of an answer whose client names no number.",
        "--max-tokens",
        "--max-new-tokens",
        min=1,
        hidden=True,
    ),
]
MaxBody = Annotated[str, _option("Most bytes of a request, such as 8MB.", hidden=True)]
Timeout = Annotated[float | None, _option(_described(OwnAnswerOptions, "timeout"))]
EndGrace = Annotated[
    int, _option("Seconds for running answers at shutdown.", "--grace", min=0, hidden=True)
]
LogPrompts = Annotated[bool, _option("Log prompts.", "--log-prompts", hidden=True)]

# -- of doctor and quickstart -------------------------------------------------------------------
CostFolder = Annotated[
    Path | None,
    _option("Keep the measured times beside the caches here.", "--dir", resolve_path=True),
]
SampleFolder = Annotated[
    Path | None,
    _option("Folder of documents and questions.jsonl. Default: samples that suit the model."),
]

# -- of tune ------------------------------------------------------------------------------------
TuneQuestions = Annotated[
    Path, _option("JSON Lines file: question, answers, and documents if they are known.")
]
Lose = Annotated[float, _option("Accepted loss of right answers against full prefill, in points.")]
Minutes = Annotated[float, _option("Most minutes of measuring.")]
Writes = Annotated[bool, _option("Write the setting beside the caches.", "--write/--no-write")]
