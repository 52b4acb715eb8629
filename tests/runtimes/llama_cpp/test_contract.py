"""What every runtime must do, on llama.cpp."""

from __future__ import annotations

from samkv_integrations.runtimes.llama_cpp.runtime import LlamaCppModel
from tests.contracts.runtime_contract import RuntimeContract
from tests.support.llama_cpp import smollm2, with_llama_cpp

pytestmark = with_llama_cpp


class TestLlamaCpp(RuntimeContract):
    repeats_bits = False  # sums of attention are rounded otherwise where few tokens are computed

    def runtime(self) -> LlamaCppModel:
        return smollm2()
