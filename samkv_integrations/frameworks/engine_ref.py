"""An engine as a private part of a component."""

from __future__ import annotations

from typing import Any

from samkv_integrations.engine.engine import Engine
from samkv_integrations.errors import InvalidOption


class EngineRef:
    """An engine as a private part: copies share it, and pickles leave it behind.

    Frameworks copy their components deeply and send them to other processes; a loaded model is
    too big for either.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        self._engine = engine

    @classmethod
    def of(cls, llm: object | None, engine: Engine | None) -> EngineRef:
        """From the two arguments that a component takes, of which one must be given."""
        if (llm is None) == (engine is None):
            raise InvalidOption("give either llm (one of samkv-integrations) or engine")
        found = engine if llm is None else getattr(llm, "engine", None)
        if not isinstance(found, Engine):
            given = type(engine if llm is None else llm).__name__
            raise InvalidOption(
                f"{given} has no engine; give an LLM of samkv-integrations as llm, or an Engine"
            )
        return cls(found)

    @property
    def engine(self) -> Engine:
        """The engine. Raises InvalidOption after a pickle."""
        if self._engine is None:
            raise InvalidOption(
                "this component came from another process, and its engine stayed there; make it "
                "anew in this process, or use it in the one that it came from"
            )
        return self._engine

    def __deepcopy__(self, memo: dict[int, Any]) -> EngineRef:
        return self

    def __reduce__(self) -> tuple[type[EngineRef], tuple[()]]:
        return EngineRef, ()
