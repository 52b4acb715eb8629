"""``samkv bench quality``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, cast

import typer

from samkv_integrations import figures
from samkv_integrations.bench import markdown, variants
from samkv_integrations.bench import plot as picture
from samkv_integrations.bench import quality as bench
from samkv_integrations.bench.data import BUILTIN, SHORT, PromptStyle, load
from samkv_integrations.bench.quality_summary import ALL, summarise
from samkv_integrations.bench.variants import TRUTH, Table4Row, Variant
from samkv_integrations.cache.quantise import DEFAULT_STORE_BITS
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import bench_runs as runs
from samkv_integrations.cli import comma_lists as lists
from samkv_integrations.cli.method_options import evictions_of
from samkv_integrations.errors import InvalidOption
from samkv_integrations.figures import Row

View = Literal["all", "ablation", "knobs", "table1", "table3"]
"""What is compared, and as which table it is shown; "all" is neither the paper's nor a study."""


def quality(
    model: args.ModelName = "builtin", device: args.Device = "auto", dtype: args.Dtype = "auto",
    block_size: args.BlockSize = None, store_bits: args.StoreBits = DEFAULT_STORE_BITS,
    data: args.Data = None, builtin_set: args.BuiltinSet = None,
    questions: args.MostQuestions = None, kinds: args.Kinds = "",
    documents: args.DocumentCounts = "", max_tokens: args.MaxTokens = None,
    answerable: args.Answerable = False, prompt: args.Prompt = "auto", chat: args.Chat = False,
    max_new_tokens: args.AnswerTokens = None, methods: args.Methods = "",
    budgets: args.Budgets = "", recompute_ratios: args.RecomputeRatios = "",
    eviction: args.Evictions = "", ablation: args.Ablation = False, knobs: args.Knobs = False,
    table1: args.Table1 = False, table3: args.Table3 = False, output: args.RunFolder = None,
    fresh: args.Fresh = False, json_file: args.JsonFile = None, plot: args.Plot = None,
) -> None:  # fmt: skip
    """Answers of every method to the same questions over the same chunks."""
    view = _view(ablation=ablation, knobs=knobs, table1=table1, table3=table3)
    compared, table4_rows = _compared(view, methods, budgets, recompute_ratios, eviction)
    sources = _sources(data, builtin_set)
    _check_files(json_file, plot, compared)
    config = bench.QualityConfig(
        questions=load(
            sources, builtin_set=builtin_set or SHORT,
            prompt=cast(PromptStyle, prompt),  # load refuses any other word
            kinds=lists.words(kinds), documents=lists.counts("--documents", documents),
            max_new_tokens=max_new_tokens,
        ),
        variants=compared, chat=chat, most=questions, max_tokens=max_tokens,
        answerable=answerable, block_size=block_size, store_bits=store_bits,
    )  # fmt: skip
    config.require_extras()
    loaded = runs.loaded_model(model, device, dtype)
    settings = config.settings(loaded)
    with runs.journal_of(output, settings, fresh=fresh) as journal:
        result = bench.run(config, loaded, journal)
    rows = summarise(result.rows)
    _report_run(journal.folder, rows, result)
    if json_file:
        left_out = {"too_long": result.too_long, "not_answered": result.not_answered}
        more = {"hardware": settings["hardware"], "settings": settings, "left_out": left_out}
        runs.write(figures.to_json("bench quality", model, rows, more), json_file)
    if plot:
        totals = [row for row in rows if row["kind"] == ALL and row["documents"] is None]
        picture.draw(totals, plot, f"{model}, {rows[0]['questions']} questions")
    if json_file != runs.STDOUT:
        typer.echo(figures.visible(_table(view, rows, result.rows, table4_rows)))


def _view(**wanted: bool) -> View:
    named = [name for name, is_wanted in wanted.items() if is_wanted]
    if len(named) > 1:
        raise InvalidOption("--ablation, --knobs, --table1 and --table3: give at most one of them")
    return cast(View, named[0] if named else "all")


def _compared(
    view: View, methods: str, budgets: str, recompute_ratios: str, eviction: str
) -> tuple[dict[str, Variant], dict[str, Table4Row]]:
    """Label -> what answers; and label -> row of the paper's Table 4, empty for other views."""
    brings_methods = view in ("ablation", "knobs")
    if brings_methods and (methods or recompute_ratios or eviction):
        raise InvalidOption(
            "--ablation and --knobs bring their own methods; leave --methods, --recompute-ratios "
            "and --eviction out"
        )
    kept = lists.shares("--budgets", budgets)
    if view == "ablation":
        return variants.table4(kept)
    if view == "knobs":
        if kept:
            raise InvalidOption(f"--knobs with --budgets {budgets}; leave --budgets out")
        return variants.knobs(), {}
    names = lists.method_names(methods or "all")
    again = lists.shares("--recompute-ratios", recompute_ratios)
    return variants.combine(names, kept, again, evictions_of(lists.words(eviction))), {}


def _sources(data: Sequence[str] | None, builtin_set: str | None) -> Sequence[str]:
    sources = data or [BUILTIN]
    if builtin_set is not None and BUILTIN not in sources:
        raise InvalidOption(
            f"--set {builtin_set} picks built-in questions, and --data {' --data '.join(sources)} "
            f"brings others; add --data {BUILTIN}, or leave --set out"
        )
    return sources


def _check_files(
    json_file: Path | None, plot: Path | None, compared: Mapping[str, Variant]
) -> None:
    """Raise before anything is measured if a file could not be written afterwards."""
    if plot:
        picture.check(plot)
        if TRUTH not in compared:
            raise InvalidOption(f"--plot shows shares of {TRUTH!r}; add it to --methods")
    for file in (json_file, plot):
        runs.require_folder(file)


def _report_run(folder: Path, rows: Sequence[Row], result: bench.Result) -> None:
    typer.echo(
        f"{folder}: {rows[0]['questions']} questions; left out: {result.too_long} too long, "
        f"{result.not_answered} not answered by full prefill",
        err=True,
    )


def _table(
    view: View, rows: Sequence[Row], answers: Sequence[Row], table4_rows: Mapping[str, Table4Row]
) -> str:
    """The markdown of a view. rows: summaries. answers: what they summarise."""
    if view == "table1":
        return markdown.table1(rows)
    if view == "table3":
        return markdown.table3(answers)
    if view == "ablation":
        return markdown.table4(answers, table4_rows)
    return markdown.quality(rows)
