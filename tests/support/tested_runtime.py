"""The runtime of the models that tests share: transformers, or llama.cpp where that is asked for.

``SAMKV_TEST_RUNTIME=llama_cpp`` makes `builtin`, `tiny_model`, `quoting_model` and `tool_model`
models of llama.cpp. ``make test-llama-cpp`` names the tests that then still mean something.
"""

from __future__ import annotations

import os

import pytest

from samkv_integrations.runtimes.base import Runtime
from samkv_integrations.runtimes.transformers.runtime import Model

ON_LLAMA_CPP = os.environ.get("SAMKV_TEST_RUNTIME") == "llama_cpp"

of_transformers_alone = pytest.mark.skipif(ON_LLAMA_CPP, reason="about a model of transformers")
"""A test that says nothing about llama.cpp."""


def model_class() -> type[Runtime]:
    """The class of these models."""
    if ON_LLAMA_CPP:
        from samkv_integrations.runtimes.llama_cpp.runtime import LlamaCppModel

        return LlamaCppModel
    return Model
