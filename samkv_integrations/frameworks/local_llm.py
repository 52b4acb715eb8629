"""What an LLM can be told in every framework, and the engine that it makes of it.

Both frameworks declare their components with pydantic, which comes with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SkipValidation,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.options import check_on_miss, check_timeout
from samkv_integrations.engine.report import Report
from samkv_integrations.errors import InvalidOption, UnknownOption
from samkv_integrations.frameworks.engine_args import (
    ModelSource,
    check_choices,
    engine_of,
    folder_of,
    own_choices,
    remote_of,
)
from samkv_integrations.frameworks.engine_ref import EngineRef
from samkv_integrations.model.quoting import RenderedPrompt
from samkv_integrations.prompt.resolve import OnMiss


def _checked_on_miss(on_miss: str) -> str:
    check_on_miss(on_miss)
    return on_miss


def _checked_name(part: Any, info: ValidationInfo) -> Any:  # noqa: ANN401
    """A name, that is; an LLM is written down and made again, and what has a name can be."""
    if not isinstance(part, str | None):
        raise InvalidOption(
            f"{info.field_name} is a {type(part).__name__}; an LLM takes a name. Give an engine "
            f"yours, and the LLM that: engine=Engine.from_pretrained(model, {info.field_name}=...)"
        )
    return part


class LocalLLM(BaseModel):
    """Arguments of an LLM that answers from chunk caches. A framework's class adds its own.

    Copies share the engine, and pickles leave it behind, as those of an `EngineRef`.

    Raises:
        InvalidOption, UnknownOption: an argument is wrong, or contradicts ``engine``.
        ModelNotFound, UnsupportedModel, StoreError: see `Engine` and `ChunkStore`.
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True, protected_namespaces=(), use_attribute_docstrings=True
    )

    model_name: str = ""
    """A hub id, a local folder, a GGUF file, ``"smollm2"`` or ``"builtin"``."""
    tokenizer_name: str | None = None
    """Hub id or folder of the tokenizer, if it is not the model's own."""
    device_map: str | None = "auto"
    """``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``; None for ``"cpu"``."""
    dtype: str = "auto"
    """``"float32"``, ``"bfloat16"``, or ``"auto"`` for the checkpoint's; float32 where this
    processor computes bfloat16 slowly."""
    model_kwargs: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Passed on to ``from_pretrained`` of the model: ``revision``, ``token``, ``cache_dir``,
    ``local_files_only`` and so on."""
    tokenizer_kwargs: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Passed on to ``from_pretrained`` of the tokenizer."""
    stopping_ids: list[SkipValidation[int]] = Field(default_factory=list)
    """Token ids that end an answer, beside the model's own."""
    kv_dir: str | Path | None = None
    """Folder of the chunk caches; None keeps them in memory."""
    kv_remote: str | None = None
    """Where machines share their chunk caches, such as ``s3://bucket/prefix``; ``kv_dir`` is then
    what this machine keeps of them. None for caches of this machine alone."""
    namespace: str | None = None
    """Whose the chunk caches are, such as a tenant's: none is found, or read, under another one;
    None for the engine's, which is ``""`` by default."""
    max_bytes: int | None = None
    """What the chunk caches in ``kv_dir`` may take on disk, those of all namespaces together and
    for every process from now on; None for what was said before. What was used longest ago makes
    room, and is computed again when it is asked for."""
    store_bits: int | None = None
    """Bits of the numbers in chunk caches: 4, 8, or 16 for the model's dtype; None for the
    engine's, which are 4 by default."""
    engine: SkipJsonSchema[Engine] = Field(default=None, exclude=True, repr=False)  # type: ignore[assignment]
    """An engine to share, in place of loading a model over ``kv_dir``."""
    method: Annotated[str | None, BeforeValidator(_checked_name)] = None
    """How to answer, a name out of ``METHODS``; None for the engine's."""
    eviction: Annotated[str | None, BeforeValidator(_checked_name)] = None
    """Which KV entries an answer goes on with after its first token, a name out of ``EVICTIONS``
    or ``"none"`` for all; None for the engine's."""
    match_text: bool = True
    """Whether texts of cached chunks are found in prompts; else handles alone are."""
    on_miss: Annotated[OnMiss, BeforeValidator(_checked_on_miss)] = "compute"
    """For a chunk without a usable cache: ``"compute"`` (as a chunk, and keep it; with ``auto``
    only where that does not take longer than full prefill), ``"text"`` (compute its text, this
    once) or ``"error"``."""

    timeout: float | None = None
    """Seconds after which an answer that is not complete ends with `TimedOut`."""

    _last_report: Report | None = PrivateAttr(default=None)

    # -- from arguments to an engine ------------------------------------------------------------

    @model_validator(mode="wrap")
    @classmethod
    def _validated(cls, given: Any, build: ModelWrapValidatorHandler[Self]) -> Self:  # noqa: ANN401
        if not isinstance(given, Mapping):  # an LLM was checked when it was made
            return build(given)
        try:
            llm = build(cls._arguments(given))
        except ValidationError as error:
            first = error.errors()[0]
            # what follows the name in a path are pydantic's words for the kinds that it tried
            name = first["loc"][0] if first["loc"] else cls.__name__
            value = given.get(str(name), first["input"])
            raise InvalidOption(f"{name}={value!r}: {first['msg']}") from error
        llm._check()
        llm._attach()
        return llm

    @classmethod
    def _arguments(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that say something. Raises UnknownOption for one that there is not.

        A wrapper that has no own opinion passes None, also for what cannot be None.
        """
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        for name in given:
            if name not in fields:
                raise UnknownOption.among(f"argument of {cls.__name__}", name, fields)
        return {
            name: value
            for name, value in given.items()
            if value is not None or type(None) in get_args(fields[name].annotation)
        }

    def _check(self) -> None:
        """Raises for what is wrong without a model: loading one takes its time."""
        check_choices(self.method, self.eviction, self.store_bits)
        check_timeout(self.timeout)

    def _source(self) -> ModelSource:
        return ModelSource(
            engine=self.engine,
            model_name=self.model_name or None,
            tokenizer_name=self.tokenizer_name,
            device_map=self.device_map or "cpu",
            dtype=self.dtype,
            model_kwargs=self.model_kwargs,
            tokenizer_kwargs=self.tokenizer_kwargs,
            kv_dir=self.kv_dir,
            kv_remote=self.kv_remote,
            namespace=self.namespace,
            store_bits=self.store_bits,
            max_bytes=self.max_bytes,
        )

    def _attach(self) -> None:
        """Load the model, unless an engine was given that has it; say what the engine is."""
        source = self._source()
        was_given = source.engine is not None or source.model is not None
        self.engine = engine_of(source)
        self.model_name, self.device_map = self.engine.model.name, self.device_map or "cpu"
        if was_given:  # "auto" may load it in another one, under which there are no caches
            self.dtype = self.engine.model.dtype_name
        self.kv_dir, self.store_bits = folder_of(self.engine), self.engine.store_bits
        self.kv_remote = remote_of(self.engine)
        self.namespace = self.engine.store.namespace
        method, eviction = own_choices(self.engine)
        self.method, self.eviction = self.method or method, self.eviction or eviction

    # -- one engine, however often a framework copies its components ----------------------------

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        if "engine" in self.__dict__:  # what came out of a pickle has none
            memo[id(self.engine)] = self.engine
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[Any, Any]:
        without = self.model_copy()  # frameworks try to pickle every attribute, and delete some
        without.__dict__.pop("engine", None)
        return super(LocalLLM, without).__getstate__()

    if not TYPE_CHECKING:  # or every attribute would be known

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401
            if name == "engine":
                return EngineRef().engine  # raises: it stayed behind
            return super().__getattr__(name)

    # -- what frameworks ask of an LLM ----------------------------------------------------------

    @property
    def last_report(self) -> Report | None:
        """What the answer that was finished last cost; None before the first."""
        return self._last_report

    def _n_tokens(self, text: str) -> int:
        """Tokens of a part of a prompt, handles at the length of their chunks, without BOS."""
        if not text:
            return 0
        return self.engine.count_tokens(RenderedPrompt(text, is_chat=True))
