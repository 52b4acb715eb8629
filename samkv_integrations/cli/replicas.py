"""``samkv serve --ray``: the options of replicas, and the command while they answer."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args

import typer

from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.cli.loading import BUILTIN
from samkv_integrations.cluster.pool import require_ray
from samkv_integrations.cluster.replicas import Replicas, Route
from samkv_integrations.cluster.serve import serving
from samkv_integrations.engine.scheduler import Limits
from samkv_integrations.errors import InvalidOption, UnknownOption
from samkv_integrations.model.loading import load_tokenizer

if TYPE_CHECKING:
    from samkv_integrations.server.source import ServerSource

ENDED_BY_SIGTERM = 128 + signal.SIGTERM


def replicas_of(on_ray: bool, limits: Limits, grace_s: int, **given: Any) -> Replicas | None:  # noqa: ANN401
    """The replicas that the options ask for; None without ``--ray``.

    given: values by the name of their option, with underscores; None for what was not given.

    Raises InvalidOption for one that would be ignored, or is none; MissingExtra without Ray.
    """
    named = {f"--{name.replace('_', '-')}": value for name, value in given.items()}
    if not on_ray:
        for option, value in named.items():
            if value is not None:
                raise InvalidOption(f"{option} {value} is about replicas on Ray; give --ray too")
        return None
    for option in ("--replicas", "--min-replicas", "--max-replicas", "--replica-cpus"):
        value = named[option]
        if value is not None and value < 1:
            raise InvalidOption(f"{option} {value}; give at least 1")
    if named["--replica-gpus"] is not None and not named["--replica-gpus"] >= 0:
        raise InvalidOption(f"--replica-gpus {named['--replica-gpus']}; give at least 0")
    if given["route"] not in (None, *get_args(Route)):
        raise UnknownOption.among("route", given["route"], get_args(Route))
    require_ray()
    n_first, least, most = _numbers(given["replicas"], given["min_replicas"], given["max_replicas"])
    return Replicas(
        n_replicas=n_first,
        least=least,
        most=most,
        n_cpus=given["replica_cpus"] or 1,
        n_gpus=given["replica_gpus"] or 0.0,
        address=given["ray_address"],
        n_at_once=limits.max_batch,
        n_waiting=limits.max_waiting or 0,
        route=given["route"] or "load",
        grace_s=grace_s,
    )


def _numbers(
    n_first: int | None, least: int | None, most: int | None
) -> tuple[int, int | None, int | None]:
    """How many replicas at first, at least and at most; one of the last two brings the other."""
    if least is None and most is None:
        return n_first or 2, None, None
    if most is None:
        raise InvalidOption(f"--min-replicas {least} without --max-replicas; give both")
    least = least or 1
    n_first = n_first or least
    if not least <= n_first <= most:
        raise InvalidOption(
            f"--min-replicas {least}, --replicas {n_first}, --max-replicas {most}; none may be "
            "more than the next"
        )
    return n_first, least, most


def require_device(replicas: Replicas, device: str) -> str:
    """The device of each replica. Raises InvalidOption for a GPU that none is given."""
    if replicas.n_gpus:
        return device
    if device not in ("auto", "cpu"):
        raise InvalidOption(f"--device {device} for replicas without a GPU; give --replica-gpus")
    return "cpu"


def serve_on_ray(
    source: ServerSource, replicas: Replicas, address: tuple[str, int], say: Callable[[], None]
) -> None:
    """Serve until SIGTERM or Ctrl-C; running answers are let end then.

    address: host and port. say: called once replicas answer. Raises as `serving` does, and what a
    wrong model name or folder raises, before a replica begins.
    """
    load_tokenizer(source.model)
    for tenant in source.keys.tenants:  # so that none is made by two replicas at once
        ChunkStore(source.folder / "kv", namespace=tenant.namespace, remote=source.remote)
    n_threads = 1 if source.model == BUILTIN else replicas.n_cpus
    with serving(source.replica, replicas, *address, n_threads=n_threads):
        say()
        told = _wait_for_signal()
    if told == signal.SIGTERM:
        raise typer.Exit(ENDED_BY_SIGTERM)


def _wait_for_signal() -> int:
    """Waits for SIGINT or SIGTERM, and gives which; the next one is not waited for."""
    told, seen = threading.Event(), list[int]()

    def take(number: int, _: object) -> None:
        seen.append(number)
        told.set()

    before = {one: signal.signal(one, take) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        told.wait()
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    return seen[0]
