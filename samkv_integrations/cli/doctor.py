"""``samkv doctor``."""

from __future__ import annotations

import typer

from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli.loading import use_threads_for

CHECK_FAILED = 1
"""Exit code if a model is not computed exactly."""


def doctor(
    model: args.ModelName = "builtin", device: args.Device = "auto", dtype: args.Dtype = "auto",
    weights: args.Weights = "auto", folder: args.CostFolder = None, as_json: args.Json = False,
) -> None:  # fmt: skip
    """Check that a model is computed exactly, and measure what suits it. Exit code 1 if it is not.

    It says when full prefill is faster. 'samkv tune' counts right answers.
    """
    from tqdm.auto import tqdm

    from samkv_integrations.cache.disk import ChunkStore
    from samkv_integrations.engine.doctor import examine
    from samkv_integrations.model.loading import load_model

    use_threads_for(model)  # times of another number of threads would not be found again
    loaded = load_model(model, device=device, dtype=dtype, weights=weights)
    store = None if folder is None else ChunkStore(folder / "kv")
    checks = list(tqdm(examine(loaded, store), desc="checking", unit="check", leave=False))
    failed = [check.name for check in checks if not check.ok]
    if as_json:
        tables.write_json("doctor", model, [check.to_row() for check in checks])
    else:
        out = tables.console()
        words = [(c.name, "ok" if c.ok else "failed", c.detail) for c in checks]
        out.print(tables.table(("check", "", "detail"), words, left=3))
        verdict = f"FAILED: {', '.join(failed)}" if failed else "computed as by transformers"
        out.print(f"\n{model} in {loaded.dtype_name} on {loaded.device}: {verdict}")
    if failed:
        raise typer.Exit(CHECK_FAILED)
