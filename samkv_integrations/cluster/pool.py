"""Processes on Ray, and the cluster that they run on."""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from samkv_integrations.errors import InvalidOption, MissingExtra

_ADDRESS = re.compile(r"[^/\s]+:[0-9]+")
_ERROR = re.compile(r"[\w.]+(Error|Exception|Interrupt): ")

_OWN_CLUSTER = {
    # Ray listens on all addresses of a machine, and runs the code that it is sent.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # which tells of things that its own Ray Data does
}
"""Variables of a cluster that is this process's alone, unless they are set. Ray reads them when it
is imported."""


def require_ray() -> None:
    """Raises MissingExtra if Ray is not installed. It is not imported."""
    if find_spec("ray") is None:
        raise MissingExtra.of("ray", "ray")


def reason_in(message: str) -> str:
    """The cause in an error of Ray, which adds a traceback and lines of its own."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if ours := [line for line in lines if line.startswith("samkv_integrations.errors.")]:
        return ours[-1].partition(": ")[2]
    errors = [line for line in lines if _ERROR.match(line)]
    return errors[-1] if errors else lines[0] if lines else "Ray does not say"


@dataclass(frozen=True, kw_only=True)
class WorkerPool:
    """The number of workers, and the resources of each; each loads the model.

    n_cpus: CPUs of a worker, and threads of torch. n_gpus: GPUs of a worker, also fractions; 0 for
        the CPU.
    address: of a running Ray cluster, or ``auto`` for that of this machine; None for a temporary
        cluster on this machine. If this process is connected to a cluster, that is used.
    """

    n_workers: int = 2
    n_cpus: int = 1
    n_gpus: float = 0.0
    address: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("n_workers", 1), ("n_cpus", 1), ("n_gpus", 0)):
            value = getattr(self, name)
            if not value >= least or (least and type(value) is not int):
                raise InvalidOption(f"{name}={value!r}; give a number of at least {least}")
        if self.address not in (None, "auto") and not _ADDRESS.fullmatch(str(self.address)):
            raise InvalidOption(f"address={self.address!r}; give HOST:PORT of a cluster, or 'auto'")

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """Ray, connected to a cluster with resources for at least one worker.

        Raises:
            MissingExtra: Ray is not installed.
            InvalidOption: the cluster cannot be reached, or cannot hold a worker.
        """
        if self.address is None and "ray" not in sys.modules:
            for name, value in _OWN_CLUSTER.items():
                os.environ.setdefault(name, value)
        require_ray()
        import ray.data

        is_begun_here = not ray.is_initialized()
        if is_begun_here:
            self._connect(ray)
        try:
            # Ray would wait forever for resources that it does not have
            total = ray.cluster_resources()  # type: ignore[no-untyped-call]
            cpus, gpus = total.get("CPU", 0), total.get("GPU", 0)
            # a cluster may gain nodes; this machine does not grow
            n_needed = self.n_workers if self.address is None else 1
            if n_needed * self.n_cpus > cpus or n_needed * self.n_gpus > gpus:
                raise InvalidOption(
                    f"{self.n_workers} workers of {self.n_cpus} CPUs and {self.n_gpus:g} GPUs; Ray "
                    f"has {cpus:g} CPUs and {gpus:g} GPUs in all; give fewer or smaller ones"
                )
            yield ray
        finally:
            if is_begun_here:
                ray.shutdown()

    def _connect(self, ray: Any) -> None:  # noqa: ANN401
        try:
            if self.address not in (None, "auto"):  # Ray itself would wait minutes for an answer
                host, _, port = str(self.address).rpartition(":")
                socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
            ray.init(
                address=self.address or "local", log_to_driver=False, logging_level="ERROR",
                include_dashboard=None if self.address else False,
            )  # fmt: skip
        except (OSError, OverflowError, RuntimeError, ValueError) as error:
            why = (str(error).strip().splitlines() or [repr(error)])[0]
            raise InvalidOption(
                f"there is no Ray cluster at {self.address or 'this machine'!r} ({why}); start one "
                "with 'ray start --head', or leave the address out for one of this process"
            ) from error
