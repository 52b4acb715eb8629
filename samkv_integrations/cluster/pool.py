"""The workers of an ingest, and the cluster that they run on."""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from samkv_integrations.errors import InvalidOption, MissingExtra

if TYPE_CHECKING:
    from types import ModuleType


_ADDRESS = re.compile(r"[^/\s]+:[0-9]+")
_PATIENCE_S = 5.0

_OWN_CLUSTER = {
    # Ray listens on all addresses of a machine, and runs the code that it is sent.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # which tells of things that its own Ray Data does
}
"""Variables of a cluster that is this process's alone, unless they are set. Ray reads them when it
is imported."""


@contextmanager
def errors_only(logger_name: str) -> Iterator[None]:
    """A block in which a logger of Ray's tells of errors and of nothing else."""
    logger = logging.getLogger(logger_name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def require_ray() -> None:
    """Raises MissingExtra if Ray is not installed. It is not imported."""
    if find_spec("ray") is None:
        raise MissingExtra.of("ray", "ray")


def _imported(*, for_own_cluster: bool) -> ModuleType:
    if for_own_cluster and "ray" not in sys.modules:
        for name, value in _OWN_CLUSTER.items():
            os.environ.setdefault(name, value)
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise MissingExtra.of("ray", "ray") from error
    return ray


@dataclass(frozen=True, kw_only=True)
class WorkerPool:
    """How many workers there are, and what each is given; each loads the model.

    n_cpus: processors of a worker, and threads that torch uses there. n_gpus: accelerators of a
        worker, parts of one included; 0 has the model on the processor.
    address: of a running Ray cluster, ``auto`` for the one of this machine; None for a cluster of
        this machine that begins and ends with the ingest. If this process is connected to one, that
        is used.
    """

    n_workers: int = 2
    n_cpus: int = 1
    n_gpus: float = 0.0
    address: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("n_workers", 1), ("n_cpus", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise InvalidOption(f"{name}={value!r}; give a whole number of at least {least}")
        if not self.n_gpus >= 0:
            raise InvalidOption(f"n_gpus={self.n_gpus!r}; give 0 or more")
        if self.address not in (None, "auto") and not _ADDRESS.fullmatch(str(self.address)):
            raise InvalidOption(f"address={self.address!r}; give HOST:PORT of a cluster, or 'auto'")

    @contextmanager
    def connected(self) -> Iterator[ModuleType]:
        """Ray, connected to the cluster, on which one worker at least has room.

        Raises:
            MissingExtra: Ray is not installed.
            InvalidOption: the cluster cannot be reached, or has no room for a worker.
        """
        ray = _imported(for_own_cluster=self.address is None)
        if ray.is_initialized():
            self._require_room(ray)
            yield ray
            return
        self._connect(ray)
        try:
            self._require_room(ray)
            yield ray
        finally:
            ray.shutdown()

    def _connect(self, ray: ModuleType) -> None:
        if self.address is None:
            given: dict[str, Any] = {"address": "local", "include_dashboard": False}
        else:
            given = {"address": self.address}
        try:
            if self.address not in (None, "auto"):
                _require_answer(str(self.address))
            ray.init(log_to_driver=False, logging_level="ERROR", **given)
        except (OSError, OverflowError, RuntimeError, ValueError) as error:
            where = "on this machine" if self.address is None else f"at {self.address!r}"
            raise InvalidOption(
                f"there is no Ray cluster {where} ({_first_line(error)}); start one with "
                "'ray start --head', or leave the address out for one of this process"
            ) from error

    def _require_room(self, ray: ModuleType) -> None:
        """Raises InvalidOption rather than wait for ever for a worker that fits nowhere."""
        n_fitting = 0
        for node in ray.nodes():
            has = node["Resources"] if node["Alive"] else {}
            n_fitting += int(
                min(
                    has.get("CPU", 0.0) // self.n_cpus,
                    has.get("GPU", 0.0) / self.n_gpus if self.n_gpus else self.n_workers,
                )
            )
        # The nodes of a cluster may become more, this machine does not grow.
        least = self.n_workers if self.address is None else 1
        if n_fitting < least:
            total = ray.cluster_resources()
            raise InvalidOption(
                f"{self.n_workers} workers of {self.n_cpus} CPUs and {self.n_gpus:g} GPUs; Ray has "
                f"{total.get('CPU', 0):g} CPUs and {total.get('GPU', 0):g} GPUs in all, room for "
                f"{n_fitting}; give fewer or smaller ones"
            )


def _require_answer(address: str) -> None:
    """Raises OSError if nothing listens there, for which Ray itself would wait minutes."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE_S).close()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0]
