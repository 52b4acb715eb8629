"""Every option of a model, a store, an engine and an answer, declared once.

From here come the fields of both frameworks' LLMs (`samkv_integrations.frameworks.fields`), flags
of the command line (`samkv_integrations.cli.arguments`) and the tables of the API reference. The
code that uses an option reads it from `Engine`'s arguments or from `AnswerSettings`. The options of
sampling are declared where they are used, in `samkv_integrations.model.sampling`.

Nothing here imports torch, so that ``samkv --help`` need not wait for it. For the same reason types
of the engine stand in quotes.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, get_args

from samkv_integrations.errors import InvalidOption
from samkv_integrations.option import Option

if TYPE_CHECKING:
    from samkv_integrations.engine.chunk_prefix import PrefixPolicy
    from samkv_integrations.eviction import Eviction
    from samkv_integrations.methods import Method
    from samkv_integrations.prompt.resolve import OnMiss


def declared(options: type) -> dict[str, tuple[Any, Option]]:
    """Name -> type and declaration of the options of a class below."""
    hints = options.__annotations__
    return {name: (hint.__origin__, hint.__metadata__[0]) for name, hint in hints.items()}


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


def check_method(method: object) -> None:
    """Raises UnknownOption, which lists the names, for what is no method."""
    from samkv_integrations.methods import get_method

    get_method(method)  # type: ignore[arg-type]  # which is the question


def check_eviction(eviction: object) -> None:
    """Raises UnknownOption, which lists the names, for what is no eviction."""
    from samkv_integrations.eviction import get_eviction

    get_eviction(eviction)  # type: ignore[arg-type]  # which is the question


def check_prefix(prefix: object) -> None:
    """Raises InvalidOption for what is neither a policy nor the path of a learned prefix."""
    from samkv_integrations.engine.chunk_prefix import PrefixPolicy

    is_file = isinstance(prefix, os.PathLike) or str(prefix).endswith(".safetensors")
    if prefix not in get_args(PrefixPolicy) and not is_file:
        raise InvalidOption(
            f"prefix={prefix!r}; allowed: {', '.join(get_args(PrefixPolicy))}, or the path of a "
            "learned prefix (.safetensors)"
        )


def check_store_bits(bits: int) -> None:
    """Raises InvalidOption if caches cannot have so many bits."""
    from samkv_integrations.cache import quantise

    quantise.check_store_bits(bits)


def check_on_miss(on_miss: str) -> None:
    """Raises InvalidOption if ``on_miss`` is nothing that can be done for a missed chunk."""
    from samkv_integrations.prompt.resolve import OnMiss

    if on_miss not in get_args(OnMiss):
        raise InvalidOption(f"on_miss={on_miss!r}; allowed: {', '.join(get_args(OnMiss))}")


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


def check_json_schema(schema: Mapping[str, Any]) -> None:
    """Raises InvalidOption for a JSON schema that an answer cannot be held to."""
    from samkv_integrations.model import sampling

    sampling.check_json_schema(schema)


# -- options -----------------------------------------------------------------------------------


class ModelOptions(TypedDict, total=False):
    """How a model is loaded, in the names of both frameworks."""

    model_name: Annotated[
        str, Option("", "A hub id, a local folder, a GGUF file, 'smollm2' or 'builtin'.")
    ]
    tokenizer_name: Annotated[
        str | None,
        Option(None, "Hub id or folder of the tokenizer.", unset="where the model is"),
    ]
    device_map: Annotated[
        str | None,
        Option(
            "auto",
            "'auto', 'cpu', 'cuda', 'cuda:N' or 'mps'. Several devices: "
            'model_kwargs={"device_map": ...}.',
            unset="'cpu'",
        ),
    ]
    dtype: Annotated[
        str,
        Option(
            "auto",
            "'float32', 'bfloat16', 'float16', or 'auto' for the checkpoint's; float32 where this "
            "processor computes bfloat16 slowly.",
        ),
    ]
    model_kwargs: Annotated[
        dict[str, Any],
        Option(
            {},
            "Passed to from_pretrained of the model: revision, token, cache_dir, local_files_only "
            "and so on.",
        ),
    ]
    tokenizer_kwargs: Annotated[
        dict[str, Any], Option({}, "Passed to from_pretrained of the tokenizer.")
    ]


class StoreOptions(TypedDict, total=False):
    """Where chunk caches are kept, see `ChunkStore`."""

    kv_dir: Annotated[
        str | Path | None, Option(None, "Folder of the chunk caches.", unset="in memory")
    ]
    kv_remote: Annotated[
        str | None,
        Option(
            None,
            "Where machines share chunk caches, such as 's3://bucket/prefix'; kv_dir then holds "
            "what this machine keeps of them.",
            unset="they are this machine's alone",
        ),
    ]
    namespace: Annotated[
        str | None,
        Option(
            None,
            "Owner of the chunk caches, such as a tenant: those of other namespaces are neither "
            "found nor read.",
            unset="the engine's, '' by default",
        ),
    ]
    max_bytes: Annotated[
        int | None,
        Option(
            None,
            "Most bytes of all chunk caches in kv_dir, for every process from now on; the least "
            "recently used are evicted.",
            unset="the limit that was set before",
        ),
    ]


METHOD = Option(
    None, "How prompts are answered: a name out of METHODS, or a Method.",
    unset="as tuned, else auto", check=check_method, plain=str, flag=False,
)  # fmt: skip
EVICTION = Option(
    None,
    "Which KV entries an answer attends to after its first token: a name out of EVICTIONS, an "
    "Eviction, or 'none' for all.",
    unset="the method's own", check=check_eviction, plain=str, flag=False,
)  # fmt: skip


class CacheOptions(TypedDict, total=False):
    """Options of an engine that decide what its chunk caches hold."""

    store_bits: Annotated[
        int | None,
        Option(
            None,
            "Bits of the numbers in chunk caches: 4, 8, or 16 for the model's dtype.",
            unset="as tuned, else 4",
            check=check_store_bits, flag=False,
        ),
    ]  # fmt: skip


class SourceOptions(ModelOptions, StoreOptions, CacheOptions, total=False):
    """What chunk caches are made with."""


class OwnEngineOptions(TypedDict, total=False):
    """Options of an `Engine` beside its model, its store, and what its caches hold."""

    method: Annotated["str | Method | None", METHOD]
    eviction: Annotated["str | Eviction | None", EVICTION]
    block_size: Annotated[
        int | Literal["auto"],
        Option(
            "auto",
            "Tokens a block; 'auto' takes the size of the caches that the store holds for this "
            "model, else one that suits the length of the first chunks.",
            in_llms=False, flag=False,
        ),
    ]  # fmt: skip
    prefix: Annotated[
        "PrefixPolicy | os.PathLike[str] | str",
        Option(
            "auto",
            "What a chunk is prefilled after: 'documents' (BOS and two short made-up documents), "
            "'learned' (BOS and the embeddings that 'samkv adapt' wrote beside the caches), the "
            "path of such embeddings, 'bos' or 'none'; 'auto' is 'learned' where there are any, "
            "else 'documents'.",
            check=check_prefix, in_llms=False, flag=False,
        ),
    ]  # fmt: skip
    prefix_text: Annotated[
        str,
        Option(
            "",
            "Text in place of the documents, such as the system prompt that begins every request: "
            "the first chunk after it is exact.",
            allows=lambda text: isinstance(text, str), bounds="a string", in_llms=False, flag=False,
        ),
    ]  # fmt: skip
    prefix_bytes: Annotated[
        int,
        Option(
            2**28,
            "Memory for the KV entries of prompts' beginnings (system prompt, earlier turns, "
            "documents that were computed in full), which later prompts reuse; 0 for none.",
            in_llms=False, flag=False,
        ),
    ]  # fmt: skip
    exact_beginnings: Annotated[
        bool,
        Option(
            True,
            "Whether a chunk that has stood first in a prompt gets a second cache, computed in "
            "idle time behind the same head (chat template, system prompt): none of its tokens is "
            "recomputed when it stands first again. For stores on disk.",
        ),
    ]


class EngineOptions(OwnEngineOptions, CacheOptions, total=False):
    """Options of an `Engine` beside its model and its store."""


class OwnAnswerOptions(TypedDict, total=False):
    """Options of one answer, but for those of sampling."""

    method: Annotated["str | Method | None", replace(METHOD, unset="the engine's")]
    eviction: Annotated["str | Eviction | None", replace(EVICTION, unset="the engine's")]
    context_window: Annotated[
        int | None,
        Option(
            None, "Most tokens of prompt and answer together.", unset="the model's",
            allows=lambda n: type(n) is int and n >= 1, bounds="a whole number of at least 1",
            in_llms=False, flag=False,
        ),
    ]  # fmt: skip
    stop: Annotated[
        Sequence[str],
        Option(
            (), "Strings that end the answer and are no part of it.", check=check_stop,
            in_llms=False, flag=False,
        ),
    ]  # fmt: skip
    stop_ids: Annotated[
        Collection[int],
        Option((), "Token ids that end the answer, beside the model's own.", in_llms=False,
               flag=False),
    ]  # fmt: skip
    json_schema: Annotated[
        Mapping[str, Any] | None,
        Option(
            None,
            "A JSON schema that the answer conforms to; an answer that reaches max_new_tokens is "
            "cut, with finish_reason 'length'. Needs the extra 'structured'.",
            check=check_json_schema, in_llms=False, flag=False,
        ),
    ]  # fmt: skip
    timeout: Annotated[
        float | None,
        Option(
            None,
            "Seconds, waiting included, after which an incomplete answer ends with TimedOut.",
            unset="no limit",
            check=check_timeout, flag=False,
        ),
    ]  # fmt: skip
    on_miss: Annotated[
        "OnMiss",
        Option(
            "compute",
            "For a chunk without a usable cache: 'compute' (compute it as a chunk and keep it; "
            "with 'auto' only where that takes no longer than full prefill), 'text' (compute it "
            "with the rest of the prompt, keep nothing) or 'error'.",
            check=check_on_miss, plain=str, flag=False,
        ),
    ]  # fmt: skip
