"""A server answers with what was tuned, unless it is told otherwise."""

from __future__ import annotations

from pathlib import Path

from samkv_integrations import METHODS, ChunkStore
from samkv_integrations.engine.scheduler import Scheduler
from samkv_integrations.engine.tuned import TunedSetting, write_tuned
from samkv_integrations.server.tenancy import Tenancy, Tenant
from tests.support.models import tiny_model


def test_every_namespace_of_a_folder_follows_its_file(tmp_path: Path) -> None:
    ChunkStore(tmp_path / "kv")
    setting = TunedSetting(model="tiny-llama", method="epic", set=("recompute.first=3",))
    write_tuned(tmp_path / "kv", setting)
    scheduler = Scheduler.of(tiny_model(), None)
    for options, method in (({}, setting.to_method()), ({"method": "reuse"}, METHODS["reuse"])):
        tenancy = Tenancy(scheduler, tmp_path, **options)  # type: ignore[arg-type]
        for namespace in ("", "other"):
            engine = tenancy.engine(Tenant(namespace=namespace, collections=()))
            assert engine.method == method
