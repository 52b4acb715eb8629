"""An LLM as a dictionary, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from llama_index.core.bridge.pydantic import BaseModel, PrivateAttr, field_serializer
from llama_index.core.llms.custom import CustomLLM

from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.cache.memory import MemoryStore
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.options import prefix_ids
from samkv_integrations.errors import InvalidOption
from samkv_integrations.frameworks.engine_args import MADE_BY, own_choices
from samkv_integrations.frameworks.local_llm import LocalLLM
from samkv_integrations.methods import METHODS

_UNWRITTEN = "engine_only"
"""Field of a dictionary with the names of what it leaves out, if there is anything."""


class WrittenLLM(LocalLLM, CustomLLM):
    """A `LocalLLM` of LlamaIndex that a dictionary describes, as far as one can.

    What one cannot is named in the dictionary, and refused when an LLM is made of it: `to_dict`
    itself never fails, because LlamaIndex calls it for its events and caches too.
    """

    _engine_only: list[str] = PrivateAttr(default_factory=list)  # a pickle has no engine to ask

    def _attach(self) -> None:
        super()._attach()
        self._engine_only = _unwritten(self.engine, self.method, self.eviction)

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401
        """The arguments; and under ``engine_only`` the names of what `from_dict` needs engine= for.

        kwargs: those of LlamaIndex.
        """
        data: dict[str, Any] = super().to_dict(**kwargs)
        return data | ({_UNWRITTEN: self._engine_only} if self._engine_only else {})

    @classmethod
    def from_dict(cls, data: dict[str, Any], **kwargs: Any) -> Self:  # noqa: ANN401
        """The LLM that `to_dict` described, loaded anew by its name.

        kwargs: arguments that win over ``data``; with ``engine``, or ``model`` and ``tokenizer``,
        nothing is loaded. Functions, parsers and hub tokens are not in ``data``: give them again.

        Raises InvalidOption if ``data`` names what it could not hold, and no ``engine`` is given.
        """
        data = _without_names(data, kwargs.get("engine"))
        spared = {
            name
            for live, names in MADE_BY.items()
            if kwargs.get(live) is not None
            for name in names
            if name in data and name not in kwargs
        }
        llm: Self = super().from_dict(
            {name: value for name, value in data.items() if name not in spared}, **kwargs
        )
        for name in spared:  # the next to be loaded from a dict needs them
            setattr(llm, name, data[name])
        return llm

    def __setstate__(self, state: dict[str, Any]) -> None:
        # LlamaIndex would call the constructor, and that would load the model again
        BaseModel.__setstate__(self, state)

    @field_serializer("model_kwargs", "tokenizer_kwargs")
    def _without_secrets(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in kwargs.items() if name != "token"}


def _unwritten(engine: Engine, method: str | None, eviction: str | None) -> list[str]:
    """Arguments of the engine that an LLM has no field for, and that have not their default.

    method, eviction: those of the LLM, which win over the engine's.
    """
    own_method, own_eviction = own_choices(engine)
    # a tuned one lies in the folder of the caches, where the next engine finds it
    is_default = METHODS.get(engine.method.name) == engine.method or engine.tuned is not None
    left_out = {
        "method": method is None and own_method is None and not is_default,
        "eviction": eviction is None and own_eviction is None and engine.eviction is not None,
        "prefix": engine.prefix != prefix_ids(engine.model, "documents", ""),
        "block_size": engine.chunks.has_own_scheme,
        "store": type(engine.store) not in (ChunkStore, MemoryStore),
    }
    return [name for name, is_left_out in left_out.items() if is_left_out]


def _without_names(data: Mapping[str, Any], engine: Engine | None) -> dict[str, Any]:
    """``data`` as arguments. Raises InvalidOption if it left something out, without an engine."""
    arguments = dict(data)
    names = arguments.pop(_UNWRITTEN, ())
    if names and engine is None:
        raise InvalidOption(
            f"the LLM was made on an engine whose {', '.join(names)} no dictionary can hold, and "
            "without which other caches would be looked for, or other answers given; make that "
            "engine again and give it to from_dict as engine=, or, to go on with the defaults, "
            f"leave {_UNWRITTEN!r} out of the dictionary"
        )
    return arguments
