"""How commands declare their flags, and the flags that several commands share.

A command takes groups of flags: dataclasses, and the TypedDicts of `samkv_integrations.options`,
whose options with ``has_flag`` become flags.
"""

from __future__ import annotations

import functools
import inspect
import shlex
from codecs import lookup
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ForwardRef, get_type_hints, is_typeddict

import typer
import typer.core

from samkv_integrations.errors import Given, InvalidOption, SamkvError, shown
from samkv_integrations.option import bytes_of, declared
from samkv_integrations.options import LlamaCppOptions, ModelOptions

if TYPE_CHECKING:
    from samkv_integrations.ingest.reader import ReadLimits

BUILTIN = "builtin"

FURTHER = "Model, caches and engine"
"""The group of flags that few questions need."""

further = partial(typer.Option, rich_help_panel=FURTHER)
"""An option in that panel."""

READING = "Reading documents"
"""The group of flags that say what is read, and how."""

of_reading = partial(typer.Option, rich_help_panel=READING)
"""An option in that panel."""

_PARAMETERS = {
    "budget_ratio": "eviction_budget", "device_map": "device", "kv_remote": "remote",
    "model_name": "model",
}  # fmt: skip
"""Option of the library -> parameter of a command, if that has another name."""


class Command(typer.core.TyperCommand):
    """A command whose help has groups of flags, and whose errors name flags."""

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        titles = ("Arguments", "Options", READING, FURTHER)
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in titles}
        for each in self.get_params(ctx):
            if (record := each.get_help_record(ctx)) is not None:
                is_argument = each.param_type_name == "argument"
                panel = getattr(each, "rich_help_panel", None)
                title = "Arguments" if is_argument else panel or "Options"
                groups[title].append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # noqa: ANN401
        try:
            return super().invoke(ctx)
        except SamkvError as error:
            error.args = (error.told(self._as_flag),)
            raise

    def _as_flag(self, given: Given) -> str:
        """An option with its value, as a flag of this command; if it has none, as in Python."""
        name = _PARAMETERS.get(given.option, given.option)
        flags = {each.name: each.opts[0] for each in self.params if each.opts[0].startswith("--")}
        if name not in flags:
            return str(given)
        is_word = isinstance(given.value, str | Path) and len(str(given.value)) < 80
        return f"{flags[name]}={shlex.quote(str(given.value)) if is_word else shown(given.value)}"


# -- groups of flags ----------------------------------------------------------------------------


