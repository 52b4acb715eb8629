"""LangChain's own suites: on the built-in model, and on a random one whose template takes tools.

What is declared, and which tests are not run:

- The built-in model's chat template takes no tools, so tool calling and structured output, which
  the suites want by tools too, are declared absent.
- Of random weights nobody can expect the call that fits a question, so the tests that want it are
  not run. Nor are those of JSON mode: strings of random letters are too long for them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_samkv import ChatSamKV
from samkv_integrations import Engine
from tests.support.records import builtin
from tests.support.tools import tool_model

# of LangChain, about its own next version of events
pytestmark = pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")

NO_TRAINED_MODEL = "wants the call that fits the question, which random weights do not know"
needs_a_trained_model = pytest.mark.xfail(run=False, strict=True, reason=NO_TRAINED_MODEL)


@cache
def engine() -> Engine:
    return Engine(builtin())


@cache
def tool_engine() -> Engine:
    return Engine(tool_model(likes=('"', "<|end|>")))


class BuiltIn:
    """A trained model without tools."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatSamKV

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # an engine, as for any second LLM of a process: `test_init_time` makes hundreds of them
        return {"engine": engine()}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False


class TestUnit(BuiltIn, ChatModelUnitTests):
    pass


class TestIntegration(BuiltIn, ChatModelIntegrationTests):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return super().chat_model_params | {"max_tokens": 24}


class WithTools:
    """Random weights, whose answers keep to schemas all the same; all is as the suites have it."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatSamKV

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": tool_engine()}


class TestUnitWithTools(WithTools, ChatModelUnitTests):
    pass


class TestIntegrationWithTools(WithTools, ChatModelIntegrationTests):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        # strings of random letters end by chance
        sampling = {"max_tokens": 1200, "temperature": 1.0, "seed": 1, "top_p": 0.9}
        return super().chat_model_params | sampling

    @needs_a_trained_model
    def test_tool_calling(self) -> None:
        pytest.fail(NO_TRAINED_MODEL)

    @needs_a_trained_model
    async def test_tool_calling_async(self) -> None:
        pytest.fail(NO_TRAINED_MODEL)

    @needs_a_trained_model
    def test_agent_loop(self) -> None:
        pytest.fail(NO_TRAINED_MODEL)

    @needs_a_trained_model
    def test_unicode_tool_call_integration(self) -> None:
        pytest.fail(NO_TRAINED_MODEL)
