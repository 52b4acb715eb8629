"""How commands declare their options, and the options that several commands share.

A command takes groups of options: dataclasses whose fields are flags, and the TypedDicts of
`samkv_integrations.options`. The docstring below a field is the help of its flag.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ForwardRef, Literal, get_type_hints, is_typeddict

import typer
import typer.core

from samkv_integrations.errors import InvalidOption, SamkvError
from samkv_integrations.option import declared, docstring_of
from samkv_integrations.options import ModelOptions

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
        ("serve --ray", "serve --ray-address", "--replicas", "--replica-cpus", "--replica-gpus",
         "--min-replicas", "--max-replicas"),
        "start several servers behind a load balancer, on one --dir or --remote",
    ),
    "--route": "put a proxy that hashes 'x-session-id' before several servers",
}  # fmt: skip
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
    """The command for typer, with the groups among its parameters as flags."""
    parameters = inspect.signature(command, eval_str=True).parameters
    groups = {
        name: _flags_of(each.annotation) for name, each in parameters.items()
        if is_dataclass(each.annotation) or is_typeddict(each.annotation)
    }  # fmt: skip
    flags = [each for each in parameters.values() if each.name not in groups]
    flags += chain(*groups.values())

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, of_group in groups.items():
            filled = {each.name: given.pop(each.name) for each in of_group}
            given[name] = parameters[name].annotation(**filled)
        command(**given)

    by_name = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in flags]
    run.__signature__ = inspect.Signature(by_name)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in flags}
    return run


def _flags_of(group: Any) -> list[inspect.Parameter]:  # noqa: ANN401
    if is_typeddict(group):
        options = declared(group).items()
        rows = [(name, kind, each.default) for name, (kind, each) in options if each.flag]
    else:
        hints = get_type_hints(group, include_extras=True)
        rows = [(each.name, hints[each.name], each.default) for each in fields(group)]
    return [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is MISSING else default,
            annotation=_flag(name, kind, default, docstring_of(group, name)),
        )
        for name, kind, default in rows
    ]  # fmt: skip


def _flag(name: str, kind: Any, default: object, help: str) -> Any:  # noqa: ANN401
    """The type of a flag for typer, with its names and its help."""
    info, *_ = getattr(kind, "__metadata__", [None])
    kind = getattr(kind, "__origin__", kind)
    if info is None:
        # a switch that is off has no --no-...
        info = typer.Option(f"--{name.replace('_', '-')}") if default is False else typer.Option()
    info = copy(info)
    info.help = help or info.help
    if isinstance(kind, ForwardRef) or kind == int | str | None:  # typer knows no such types
        kind = str if default else str | None
    annotated: Any = Annotated  # type checkers refuse a type that is computed
    return annotated[kind, info]


# -- of several commands ------------------------------------------------------------------------

ModelName = Annotated[
    str, typer.Option("--model", help=declared(ModelOptions)["model_name"][1].description)
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")]
Weights = Annotated[
    Literal["auto", "packed", "unpacked", "int8"],
    typer.Option(help=declared(ModelOptions)["weights"][1].description),
]
# absolute, because Chroma remembers a folder under the name by which it was opened
Folder = Annotated[
    Path,
    typer.Option("--dir", resolve_path=True, help="Folder of the collections and chunk caches."),
]
Collection = Annotated[str, typer.Option(help="Name of the Chroma collection.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