def with_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command for typer, with the groups among its parameters as flags."""
    parameters = inspect.signature(command, eval_str=True).parameters
    groups = {
        name: _flags_of(each.annotation) for name, each in parameters.items()
        if is_dataclass(each.annotation) or is_typeddict(each.annotation)
    }  # fmt: skip
    flags = [each for each in parameters.values() if each.name not in groups]
    flags += chain(*groups.values())

    @functools.wraps(command)
    def run(**given: Any) -> Any:  # noqa: ANN401
        for name, of_group in groups.items():
            filled = {each.name: given.pop(each.name) for each in of_group}
            given[name] = parameters[name].annotation(**filled)
        return command(**given)

    by_name = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in flags]
    run.__signature__ = inspect.Signature(by_name)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in flags}
    return run


def _flags_of(group: Any) -> list[inspect.Parameter]:  # noqa: ANN401
    """The parameters for typer of the options of a TypedDict, or of the fields of a dataclass."""
    annotated: Any = Annotated  # type checkers refuse a type that is computed
    if is_typeddict(group):
        rows = [
            (name, annotated[_readable(kind), flag(group, name)], each.default)
            for name, (kind, each) in declared(group).items()
            if each.has_flag
        ]
    else:
        hints = get_type_hints(group, include_extras=True)
        rows = [(each.name, hints[each.name], each.default) for each in fields(group)]
    return [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, annotation=kind,
            default=inspect.Parameter.empty if default is MISSING else default,
        )
        for name, kind, default in rows
    ]  # fmt: skip


def _readable(kind: Any) -> Any:  # noqa: ANN401
    """The type of an option as typer knows one."""
    return str | None if isinstance(kind, ForwardRef) or kind == int | str | None else kind


def flag(group: type, name: str, *names: str, default: str = "") -> Any:  # noqa: ANN401
    """The flag of a declared option.

    names: names of the flag, if not the option's. default: the help's words for the default, if it
    is not the option's.
    """
    _, each = declared(group)[name]
    default = default or (each.unset if each.default is None else "")
    words = f"{each.description} Default: {default}." if default else each.description
    panel = None if each.is_everyday else FURTHER
    return typer.Option(*names, help=words, rich_help_panel=panel)


# -- of several commands ------------------------------------------------------------------------

ModelName = Annotated[str, flag(ModelOptions, "model_name", "--model")]
Device = Annotated[str, flag(ModelOptions, "device_map", "--device")]
Dtype = Annotated[str, flag(ModelOptions, "dtype")]


@dataclass(frozen=True, kw_only=True)
class OfRuntime:
    """The options of the runtime that runs a model."""

    runtime: Annotated[str | None, flag(ModelOptions, "runtime")] = None
    n_threads: Annotated[int | None, flag(ModelOptions, "n_threads")] = None
    n_gpu_layers: Annotated[int | None, flag(LlamaCppOptions, "n_gpu_layers")] = None
    n_ctx: Annotated[int | None, flag(LlamaCppOptions, "n_ctx")] = None
    type_k: Annotated[str | None, flag(LlamaCppOptions, "type_k")] = None
    type_v: Annotated[str | None, flag(LlamaCppOptions, "type_v")] = None
    main_gpu: Annotated[int | None, flag(LlamaCppOptions, "main_gpu")] = None
    tensor_split: Annotated[list[float] | None, flag(LlamaCppOptions, "tensor_split")] = None
    use_mmap: Annotated[bool | None, flag(LlamaCppOptions, "use_mmap")] = None
    use_mlock: Annotated[bool | None, flag(LlamaCppOptions, "use_mlock")] = None

    def of_runtime(self, model: str) -> dict[str, Any]:
        """These options by their names in Python.

        The built-in model runs on one thread by default: it is too small for a second one to help.
        """
        given = {each.name: getattr(self, each.name) for each in fields(OfRuntime)}
        if model == BUILTIN and self.n_threads is None:
            given["n_threads"] = 1
        return given


@dataclass(frozen=True, kw_only=True)
class Converting:
    """The options that say how a file becomes text, and what that may cost."""

    encoding: Annotated[
        str | None, of_reading(help="Of files of text, such as cp1252. Default: detected.")
    ] = None
    max_file: Annotated[str, of_reading(help="Most bytes of a file.")] = "200MB"
    max_text: Annotated[str, of_reading(help="Most bytes of the text of a file.")] = "50MB"
    max_pages: Annotated[int, of_reading(min=1, help="Most pages of a PDF.")] = 2000
    read_seconds: Annotated[
        float, of_reading(min=0.1, help="Most seconds to convert a file to text.")
    ] = 60.0
    read_memory: Annotated[str, of_reading(help="Most memory to convert a file to text.")] = "2GB"

    def __post_init__(self) -> None:
        if self.encoding is not None:
            try:
                lookup(self.encoding)
            except (LookupError, ValueError) as error:
                raise InvalidOption(
                    Given("encoding", self.encoding), "; it must be one that Python knows"
                ) from error

    @property
    def limits(self) -> ReadLimits:
        """Raises InvalidOption if a size is none."""
        from samkv_integrations.ingest.reader import ReadLimits

        return ReadLimits(
            file_bytes=bytes_of("max_file", self.max_file),
            text_bytes=bytes_of("max_text", self.max_text),
            pages=self.max_pages,
            seconds=self.read_seconds,
            memory_bytes=bytes_of("read_memory", self.read_memory),
        )


# absolute, because Chroma remembers a folder by the name with which it was opened
Folder = Annotated[
    Path,
    typer.Option("--dir", resolve_path=True, help="Folder of the collections and chunk caches."),
]
CacheFolder = Annotated[
    Path | None,
    further(
        "--kv-dir",
        resolve_path=True,
        help="Folder of the chunk caches, such as a program's kv_dir. Default: kv in --dir.",
    ),
]
Collection = Annotated[str, typer.Option(help="Name of the Chroma collection.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
