"""``samkv bench``: the measurements of docs/results.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, cast

import torch
import typer

from samkv_integrations import figures
from samkv_integrations.bench import divergence, markdown, variants
from samkv_integrations.bench import fidelity as distance
from samkv_integrations.bench import plot as picture
from samkv_integrations.bench import quality as answers
from samkv_integrations.bench.data import BUILTIN, SETS, SHORT, PromptStyle, load
from samkv_integrations.cache.quantise import DEFAULT_STORE_BITS
from samkv_integrations.cli import bench_times as timing
from samkv_integrations.cli import comma_lists as lists
from samkv_integrations.errors import InvalidOption
from samkv_integrations.methods import METHODS
from samkv_integrations.model.loading import load_model
from samkv_integrations.model.model import Model

StoreBits = Annotated[
    int, typer.Option(help="Bits of the numbers in caches: 4, 8, or 16 for the model's own.")
]


app = typer.Typer(help="Measure answers and time.", no_args_is_help=True)


RUNS = Path(".samkv/bench")
"""Where runs are kept that are given no folder."""


app.command()(timing.latency)


app.command()(timing.ingest)


@app.command()
def quality(
    model: Annotated[str, typer.Option(help="Hub id, local folder, or 'builtin'.")] = "builtin",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    block_size: Annotated[int | None, typer.Option(help="Tokens a block; else automatic.")] = None,
    store_bits: StoreBits = DEFAULT_STORE_BITS,
    data: Annotated[
        list[str] | None,
        typer.Option(help="'builtin' or a JSON Lines file, LongBench's too; may be repeated."),
    ] = None,
    builtin_set: Annotated[
        str | None,
        typer.Option("--set", help=f"Of the built-in questions: {', '.join(SETS)}. [short]"),
    ] = None,
    questions: Annotated[int | None, typer.Option(help="How many to ask; else all.")] = None,
    kinds: Annotated[str, typer.Option(help="Only these kinds or sets: NAME,NAME,...")] = "",
    documents: Annotated[
        str, typer.Option(help="Only questions with so many documents: 4,8,...")
    ] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Leave longer prompts out.")] = None,
    answerable: Annotated[
        bool, typer.Option(help="Only questions that full prefill answers exactly.")
    ] = False,
    prompt: Annotated[
        str, typer.Option(help="auto, rag or longbench; auto: LongBench's for its data sets.")
    ] = "auto",
    chat: Annotated[bool, typer.Option(help="Use the model's chat template.")] = False,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Longest answer; else 16, and LongBench's for its sets.")
    ] = None,
    methods: Annotated[str, typer.Option(help="NAME,NAME,...; else all.")] = "",
    budgets: Annotated[
        str, typer.Option(help="Kept ratios for the methods that select: 0.1,0.2,...")
    ] = "",
    recompute_ratios: Annotated[
        str, typer.Option(help="Shares for the methods that recompute one: 0.05,0.15,...")
    ] = "",
    eviction: Annotated[
        str, typer.Option(help="NAME,NAME@RATIO,... or none; each with every method.")
    ] = "",
    ablation: Annotated[
        bool, typer.Option(help="The grid of the paper's Table 4 instead, at every budget.")
    ] = False,
    knobs: Annotated[
        bool, typer.Option(help="The default with one of its decisions changed a row.")
    ] = False,
    table1: Annotated[bool, typer.Option(help="Print the columns of the paper's Table 1.")] = False,
    table3: Annotated[bool, typer.Option(help="Print F1 by data set, as its Table 3.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of the run; the same command again goes on with it."),
    ] = None,
    fresh: Annotated[bool, typer.Option(help="Drop what the folder of the run holds.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write one JSON object there; - for stdout.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a picture, .png or .svg.")] = None,
) -> None:
    """Answers of every method to the same questions over the same chunks."""
    if sum((ablation, knobs, table1, table3)) > 1:
        raise InvalidOption("--ablation, --knobs, --table1 and --table3: give at most one of them")
    if (ablation or knobs) and (methods or recompute_ratios or eviction):
        raise InvalidOption(
            "--ablation and --knobs bring their own methods; leave --methods, --recompute-ratios "
            "and --eviction out"
        )
    kept = lists.shares("--budgets", budgets)
    table4_rows: Mapping[str, variants.Table4Row] = {}
    if ablation:
        chosen, table4_rows = variants.table4(kept)
    elif knobs:
        if kept:
            raise InvalidOption(f"--knobs with --budgets {budgets}; leave --budgets out")
        chosen = variants.knobs()
    else:
        again = lists.shares("--recompute-ratios", recompute_ratios)
        chosen = variants.combine(
            lists.method_names(methods or "all"), kept, again, lists.words(eviction)
        )
    sources = data or [BUILTIN]
    if builtin_set is not None and BUILTIN not in sources:
        raise InvalidOption(
            f"--set {builtin_set} picks built-in questions, and --data {' --data '.join(sources)} "
            f"brings others; add --data {BUILTIN}, or leave --set out"
        )
    if plot:
        picture.check(plot)
        if variants.TRUTH not in chosen:
            raise InvalidOption(f"--plot shows shares of {variants.TRUTH!r}; add it to --methods")
    for file in (json_file, plot):
        if file:
            _require_folder(file)
    plan = answers.Plan(
        questions=load(
            sources,
            builtin_set=builtin_set or SHORT,
            prompt=cast(PromptStyle, prompt),  # load refuses any other word
            kinds=lists.words(kinds),
            documents=lists.counts("--documents", documents),
            max_new_tokens=max_new_tokens,
        ),
        variants=chosen,
        chat=chat,
        most=questions,
        max_tokens=max_tokens,
        answerable=answerable,
        block_size=block_size,
        store_bits=store_bits,
    )
    plan.require_extras()
    loaded = _load(model, device, dtype)
    settings = plan.settings(loaded)
    folder = output or RUNS / answers.digest(settings)
    with answers.Journal(folder, settings, fresh=fresh) as journal:
        result = answers.run(plan, loaded, journal)
    rows = answers.summarise(result.rows)
    typer.echo(
        f"{folder}: {rows[0]['questions']} questions; left out: {result.too_long} too long, "
        f"{result.not_answered} not answered by full prefill",
        err=True,
    )
    if json_file:
        left_out = {"too_long": result.too_long, "not_answered": result.not_answered}
        more = {"hardware": settings["hardware"], "settings": settings, "left_out": left_out}
        _write(figures.to_json("bench quality", model, rows, more), json_file)
    if plot:
        totals = [row for row in rows if row["kind"] == answers.ALL and row["documents"] is None]
        picture.draw(totals, plot, f"{model}, {rows[0]['questions']} questions")
    if json_file != Path("-"):
        if table1:
            typer.echo(markdown.table1(rows))
        elif table3:
            typer.echo(markdown.table3(result.rows))
        elif ablation:
            typer.echo(markdown.table4(result.rows, table4_rows))
        else:
            typer.echo(markdown.quality(rows))


@app.command()
def fidelity(
    model: Annotated[str, typer.Option(help="Hub id, local folder, or 'builtin'.")] = "builtin",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    part: Annotated[
        str, typer.Option(help="choose (to choose settings on), report (for figures) or all.")
    ] = "report",
    store_bits: StoreBits = DEFAULT_STORE_BITS,
    questions: Annotated[int | None, typer.Option(help="How many to ask; else all.")] = None,
    documents: Annotated[int, typer.Option(help="Most documents a question.")] = 10,
    tokens: Annotated[
        int, typer.Option(help="Most tokens of full prefill's answer that are forced on all.")
    ] = 32,
    past_end: Annotated[
        bool, typer.Option(help="So many tokens whether or not that answer ends before.")
    ] = False,
    chat: Annotated[bool, typer.Option(help="Use the model's chat template.")] = False,
    methods: Annotated[str, typer.Option(help="NAME,NAME,... or 'all'.")] = "all",
    budgets: Annotated[
        str, typer.Option(help="Kept ratios for the methods that select: 0.1,0.2,...")
    ] = "",
    recompute_ratios: Annotated[
        str, typer.Option(help="Shares for the methods that recompute one: 0.05,0.1,...")
    ] = "",
    eviction: Annotated[
        str, typer.Option(help="NAME,NAME@RATIO,... or none; each with every method.")
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of the run; the same command again goes on with it."),
    ] = None,
    fresh: Annotated[bool, typer.Option(help="Drop what the folder of the run holds.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write one JSON object there; - for stdout.")
    ] = None,
) -> None:
    """How far every method's next-token distributions are from full prefill's, on real text."""
    again = lists.shares("--recompute-ratios", recompute_ratios)
    kept = lists.shares("--budgets", budgets)
    chosen = variants.combine(lists.method_names(methods), kept, again, lists.words(eviction))
    truth = variants.Variant(method=METHODS[variants.TRUTH])
    if json_file:
        _require_folder(json_file)
    plan = distance.Plan(
        questions=distance.questions(cast(distance.Part, part), documents),  # refuses other words
        variants={variants.TRUTH: truth, **chosen},  # what is measured against is always there
        tokens=tokens,
        past_end=past_end,
        chat=chat,
        most=questions,
        store_bits=store_bits,
    )
    plan.require_extras()
    loaded = _load(model, device, dtype)
    settings = {**plan.settings(loaded), "part": part}
    folder = output or RUNS / answers.digest(settings)
    with answers.Journal(folder, settings, fresh=fresh) as journal:
        result = distance.run(plan, loaded, journal)
    rows = divergence.summarise(result.rows)
    n_asked = rows[0]["questions"]
    typer.echo(f"{folder}: {n_asked} questions; left out: {result.too_long} too long", err=True)
    if json_file:
        more = {"hardware": settings["hardware"], "settings": settings,
                "left_out": {"too_long": result.too_long}}  # fmt: skip
        _write(figures.to_json("bench fidelity", model, rows, more), json_file)
    if json_file != Path("-"):
        typer.echo(markdown.fidelity(rows))


def _require_folder(file: Path) -> None:
    if not file.parent.is_dir():
        raise InvalidOption(f"the folder {file.parent} of {file} does not exist; make it first")


def _load(model: str, device: str, dtype: str) -> Model:
    if model == BUILTIN:  # it is so small that a second thread costs more than it gives
        torch.set_num_threads(1)
    return load_model(model, device=device, dtype=dtype)


def _write(text: str, file: Path) -> None:
    typer.echo(text) if file == Path("-") else file.write_text(text + "\n", "utf-8")
