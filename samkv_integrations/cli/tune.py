"""``samkv tune``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from samkv_integrations import figures
from samkv_integrations.bench import intervals
from samkv_integrations.bench.data import Question
from samkv_integrations.bench.journal import Journal, digest
from samkv_integrations.bench.run_settings import common_settings
from samkv_integrations.bench.variants import Variant
from samkv_integrations.chroma.client import open_collection
from samkv_integrations.chroma.link import ChromaLink
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli import tune_arguments as own
from samkv_integrations.cli import tune_tables as shown
from samkv_integrations.cli.loading import use_threads_for
from samkv_integrations.cli.questions import read_questions
from samkv_integrations.cli.stores import store_in
from samkv_integrations.engine.costs import name_of
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.tuned import TunedSetting, write
from samkv_integrations.errors import InvalidOption, MissingExtra
from samkv_integrations.tuning import picture
from samkv_integrations.tuning.candidates import Candidate, full_prefill, grid
from samkv_integrations.tuning.measure import Measurer
from samkv_integrations.tuning.model_questions import asked_by_model
from samkv_integrations.tuning.questions import from_chunks, shuffled
from samkv_integrations.tuning.recommend import recommended
from samkv_integrations.tuning.retrieval import Retrieval, texts_of
from samkv_integrations.tuning.run import Result, Run, TuneConfig
from samkv_integrations.tuning.standing import By

PICTURE = "agreement.svg"
MOST_ASKED_BY_MODEL = 100
"""Questions that the model is asked to write; each takes a pass over a chunk, and an answer."""


def tune(
    collection: args.Collection = "documents", folder: args.Folder = Path(".samkv"),
    model: args.ModelName = "builtin", device: args.Device = "auto", dtype: args.Dtype = "auto",
    store_bits: args.CacheBits = None, namespace: args.Namespace = "",
    questions: args.QuestionFile = None, agree: own.Agree = 0.95, by: own.AgreedBy = "exact",
    minutes: own.Minutes = 10.0, top_k: args.TopK = 4, max_new_tokens: args.MaxNewTokens = 64,
    asked_by: own.AskedBy = "chunks", chat: args.Chat = False, seed: own.Seed = 0,
    most: own.MostTuned = 400, output: args.RunFolder = None, fresh: args.Fresh = False,
    writes: own.Writes = True, fall_back: own.FallBack = False, as_json: args.Json = False,
) -> None:  # fmt: skip
    """Find the cheapest setting that answers as full prefill does, on your model and documents."""
    config = TuneConfig(agree=agree, by=cast(By, by), minutes=minutes)
    _check(asked_by, most=most, top_k=top_k, max_new_tokens=max_new_tokens)
    intervals.require_extras()
    asked = read_questions(questions) if questions else None
    opened = open_collection(folder / "chroma", collection, create=False)
    use_threads_for(model)
    store = store_in(folder, namespace)
    engine = Engine.from_pretrained(
        model, store, device=device, dtype=dtype, store_bits=store_bits, prefix_bytes=0
    )
    store.require(engine.fingerprint)
    link, out = ChromaLink(opened, engine), tables.console(stderr=as_json)
    ordered = (
        shuffled(asked, seed=seed)
        if asked
        else _made(link, asked_by, folder / "tune", seed=seed, most=most, chat=chat)
    )
    retrieval = Retrieval()
    ready = retrieval.with_documents(
        link, ordered, top_k=top_k, max_new_tokens=max_new_tokens, chat=chat, most=most
    )
    candidates = grid(engine.model.name, engine.store_bits)
    settings = _settings(engine, ready, candidates, {"collection": collection, "chat": chat})
    _calibrate(engine)
    place = output or folder / "tune" / digest(settings)
    with Journal(place, settings, fresh=fresh) as journal:
        with Measurer(engine, candidates, max_new_tokens=max_new_tokens, chat=chat) as measurer:
            result = Run(config, candidates, ready, measurer, journal).run()
    setting = recommended(result, candidates, config, collection)
    _draw(place, result, config)
    written = _written(store.path, setting, engine, writes=writes, fall_back=fall_back)
    if as_json:
        _write_json(model, result, setting, written, config)
    shown.show(out, result, config, retrieval, place)
    shown.show_end(out, setting, result.why, written, engine.store_bits, model)


def _made(
    link: ChromaLink, asked_by: str, folder: Path, *, seed: int, most: int, chat: bool
) -> list[Question]:
    """Questions that are made of the collection. folder: keeps those that the model asks."""
    texts, engine = texts_of(link), link.engine
    if asked_by == "chunks":
        return from_chunks(texts, seed=seed)
    settings = {"model": engine.model.name, "weights": engine.model.weights_digest, "chat": chat}
    with Journal(folder / f"questions-{digest(settings)}", settings) as journal:
        most = min(most, MOST_ASKED_BY_MODEL)
        return asked_by_model(engine, texts, journal, seed=seed, most=most, chat=chat)


def _check(asked_by: str, **counts: int) -> None:
    if asked_by not in ("chunks", "model"):
        raise InvalidOption(f"--asked-by {asked_by!r}; allowed: chunks, model")
    for name, value in counts.items():
        if value < 1:
            raise InvalidOption(f"--{name.replace('_', '-')} {value}; give at least 1")


def _calibrate(engine: Engine) -> None:
    """Measure what passes cost if nobody has: ``auto`` decides by it."""
    if engine.store.note(name_of(engine.model)) is None:
        engine.calibrate()


def _settings(
    engine: Engine,
    questions: Sequence[Question],
    candidates: Sequence[Candidate],
    more: Mapping[str, object],
) -> dict[str, Any]:
    """What the rows of a run depend on: not the target, nor the minutes."""
    variants = {each.label: Variant.of(each.method) for each in candidates}
    return {
        **common_settings(engine.model, questions, variants),
        "store_bits": [each.setting.store_bits for each in candidates],
        **more,
    }


def _written(
    folder: Path, setting: TunedSetting | None, engine: Engine, *, writes: bool, fall_back: bool
) -> Path | None:
    """The file that was written, None for none."""
    if setting is None and fall_back:
        setting = full_prefill(engine.model.name, engine.store_bits).setting
    return write(folder, setting) if writes and setting else None


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
    rows = [standing.to_row() for standing in result.race.standings.values()]
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
