"""Every option of a model, a store, an engine and an answer, declared once.

From here come the flags of an engine's options (`samkv_integrations.cli.arguments`), the tables of
the API reference, and the descriptions of the LLMs' fields
(`samkv_integrations.frameworks.fields`). The code that uses an option reads it from `Engine`'s
arguments or from `AnswerSettings`, which repeat its name and default. The options of sampling are
declared in `samkv_integrations.runtimes.transformers.sampling`.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, get_args

from samkv_integrations.errors import InvalidOption
from samkv_integrations.option import Option, declared

if TYPE_CHECKING:
    import torch

    from samkv_integrations.methods import Method
    from samkv_integrations.methods.eviction import Eviction
    from samkv_integrations.prompt.resolve import OnMiss
    from samkv_integrations.runtimes.transformers.passes.prefill import PrefixPolicy


def check_options(options: type, given: Mapping[str, Any]) -> None:
    """Raises InvalidOption or UnknownOption for the first value that a declaration refuses."""
    for name, (_, option) in declared(options).items():
        if name not in given or given[name] is None is option.default:
            continue
        value = given[name]
        if option.check is not None:
            option.check(value)
        elif option.allows is not None and not option.allows(value):
            raise InvalidOption(f"{name}={value!r}; it must be {option.bounds}")


# -- checks ------------------------------------------------------------------------------------


def check_value(name: str, value: Any) -> object:  # noqa: ANN401
    """The check of the code that uses the option ``name``."""
    from samkv_integrations.methods import get_method
    from samkv_integrations.methods.eviction import get_eviction
    from samkv_integrations.runtimes.transformers.entries.quantise import check_store_bits
    from samkv_integrations.runtimes.transformers.sampling import check_json_schema

    checks: Mapping[str, Callable[[Any], object]] = {
        "method": get_method, "eviction": get_eviction, "store_bits": check_store_bits,
        "json_schema": check_json_schema,
    }  # fmt: skip
    return checks[name](value)


def check_prefix(prefix: object) -> None:
    """Raises InvalidOption for an unknown policy, or a learned prefix, which was removed."""
    from samkv_integrations.runtimes.transformers.passes.prefill import PrefixPolicy

    is_file = isinstance(prefix, os.PathLike) or str(prefix).endswith(".safetensors")
    if prefix == "learned" or is_file:
        raise InvalidOption(
            f"prefix={str(prefix)!r}: learned prefixes were removed; give prefix='documents', and "
            "ingest again"
        )
    InvalidOption.unless_among("prefix", prefix, get_args(PrefixPolicy))


def check_on_miss(on_miss: str) -> None:
    """Raises InvalidOption if ``on_miss`` is nothing that can be done for a missed chunk."""
    from samkv_integrations.prompt.resolve import OnMiss

    InvalidOption.unless_among("on_miss", on_miss, get_args(OnMiss))


def check_timeout(timeout: Any) -> None:  # noqa: ANN401
    """Raises InvalidOption if ``timeout`` is no number of seconds that one could wait."""
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not (is_number and 0 < timeout <= TIMEOUT_MAX):
        raise InvalidOption(
            f"timeout={timeout!r}; it must be above 0 and at most {TIMEOUT_MAX:.0f} seconds, or "
            "None for no end"
        )


def check_stop(stop: object) -> None:
    """Raises InvalidOption unless ``stop`` is a list of strings; an empty one would end all."""
    is_list = isinstance(stop, Collection) and not isinstance(stop, str)
    for text in stop if is_list else ("",):  # type: ignore[attr-defined]  # a Collection
        if not isinstance(text, str) or not text:
            raise InvalidOption(f"stop={stop!r}; it must be a list of non-empty strings")


# -- options -----------------------------------------------------------------------------------


class ModelOptions(TypedDict, total=False):
    """How a model is loaded, in the names of both frameworks."""

    model_name: Annotated[str | Path, Option(default="")]
    """A hub id, a local folder, a GGUF file, 'smollm2' or 'builtin'."""
    tokenizer_name: Annotated[str | None, Option(default=None, unset="where the model is")]
    """Hub id or folder of the tokenizer."""
    device_map: Annotated[str | None, Option(default="auto", unset="'cpu'")]
    """'auto', 'cpu', 'cuda', 'cuda:N' or 'mps'. Several devices: model_kwargs={"device_map":
    ...}."""
    dtype: Annotated["str | torch.dtype", Option(default="auto")]
    """'float32', 'bfloat16', 'float16', or 'auto' for the checkpoint's; float32 where this
    processor computes bfloat16 slowly."""
    weights: Annotated[Literal["auto", "packed", "unpacked", "int8"], Option(default="auto")]
    """How a CPU keeps weights: 'packed' as in the GGUF file, 'unpacked', 'int8' for other
    checkpoints, or 'auto' as memory allows."""
    model_kwargs: Annotated[dict[str, Any], Option(default={})]
    """Passed to from_pretrained of the model: revision, token, cache_dir, local_files_only and so
    on."""
    tokenizer_kwargs: Annotated[dict[str, Any], Option(default={})]
    """Passed to from_pretrained of the tokenizer."""


class StoreOptions(TypedDict, total=False):
    """Where chunk caches are kept, see `ChunkStore`."""

    kv_dir: Annotated[str | Path | None, Option(default=None, unset="in memory")]
    """Folder of the chunk caches."""
    kv_remote: Annotated[
        str | None, Option(default=None, unset="this machine alone has the caches")
    ]
    """Where machines share chunk caches, such as 's3://bucket/prefix'; kv_dir then holds what this
    machine keeps of them."""
    namespace: Annotated[str | None, Option(default=None, unset="the engine's, '' by default")]
    """Owner of the chunk caches, such as a tenant: those of other namespaces are neither found nor
    read."""
    max_bytes: Annotated[
        int | str | None, Option(default=None, unset="the limit that was set before")
    ]
    """Most bytes of all chunk caches in kv_dir, a number or a size such as '20GB', for every
    process from now on; the least recently used are evicted."""


METHOD = Option(
    default=None, unset="as tuned, else 'auto'", flag=False, check=partial(check_value, "method")
)  # fmt: skip
EVICTION = Option(
    default=None, unset="the method's own", flag=False, check=partial(check_value, "eviction")
)  # fmt: skip


class CacheOptions(TypedDict, total=False):
    """Options of an engine that decide what its chunk caches hold."""

    store_bits: Annotated[
        int | None,
        Option(
            default=None, unset="as tuned, else 4", flag=False,
            check=partial(check_value, "store_bits"),
        ),
    ]  # fmt: skip
    """Bits of the numbers in chunk caches: 4, 8, or 16 for the model's dtype."""


