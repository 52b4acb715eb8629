"""``samkv tune``."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import cast

from samkv_integrations import figures
from samkv_integrations.bench import intervals
from samkv_integrations.chroma.client import Database
from samkv_integrations.chroma.link import ChromaLink
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli import tune_arguments as own
from samkv_integrations.cli import tune_tables as shown
from samkv_integrations.cli.loading import use_threads_for
from samkv_integrations.cli.questions import read_questions
from samkv_integrations.cli.stores import store_in
from samkv_integrations.cli.tune_setup import QuestionOptions, TuneSetup
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.tuned import FILE, TunedSetting, tuned_setting, write
from samkv_integrations.errors import InvalidOption, MissingExtra
from samkv_integrations.tuning import picture
from samkv_integrations.tuning.candidates import Candidate, as_label, full_prefill, grid
from samkv_integrations.tuning.recommend import recommended
from samkv_integrations.tuning.run import Result, TuneConfig
from samkv_integrations.tuning.standing import By

PICTURE = "agreement.svg"


def tune(
    collection: args.Collection = "documents", folder: args.Folder = Path(".samkv"),
    chroma: args.ChromaServer = None,
    model: args.ModelName = "builtin", device: args.Device = "auto", dtype: args.Dtype = "auto",
    store_bits: args.CacheBits = None, namespace: args.Namespace = "", remote: args.Remote = None,
    questions: args.QuestionFile = None, agree: own.Agree = 0.95, by: own.AgreedBy = "exact",
    minutes: own.Minutes = 10.0, top_k: args.TopK = 4, max_new_tokens: args.MaxNewTokens = 64,
    asked_by: own.AskedBy = "chunks", chat: args.Chat = False, seed: own.Seed = 0,
    most: own.MostTuned = 400, output: args.RunFolder = None, fresh: args.Fresh = False,
    check: own.CheckOnly = False, writes: own.Writes = True, fall_back: own.FallBack = False,
    as_json: args.Json = False,
) -> None:  # fmt: skip
    """Find the cheapest setting that answers as full prefill does, on your model and documents."""
    config = TuneConfig(agree=agree, by=cast(By, by), minutes=minutes)
    options = QuestionOptions(
        given=read_questions(questions, with_documents=True) if questions else None,
        asked_by=asked_by, top_k=top_k, max_new_tokens=max_new_tokens, chat=chat, seed=seed,
        most=most,
    )  # fmt: skip
    intervals.require_extras()
    if output is not None and output.exists() and not output.is_dir():
        raise InvalidOption(f"--output {output} is no folder; name a new one, or that of a run")
    opened = Database(folder / "chroma", chroma).collection(collection)
    use_threads_for(model)
    store = store_in(folder, namespace, remote)
    engine = Engine.from_pretrained(
        model, store, device=device, dtype=dtype, store_bits=store_bits, prefix_bytes=0
    )
    store.require(engine.fingerprint)
    entry = tuned_setting(engine.model, store) if check else None
    if check and entry is None:
        raise InvalidOption(
            f"--check, and {store.path / FILE} has no entry for {model!r}; run 'samkv tune' first"
        )
    setup = TuneSetup.of(ChromaLink(opened, engine), store, options, folder / "tune")
    if entry is not None:
        _check(setup, entry, config, output, fresh=fresh, as_json=as_json)
        return
    candidates = grid(engine.model.name, engine.store_bits)
    with setup.run(config, candidates, output, fresh=fresh) as (run, place):
        result = run.run()
    setting = recommended(result, candidates, config, collection)
    _draw(place, result, config)
    written = _written(setup, setting, writes=writes, fall_back=fall_back)
    if as_json:
        _write_json(model, result, setting, written, config)
    out = tables.console(stderr=as_json)
    shown.show(out, result, config, setup.retrieval, place)
    shown.show_end(out, setting, result.why, written, engine.store_bits, model)


def _check(
    setup: TuneSetup,
    entry: TunedSetting,
    config: TuneConfig,
    output: Path | None,
    *,
    fresh: bool,
    as_json: bool,
) -> None:
    """Measure the setting that is in use, and compare with what was said of it."""
    candidate = Candidate(
        label=as_label(entry), setting=entry,
        in_store=entry.store_bits == setup.engine.store_bits,
    )  # fmt: skip
    with setup.run(config, [candidate], output, fresh=fresh) as (run, _):
        standing = run.measure_all(candidate.label)
    if as_json:
        more = {"setting": entry.line, "measured": dict(entry.measured)}
        text = figures.to_json("tune", entry.model, [standing.to_row()], more)
        tables.write_text(text)
    shown.show_check(tables.console(stderr=as_json), entry, standing)


def _written(
    setup: TuneSetup, setting: TunedSetting | None, *, writes: bool, fall_back: bool
) -> Path | None:
    """The file that was written, None for none."""
    if setting is None and fall_back:
        engine = setup.engine
        setting = full_prefill(engine.model.name, engine.store_bits).setting
    return write(setup.store.path, setting) if writes and setting else None


def _draw(folder: Path, result: Result, config: TuneConfig) -> None:
    """A picture in the folder of the run, where matplotlib is there to draw it."""
    with suppress(MissingExtra):
        standings = sorted(result.race.standings.values(), key=lambda each: each.ttft_ratio)
        picture.draw(standings, folder / PICTURE, target=config.agree, chosen=result.chosen)


def _write_json(
    model: str,
    result: Result,
    setting: TunedSetting | None,
    written: Path | None,
    config: TuneConfig,
) -> None:
    race = result.race
    rows = [
        {**standing.to_row(), **result.intervals[label], "state": race.state_of(label)}
        for label, standing in race.standings.items()
    ]
    more = {
        "target": config.agree,
        "agreed_by": config.by,
        "recommended": setting.line if setting else "--method recompute",
        "store_bits": setting.store_bits if setting else None,
        "why": result.why,
        "held_out": [each.standing.to_row() for each in result.checked],
        "written": str(written) if written else None,
        "seconds": result.seconds,
    }
    tables.write_text(figures.to_json("tune", model, rows, more))
