"""LangChain's own suites, as they come: nothing in them is overridden."""

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

# of LangChain, about its own next version of events
pytestmark = pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")


@cache
def engine() -> Engine:
    return Engine(builtin())


class What:
    """What is asked of the suites: text in, text out."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatSamKV

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # an engine, as for any second LLM of a process: `test_init_time` makes hundreds of them
        return {"engine": engine()}

    # bind_tools and with_structured_output are overridden, to say that and why there are none
    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False


class TestUnit(What, ChatModelUnitTests):
    pass


class TestIntegration(What, ChatModelIntegrationTests):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return super().chat_model_params | {"max_tokens": 24}
