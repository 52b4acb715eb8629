"""The server of ``samkv serve`` as an application of Ray Serve."""

from __future__ import annotations

import logging
import platform
import random
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from samkv_integrations.cli import arguments as args
from samkv_integrations.cli.app import UsageError, keep_freed_memory
from samkv_integrations.cli.arguments import BUILTIN
from samkv_integrations.cli.loading import Answering, Embedded, Index
from samkv_integrations.cli.serve import KEYS_VARIABLE, ServerOptions, Serving
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
"""Most requests at a replica, and most that wait for one. ``--max-waiting`` limits each key's."""

_PATHS = ("api-keys", "dir", "kv-dir")

_PERHAPS_PATHS = {"chroma": (), "embedding": ("chroma",), "model": (BUILTIN, "smollm2")}
"""Options whose value may be a path, and may be a name or a URL, with values that are no path."""


def app(given: dict[str, Any]) -> Any:  # noqa: ANN401
    """The application for ``serve run samkv_integrations.cli.ray:app`` and Ray's config files.

    given: options of ``samkv serve`` by their names without dashes; a list repeats an option. Keys
    are read here, and replicas get their digests.

    Raises:
        InvalidOption: a value is wrong, there is no key, or the store or a collection does not
            exist here.
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
            "no API keys, and Ray's proxies may listen for other machines; give api-keys: FILE, or "
            f"the variable {KEYS_VARIABLE}"
        )
    of_router: Any = Router  # Ray's own type for it is wrong
    deployment = serve.deployment(
        name=NAME, max_ongoing_requests=MOST_REQUESTS, max_queued_requests=MOST_REQUESTS,
        graceful_shutdown_timeout_s=options.serving.grace,
        ray_actor_options={"num_cpus": options.index.n_threads or 1},
        request_router_config=RequestRouterConfig(request_router_class=of_router),
    )  # fmt: skip
    return deployment(serve.ingress()(Replica)).bind(options, keys, mark_of(options.index))


def parsed(given: Mapping[str, Any]) -> tuple[ServerOptions, ApiKeys]:
    """The options of a server, from their names and values, and the API keys."""
    commands = typer.Typer(add_completion=False)
    commands.command(cls=args.Command, add_help_option=False)(args.with_flags(_read))
    command: Any = typer.main.get_command(commands)
    known = {flag.removeprefix("--"): each for each in command.params for flag in each.opts}
    flags = [word for name in given for word in _flags(name, given[name], known.get(name))]
    try:
        found: tuple[ServerOptions, ApiKeys] = command.main(flags, standalone_mode=False)
    except UsageError as error:
        raise InvalidOption(
            f"{error.format_message().rstrip('.')}; the options are those of 'samkv serve --help'"
        ) from error
    return found


def _flags(name: str, value: Any, option: Any) -> list[str]:  # noqa: ANN401 - of YAML, of typer
    """An option of the config file, as a command has it. option: None if there is no such one."""
    if getattr(option, "is_flag", False):
        if not isinstance(value, bool):
            raise InvalidOption(f"{name}: {value!r}; give true or false")
        switch: list[str] = option.opts if value else option.secondary_opts
        return switch[:1]
    if isinstance(value, list) and not getattr(option, "multiple", True):
        raise InvalidOption(f"{name}: {value!r} is a list; give one value")
    values = value if isinstance(value, list) else [value]
    if None in values:
        raise InvalidOption(f"{name}: null is no value; give one, or leave the option out")
    for each in map(str, values):
        is_name = name not in _PERHAPS_PATHS or each in _PERHAPS_PATHS[name]
        may_be_one = not is_name and (each.startswith(".") or Path(each).exists())
        if (may_be_one or name in _PATHS) and not Path(each).is_absolute():
            raise InvalidOption(
                f"{name}: {each!r} is relative, and Ray runs replicas in folders of its own; give "
                "an absolute path"
            )
    return [word for each in values for word in (f"--{name}", str(each))]


def _read(
    index: Index,
    options: EngineOptions,
    serving: Serving,
    answering: Answering,
    embedded: Embedded,
) -> Any:  # noqa: ANN401 - `with_flags` evaluates it
    given = ServerOptions(index, options, serving, answering, embedded)
    keys = given.keys()
    # here, once for all replicas, also for those that begin after another ingest
    index = replace(index, **asdict(given.checked(keys)))
    kind = runtime_for(str(index.model), index.runtime)
    if not kind.is_installed():
        extra = kind.name.replace("_", "-")
        raise MissingExtra.of(kind.name, extra)
    if index.dtype == "auto" and "dtype" in kind.options:
        raise InvalidOption(
            Given("dtype", "auto"),
            " may choose another dtype in each replica; give 'bfloat16' or 'float32', or ingest "
            "first, whose dtype is taken",
        )
    return replace(given, index=index), keys


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
        own = replace(options, index=index)
        self._tenancy, settings = own.opened(keys, own.checked(keys))
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
