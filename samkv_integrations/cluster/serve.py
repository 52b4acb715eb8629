"""Replicas of an ASGI application behind one address, with Ray Serve."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from samkv_integrations.cluster.workers import WorkerPool, reason_in
from samkv_integrations.errors import ClusterError, InvalidOption, UnknownOption

APPLICATION = "samkv"
"""Name of the application on the cluster."""

Route = Literal["load", "collection"]
"""Which replica gets a request: one with less load, or that of the request's collection."""

SESSION_HEADER = "x-session-id"
"""Header with the collection of a request. Ray's proxies read headers, but no bodies."""

_BY_SESSION = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"

App = Callable[[Any, Any, Any], Awaitable[None]]
"""An ASGI application."""


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Replicas of an application on Ray Serve.

    n_replicas: number at first; None for ``least``, or 2 without it.
    least, most: bounds between which Ray scales by load. Without ``most`` the number is fixed.
    n_cpus, n_gpus, address: resources of a replica, and the cluster; see `WorkerPool`.
    n_at_once: requests that a replica answers together. Ray scales towards this number.
    n_waiting: further requests that may wait at a replica. While all replicas are full, as many
        requests as both numbers together may wait at each proxy; the next one is refused.
    route: ``collection`` sends all requests with the same `SESSION_HEADER` to the same replica, or
        to the next one while that is full.
    grace_s: seconds that running answers have when a replica ends.
    """

    n_replicas: int | None = None
    least: int | None = None
    most: int | None = None
    n_cpus: int = 1
    n_gpus: float = 0.0
    address: str | None = None
    n_at_once: int = 8
    n_waiting: int = 64
    route: Route = "load"
    grace_s: float = 30.0

    def __post_init__(self) -> None:
        if self.route not in get_args(Route):
            raise UnknownOption.among("route", self.route, get_args(Route))
        if self.most is None and self.least is not None:
            raise InvalidOption(f"at least {self.least} replicas; say how many at most, too")
        if self.most is not None and not 1 <= (self.least or 1) <= self.n_first <= self.most:
            raise InvalidOption(
                f"{self.n_first} replicas, at least {self.least or 1} and at most {self.most}; "
                "give 1 <= least <= replicas <= most"
            )
        self.pool  # noqa: B018, raises for a wrong number of replicas or a wrong address

    @property
    def n_first(self) -> int:
        """Number of replicas at the start."""
        default = 2 if self.most is None else self.least or 1
        return default if self.n_replicas is None else self.n_replicas

    @property
    def pool(self) -> WorkerPool:
        """The resources of the largest number of replicas."""
        n_most = self.most or self.n_first
        return WorkerPool(
            n_workers=n_most, n_cpus=self.n_cpus, n_gpus=self.n_gpus, address=self.address
        )

    def deployment_options(self) -> dict[str, Any]:
        """The arguments of Ray's ``serve.deployment``."""
        n_ongoing = self.n_at_once + self.n_waiting
        options: dict[str, Any] = {
            "max_ongoing_requests": n_ongoing,
            "max_queued_requests": n_ongoing,
            "graceful_shutdown_wait_loop_s": min(1.0, self.grace_s),
            "graceful_shutdown_timeout_s": self.grace_s,
            "ray_actor_options": {"num_cpus": self.n_cpus, "num_gpus": self.n_gpus},
            "logging_config": {"log_level": "WARNING"},
        }
        if self.most is None:
            options["num_replicas"] = self.n_first
        else:
            options["autoscaling_config"] = {
                "min_replicas": self.least or 1,
                "initial_replicas": self.n_first,
                "max_replicas": self.most,
                "target_ongoing_requests": self.n_at_once,
            }
        if self.route == "collection":
            options["request_router_config"] = {"request_router_class": _BY_SESSION}
        return options


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
