"""A server within the test's own event loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.server.app import create_app
from samkv_integrations.server.service import Settings
from samkv_integrations.server.tenancy import ApiKeys, Tenancy, Tenant
from samkv_integrations.serving.fairness import FairTurns
from samkv_integrations.serving.scheduler import Scheduler
from samkv_integrations.serving.turns import Limits
from tests.support.asgi import Client
from tests.support.models import tiny_model

KEYS = "sk-of-the-red-team red\nsk-of-the-blue-team blue notes\nsk-of-nobody-else-1"


class App:
    """An application on a tiny model, and what stands behind it."""

    def __init__(
        self, folder: Path, *, keys: str = "", limits: Limits | None = None,
        model: Model | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.scheduler = Scheduler(model or tiny_model("llama"), limits, turns=FairTurns)
        self.tenancy = Tenancy(self.scheduler, folder, method="reuse", block_size=8)
        self.keys = ApiKeys(keys, Tenant())
        defaults = {"model_name": "tiny", "most_tokens": 6, "max_body_bytes": 100_000}
        settings = Settings(**{**defaults, **options})
        self.asgi = create_app(self.tenancy, self.keys, settings)
        self.client = Client(self.asgi)

    def of(self, key: str) -> Client:
        """A client that has a key."""
        return Client(self.asgi, authorization=f"Bearer {key}")

    def engine(self, namespace: str = "") -> Any:
        return self.tenancy.engine(Tenant(namespace=namespace))


@pytest.fixture
def make_app(tmp_path: Path) -> Callable[..., App]:
    return lambda **options: App(tmp_path, **options)


@pytest.fixture
def app(make_app: Callable[..., App]) -> App:
    return make_app()
