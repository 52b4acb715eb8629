"""``samkv tune``."""

from __future__ import annotations

import random
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from samkv_integrations import formatting
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli.loading import Index, store_in
from samkv_integrations.errors import EmptyInput, InvalidOption
from samkv_integrations.formatting import count, ratio, seconds

if TYPE_CHECKING:
    from samkv_integrations.cache.disk import ChunkStore
    from samkv_integrations.engine.tuned import TunedSetting
    from samkv_integrations.tuning.run import Standing, TuneConfig

LEGEND = """\
points: {right} answers more than full prefill, on the same questions, with 95 % interval
  (of no width: no question changed, which few questions may not show)
out: loses more than {lose:g} points, or slower than full prefill; refused: so on held-out questions
enough: there too, but not the first choice; in: might be, not tried
KL: of the first token; first token, KV: of full prefill's"""

NO_GOLD = (
    "{n} of {of} have gold answers, too few to judge by: what full prefill answers counts as "
    'right, so a setting can only lose. --questions FILE with "answers" counts right answers.'
)


def tune(
    index: Index, collection: args.Collection = "documents",
    questions: args.QuestionFile = None, lose: args.Lose = 3.0, minutes: args.Minutes = 10.0,
    top_k: args.TopK = 4, max_new_tokens: args.MaxNewTokens = 64,
    chat: args.Chat = None, seed: args.Seed = 0, most: args.MostQuestions = 400,
    check: args.CheckWritten = False, writes: args.Writes = True,
    fall_back: args.FallBack = False, as_json: args.Json = False,
) -> None:  # fmt: skip
    """Find the fastest setting with as many right answers as full prefill, on your documents."""
    from samkv_integrations.chroma.link import ChromaLink
    from samkv_integrations.engine.costs import name_of
    from samkv_integrations.engine.tuned import (
        TUNED_FILE,
        TunedSetting,
        tuned_setting,
        write_tuned,
    )
    from samkv_integrations.evaluation.judge import is_in_documents
    from samkv_integrations.evaluation.questions import read_questions
    from samkv_integrations.tuning import questions as made
    from samkv_integrations.tuning.run import (
        FULL,
        GOLD,
        Measurer,
        Run,
        TuneConfig,
        as_label,
        candidates,
        judged,
        recommended,
    )

    config = TuneConfig(lose=lose, minutes=minutes)
    given = read_questions(questions, with_documents=True) if questions else None
    opened = index.database.collection(collection)
    as_before = index.as_ingested([(index.namespace, collection)])
    model = as_before.model
    store_in(index.folder, index.namespace, index.remote)  # raises if there is none
    engine = index.engine(as_before, prefix_bytes=0)
    store = cast("ChunkStore", engine.store)
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
        asked = sorted(given, key=lambda one: not one.has_gold)
        random.Random(seed).shuffle(asked)
    elif not (asked := made.from_chunks(texts := made.texts_of(link), seed=seed)):
        raise EmptyInput(
            f"no question can be made of collection {collection!r} ({count(len(texts), 'chunk')}): "
            "none has a title, or a sentence of a few words; give --questions FILE"
        )
    known, judge = judged(asked)
    retrieved = made.with_documents(
        link, known, top_k=top_k, max_new_tokens=max_new_tokens, chat=in_chat, most=most
    )
    methods = {label: setting.to_method() for label, setting in settings.items()}
    measurer = Measurer(engine, methods, max_new_tokens=max_new_tokens, chat=in_chat)
    run = Run(config, measurer.compare)
    out, right = tables.console(stderr=as_json), "right" if judge == GOLD else "same"
    elsewhere = [
        one for one in retrieved.questions
        if one.answers and not is_in_documents(one.answers, one.documents)
    ]  # fmt: skip
    if judge != GOLD:
        n_gold = sum(one.has_gold for one in asked)
        out.print(NO_GOLD.format(n=n_gold, of=count(len(asked), "question")))
    elif n_without := len(asked) - len(known):
        out.print(f"{count(n_without, 'question')} left out: without answers.")
    if elsewhere:
        out.print(
            f"{count(len(elsewhere), 'question')} with answers that stand in none of the "
            "documents, counted all the same."
        )
    if check:
        (standing,) = run.standings([*settings], retrieved.questions)
        entry = settings[standing.label]
        if as_json:
            found = {"setting": entry.line, "judged_by": judge, "measured": dict(entry.measured)}
            tables.write_text(formatting.to_json("tune", model, [asdict(standing)], found))
        out.print(_checked(entry, _in_words(standing, right), standing, config, judge))
        return
    result = run.tune([*settings], retrieved.questions)
    setting = recommended(result, settings, config, collection, judge)
    kept = setting
    if setting is None and fall_back:
        kept = TunedSetting(model=engine.model.name, method=FULL, store_bits=engine.store_bits)
    written = write_tuned(store.path, kept) if writes and kept else None
    if as_json:
        rows = [asdict(one) | {"state": result.states[one.label]} for one in result.standings]
        more: dict[str, Any] = {
            "lose": -config.least, "judged_by": judge, "without_answers": len(asked) - len(known),
            "answers_in_no_document": len(elsewhere),
            "recommended": setting.line if setting else f"--method {FULL}",
            "store_bits": setting.store_bits if setting else None, "why": result.why,
            "held_out": [asdict(one) for one in result.checked],
            "written": str(written) if written else None, "seconds": result.seconds,
        }  # fmt: skip
        tables.write_text(formatting.to_json("tune", model, rows, more))
    standings = sorted(result.standings, key=lambda each: each.ttft_ratio)
    longest = max(standings, key=lambda each: each.questions)
    cells = [
        ("full prefill", f"{longest.full} of {longest.questions}", *[""] * 4, *["1.00"] * 2, "")
    ]
    cells += [
        (
            each.label, f"{each.right} of {each.questions}", str(each.lost), str(each.won),
            each.points, f"{each.first_kl:.3f}", ratio(each.ttft_ratio), ratio(each.kv_ratio),
            result.states[each.label],
        )
        for each in standings
    ]  # fmt: skip
    titles = ("setting", right, "lost", "won", "points", "KL", "first\ntoken", "KV", "")
    out.print(tables.table(titles, cells, gap=1))
    out.print(LEGEND.format(right=right, lose=lose))
    out.print(
        f"\n{count(len(standings), 'setting')} on up to {count(longest.questions, 'question')}, "
        f"{seconds(result.seconds)}; judged by {judge}."
    )
    if left_out := retrieved.too_long + retrieved.uncached:
        out.print(
            f"{count(left_out, 'question')} left out: {retrieved.too_long} too long, "
            f"{retrieved.uncached} with chunks that have no cache."
        )
    for one in result.checked:
        verdict = "not enough" if result.states[one.label] == "refused" else "enough"
        out.print(f"{one.label} is {verdict} on held-out questions: {_in_words(one, right)}.")
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


