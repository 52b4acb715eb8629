"""``samkv bench fidelity``."""

from __future__ import annotations

from typing import cast

import typer

from samkv_integrations import figures
from samkv_integrations.bench import fidelity as bench
from samkv_integrations.bench import markdown, variants
from samkv_integrations.bench.fidelity_summary import summarise
from samkv_integrations.bench.variants import TRUTH, Variant
from samkv_integrations.cache.quantise import DEFAULT_STORE_BITS
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import bench_runs as runs
from samkv_integrations.cli import comma_lists as lists
from samkv_integrations.cli.method_options import evictions_of
from samkv_integrations.methods import METHODS


def fidelity(
    model: args.ModelName = "builtin", device: args.Device = "auto", dtype: args.Dtype = "auto",
    part: args.Part = "report", store_bits: args.StoreBits = DEFAULT_STORE_BITS,
    questions: args.MostQuestions = None, documents: args.MostDocuments = 10,
    tokens: args.ForcedTokens = 32, past_end: args.PastEnd = False, chat: args.Chat = False,
    methods: args.AllMethods = "all", budgets: args.Budgets = "",
    recompute_ratios: args.FidelityRatios = "", eviction: args.Evictions = "",
    output: args.RunFolder = None, fresh: args.Fresh = False, json_file: args.JsonFile = None,
) -> None:  # fmt: skip
    """How far every method's next-token distributions are from full prefill's, on real text."""
    again = lists.shares("--recompute-ratios", recompute_ratios)
    kept = lists.shares("--budgets", budgets)
    names, rules = lists.method_names(methods), evictions_of(lists.words(eviction))
    compared = variants.combine(names, kept, again, rules)
    truth = Variant(method=METHODS[TRUTH])
    runs.require_folder(json_file)
    config = bench.FidelityConfig(
        questions=bench.questions(cast(bench.Part, part), documents),  # refuses other words
        variants={TRUTH: truth, **compared},  # what is measured against is always there
        tokens=tokens, past_end=past_end, chat=chat, most=questions, store_bits=store_bits,
    )  # fmt: skip
    config.require_extras()
    loaded = runs.loaded_model(model, device, dtype)
    settings = {**config.settings(loaded), "part": part}
    with runs.journal_of(output, settings, fresh=fresh) as journal:
        result = bench.run(config, loaded, journal)
    rows = summarise(result.rows)
    typer.echo(
        f"{journal.folder}: {rows[0]['questions']} questions; left out: {result.too_long} too long",
        err=True,
    )
    if json_file:
        more = {"hardware": settings["hardware"], "settings": settings,
                "left_out": {"too_long": result.too_long}}  # fmt: skip
        runs.write(figures.to_json("bench fidelity", model, rows, more), json_file)
    if json_file != runs.STDOUT:
        typer.echo(figures.visible(markdown.fidelity(rows)))
