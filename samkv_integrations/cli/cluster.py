"""``samkv ingest --ray``: the options of workers, and what is shown of their work."""

from __future__ import annotations

from collections.abc import Sequence

from samkv_integrations import figures
from samkv_integrations.cli import tables
from samkv_integrations.cli.documents import DocumentChunk
from samkv_integrations.cluster.ingest import ClusterIngest
from samkv_integrations.cluster.pool import WorkerPool, require_ray
from samkv_integrations.errors import InvalidOption

SHOWN_FAILED = 10


def pool_of(
    on_ray: bool, address: str | None, workers: int | None, cpus: int | None, gpus: float | None
) -> WorkerPool | None:
    """The workers that the options ask for; None without ``--ray``.

    Raises InvalidOption for one that would be ignored, MissingExtra if Ray is not installed.
    """
    given = {
        "--ray-address": address, "--workers": workers, "--worker-cpus": cpus,
        "--worker-gpus": gpus,
    }  # fmt: skip
    if not on_ray:
        for option, value in given.items():
            if value is not None:
                raise InvalidOption(f"{option} {value} is about workers on Ray; give --ray too")
        return None
    for option, least in (("--workers", 1), ("--worker-cpus", 1), ("--worker-gpus", 0)):
        value = given[option]
        if value is not None and not float(value) >= least:
            raise InvalidOption(f"{option} {value}; give at least {least}")
    require_ray()
    return WorkerPool(
        n_workers=2 if workers is None else workers,
        n_cpus=1 if cpus is None else cpus,
        n_gpus=0.0 if gpus is None else gpus,
        address=address,
    )


def show_summary(done: ClusterIngest, chunks: Sequence[DocumentChunk]) -> None:
    """What the workers did, and on standard error which chunks have no cache."""
    out = tables.console()
    out.print(
        f"{done.n_workers} workers, {figures.seconds(done.working_s)} of work in "
        f"{figures.seconds(done.seconds)}; {done.n_retried} batches begun again"
    )
    out = tables.console(stderr=True)
    for place, why in list(done.failed.items())[:SHOWN_FAILED]:
        out.print(f"not ingested: {chunks[place].id}: {why}", soft_wrap=True)
    if len(done.failed) > SHOWN_FAILED:
        out.print(f"{len(done.failed)} chunks were not ingested in all; --json names each")


def failed_rows(done: ClusterIngest, chunks: Sequence[DocumentChunk]) -> list[dict[str, str | int]]:
    """The chunks without a cache, for --json."""
    return [
        {"path": chunks[place].source, "number": chunks[place].number, "why": why}
        for place, why in done.failed.items()
    ]
