"""An ASGI application as several replicas behind one address, with Ray Serve."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from samkv_integrations.cluster.pool import errors_only
from samkv_integrations.cluster.replicas import Replicas
from samkv_integrations.errors import ClusterError, InvalidOption, MissingExtra

APPLICATION = "samkv"
"""Its name on the cluster."""

_ENDING_S = 15.0
"""Seconds that Ray may take beside the grace of the answers."""

_REQUEST_ID = b"x-request-id"
_ERROR = re.compile(r"[\w.]+(Error|Exception|Interrupt): ")

App = Callable[[Any, Any, Any], Awaitable[None]]
"""An ASGI application."""


@contextmanager
def serving(
    build: Callable[[], App], replicas: Replicas, host: str, port: int, *, n_threads: int
) -> Iterator[None]:
    """Replicas that answer on ``host`` and ``port`` until the block is left.

    Running answers are let end then, for the replicas' grace. A cluster that this began ends too.

    build: makes the application, once in each replica; it has to be picklable.
    n_threads: that torch uses in a replica.

    Raises:
        InvalidOption: the cluster cannot be reached, has no room, or serves already.
        ClusterError: no replica can begin.
        MissingExtra: Ray Serve is not installed.
    """
    options = replicas.deployment_options()
    with replicas.pool.connected():
        try:
            from ray import serve
        except ImportError as error:
            raise MissingExtra.of("ray", "ray") from error
        _require_unused(serve)
        with errors_only("ray.serve"):  # it tells of each step
            try:
                serve.start(
                    proxy_location="EveryNode",
                    http_options={"host": host, "port": port},
                    logging_config={"log_level": "WARNING"},
                )
                answering = serve.ingress(_builder(build, n_threads))()
                made = serve.deployment(name="replica", **options)(answering)
                _run(serve, made.bind())
                yield
            finally:
                _end(serve, replicas.grace_s)


def _builder(build: Callable[[], App], n_threads: int) -> Callable[[], App]:
    """A function without arguments, as Ray wants one."""

    def made_in_replica() -> App:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        torch.set_num_threads(n_threads)
        return without_request_id(build())

    return made_in_replica


def without_request_id(app: App) -> App:
    """The application, for Ray's proxies, which add the header of a request's id themselves."""

    async def passed_on(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401
        async def send_without(message: Any) -> None:  # noqa: ANN401
            if message["type"] == "http.response.start":
                headers = [pair for pair in message["headers"] if pair[0].lower() != _REQUEST_ID]
                message = message | {"headers": headers}
            await send(message)

        await app(scope, receive, send_without)

    return passed_on


def _require_unused(serve: Any) -> None:  # noqa: ANN401
    """The address of Ray Serve is that of who began it, and might let in whoever asks."""
    if serve.status().proxies:
        raise InvalidOption(
            "Ray Serve runs on this cluster already, with an address of its own; end it with "
            "'serve shutdown', or give another cluster"
        )


def _run(serve: Any, bound: Any) -> None:  # noqa: ANN401
    try:
        serve.run(bound, name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        found = serve.status().applications.get(APPLICATION)
        told = [one.message for one in found.deployments.values()] if found else []
        reason = reason_in("\n".join([str(error), *told]))
        raise ClusterError(f"no replica can begin: {reason}") from error


def reason_in(message: str) -> str:
    """What went wrong in a replica: Ray hands on its traceback, and lines of its own after it."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if ours := [line for line in lines if line.startswith("samkv_integrations.errors.")]:
        return ours[-1].partition(": ")[2]
    errors = [line for line in lines if _ERROR.match(line)]
    return errors[-1] if errors else lines[0] if lines else "Ray does not say"


def _end(serve: Any, grace_s: float) -> None:  # noqa: ANN401
    """End the replicas, which let their answers end, and Ray Serve after them."""
    until = time.monotonic() + grace_s + _ENDING_S
    try:
        while time.monotonic() < until:
            with suppress(TimeoutError):  # after a minute of its own
                serve.delete(APPLICATION)
                break
    finally:
        serve.shutdown()
