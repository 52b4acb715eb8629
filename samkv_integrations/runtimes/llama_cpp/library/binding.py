"""The functions and structures of llama.cpp that this runtime uses: no other file knows them.

They come from llama-cpp-python, with its own structures, or else from the library in the wheel of
xllamacpp, whose structures are written down here. Structures change from build to build, and a call
with another layout crashes the process, so versions are checked before anything is called, and the
default parameters are compared with those that the build must give.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from ctypes import (
    CDLL,
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)  # fmt: skip
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samkv_integrations.errors import MissingExtra

XLLAMACPP = "2026.10.11549"
"""The version of xllamacpp whose structures are below."""

OLDEST_LLAMA_CPP_PYTHON = (0, 3, 36)

F16 = 1  # ggml_type
FLASH_ATTENTION_AUTO, FLASH_ATTENTION_ON = -1, 1
SPM = 1  # llama_vocab_type
NORM, NEOX = 0, 2  # llama_rope_type: pairs are neighbours, or lie half a head apart
CONTROL, USER_DEFINED, LSTRIP, RSTRIP = 1 << 3, 1 << 4, 1 << 7, 1 << 8  # llama_token_attr
LOAD_AUTO, LOAD_NONE, LOAD_MLOCK, LOAD_MMAP_MLOCK = -1, 0, 2, 3  # llama_load_mode
NO_CELLS = 1  # what llama_decode returns

_LOG_WARNING = 3  # ggml_log_level


class ModelParams(Structure):
    """llama_model_params."""

    _fields_ = [
        ("devices", c_void_p), ("tensor_buft_overrides", c_void_p), ("n_gpu_layers", c_int32),
        ("split_mode", c_int), ("load_mode", c_int), ("lazy_mode", c_int), ("main_gpu", c_int32),
        ("tensor_split", POINTER(c_float)), ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p), ("kv_overrides", c_void_p),
        ("vocab_only", c_bool), ("check_tensors", c_bool), ("use_extra_bufts", c_bool),
        ("no_host", c_bool), ("no_alloc", c_bool), ("load_mtp", c_bool),
    ]  # fmt: skip


class ContextParams(Structure):
    """llama_context_params."""

    _fields_ = [
        ("n_ctx", c_uint32), ("n_batch", c_uint32), ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32), ("n_rs_seq", c_uint32), ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32), ("n_threads", c_int32), ("n_threads_batch", c_int32),
        ("ctx_type", c_int), ("rope_scaling_type", c_int), ("pooling_type", c_int),
        ("attention_type", c_int), ("flash_attn_type", c_int), ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float), ("yarn_ext_factor", c_float), ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float), ("yarn_beta_slow", c_float), ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float), ("cb_eval", c_void_p), ("cb_eval_user_data", c_void_p),
        ("type_k", c_int), ("type_v", c_int), ("moe_cache_size", c_size_t),
        ("abort_callback", c_void_p), ("abort_callback_data", c_void_p), ("embeddings", c_bool),
        ("offload_kqv", c_bool), ("no_perf", c_bool), ("op_offload", c_bool),
        ("swa_full", c_bool), ("kv_unified", c_bool), ("samplers", c_void_p),
        ("n_samplers", c_size_t), ("ctx_other", c_void_p),
    ]  # fmt: skip


class Batch(Structure):
    """llama_batch; its arrays belong to the caller."""

    _fields_ = [
        ("n_tokens", c_int32), ("token", c_void_p), ("embd", c_void_p), ("pos", c_void_p),
        ("n_seq_id", c_void_p), ("seq_id", c_void_p), ("logits", c_void_p),
    ]  # fmt: skip


_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "llama_model_default_params": {
        "n_gpu_layers": -1, "split_mode": 1, "load_mode": LOAD_AUTO, "main_gpu": 0,
        "vocab_only": False, "check_tensors": False, "use_extra_bufts": True, "no_host": False,
        "no_alloc": False,
    },
    "llama_context_default_params": {
        "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_outputs_max": 0,
        "flash_attn_type": FLASH_ATTENTION_AUTO, "rope_freq_base": 0.0, "yarn_ext_factor": -1.0,
        "defrag_thold": -1.0, "type_k": F16, "type_v": F16, "embeddings": False,
        "offload_kqv": True, "no_perf": True, "op_offload": True, "swa_full": True,
        "kv_unified": False, "n_samplers": 0,
    },
}  # fmt: skip
"""Default parameters by which a build shows that its structures are those that are used here."""

_LogCallback = CFUNCTYPE(None, c_int, c_char_p, c_void_p)

_MODEL, _CONTEXT, _VOCAB, _MEMORY = c_void_p, c_void_p, c_void_p, c_void_p

_FUNCTIONS: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (_LogCallback, c_void_p)),
    "llama_supports_gpu_offload": (c_bool, ()),
    "llama_max_devices": (c_size_t, ()),
    "llama_print_system_info": (c_char_p, ()),
    # a model
    "llama_model_free": (None, (_MODEL,)),
    "llama_model_get_vocab": (_VOCAB, (_MODEL,)),
    "llama_model_rope_type": (c_int, (_MODEL,)),
    "llama_model_n_ctx_train": (c_int32, (_MODEL,)),
    "llama_model_n_embd": (c_int32, (_MODEL,)),
    "llama_model_n_layer": (c_int32, (_MODEL,)),
    "llama_model_n_head": (c_int32, (_MODEL,)),
    "llama_model_n_head_kv": (c_int32, (_MODEL,)),
    "llama_model_n_swa": (c_int32, (_MODEL,)),
    "llama_model_n_params": (c_uint64, (_MODEL,)),
    "llama_model_size": (c_uint64, (_MODEL,)),
    "llama_model_is_recurrent": (c_bool, (_MODEL,)),
    "llama_model_is_hybrid": (c_bool, (_MODEL,)),
    "llama_model_is_diffusion": (c_bool, (_MODEL,)),
    "llama_model_has_encoder": (c_bool, (_MODEL,)),
    "llama_model_meta_val_str": (c_int32, (_MODEL, c_char_p, c_char_p, c_size_t)),
    "llama_model_chat_template": (c_char_p, (_MODEL, c_char_p)),
    # its vocabulary
    "llama_vocab_type": (c_int, (_VOCAB,)),
    "llama_vocab_n_tokens": (c_int32, (_VOCAB,)),
    "llama_vocab_get_text": (c_char_p, (_VOCAB, c_int32)),
    "llama_vocab_get_attr": (c_int, (_VOCAB, c_int32)),
    "llama_vocab_is_eog": (c_bool, (_VOCAB, c_int32)),
    "llama_vocab_bos": (c_int32, (_VOCAB,)),
    "llama_vocab_eos": (c_int32, (_VOCAB,)),
    "llama_vocab_get_add_bos": (c_bool, (_VOCAB,)),
    "llama_vocab_get_add_eos": (c_bool, (_VOCAB,)),
    "llama_tokenize": (c_int32, (_VOCAB, c_char_p, c_int32, c_void_p, c_int32, c_bool, c_bool)),
    "llama_token_to_piece": (c_int32, (_VOCAB, c_int32, c_char_p, c_int32, c_int32, c_bool)),
    # a context
    "llama_free": (None, (_CONTEXT,)),
    "llama_n_ctx": (c_uint32, (_CONTEXT,)),
    "llama_n_batch": (c_uint32, (_CONTEXT,)),
    "llama_n_seq_max": (c_uint32, (_CONTEXT,)),
    "llama_get_memory": (_MEMORY, (_CONTEXT,)),
    "llama_memory_clear": (None, (_MEMORY, c_bool)),
    "llama_memory_seq_rm": (c_bool, (_MEMORY, c_int32, c_int32, c_int32)),
    "llama_memory_seq_cp": (None, (_MEMORY, c_int32, c_int32, c_int32, c_int32)),
    "llama_state_seq_get_size": (c_size_t, (_CONTEXT, c_int32)),
    "llama_state_seq_get_data": (c_size_t, (_CONTEXT, c_void_p, c_size_t, c_int32)),
    "llama_state_seq_set_data": (c_size_t, (_CONTEXT, c_void_p, c_size_t, c_int32)),
    "llama_set_n_threads": (None, (_CONTEXT, c_int32, c_int32)),
    "llama_get_logits_ith": (POINTER(c_float), (_CONTEXT, c_int32)),
}
"""Name -> its result and its arguments, of functions that take no structure."""

_TO_HALVES = "ggml_cpu_fp32_to_fp16"


@dataclass(frozen=True, kw_only=True)
class Binding:
    """A loaded library of llama.cpp.

    build: package and version that it comes from. library: its functions, with their types.
    model_params, context_params: the defaults, each time a new structure. batch: `Batch`, or that
    of llama-cpp-python.
    log: the latest lines that llama.cpp has logged as warnings or errors, oldest first.
    """

    build: str
    library: Any
    model_params: Any
    context_params: Any
    batch: Any = Batch
    log: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    _kept_alive: list[Any] = field(default_factory=list)

    @property
    def has_device(self) -> bool:
        """Whether this build runs layers on a graphics card."""
        return bool(self.library.llama_supports_gpu_offload())

    def halves(self, numbers: NDArray[np.float32]) -> NDArray[np.float16]:
        """Numbers rounded to F16: where the build exports it, 20 times as fast as NumPy does."""
        convert = getattr(self.library, _TO_HALVES, None)
        if convert is None:
            return numbers.astype(np.float16)
        numbers = np.ascontiguousarray(numbers)
        found = np.empty(numbers.shape, np.float16)
        convert(numbers.ctypes.data, found.ctypes.data, numbers.size)
        return found

    @contextmanager
    def told(self) -> Iterator[list[str]]:
        """A block; afterwards the list holds what llama.cpp logged in it as errors."""
        self.log.clear()
        lines = list[str]()
        yield lines
        lines += self.log


def installed() -> str | None:
    """The package that brings llama.cpp, without importing it; None if none is installed."""
    for package, module in (("llama-cpp-python", "llama_cpp"), ("xllamacpp", "xllamacpp")):
        with suppress(PackageNotFoundError):
            version(package)  # a folder of that name is found as a module, too
            if find_spec(module) is not None:
                return package
    return None


@cache
def load_binding() -> Binding:
    """Load llama.cpp.

    Raises MissingExtra if no package brings it, or one whose structures are not known here.
    """
    package = installed()
    if package is None:
        raise MissingExtra(
            "llama.cpp is not installed; next step: pip install '.[llama-cpp]' in a clone of "
            "samkv-integrations, 'FILE[llama-cpp]' for the file of its wheel, or "
            "llama-cpp-python, built for your graphics card"
        )
    library, structures, build = (
        _of_llama_cpp_python() if package == "llama-cpp-python" else _of_xllamacpp()
    )
    try:
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        model_params, context_params, batch = structures
        for name, kind in (
            ("llama_model_default_params", model_params),
            ("llama_context_default_params", context_params),
        ):
            getattr(library, name).restype = kind
            getattr(library, name).argtypes = ()
        for name, arguments in (
            ("llama_model_load_from_file", (c_char_p, model_params)),
            ("llama_init_from_model", (c_void_p, context_params)),
        ):
            getattr(library, name).restype = c_void_p
            getattr(library, name).argtypes = arguments
        if (to_halves := getattr(library, _TO_HALVES, None)) is not None:
            to_halves.restype, to_halves.argtypes = None, (c_void_p, c_void_p, c_int64)
        library.llama_decode.restype = c_int32
        library.llama_decode.argtypes = (c_void_p, batch)
    except AttributeError as error:
        raise MissingExtra(
            f"{build} does not export what this package calls ({error}); on Windows, and if the "
            "wheel is another one, install llama-cpp-python instead"
        ) from error
    for name, expected in _DEFAULTS.items():
        found = getattr(library, name)()
        for of_field, value in expected.items():
            if getattr(found, of_field, None) != value:
                raise MissingExtra(
                    f"{build} gives {of_field}={getattr(found, of_field, None)!r} in {name} where "
                    f"{value!r} is expected, so its structures are others than this package "
                    f"knows; install xllamacpp=={XLLAMACPP}, or llama-cpp-python "
                    f"{_dotted(OLDEST_LLAMA_CPP_PYTHON)}"
                )
    binding = Binding(
        build=build, library=library, batch=batch,
        model_params=library.llama_model_default_params,
        context_params=library.llama_context_default_params,
    )  # fmt: skip

    def log(level: int, text: bytes | None, _: object) -> None:
        # a level of 5 continues the line before
        if level >= _LOG_WARNING and text and (line := text.decode(errors="replace").strip()):
            binding.log.append(line)

    callback = _LogCallback(log)
    binding._kept_alive.append(callback)
    library.llama_log_set(callback, None)
    library.llama_backend_init()
    return binding


def _of_llama_cpp_python() -> tuple[Any, tuple[Any, Any, Any], str]:
    found = version("llama-cpp-python")
    build = f"llama-cpp-python {found}"
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:3] if part.isdigit())
    if numbers < OLDEST_LLAMA_CPP_PYTHON:
        raise MissingExtra(
            f"{build} is too old; install {_dotted(OLDEST_LLAMA_CPP_PYTHON)} or later, or remove "
            f"it and install xllamacpp=={XLLAMACPP}"
        )
    from llama_cpp import llama_cpp

    # a handle of its own: types that are set on its functions do not change those of the package
    library = CDLL(llama_cpp._lib._name)
    structures = llama_cpp.llama_model_params, llama_cpp.llama_context_params, Batch
    return library, structures, build


def _of_xllamacpp() -> tuple[Any, tuple[Any, Any, Any], str]:
    found = version("xllamacpp")
    build = f"xllamacpp {found}"
    if found != XLLAMACPP:
        raise MissingExtra(
            f"{build} has structures that are not known here; install xllamacpp=={XLLAMACPP}"
        )
    spec = find_spec("xllamacpp")
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in Path(folder).glob("xllamacpp*.so")]
    if not files:
        raise MissingExtra(
            f"{build} has no library that other programs can call here; install llama-cpp-python "
            "instead"
        )
    return CDLL(str(files[0])), (ModelParams, ContextParams, Batch), build


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
