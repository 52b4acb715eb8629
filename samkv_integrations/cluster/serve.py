"""Replicas of an ASGI application behind one address, with Ray Serve."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from samkv_integrations.cluster.workers import WorkerPool, reason_in
from samkv_integrations.errors import ClusterError, InvalidOption

APPLICATION = "samkv"
"""Name of the application on the cluster."""

App = Callable[[Any, Any, Any], Awaitable[None]]
"""An ASGI application."""


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Replicas of an application on Ray Serve.

    pool: their number and resources, and the cluster.
    n_at_once: requests that a replica answers together.
    n_waiting: further requests that may wait at a replica. While all replicas are full, as many
        requests as both numbers together may wait at each proxy; the next one is refused.
    grace_s: seconds that running answers have when a replica ends.
    """

    pool: WorkerPool
    n_at_once: int = 8
    n_waiting: int = 64
    grace_s: float = 30.0

    def deployment_options(self) -> dict[str, Any]:
        """The arguments of Ray's ``serve.deployment``."""
        n_ongoing = self.n_at_once + self.n_waiting
        return {
            "num_replicas": self.pool.n_workers,
            "max_ongoing_requests": n_ongoing,
            "max_queued_requests": n_ongoing,
            "graceful_shutdown_wait_loop_s": min(1.0, self.grace_s),
            "graceful_shutdown_timeout_s": self.grace_s,
            "ray_actor_options": {"num_cpus": self.pool.n_cpus, "num_gpus": self.pool.n_gpus},
            "logging_config": {"log_level": "WARNING"},
        }


@contextmanager
def serving(
    build: Callable[[], App], replicas: Replicas, host: str, port: int, *, n_threads: int
) -> Iterator[None]:
    """Serve on ``host`` and ``port`` until the end of the block.

    Then running answers have the replicas' grace to end. A cluster that was started here ends too.

    build: makes the application, once in each replica. It must be picklable.
    n_threads: threads that torch uses in a replica.

    Raises:
        InvalidOption: the cluster cannot be reached, has no room, or runs Ray Serve already.
        ClusterError: no replica can start.
        MissingExtra: Ray is not installed.
    """

    def made_in_replica() -> App:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        torch.set_num_threads(n_threads)
        return without_request_id(build())

    with replicas.pool.connected():
        from ray import serve as ray_serve

        serve: Any = ray_serve

        if serve.status().proxies:  # its proxies may answer anybody
            raise InvalidOption(
                "Ray Serve runs on this cluster already, with an address of its own; end it with "
                "'serve shutdown', or give another cluster"
            )
        logging.getLogger("ray.serve").setLevel(logging.ERROR)  # which logs every step
        try:
            serve.start(
                proxy_location="EveryNode",
                http_options={"host": host, "port": port},
                logging_config={"log_level": "WARNING"},
            )
            answering = serve.ingress(made_in_replica)()
            made = serve.deployment(name="replica", **replicas.deployment_options())(answering)
            try:
                serve.run(made.bind(), name=APPLICATION, route_prefix="/")
            except RuntimeError as error:
                found = serve.status().applications.get(APPLICATION)
                told = [one.message for one in found.deployments.values()] if found else []
                reason = reason_in("\n".join([str(error), *told]))
                raise ClusterError(f"no replica can begin: {reason}") from error
            yield
        finally:
            try:
                for _ in range(1 + int(replicas.grace_s // 60)):
                    with suppress(TimeoutError):  # Ray waits for one minute
                        serve.delete(APPLICATION)  # which lets running answers end
                        break
            finally:
                serve.shutdown()


def without_request_id(app: App) -> App:
    """The application without its x-request-id header, because Ray's proxies add their own."""

    async def passed_on(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401
        async def send_without(message: Any) -> None:  # noqa: ANN401
            if message["type"] == "http.response.start":
                headers = [
                    pair for pair in message["headers"] if pair[0].lower() != b"x-request-id"
                ]
                message = message | {"headers": headers}
            await send(message)

        await app(scope, receive, send_without)

    return passed_on
