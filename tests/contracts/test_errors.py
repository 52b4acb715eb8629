"""What every error of the package obeys."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from llama_index.llms.samkv import SamKVLLM
from samkv_integrations import errors
from samkv_integrations.errors import Given, InvalidOption, SamkvError, TimedOut, UnknownOption

BUILTIN = {
    "InvalidOption": ValueError, "UnknownOption": ValueError, "EmptyInput": ValueError,
    "InvalidChunk": ValueError, "PromptTooLong": ValueError, "HandleError": ValueError,
    "ChunkNotCached": LookupError, "ModelNotFound": LookupError, "MissingExtra": ImportError,
    "TimedOut": TimeoutError, "OutOfMemory": MemoryError,
}  # fmt: skip
KINDS = [
    each for each in vars(errors).values()
    if isinstance(each, type) and issubclass(each, SamkvError) and each is not errors.CacheMiss
]  # fmt: skip
PARTS = Given("top_k", -1), "; it must be 0 or more, as with ", Given("top_p", 0.5), "."


@pytest.mark.parametrize("kind", KINDS)
def test_each_front_end_writes_options_in_its_own_way(kind: type[SamkvError]) -> None:
    error = kind(*PARTS)
    assert str(error) == "top_k=-1; it must be 0 or more, as with top_p=0.5."
    flags = error.told(lambda given: f"--{given.option.replace('_', '-')} {given.value}")
    assert flags == "--top-k -1; it must be 0 or more, as with --top-p 0.5."
    assert kind("plain").option is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_from_another_process_says_the_same(kind: type[SamkvError]) -> None:
    error = kind(*PARTS)
    for again in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(again) is kind and (str(again), again.option) == (str(error), error.option)
    unknown = UnknownOption.among("method", "reus", ["reuse"])
    assert pickle.loads(pickle.dumps(unknown)).option == unknown.option == "method"


@pytest.mark.parametrize(("name", "builtin"), BUILTIN.items())
def test_is_also_the_builtin_kind(name: str, builtin: type[Exception]) -> None:
    assert issubclass(getattr(errors, name), builtin)
    assert TimedOut(*PARTS).args == PARTS, "an OSError would read a number and a file"


def test_values_are_shown_by_their_beginning() -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    assert len(str(Given("stop", deep))) < 100
    assert str(Given("stop", "x" * 1000)).endswith("...")
    assert str(Given("tools", ...)) == "tools=..."


def test_pydantic_does_not_hide_them() -> None:
    """It turns every ValueError of a validator into its own."""
    with pytest.raises(InvalidOption, match="draft=-1") as raised:
        SamKVLLM(model_name="builtin", draft=-1)
    assert raised.value.option == "draft"
    with pytest.raises(UnknownOption, match="did you mean 'kv_dir'"):
        SamKVLLM(model_name="builtin", kvdir="x")  # type: ignore[call-arg]

    class Holder(BaseModel):
        llm: SamKVLLM

    with pytest.raises(ValidationError, match="draft=-1"):  # the other class is pydantic's own
        Holder.model_validate({"llm": {"model_name": "builtin", "draft": -1}})
