"""An option is declared once: fields, flags, arguments and the reference are made of it."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from langchain_samkv import ChatSamKV, SamKV
from llama_index.llms.samkv import SamKVLLM
from samkv_integrations import Engine, options
from samkv_integrations.cli.app import app
from samkv_integrations.errors import UnknownOption
from samkv_integrations.option import declared
from samkv_integrations.server.bodies import ChatRequest, Samkv
from tests.support.models import tiny_model

LLMS = (SamKVLLM, ChatSamKV, SamKV)
OF_LLMS = {
    name: option
    for group in (
        options.ModelOptions, options.LlamaCppOptions, options.StoreOptions, options.EngineOptions,
        options.AnswerOptions,
    )
    for name, (_, option) in declared(group).items()
    if option.of_llms and name not in declared(options.SamplingOptions)
}  # fmt: skip


def flags_of(group: type) -> set[str]:
    return {name for name, (_, option) in declared(group).items() if option.has_flag}


FLAGS_OF_ENGINES = flags_of(options.EngineOptions)
FLAGS_OF_ANSWERS = flags_of(options.AnswerOptions)
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def table_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes the table of a class into the API reference."""
    monkeypatch.syspath_prepend(DOCS)
    monkeypatch.delitem(sys.modules, "fields", raising=False)
    found: Callable[[str], str] = importlib.import_module("fields").table_of
    return found


class TestAllThatThereAre:
    @pytest.mark.parametrize("name", OF_LLMS)
    @pytest.mark.parametrize("kind", LLMS)
    def test_are_fields(self, kind: Any, name: str) -> None:
        described = kind.model_fields[name].description
        is_of_langchain = name == "model_name" and kind is not SamKVLLM  # which has an alias
        assert is_of_langchain or described.startswith(OF_LLMS[name].description)

    @pytest.mark.parametrize("command", ["ask", "inspect", "serve"])
    def test_are_flags(self, command: str) -> None:
        found: Any = typer.main.get_command(app)
        known = {each.name for each in found.commands[command].params}
        assert "hot_bytes" in FLAGS_OF_ENGINES and FLAGS_OF_ENGINES <= known
        if command == "ask":
            assert "timeout" in FLAGS_OF_ANSWERS and FLAGS_OF_ANSWERS <= known

    @pytest.mark.parametrize(
        "command", ["ask", "doctor", "ingest", "inspect", "serve", "tune", "store sync"]
    )
    def test_of_runtimes_are_flags_of_commands_that_load_a_model(self, command: str) -> None:
        found: Any = typer.main.get_command(app)
        for name in command.split():
            found = found.commands[name]
        known = {each.name for each in found.params}
        assert {"runtime", "n_threads", *declared(options.LlamaCppOptions)} <= known

    def test_are_fields_of_the_server(self) -> None:
        for name in declared(options.AnswerOptions):
            assert (name in Samkv.model_fields) is (name in OF_LLMS)
        of_sampling = declared(options.SamplingOptions).keys() - {"max_new_tokens"}
        assert of_sampling <= ChatRequest.model_fields.keys() & ChatSamKV.model_fields.keys()

    def test_are_rows_of_the_reference(self, table_of: Callable[[str], str]) -> None:
        for group in (
            "ModelOptions",
            "LlamaCppOptions",
            "StoreOptions",
            "EngineOptions",
            "AnswerOptions",
        ):
            shown = table_of(f"{options.__name__}.{group}")
            for name, (_, option) in declared(getattr(options, group)).items():
                assert f"| `{name}` | `{option.default!r}` | {option.description}" in shown

    @pytest.mark.parametrize("page", ["frameworks.md", "server.md"])
    def test_of_answers_are_on_the_pages(self, page: str) -> None:
        """Those that users give by a field or a flag."""
        text = (DOCS / page).read_text(encoding="utf-8")
        of_users = (OF_LLMS.keys() & declared(options.AnswerOptions)) | FLAGS_OF_ANSWERS
        of_users |= declared(options.SamplingOptions).keys() - {"max_new_tokens"}
        missing = {name for name in of_users if f"`{name}`" not in text}
        assert not missing, f"name them in docs/{page}"

    def test_are_arguments_of_an_engine(self) -> None:
        with pytest.raises(UnknownOption, match=r"'hotbytes'.*did you mean 'hot_bytes'"):
            Engine(tiny_model(), hotbytes=1)  # type: ignore[call-arg]
        engine = Engine(tiny_model(), method=None, store_bits=None)
        assert (engine.method.name, engine.store_bits) == ("auto", 4)


@pytest.mark.parametrize("kind", LLMS)
def test_fields_keep_their_types_in_schemas_and_read_texts(kind: Any) -> None:
    fields = kind.model_fields
    llm = kind(model_name="builtin", store_bits="8", timeout="30")
    assert (llm.store_bits, llm.timeout) == (8, 30.0)
    assert "str" in str(fields["method"].annotation)


@pytest.mark.parametrize("name", OF_LLMS)
def test_fields_have_the_declared_defaults(name: str) -> None:
    found = SamKVLLM.model_fields[name].get_default(call_default_factory=True)
    assert found == OF_LLMS[name].default
