"""``samkv tune``."""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from samkv_integrations import figures
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli.loading import as_ingested, store_in, use_threads_for
from samkv_integrations.errors import EmptyInput, InvalidOption
from samkv_integrations.figures import count, ratio, seconds, size

if TYPE_CHECKING:
    from samkv_integrations.engine.options import TunedSetting
    from samkv_integrations.tuning.run import By, Result, Standing

_LEAST_FOR_A_RATE = 10  # questions: "1.00" of one would look like a finding

LEGEND = """\
out: cannot reach {target:g}, or slower than full prefill; refused: did not reach it on held-out
questions; in: might. KL, top-1: of the first token; first token, KV: of full prefill's."""


def tune(
    collection: args.Collection = "documents", folder: args.Folder = Path(".samkv"),
    chroma: args.ChromaServer = None, model: args.SameModel = None,
    device: args.Device = "auto", dtype: args.SameDtype = None, store_bits: args.CacheBits = None,
    namespace: args.Namespace = "", remote: args.Remote = None,
    questions: args.QuestionFile = None, agree: args.Agree = 0.95, by: args.AgreedBy = "exact",
    minutes: args.Minutes = 10.0, top_k: args.TopK = 4, max_new_tokens: args.MaxNewTokens = 64,
    chat: args.Chat = None, seed: args.Seed = 0, most: args.MostQuestions = 400,
    check: args.CheckWritten = False, writes: args.Writes = True,
    fall_back: args.FallBack = False, as_json: args.Json = False,
) -> None:  # fmt: skip
    """Find the cheapest setting that answers as full prefill does, on your model and documents."""
    from samkv_integrations.chroma.client import Database
    from samkv_integrations.chroma.link import ChromaLink
    from samkv_integrations.engine.costs import name_of
    from samkv_integrations.engine.engine import Engine
    from samkv_integrations.engine.options import (
        TUNED_FILE,
        TunedSetting,
        tuned_setting,
        write_tuned,
    )
    from samkv_integrations.evaluation.questions import read_questions
    from samkv_integrations.tuning import questions as made
    from samkv_integrations.tuning.run import (
        FULL,
        Measurer,
        Run,
        TuneConfig,
        as_label,
        candidates,
        recommended,
    )

    config = TuneConfig(agree=agree, by=cast("By", by), minutes=minutes)
    given = read_questions(questions, with_documents=True) if questions else None
    opened = Database(folder / "chroma", chroma).collection(collection)
    as_before = as_ingested(folder, [(namespace, collection)], model, dtype, store_bits)
    model = as_before.model
    use_threads_for(model)
    store = store_in(folder, namespace, remote)
    engine = Engine.from_pretrained(
        model, store, device=device, dtype=as_before.dtype, store_bits=as_before.store_bits,
        prefix_bytes=0,
    )  # fmt: skip
    store.require(engine.fingerprint)
    in_chat = engine.model.asks_in_chat if chat is None else chat
    settings = candidates(engine.model.name, engine.store_bits)
    if check:
        entry = tuned_setting(engine.model, store)
        if entry is None:
            raise InvalidOption(
                f"--check, and {store.path / TUNED_FILE} has no entry for {model!r}; run "
                "'samkv tune' first"
            )
        if entry.store_bits != engine.store_bits:
            raise InvalidOption(
                f"--check, and the entry for {model!r} is of caches of {entry.store_bits} bits, "
                f"which have {engine.store_bits} here; ingest again with --store-bits "
                f"{entry.store_bits}, or tune again"
            )
        settings = {as_label(entry): entry}
    if store.note(name_of(engine.model)) is None:  # `auto` decides by what passes cost
        engine.calibrate()
    link = ChromaLink(opened, engine)
    if given is not None:
        asked = made.distinct(given)
        random.Random(seed).shuffle(asked)
    elif not (asked := made.from_chunks(texts := made.texts_of(link), seed=seed)):
        raise EmptyInput(
            f"no question can be made of collection {collection!r} ({count(len(texts), 'chunk')}): "
            "none has a title, or a sentence of a few words; give --questions FILE"
        )
    retrieved = made.with_documents(
        link, asked, top_k=top_k, max_new_tokens=max_new_tokens, chat=in_chat, most=most
    )
    methods = {label: setting.to_method() for label, setting in settings.items()}
    measurer = Measurer(engine, methods, max_new_tokens=max_new_tokens, chat=in_chat)
    run = Run(config, measurer.compare)
    out = tables.console(stderr=as_json)
    if check:
        (standing,) = run.standings([*settings], retrieved.questions)
        entry = settings[standing.label]
        if as_json:
            found = {"setting": entry.line, "measured": dict(entry.measured)}
            tables.write_text(figures.to_json("tune", model, [asdict(standing)], found))
        out.print(_checked(entry, standing))
        return
    result = run.tune([*settings], retrieved.questions)
    setting = recommended(result, settings, config, collection)
    kept = setting
    if setting is None and fall_back:
        kept = TunedSetting(model=engine.model.name, method=FULL, store_bits=engine.store_bits)
    written = write_tuned(store.path, kept) if writes and kept else None
    if as_json:
        rows = [asdict(one) | {"state": _state(one, result)} for one in result.standings]
        more: dict[str, Any] = {
            "target": agree, "agreed_by": by,
            "recommended": setting.line if setting else f"--method {FULL}",
            "store_bits": setting.store_bits if setting else None, "why": result.why,
            "held_out": [asdict(one) for one in result.checked],
            "written": str(written) if written else None, "seconds": result.seconds,
        }  # fmt: skip
        tables.write_text(figures.to_json("tune", model, rows, more))
    standings = sorted(result.standings, key=lambda each: each.ttft_ratio)
    titles = (
        "setting", "agreement", "asked", "F1", "KL", "top-1", "first\ntoken", "read", "KV", "",
    )  # fmt: skip
    cells = [
        (
            each.label, _agreement(each), str(each.n), ratio(each.f1), f"{each.first_kl:.3f}",
            ratio(each.first_top1), ratio(each.ttft_ratio), size(each.bytes_read),
            ratio(each.kv_ratio), _state(each, result),
        )
        for each in standings
    ]  # fmt: skip
    out.print(tables.table(titles, cells, gap=1))
    out.print(LEGEND.format(target=agree))
    out.print(
        f"\n{count(len(standings), 'setting')} on up to "
        f"{count(max(each.n for each in standings), 'question')}, "
        f"{seconds(result.seconds)}; every figure against full prefill on the same prompts."
    )
    if left_out := retrieved.too_long + retrieved.uncached:
        out.print(
            f"{count(left_out, 'question')} left out: {retrieved.too_long} too long, "
            f"{retrieved.uncached} with chunks that have no cache."
        )
    for one in result.checked:
        verdict = "is enough" if one is result.chosen else "is not enough"
        out.print(
            f"On {count(one.n, 'held-out question')} {one.label} {verdict}: "
            f"agreement {_agreement(one)}, first token {ratio(one.ttft_ratio)} of full prefill."
        )
    if setting is None:
        out.print(f"\nRecommended: full prefill, --method {FULL}: {result.why}.")
    else:
        out.print(f"\nRecommended: {setting.line}")
    if written is not None:
        out.print(f"Written to {written}, for {model!r}; explicit arguments win.")
    elif setting is None:
        out.print("Nothing was written; --fall-back writes it.")
    else:
        out.print(f"Not written: --write keeps it in {TUNED_FILE} beside the caches.")