def _checked(
    entry: TunedSetting, words: str, standing: Standing, config: TuneConfig, judge: str
) -> str:
    """The figures of a setting now, compared with those in the file."""
    from samkv_integrations.engine.tuned import TUNED_FILE

    verdict = "enough" if config.is_enough(standing) else "not enough: tune again"
    shown = f"{entry.line}\n{words}; judged by {judge}.\nThat is {verdict}."
    said = [entry.measured.get(name) for name in ("difference", "low", "high")]
    numbers = [100 * each for each in said if isinstance(each, int | float)]
    if len(numbers) < len(said) or entry.measured.get("judged_by") != judge:
        return f"{shown} {TUNED_FILE} has no figures of this judge; tune again to compare."
    was, low, high = numbers
    than = "worse than" if 100 * standing.high < low else "as"
    than = "better than" if 100 * standing.low > high else than
    return (
        f"{shown} It is {than} when it was written: {was:+.1f} ({low:+.1f} to {high:+.1f}) points "
        f"on {entry.measured.get('questions', '?')} questions."
    )


def _in_words(each: Standing, right: str) -> str:
    """The figures of a setting. right: 'right', or 'same' as full prefill's answers."""
    return (
        f"{right} answers {each.right} of {each.questions}, full prefill {each.full} (lost "
        f"{each.lost}, won {each.won}): {each.points} points; first token {ratio(each.ttft_ratio)} "
        "of full prefill's"
    )
