"""``samkv doctor``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli.arguments import BUILTIN
from samkv_integrations.cli.loading import Index, Ingested
from samkv_integrations.options import ModelOptions

if TYPE_CHECKING:
    from samkv_integrations.lab.runtime_doctor import Check

CHECK_FAILED = 1
"""Exit code if a check of exactness fails."""
_KEPT = "Keep the measured times beside the caches here."
_DEFAULT = "as ingested into --dir, else"


def doctor(
    of_runtime: args.OfRuntime,
    model: Annotated[
        str | None, args.flag(ModelOptions, "model_name", "--model", default=f"{_DEFAULT} builtin")
    ] = None,
    device: args.Device = "auto",
    dtype: Annotated[
        str | None, args.flag(ModelOptions, "dtype", default=f"{_DEFAULT} auto")
    ] = None,
    folder: Annotated[Path | None, typer.Option("--dir", resolve_path=True, help=_KEPT)] = None,
    kv_dir: args.CacheFolder = None,
    as_json: args.Json = False,
) -> None:  # fmt: skip
    """Check that a model is computed exactly, and measure what suits it. Exit code 1 if it is not.

    It says when full prefill is faster. 'samkv tune' counts right answers.
    """
    index = Index(
        folder=folder or Path(), kv_dir=kv_dir, model=model, dtype=dtype, **vars(of_runtime)
    )
    kv = index.kv if folder or kv_dir else None
    given = (
        Ingested(model=model or BUILTIN, runtime=index.runtime, dtype=dtype or "auto")
        if kv is None
        else index.as_ingested(())
    )

    from tqdm.auto import tqdm

    from samkv_integrations.runtimes import load_runtime, runtime_for
    from samkv_integrations.store.disk import ChunkStore

    name = given.model
    typer.echo(f"Checking {name}, for minutes if it is large ...", err=True)
    examine, verdict = _checks_of(runtime_for(name, given.runtime).name)
    # costs are kept by number of threads
    options = of_runtime.of_runtime(name) | {"runtime": given.runtime}
    loaded = load_runtime(name, device=device, dtype=given.dtype, **options)
    store = None if kv is None else ChunkStore(kv)
    checks = list(
        tqdm(examine(loaded, store), desc="checking", unit="check", leave=False, disable=None)
    )
    failed = [check.name for check in checks if not check.ok]
    words = [(check.name, "ok" if check.ok else "failed", check.detail) for check in checks]
    if failed:
        verdict = f"FAILED: {', '.join(failed)}"
    tables.report(
        "doctor", name, [check.to_row() for check in checks],
        tables.table(("check", "", "detail"), words, left=3),
        f"\n{name} in {loaded.dtype_name} on {loaded.device_name}: {verdict}", as_json=as_json,
    )  # fmt: skip
    if failed:
        raise typer.Exit(CHECK_FAILED)


def _checks_of(runtime: str) -> tuple[Callable[..., Iterable[Check]], str]:
    """The function that makes the checks of models on a runtime, and what it means if none fails.

    Only checks of transformers need torch.
    """
    if runtime == "transformers":
        from samkv_integrations.lab import doctor

        return doctor.examine, "computed as by transformers"
    from samkv_integrations.lab import runtime_doctor

    return runtime_doctor.examine, f"run by {runtime}"