class OwnEngineOptions(TypedDict, total=False):
    """Options of an `Engine` beside its model, its store, and what its caches hold."""

    method: Annotated["str | Method | None", METHOD]
    """How prompts are answered: a name out of METHODS, or a Method."""
    eviction: Annotated["str | Eviction | None", EVICTION]
    """Which KV entries an answer attends to after its first token: a name out of EVICTIONS, an
    Eviction, or 'none' for all."""
    block_size: Annotated[int | Literal["auto"], Option(default="auto", in_llms=False, flag=False)]
    """Tokens a block; 'auto' takes the size of the caches that the store holds for this model, else
    one that suits the length of the first chunks."""
    prefix: Annotated[
        "PrefixPolicy",
        Option(default="auto", check=check_prefix, in_llms=False, flag=False),
    ]
    """What a chunk is prefilled after: 'documents' (BOS and two short made-up documents), 'bos' or
    'none'; 'auto' is 'documents'. After 'bos' the chunk that stands first in a prompt is exact;
    after documents all others are nearer to full prefill."""
    prefix_text: Annotated[
        str,
        Option(
            default="", allows=lambda text: isinstance(text, str), bounds="a string",
            in_llms=False, flag=False,
        ),
    ]  # fmt: skip
    """Text in place of the documents, such as the system prompt that begins every request: the
    first chunk after it is exact."""
    prefix_bytes: Annotated[
        int | str | None,
        Option(default=None, unset="an eighth of the memory that is available"),
    ]
    """Memory for the KV entries of the latest prompts and answers, a number of bytes or a size such
    as '2GB': a follow-up computes its new tokens only; 0 for none. A token takes 12 kB with a model
    of 0.5 B parameters, and 131 kB with Llama 3.1 8B in 16 bits."""
    hot_bytes: Annotated[
        int | str | None,
        Option(default=None, unset="0 on a CPU, on a GPU a tenth of the memory that is free"),
    ]
    """Memory for chunk caches that were read and verified lately, a number of bytes or a size such
    as '2GB': the next question reads no file for them. On a GPU its memory, and as much pinned
    memory of the host behind it. For stores on disk."""


class EngineOptions(OwnEngineOptions, CacheOptions, total=False):
    """Options of an `Engine` beside its model and its store."""


class OwnAnswerOptions(TypedDict, total=False):
    """Options of one answer, but for those of sampling."""

    method: Annotated["str | Method | None", replace(METHOD, unset="the engine's")]
    """How the prompt is answered: a name out of METHODS, or a Method."""
    eviction: Annotated["str | Eviction | None", replace(EVICTION, unset="the engine's")]
    """Which KV entries the answer attends to after its first token: a name out of EVICTIONS, an
    Eviction, or 'none' for all."""
    context_window: Annotated[
        int | None,
        Option(
            default=None, unset="the model's", in_llms=False, flag=False,
            allows=lambda n: type(n) is int and n >= 1, bounds="a whole number of at least 1",
        ),
    ]  # fmt: skip
    """Most tokens of prompt and answer together."""
    stop: Annotated[Sequence[str], Option(default=(), check=check_stop, in_llms=False, flag=False)]
    """Strings that end the answer and are no part of it."""
    stop_ids: Annotated[Collection[int], Option(default=(), in_llms=False, flag=False)]
    """Token ids that end the answer, beside the model's own."""
    json_schema: Annotated[
        Mapping[str, Any] | None,
        Option(
            default=None, unset="any text", in_llms=False, flag=False,
            check=partial(check_value, "json_schema"),
        ),
    ]  # fmt: skip
    """A JSON schema that the answer conforms to; an answer that reaches max_new_tokens is cut, with
    finish_reason 'length'. Needs the extra 'structured'."""
    timeout: Annotated[float | None, Option(default=None, unset="no limit", check=check_timeout)]
    """Seconds, waiting included, after which an incomplete answer ends with TimedOut."""
    on_miss: Annotated["OnMiss", Option(default="compute", check=check_on_miss)]
    """For a chunk without a usable cache: 'compute' (compute it as a chunk and keep it; with 'auto'
    only where that takes no longer than full prefill), 'text' (compute it with the rest of the
    prompt, keep nothing) or 'error'."""
    draft: Annotated[
        int,
        Option(
            default=7,
            allows=lambda n: type(n) is int and n >= 0,
            bounds="a whole number, 0 or more",
        ),
    ]
    """Most tokens that are drafted and checked at once; 0 drafts none. Drafts are copied from where
    the last tokens occurred before, in the prompt or the answer (prompt lookup); they change the
    speed of an answer and nothing else."""
