"""``samkv adapt``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Exit, Option

from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli.ingest import find_documents, read_chunks
from samkv_integrations.documents import SUFFIXES
from samkv_integrations.errors import InvalidOption
from samkv_integrations.figures import count

if TYPE_CHECKING:
    from samkv_integrations.tuning.adapt import Judged

CHUNK_SIZES = (128, 512, 1024)
"""Longest chunks, in tokens, that documents are cut into: a prefix that has seen short ones alone
does nothing for long ones."""


def adapt(
    data: Annotated[
        Path, Option(help="Folder of documents, or questions with documents (JSON Lines).")
    ],
    model: args.ModelName,
    folder: args.Folder = Path(".samkv"),
    device: args.Device = "auto",
    dtype: args.Dtype = "auto",
    minutes: Annotated[
        float, Option(help="That learning may take, besides preparing and judging.")
    ] = 20.0,
    steps: Annotated[int, Option(help="Prompts to learn from.")] = 160,
    embeddings: Annotated[
        int | None, Option(help="How many to learn. Default: as the made-up documents have.", min=1)
    ] = None,
    most_tokens: Annotated[
        int, Option(help="Of a prompt to learn from; fewer take less memory and time.", min=1)
    ] = 2048,
    seed: Annotated[int, Option(help="Of the prompts.")] = 0,
    as_json: args.Json = False,
) -> None:
    """Learn a prefix for your model, so that cached chunks answer more as full prefill does.

    It is kept beside the caches of --dir, and engines over them take it. Ingest again after it.
    Interrupted, the same command goes on where it was. Exit code 1 if it is no better on held-out
    prompts: nothing is kept then.
    """
    from tqdm.auto import tqdm

    from samkv_integrations.cache.disk import ChunkStore
    from samkv_integrations.engine.chunk_prefix import LEARNED_FILE, LearnedPrefix, OtherWeights
    from samkv_integrations.evaluation.questions import read_questions
    from samkv_integrations.model.loading import load_model
    from samkv_integrations.tuning.adapt import Recipe, identity_of, learn
    from samkv_integrations.tuning.mixed_prompts import Source, usable

    if not minutes > 0:
        raise InvalidOption(f"--minutes {minutes}; give more than 0")
    if not data.exists() or (data.is_file() and data.suffix.lower() in SUFFIXES):
        what = "is a document" if data.exists() else "does not exist"
        raise InvalidOption(
            f"--data {data} {what}; give a folder of documents, or a JSON Lines file of questions "
            "with their documents"
        )
    recipe = Recipe(steps=steps, n=embeddings, seed=seed)
    loaded = load_model(model, device=device, dtype=dtype)
    most = min(most_tokens, loaded.context_window - recipe.tokens)
    if data.is_dir():
        files = find_documents([data]).files
        cuts = [
            usable(loaded, [chunk.text for chunk in read_chunks(files, loaded, size).chunks])
            for size in CHUNK_SIZES
        ]
        source = Source(cuts=cuts, most_tokens=most)
    else:
        source = Source(questions=read_questions(data, with_documents=True), most_tokens=most)
    kv = ChunkStore(folder / "kv").path
    partial = kv / f"{LEARNED_FILE}.{identity_of(loaded, source, recipe)}.partial"
    try:
        LearnedPrefix.load(kv / LEARNED_FILE, loaded)
    except OtherWeights as error:
        raise InvalidOption(
            f"{kv / LEARNED_FILE} is of another model or dtype, and a folder has one; give another "
            "--dir, or move it away"
        ) from error
    except InvalidOption:
        pass  # there is none, or a broken one, which is replaced
    now, bar = ("", 0, 0), tqdm(disable=True)

    def told(stage: str, done: int, of: int, kl: float | None) -> None:
        nonlocal now, bar
        if stage != now[0]:
            bar.close()
            bar = tqdm(desc=stage, initial=done, total=of, leave=False)
        now = stage, done, of
        bar.update(done - bar.n)
        if stage == "learning" and kl is not None:
            bar.set_postfix_str(f"KL {kl:.3f}")

    try:
        found = learn(loaded, source, recipe, partial=partial, minutes=minutes, told=told)
    except KeyboardInterrupt:
        then = "the same command goes on there" if partial.exists() else "nothing is kept yet"
        stage, done, of = now
        tqdm.write(f"interrupted in {stage}, after {done} of {of}; {then}", file=sys.stderr)
        raise
    finally:
        bar.close()
    kept = found.prefix.save(kv / LEARNED_FILE) if found.is_better else None
    if kept or found.steps == steps:
        for each in kv.glob(f"{LEARNED_FILE}.*.partial") if kept else [partial]:
            each.unlink(missing_ok=True)
    if as_json:
        more = {"steps": found.steps, "kept": kept and str(kept)}
        tables.write_json("adapt", loaded.name, [asdict(one) | more for one in found.figures])
    else:
        _show(found.figures, found.steps, kept, more="steps" if found.steps == steps else "minutes")
    if kept is None:
        raise Exit(1)


def _show(figures: Sequence[Judged], steps: int, kept: Path | None, *, more: str) -> None:
    """more: the option that ended learning."""
    from samkv_integrations.tuning.adapt import JUDGING

    out = tables.console()
    out.print(
        tables.table(
            ("recomputed", "prefix", "KL", "of documents", "top-1", "same\nanswers"),
            [
                (
                    (f"first {one.first} of each" if one.first else "nothing") if is_before else "",
                    "documents" if is_before else "learned",
                    f"{each.kl:.4f}",
                    "{:.2f} to {:.2f}".format(*one.ratio) if one.ratio and not is_before else "",
                    f"{each.top1:.3f}", f"{each.same:.0%}",
                )
                for one in figures
                for is_before, each in ((True, one.before), (False, one.after))
            ],
        )
    )  # fmt: skip
    out.print(
        f"\n{count(steps, 'step')}. Along full prefill's answers on {JUDGING} held-out prompts: "
        "KL in nats with the 95 % interval of its ratio, share of equal likeliest tokens, of equal "
        "answers."
    )
    if kept is None:
        again = " The same command goes on where it was." if more == "minutes" else ""
        out.print(f"It is not clearly better there, so no prefix was kept. More --{more}, or more "
                  f"documents, may help.{again}")  # fmt: skip
    else:
        out.print(f"Kept in {kept}. Caches made before do not have it: run 'samkv ingest' again.")
