"""``samkv doctor``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli.loading import require_model
from samkv_integrations.option import check_options
from samkv_integrations.options import ModelOptions

if TYPE_CHECKING:
    from samkv_integrations.lab.runtime_doctor import Check

CHECK_FAILED = 1
"""Exit code if a check of exactness fails."""
_KEPT = "Keep the measured times beside the caches here."


def doctor(
    of_runtime: args.OfRuntime, model: args.ModelName = "builtin", device: args.Device = "auto",
    dtype: args.Dtype = "auto",
    folder: Annotated[Path | None, typer.Option("--dir", resolve_path=True, help=_KEPT)] = None,
    kv_dir: args.CacheFolder = None,
    as_json: args.Json = False,
) -> None:  # fmt: skip
    """Check that a model is computed exactly, and measure what suits it. Exit code 1 if it is not.

    It says when full prefill is faster. 'samkv tune' counts right answers.
    """
    check_options(ModelOptions, {"dtype": dtype})
    require_model(model)

    from tqdm.auto import tqdm

    from samkv_integrations.runtimes import load_runtime, runtime_for
    from samkv_integrations.store.disk import ChunkStore

    typer.echo("Checking, for minutes with a large model ...", err=True)
    examine, verdict = _checks_of(runtime_for(model, of_runtime.runtime).name)
    # costs are kept by number of threads
    loaded = load_runtime(model, device=device, dtype=dtype, **of_runtime.of_runtime(model))
    kv = kv_dir or (folder and folder / "kv")
    store = None if kv is None else ChunkStore(kv)
    checks = list(
        tqdm(examine(loaded, store), desc="checking", unit="check", leave=False, disable=None)
    )
    failed = [check.name for check in checks if not check.ok]
    words = [(check.name, "ok" if check.ok else "failed", check.detail) for check in checks]
    if failed:
        verdict = f"FAILED: {', '.join(failed)}"
    tables.report(
        "doctor", model, [check.to_row() for check in checks],
        tables.table(("check", "", "detail"), words, left=3),
        f"\n{model} in {loaded.dtype_name} on {loaded.device_name}: {verdict}", as_json=as_json,
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
