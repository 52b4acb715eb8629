"""The transformers runtime does what every runtime must."""

from __future__ import annotations

from samkv_integrations.runtimes.base import Runtime
from tests.contracts.runtime_contract import RuntimeContract
from tests.support.models import tiny_model


class TestTransformers(RuntimeContract):
    def runtime(self) -> Runtime:
        return tiny_model()
