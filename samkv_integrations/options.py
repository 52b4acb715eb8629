"""Every option of a model, a store, an engine and an answer, declared once.

A declaration is a row of a TypedDict: a name, a type, and an `Option`
(`samkv_integrations.option`). These rows define the keyword arguments of `Engine` and of its
answers, their checks and defaults, the fields of LLMs and of the server's requests
(`samkv_integrations.frameworks.fields`), the flags of the command line
(`samkv_integrations.cli.arguments`), and the tables of the API reference (``docs/fields.py``).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, Unpack, get_args

from samkv_integrations.errors import Given, InvalidOption
from samkv_integrations.option import (
    DEFAULT_STORE_BITS,
    STORE_BITS,
    OnMiss,
    Option,
    PrefixPolicy,
    among,
    bytes_of,
    check_dtype,
    check_shares,
    check_size,
    check_stop,
    check_text,
    check_timeout,
    complete,
    declared,
    number,
)

if TYPE_CHECKING:
    from samkv_integrations.methods import Method
    from samkv_integrations.methods.eviction import Eviction

DEFAULT_METHOD = "auto"


# -- checks that look a value up ---------------------------------------------------------------


def check_method(name: str, method: Any) -> None:  # noqa: ANN401
    """Raises UnknownOption for a method that does not exist."""
    from samkv_integrations.methods import get_method

    get_method(method)


def check_eviction(name: str, eviction: Any) -> None:  # noqa: ANN401
    """Raises UnknownOption for a rule that does not exist, InvalidOption for a wrong kind."""
    from samkv_integrations.methods.eviction import get_eviction

    get_eviction(eviction)


# -- options -----------------------------------------------------------------------------------


class ModelOptions(TypedDict, total=False):
    """How a model is loaded, in the names of both frameworks."""

    model_name: Annotated[
        str | Path,
        Option(
            description="A hub id, a local folder, a GGUF file, 'smollm2' or 'builtin'.",
            default="", is_everyday=True,
        ),
    ]  # fmt: skip
    tokenizer_name: Annotated[
        str | None,
        Option(
            description="Hub id or folder of the tokenizer.", default=None,
            unset="where the model is",
        ),
    ]  # fmt: skip
    device_map: Annotated[
        str | None,
        Option(
            description="'auto', 'cpu', 'cuda', 'cuda:N' or 'mps'.",
            more='Several devices: model_kwargs={"device_map": ...}.',
            default="auto", unset="'cpu'",
        ),
    ]  # fmt: skip
    dtype: Annotated[
        Any,  # a string, or a dtype of torch
        Option(
            description="'float32', 'bfloat16', 'float16', or 'auto' for the checkpoint's.",
            more="'auto' is float32 where this processor computes bfloat16 slowly.",
            default="auto", check=check_dtype,
        ),
    ]  # fmt: skip
    model_kwargs: Annotated[
        dict[str, Any],
        Option(
            description="Passed to from_pretrained of the model: revision, token, cache_dir, "
            "local_files_only and so on.",
            default={},
        ),
    ]  # fmt: skip
    tokenizer_kwargs: Annotated[
        dict[str, Any],
        Option(description="Passed to from_pretrained of the tokenizer.", default={}),
    ]
    runtime: Annotated[
        str | None,
        Option(
            description="What runs the model: 'llama_cpp' or 'transformers'.", default=None,
            unset="llama_cpp for a GGUF file if llama.cpp is installed, else transformers",
        ),
    ]  # fmt: skip
    n_threads: Annotated[
        int | None,
        Option(
            description="Threads of a pass on a CPU.",
            more="With transformers they hold for the process.", default=None,
            unset="the physical cores with llama.cpp, torch's number with transformers",
            check=number("at least 1", lambda n: n >= 1, is_whole=True),
        ),
    ]  # fmt: skip


class LlamaCppOptions(TypedDict, total=False):
    """How llama.cpp loads a GGUF file, in the names of llama-cpp-python."""

    n_gpu_layers: Annotated[
        int | None,
        Option(
            description="Layers on a graphics card, -1 for all.", default=None,
            unset="all if this build of llama.cpp has one",
            check=number("-1 (all layers) or more", lambda n: n >= -1, is_whole=True),
        ),
    ]  # fmt: skip
    n_ctx: Annotated[
        int | None,
        Option(
            description="Tokens of all answers and kept conversations together.", default=None,
            unset="8192", check=number("at least 1", lambda n: n >= 1, is_whole=True),
        ),
    ]  # fmt: skip
    type_k: Annotated[
        str | int | None,
        Option(
            description="The type of keys in memory, such as 'q8_0'.",
            more="Or llama.cpp's number of it. Chunks are cached with 'f16' alone.", default=None,
            unset="'f16'",
        ),
    ]  # fmt: skip
    type_v: Annotated[
        str | int | None,
        Option(
            description="The type of values in memory, such as 'q8_0'.",
            more="Or llama.cpp's number of it. Chunks are cached with 'f16' alone.", default=None,
            unset="'f16'",
        ),
    ]  # fmt: skip
    main_gpu: Annotated[
        int | None,
        Option(
            description="Number of the graphics card that has what is not split.", default=None,
            unset="0", check=number("0 or more", lambda n: n >= 0, is_whole=True),
        ),
    ]  # fmt: skip
    tensor_split: Annotated[
        Sequence[float] | None,
        Option(
            description="The share of the model on each graphics card.", default=None,
            unset="by their free memory", check=check_shares,
        ),
    ]  # fmt: skip
    use_mmap: Annotated[
        bool | None,
        Option(
            description="Whether the file is mapped into memory, not read.", default=None,
            unset="True where that works", check=among(True, False),
        ),
    ]  # fmt: skip
    use_mlock: Annotated[
        bool | None,
        Option(
            description="Whether the model is kept out of swap.", default=None, unset="False",
            check=among(True, False),
        ),
    ]  # fmt: skip


class StoreOptions(TypedDict, total=False):
    """Where chunk caches are kept, see `ChunkStore`."""

    kv_dir: Annotated[
        str | Path | None,
        Option(description="Folder of the chunk caches.", default=None, unset="in memory"),
    ]
    kv_remote: Annotated[
        str | None,
        Option(
            description="Where machines share chunk caches, such as 's3://bucket/prefix'.",
            more="kv_dir then holds what this machine keeps of them.",
            default=None, unset="this machine alone has the caches",
        ),
    ]  # fmt: skip
    namespace: Annotated[
        str | None,
        Option(
            description="Owner of the chunk caches, such as a tenant.",
            more="Those of other namespaces are neither found nor read.",
            default=None, unset="the engine's, '' by default",
        ),
    ]  # fmt: skip
    max_bytes: Annotated[
        int | str | None,
        Option(
            description="Most bytes of all chunk caches in kv_dir, a number or a size such as "
            "'20GB', for every process from now on.",
            more="The least recently used are evicted.",
            default=None, unset="the limit that was set before", check=bytes_of,
        ),
    ]  # fmt: skip


class EngineOptions(TypedDict, total=False):
    """Options of an `Engine` beside its model and its store."""

    method: Annotated[
        "str | Method | None",
        Option(
            description="How prompts are answered: a name out of METHODS, or a Method.",
            default=None, unset=repr(DEFAULT_METHOD), check=check_method,
        ),
    ]  # fmt: skip
    eviction: Annotated[
        "str | Eviction | None",
        Option(
            description="Which KV entries an answer attends to after its first token: a name out "
            "of EVICTIONS, an Eviction, or 'none' for all.",
            default=None, unset="the method's own", check=check_eviction,
        ),
    ]  # fmt: skip
    store_bits: Annotated[
        int | None,
        Option(
            description="Bits of the numbers in chunk caches: 4, 8, or 16 for the model's dtype.",
            default=None, unset=str(DEFAULT_STORE_BITS), check=among(*STORE_BITS),
        ),
    ]  # fmt: skip
    block_size: Annotated[
        int | Literal["auto"],
        Option(
            description="Tokens of a block.",
            more="'auto' takes the size of the caches that the store holds for this model, else "
            "one that suits the length of the first chunks.",
            default="auto", of_llms=False,
        ),
    ]  # fmt: skip
    prefix: Annotated[
        PrefixPolicy,
        Option(
            description="The tokens that precede a chunk while it is computed: 'documents' (BOS "
            "and two short made-up documents), 'bos' or 'none'; 'auto' is 'documents'.",
            more="With 'bos', a chunk at the beginning of a prompt is exact. With 'documents', no "
            "chunk is exact, but all later chunks are closer to full prefill.",
            default="auto", check=among(*get_args(PrefixPolicy)), of_llms=False,
        ),
    ]  # fmt: skip
    prefix_text: Annotated[
        str,
        Option(
            description="Text in place of the documents, such as the system prompt that begins "
            "every request.",
            more="A chunk that directly follows it is exact.",
            default="", check=check_text, of_llms=False,
        ),
    ]  # fmt: skip
    prefix_bytes: Annotated[
        int | str | None,
        Option(
            description="Memory for the KV entries of the latest prompts and answers, a number of "
            "bytes or a size such as '2GB'; 0 for none.",
            more="A follow-up computes its new tokens only. A token takes 12 kB with a model of "
            "0.5 B parameters, and 131 kB with Llama 3.1 8B in 16 bits.",
            default=None, unset="an eighth of the memory that is available", check=check_size,
            has_flag=True,
        ),
    ]  # fmt: skip
    hot_bytes: Annotated[
        int | str | None,
        Option(
            description="Memory for chunk caches that were read and verified lately, a number of "
            "bytes or a size such as '2GB'; 0 for none.",
            more="The next question reads no file for them. On a GPU it is the GPU's memory, and "
            "as much pinned memory of the host. Only stores on disk have hot chunks.",
            default=None, unset="0 on a CPU, on a GPU a tenth of the memory that is free",
            check=check_size, has_flag=True,
        ),
    ]  # fmt: skip


SMALLEST = 1e-5
"""The smallest divisor of logits. With a smaller one they could become infinite."""


class SamplingOptions(TypedDict, total=False):
    """Options of sampling. None is allowed where it is the default."""

    max_new_tokens: Annotated[
        int,
        Option(
            description="Most tokens of the answer.", default=256, of_llms=False,
            check=number("at least 1", lambda n: n >= 1, is_whole=True),
        ),
    ]  # fmt: skip
    seed: Annotated[
        int | None,
        Option(
            description="Makes sampling repeatable.", default=None,
            check=number(
                "a number of at most 64 bits", lambda n: -(2**63) <= n < 2**64, is_whole=True
            ),
        ),
    ]  # fmt: skip
    repetition_penalty: Annotated[
        float | None,
        Option(
            description="Above 1 makes tokens of the prompt and the answer less likely.",
            default=None, unset="the generation config's",
            check=number(
                f"{SMALLEST} or more (1 for none) and finite", lambda n: SMALLEST <= n < math.inf
            ),
        ),
    ]  # fmt: skip
    temperature: Annotated[
        float,
        Option(
            description="0 takes the likeliest token; top_k, top_p and min_p then change nothing.",
            default=0.0,
            check=number(
                f"0 (greedy), or {SMALLEST} or more and finite",
                lambda n: n == 0 or SMALLEST <= n < math.inf,
            ),
        ),
    ]  # fmt: skip
    top_k: Annotated[
        int,
        Option(
            description="How many of the likeliest tokens are sampled from; 0 for all.", default=0,
            check=number("0 (all tokens) or more", lambda n: n >= 0, is_whole=True),
        ),
    ]  # fmt: skip
    top_p: Annotated[
        float,
        Option(
            description="Sample from the likeliest tokens that together have this probability.",
            default=1.0, check=number("above 0 and at most 1", lambda n: 0 < n <= 1),
        ),
    ]  # fmt: skip
    min_p: Annotated[
        float,
        Option(
            description="Sample from tokens of at least this share of the likeliest one's "
            "probability (arXiv 2407.01082).",
            default=0.0, check=number("between 0 (all tokens) and 1", lambda n: 0 <= n <= 1),
        ),
    ]  # fmt: skip


_OF_ENGINES = declared(EngineOptions)


class AnswerOptions(SamplingOptions, total=False):
    """Options of `Engine.generate` and `Engine.stream`."""

    method: Annotated[
        "str | Method | None", replace(_OF_ENGINES["method"][1], unset="the engine's")
    ]
    eviction: Annotated[
        "str | Eviction | None", replace(_OF_ENGINES["eviction"][1], unset="the engine's")
    ]
    context_window: Annotated[
        int | None,
        Option(
            description="Most tokens of prompt and answer together.", default=None,
            unset="the model's", of_llms=False,
            check=number("a whole number of at least 1", lambda n: n >= 1, is_whole=True),
        ),
    ]  # fmt: skip
    stop: Annotated[
        Sequence[str],
        Option(
            description="Strings that end the answer; they are not part of it.", default=(),
            check=check_stop, of_llms=False,
        ),
    ]  # fmt: skip
    stop_ids: Annotated[
        Collection[int],
        Option(
            description="Token ids that end the answer, beside the model's own.", default=(),
            of_llms=False,
        ),
    ]  # fmt: skip
    json_schema: Annotated[
        Mapping[str, Any] | None,
        Option(
            description="A JSON schema that the answer conforms to.",
            more="An answer that reaches max_new_tokens is cut, with finish_reason 'length'. Needs "
            "the extra 'structured'.",
            default=None, unset="any text", of_llms=False,
        ),
    ]  # fmt: skip
    timeout: Annotated[
        float | None,
        Option(
            description="Seconds, waiting included, after which an incomplete answer ends.",
            more="It ends with TimedOut.", default=None, unset="no limit", check=check_timeout,
            has_flag=True, is_everyday=True,
        ),
    ]  # fmt: skip
    on_miss: Annotated[
        OnMiss,
        Option(
            description="For a chunk without a usable cache: 'compute' (compute it as a chunk and "
            "keep it), 'text' (compute it with the rest of the prompt, keep nothing) or 'error'.",
            more="With the method 'auto', 'compute' does so only where full prefill is not faster.",
            default="compute", check=among(*get_args(OnMiss)), has_flag=True,
        ),
    ]  # fmt: skip
    draft: Annotated[
        int,
        Option(
            description="Most tokens that are drafted and checked at once; 0 drafts none.",
            more="Drafts are copied from where the last tokens occurred before, in the prompt or "
            "the answer (prompt lookup); they change the speed of an answer and nothing else.",
            default=7, has_flag=True,
            check=number("a whole number, 0 or more", lambda n: n >= 0, is_whole=True),
        ),
    ]  # fmt: skip
    owner: Annotated[
        str,
        Option(
            description="Who asks, such as an API key of a server.",
            more="With `FairTurns`, owners share the model's time equally.",
            default="", of_llms=False, check=check_text,
        ),
    ]  # fmt: skip


# -- the options of one answer, checked --------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """`SamplingOptions`, checked and complete."""

    max_new_tokens: int
    seed: int | None
    repetition_penalty: float | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @classmethod
    def of(cls, **options: Unpack[SamplingOptions]) -> "Sampling":
        """From keyword arguments. Raises InvalidOption or UnknownOption for what is wrong."""
        values = complete(SamplingOptions, options, "option of sampling")
        for name in ("temperature", "top_p", "min_p"):
            values[name] = float(values[name])  # transformers refuses whole numbers
        return cls(**values)

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the likeliest one."""
        return self.temperature == 0


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """`AnswerOptions`, complete, and checked as far as possible without a model.

    None stands for the engine's own.
    """

    sampling: Sampling
    method: "Method | None"
    eviction: "str | Eviction | None"
    context_window: int | None
    stop: Sequence[str]
    stop_ids: Collection[int]
    json_schema: Mapping[str, Any] | None
    timeout: float | None
    on_miss: OnMiss
    draft: int

    @classmethod
    def of(cls, **options: Unpack[AnswerOptions]) -> "AnswerSettings":
        """From keyword arguments. Raises InvalidOption or UnknownOption for what is wrong."""
        given = complete(AnswerOptions, options, "option of an answer")
        if given["json_schema"] is not None and given["stop"]:
            raise InvalidOption(
                Given("stop", given["stop"]), " with json_schema: a stop string could cut the "
                "JSON, which ends by itself; leave out either",
            )  # fmt: skip
        del given["owner"]  # of the scheduler, not of the answer
        if given["method"] is not None:
            from samkv_integrations.methods import get_method

            given["method"] = get_method(given["method"])
        sampling = Sampling(**{name: given.pop(name) for name in declared(SamplingOptions)})
        return cls(sampling=sampling, **given)

    def window_within(self, most: int) -> int:
        """Most tokens of prompt and answer together. most: the model's context window."""
        return min(self.context_window or most, most)
