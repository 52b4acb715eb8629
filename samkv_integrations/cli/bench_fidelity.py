"""``samkv bench fidelity``."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import typer

from samkv_integrations import figures
from samkv_integrations.bench import fidelity as bench
from samkv_integrations.bench import fidelity_plot, markdown, truth_files, variants
from samkv_integrations.bench import plot as picture
from samkv_integrations.bench.data import BUILTIN, Question
from samkv_integrations.bench.fidelity_summary import summarise
from samkv_integrations.bench.journal import Journal
from samkv_integrations.bench.truth_files import TruthFiles
from samkv_integrations.bench.variants import TRUTH, Variant
from samkv_integrations.cache.quantise import DEFAULT_STORE_BITS
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import bench_runs as runs
from samkv_integrations.cli import comma_lists as lists
from samkv_integrations.cli import fidelity_options as options
from samkv_integrations.cli.fidelity_data import FidelityQuestions
from samkv_integrations.cli.method_options import evictions_of
from samkv_integrations.errors import InvalidOption
from samkv_integrations.figures import Row
from samkv_integrations.methods import METHODS
from samkv_integrations.model.model import Model

_TRUTHS = "truths"
_TRUTH_FILES = f"{_TRUTHS}/{truth_files.PATTERN}"
"""The folder in that of a run where full prefill's logits wait for the floor."""


def fidelity(
    model: options.Models = None, device: args.Device = "auto", dtype: args.Dtype = "auto",
    data: options.Data = None, chunk_size: args.ChunkSize = 256, part: options.Part = None,
    store_bits: options.StoreBits = str(DEFAULT_STORE_BITS),
    questions: args.MostQuestions = None, documents: options.MostDocuments = None,
    tokens: options.ForcedTokens = 32, past_end: options.PastEnd = False, chat: args.Chat = False,
    methods: args.AllMethods = "all", budgets: args.Budgets = "",
    recompute_ratios: options.Ratios = "", eviction: args.Evictions = "",
    floor: options.Floor = False, output: args.RunFolder = None, fresh: args.Fresh = False,
    json_file: args.JsonFile = None, plot: args.Plot = None,
) -> None:  # fmt: skip
    """How far every method's next-token distributions are from full prefill's, on real text."""
    names, half = _models(model), cast(bench.Part, part or ("all" if data else "report"))
    again = lists.shares("--recompute-ratios", recompute_ratios)
    kept = lists.shares("--budgets", budgets)
    rules = evictions_of(lists.words(eviction))
    compared = variants.combine(lists.method_names(methods), kept, again, rules)
    bits = list(dict.fromkeys(lists.counts("--store-bits", store_bits)))
    if not bits:
        raise InvalidOption(f"--store-bits {store_bits!r} names none; give 4, 8 or 16")
    if plot:
        picture.check(plot)
    for file in (json_file, plot):
        runs.require_folder(file)
    config = bench.FidelityConfig(
        questions=(), store_bits=bits[0],
        # what is measured against is always there
        variants=variants.at_store_bits({TRUTH: Variant(method=METHODS[TRUTH]), **compared}, bits),
        tokens=tokens, past_end=past_end, chat=chat, most=questions, floor=floor,
    )  # fmt: skip
    config.require_extras()
    asked = FidelityQuestions(data or [BUILTIN], half, documents, chunk_size)
    done = []
    for name in names:
        folder = output / _file_name(name) if output and len(names) > 1 else output
        load = partial(runs.loaded_model, name, device)
        opened = partial(runs.journal_of, folder, fresh=fresh, beside=_TRUTH_FILES)
        done.append(_measured(config, partial(load, dtype), load, asked.of, opened, half))
    _show(dict(zip(names, done, strict=True)), json_file, plot)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The summary of a model's run, and what it depends on."""

    rows: list[Row]
    settings: Mapping[str, Any]
    left_out: Mapping[str, int]


def _models(given: Sequence[str] | None) -> list[str]:
    names = given or [BUILTIN]
    if len(set(names)) < len(names):
        raise InvalidOption(f"--model {' --model '.join(names)}; name each model once")
    return list(names)


def _file_name(model: str) -> str:
    return re.sub(r"[^\w.-]+", "_", model).strip("._") or "model"


def _measured(
    config: bench.FidelityConfig,
    load: Callable[[], Model],
    load_as: Callable[[str], Model],
    asked: Callable[[Model], list[Question]],
    journal_of: Callable[[Mapping[str, Any]], Journal],
    part: bench.Part,
) -> _Run:
    """The run of one model. load_as: loads it in a given dtype, for the floor."""
    model = load()
    config = replace(config, questions=asked(model))
    settings = {**config.settings(model), "part": part}
    with journal_of(settings) as journal:
        truths = TruthFiles(journal.folder / _TRUTHS) if config.floor else None
        result = bench.run(config, model, journal, truths)
        dtype = bench.other_dtype(model)
        del model
        _release()
        if truths:
            bench.measure_floor(config, load_as(dtype), journal, truths, result)
            _release()
    rows = summarise(result.rows)
    typer.echo(
        f"{journal.folder}: {rows[0]['questions']} questions; left out: {result.too_long} too long",
        err=True,
    )
    return _Run(rows=rows, settings=settings, left_out={"too_long": result.too_long})


def _release() -> None:
    """Free what a model took before the next one is loaded: engines refer to it in circles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _show(done: Mapping[str, _Run], json_file: Path | None, plot: Path | None) -> None:
    named = [{"model": name, **row} for name, run in done.items() for row in run.rows]
    only = next(iter(done.values())) if len(done) == 1 else None
    rows: list[Row] = only.rows if only else list(named)
    if json_file:
        more = (
            {"hardware": only.settings["hardware"], "settings": only.settings,
             "left_out": only.left_out}
            if only else
            {"settings": {name: run.settings for name, run in done.items()},
             "left_out": {name: run.left_out for name, run in done.items()}}
        )  # fmt: skip
        name = next(iter(done)) if only else None
        runs.write(figures.to_json("bench fidelity", name, rows, more), json_file)
    if plot:
        fidelity_plot.draw(named, plot, f"{', '.join(done)}: {rows[0]['questions']} questions")
    if json_file != runs.STDOUT:
        typer.echo(figures.visible(markdown.fidelity(rows)))
