"""Worker processes on Ray, and the connection to their cluster."""

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
    # Ray listens on all addresses of a machine, and runs any code that it receives.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # else it reports what Ray Data does
}
"""Environment of a cluster that this process starts for itself. Variables that are set already win.
Ray reads them when it is imported."""


def require_ray() -> None:
    """Raises MissingExtra if Ray is not installed. Does not import it."""
    if find_spec("ray") is None:
        raise MissingExtra.of("ray", "ray")


def reason_in(message: str) -> str:
    """The cause named in an error of Ray. Around it are a traceback and further lines."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if ours := [line for line in lines if line.startswith("samkv_integrations.errors.")]:
        return ours[-1].partition(": ")[2]
    errors = [line for line in lines if _ERROR.match(line)]
    return errors[-1] if errors else lines[0] if lines else "Ray does not say"


@dataclass(frozen=True, kw_only=True)
class WorkerPool:
    """The number of workers and the resources of each. Each worker loads the model.

    n_cpus: processors of a worker, and threads that torch uses there.
    n_gpus: accelerators of a worker, also a fraction; 0 runs the model on the processor.
    address: of a running Ray cluster; ``auto`` for the one of this machine; None for a cluster on
        this machine that starts and ends with the work. A cluster to which this process is
        connected already is used in any case.
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
        """Ray, connected to a cluster with room for at least one worker.

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
            # Ray would wait for ever for a worker that fits nowhere.
            total = ray.cluster_resources()  # type: ignore[no-untyped-call]
            cpus, gpus = total.get("CPU", 0), total.get("GPU", 0)
            # A cluster may get further nodes; this machine does not grow.
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
            if self.address not in (None, "auto"):  # Ray would wait for minutes
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
                "with 'ray start --head', or leave the address out to start one here"
            ) from error