def _checked(entry: TunedSetting, standing: Standing) -> str:
    """A setting on questions of now, beside what was said of it when it was written."""
    from samkv_integrations.engine.options import TUNED_FILE

    shown = (
        f"{entry.line}\nOn {count(standing.n, 'question')}: agreement {_agreement(standing)}, F1 "
        f"{ratio(standing.f1)}, first token {ratio(standing.ttft_ratio)} of full prefill.\n"
    )
    low, high = entry.measured.get("agreement_low"), entry.measured.get("agreement_high")
    if not isinstance(low, float | int) or not isinstance(high, float | int):
        return f"{shown}{TUNED_FILE} does not say what was measured when it was written."
    verdict, more = "within", ""
    if standing.agreement > high:
        verdict = "above"
    if standing.agreement < low:
        verdict, more = "below", "\nDocuments or questions are others now: tune again."
    n = entry.measured.get("held_out_questions", "?")
    return f"{shown}That is {verdict} its interval, [{low:.2f}, {high:.2f}] on {n} questions.{more}"


def _agreement(each: Standing) -> str:
    if each.n < _LEAST_FOR_A_RATE:
        return f"{each.n} asked: too few"
    return f"{each.agreement:.2f} [{each.low:.2f}, {each.high:.2f}]"


def _state(each: Standing, result: Result) -> str:
    if result.chosen is not None and each.label == result.chosen.label:
        return "chosen"
    if each.label in [one.label for one in result.checked]:
        return "refused"
    return "out" if each.label in result.out else "in"
