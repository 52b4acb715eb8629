"""What a server is made of, in plain values, so that other processes can make the same one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fastapi import FastAPI

from samkv_integrations.chroma.client import Database
from samkv_integrations.engine.options import EngineOptions
from samkv_integrations.engine.scheduler import Limits, Scheduler
from samkv_integrations.errors import InvalidOption
from samkv_integrations.model.loading import load_model
from samkv_integrations.server.keys import ApiKeys
from samkv_integrations.server.run import Settings, application
from samkv_integrations.server.tenancy import Tenancy


@dataclass(frozen=True, kw_only=True)
class ServerSource:
    """Where a server comes from. It can be pickled; keys are in it as digests.

    model: any name that `load_model` takes. device, dtype: as of `load_model`.
    folder, remote, options: as of `Tenancy`. chroma: the address of a Chroma server; None for the
        database in ``folder``.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    folder: Path
    chroma: str | None = None
    remote: str | None = None
    options: EngineOptions = field(default_factory=EngineOptions)
    limits: Limits = field(default_factory=Limits)
    keys: ApiKeys
    settings: Settings

    def database(self) -> Database:
        """Where the collections are. Raises InvalidOption for what is no address."""
        return Database(self.folder / "chroma", self.chroma)

    def tenancy(self) -> Tenancy:
        """The model, loaded, and an engine for each namespace: a wrong folder is found out now.

        Raises as `load_model` and `Tenancy.engine` do.
        """
        scheduler = Scheduler(
            load_model(self.model, device=self.device, dtype=self.dtype), self.limits
        )
        tenancy = Tenancy(
            scheduler, self.folder, self.remote, database=self.database(), **self.options
        )
        for tenant in self.keys.tenants:
            tenancy.engine(tenant)
        return tenancy

    def replica(self) -> FastAPI:
        """The application, on a model of its own, for a process beside others.

        Raises InvalidOption if the folder is not here, where no remote tier could fill it; else as
        `tenancy`.
        """
        if self.remote is None and not (self.folder / "kv").is_dir():
            raise InvalidOption(
                f"the folder {self.folder / 'kv'} of chunk caches does not exist here; give a "
                "--dir that all machines share under the same path, or --remote"
            )
        return application(self.tenancy(), self.keys, self.settings)
