"""How many replicas of an application there are, how requests find one, and how they scale."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, get_args

from samkv_integrations.cluster.pool import WorkerPool
from samkv_integrations.errors import InvalidOption, MissingExtra, UnknownOption

Route = Literal["load", "collection"]
"""To which replica a request goes: one that is less busy, or that of its collection."""

SESSION_HEADER = "x-session-id"
"""Names the collection of a request: Ray's proxies look at headers, and at no body."""

_BY_SESSION = "ray.serve.experimental.consistent_hash_router"
_LEAST_WAIT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Replicas of one application on Ray Serve.

    n_replicas: at first. least, most: between how many Ray chooses by their load; None, both, for
        always as many.
    n_cpus, n_gpus, address: of each replica, and the cluster; see `WorkerPool`.
    n_at_once: requests that a replica works at together; Ray aims at so many.
    n_waiting: requests that may wait at a replica beside them. As many as both together may wait at
        each proxy while all replicas are full; it refuses the next one.
    route: ``collection`` sends all requests with the same `SESSION_HEADER` to the same replica, or
        to the next ones while that is full.
    grace_s: seconds that running answers have when a replica ends.
    """

    n_replicas: int = 2
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
        if (self.least is None) != (self.most is None):
            raise InvalidOption(
                f"least={self.least}, most={self.most} replicas; give both, or neither for always "
                "as many"
            )
        if self.least is not None and self.most is not None:
            if not 1 <= self.least <= self.n_replicas <= self.most:
                raise InvalidOption(
                    f"{self.n_replicas} replicas, at least {self.least} and at most {self.most}; "
                    "give 1 <= least <= replicas <= most"
                )
        self.pool  # noqa: B018, raises for what is no number of replicas, or no address

    @property
    def pool(self) -> WorkerPool:
        """What they take of a cluster, when they are most."""
        return WorkerPool(
            n_workers=self.most or self.n_replicas,
            n_cpus=self.n_cpus,
            n_gpus=self.n_gpus,
            address=self.address,
        )

    def deployment_options(self) -> dict[str, Any]:
        """The arguments of Ray's ``serve.deployment``.

        Raises InvalidOption if this release of Ray routes by no header, MissingExtra without Ray.
        """
        n_ongoing = self.n_at_once + self.n_waiting
        options: dict[str, Any] = {
            "max_ongoing_requests": n_ongoing,
            "max_queued_requests": n_ongoing,
            "graceful_shutdown_wait_loop_s": min(_LEAST_WAIT_S, self.grace_s),
            "graceful_shutdown_timeout_s": self.grace_s,
            "ray_actor_options": {"num_cpus": self.n_cpus, "num_gpus": self.n_gpus},
            "logging_config": {"log_level": "WARNING"},
        }
        if self.least is None:
            options["num_replicas"] = self.n_replicas
        else:
            options["autoscaling_config"] = {
                "min_replicas": self.least,
                "initial_replicas": self.n_replicas,
                "max_replicas": self.most,
                "target_ongoing_requests": self.n_at_once,
            }
        if self.route == "collection":
            require_sessions()
            options["request_router_config"] = {
                "request_router_class": f"{_BY_SESSION}.ConsistentHashRouter"
            }
        return options


def require_sessions() -> None:
    """Raises InvalidOption if this release of Ray routes by no header, MissingExtra without Ray."""
    if find_spec("ray") is None:
        raise MissingExtra.of("ray", "ray")
    try:
        there = find_spec(_BY_SESSION)
    except ImportError:
        there = None
    if there is None:
        raise InvalidOption(
            "route='collection': this release of Ray cannot do that; install a newer one "
            "(2.60 can), or take route='load'"
        )
