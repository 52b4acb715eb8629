"""The server of ``samkv serve`` as an application of Ray Serve."""

from __future__ import annotations

import logging
import platform
import random
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import typer

from samkv_integrations.cli import arguments as args
from samkv_integrations.cli.app import UsageError, keep_freed_memory
from samkv_integrations.cli.loading import Answering, Embedded, Index
from samkv_integrations.cli.serve import KEYS_VARIABLE, ServerOptions, Serving, asked_by
from samkv_integrations.errors import ClusterError, Given, InvalidOption, MissingExtra, SamkvError
from samkv_integrations.options import EngineOptions
from samkv_integrations.runtimes import runtime_for

try:
    from ray import serve
    from ray.runtime_context import get_runtime_context
    from ray.serve.config import RequestRouterConfig
    from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
except ImportError as error:
    raise MissingExtra.of(error.name or "ray", "ray") from error

if TYPE_CHECKING:
    from samkv_integrations.server.tenancy import ApiKeys

NAME = "samkv"
"""Name of the deployment, by which a config file sets the number of replicas."""

MOST_REQUESTS = 1000
"""Most requests at a replica. Below, ``--max-waiting`` limits those of each key."""


def app(given: dict[str, Any]) -> Any:  # noqa: ANN401
    """The application for ``serve run samkv_integrations.cli.ray:app`` and Ray's config files.

    given: options of ``samkv serve`` by their names without dashes; a list repeats an option. Keys
    are read here, and replicas get their digests.

    Raises:
        InvalidOption: a value is wrong, there is no key, or the store does not exist here.
        MissingExtra: the server is not installed.
    """
    if address := {"host", "port"} & {*given}:
        raise InvalidOption(
            f"{min(address)}={given[min(address)]!r}: Ray's proxies listen, and not the replicas; "
            "give http_options in the config file, or to 'serve start'"
        )
    options, keys = parsed(given)
    if not keys:
        raise InvalidOption(
            "no API keys, and Ray's proxies may listen for other machines; give api-keys=FILE, or "
            f"the variable {KEYS_VARIABLE}"
        )
    of_router: Any = Router  # Ray's own type for it is wrong
    deployment = serve.deployment(
        name=NAME, max_ongoing_requests=MOST_REQUESTS,
        graceful_shutdown_timeout_s=options.serving.grace,
        ray_actor_options={"num_cpus": options.index.n_threads or 1},
        request_router_config=RequestRouterConfig(request_router_class=of_router),
    )  # fmt: skip
    return deployment(serve.ingress()(Replica)).bind(options, keys, mark_of(options.index))


def parsed(given: Mapping[str, Any]) -> tuple[ServerOptions, ApiKeys]:
    """The options of a server, from their names and values, and the API keys."""
    flags = []
    for name, value in given.items():
        for each in value if isinstance(value, list) else [value]:
            switch = str(each).lower()
            if switch != "false":
                flags += [f"--{name}"] if switch == "true" else [f"--{name}", str(each)]
    commands = typer.Typer()
    commands.command(cls=args.Command)(args.with_flags(_read))
    command: Any = typer.main.get_command(commands)
    try:
        found: tuple[ServerOptions, ApiKeys] = command.main(flags, standalone_mode=False)
    except UsageError as error:
        raise InvalidOption(
            f"{error.format_message()} The options are those of 'samkv serve --help'"
        ) from error
    return found


def _read(
    index: Index,
    options: EngineOptions,
    serving: Serving,
    answering: Answering,
    embedded: Embedded,
) -> Any:  # noqa: ANN401 - `with_flags` evaluates it
    keys = ServerOptions(index, options, serving, answering, embedded).keys()
    # here, once for all replicas, also for those that begin after another ingest
    index = replace(index, **asdict(index.as_ingested(asked_by(keys))))
    kind = runtime_for(str(index.model), index.runtime)
    if index.dtype == "auto" and "dtype" in kind.options:
        raise InvalidOption(
            Given("dtype", "auto"),
            " may choose another dtype in each replica; give 'bfloat16' or 'float32', or ingest "
            "first, whose dtype is taken",
        )
    return ServerOptions(index, options, serving, answering, embedded), keys


def mark_of(index: Index) -> str:
    """The same text in all processes that open the same store, or a store with the same secret."""
    from samkv_integrations.store.chunk import chunk_key

    return chunk_key(index.store().secret, "", "which store", ())


class Router(ConsistentHashRouter):
    """Routes a session to its replica, and requests without a session to the least busy one."""

    async def choose_replicas(
        self,
        candidate_replicas: list[Any],
        pending_request: Any = None,  # noqa: ANN401
    ) -> list[list[Any]]:
        if pending_request is None or pending_request.metadata.session_id:
            return await super().choose_replicas(candidate_replicas, pending_request)
        pending_request.routing_context.should_backoff = True
        return [random.sample(candidate_replicas, len(candidate_replicas))]  # the first wins ties


class Replica:
    """One of several processes that answer, with a model and kept conversations of its own.

    keys: of all replicas. mark: `mark_of` the store where the application was built.

    Raises ClusterError if this machine does not reach that store, and as ``samkv serve``. Ray
    counts a replica as healthy once it is made.
    """

    def __init__(self, options: ServerOptions, keys: ApiKeys, mark: str) -> None:
        from samkv_integrations.server.app import OneRequestId, create_app
        from samkv_integrations.server.run import shorten_pauses, spare_memory

        here = platform.node()
        shared = "give all machines one folder under the same path, or --remote and one secret"
        try:
            is_same = mark_of(options.index) == mark
        except SamkvError as error:
            raise ClusterError(f"replica on {here}: {error}; {shared}") from error
        if not is_same:
            raise ClusterError(f"replica on {here}: {options.index.kv} is another store; {shared}")
        keep_freed_memory()
        spare_memory()
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        index = replace(options.index, n_threads=options.index.n_threads or _n_cpus())
        self._tenancy, settings = replace(options, index=index).opened(keys)
        self._app = create_app(self._tenancy, keys, settings)
        self._app.add_middleware(OneRequestId)
        shorten_pauses()

    def __serve_build_asgi_app__(self) -> Any:  # noqa: ANN401
        return self._app

    def check_health(self) -> None:
        """Ray ends a replica for which this raises, and starts another."""
        from samkv_integrations.server.app import STUCK_S

        if self._tenancy.scheduler.pass_s > STUCK_S:
            raise ClusterError(f"a pass of the model has taken more than {STUCK_S} s")


def _n_cpus() -> int:
    """The CPUs that Ray has given this replica, at least one."""
    context: Any = get_runtime_context()
    return max(1, int(context.get_assigned_resources().get("CPU", 1)))
