"""``samkv bench``: the measurements of docs/results.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm.auto import tqdm

from samkv_integrations import tables
from samkv_integrations.bench import latency as timing
from samkv_integrations.bench import quality as answers
from samkv_integrations.engine import Engine
from samkv_integrations.errors import EmptyInput, InvalidOption
from samkv_integrations.methods import METHODS, get_method

app = typer.Typer(help="Measure answers and time.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Names = Annotated[str, typer.Option("--methods", help="NAME,NAME,... or 'all'.")]


@app.command()
def latency(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(timing.SHAPES)}.")] = (
        "qwen2.5-0.5b"
    ),
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    chunks: Annotated[int, typer.Option(help="Chunks in the prompt.")] = 8,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens in a chunk.")] = 512,
    repeats: Annotated[int, typer.Option(help="Rounds that count; one more warms up.")] = 3,
    methods: Names = "all",
    as_json: Json = False,
) -> None:
    """Time to first token at the shape of a known model, with random weights."""
    config = timing.LatencyConfig(
        shape=shape, dtype=dtype, device=device, n_chunks=chunks, chunk_tokens=chunk_tokens,
        repeats=repeats,
    )  # fmt: skip
    chosen = {name: get_method(name) for name in _names(methods)}
    rows = list(timing.run(config, chosen))
    if as_json:
        typer.echo(tables.to_json("bench latency", rows[0]["model"], rows))
        return
    columns = ("label", "ttft_s", "ttft_ratio", "kept_ratio", "recompute_ratio", "bytes_read",
               "kv_bytes", "probe_s", "select_s", "load_s", "blend_s")  # fmt: skip
    _print_table(columns, rows)


@app.command()
def quality(
    questions: Annotated[Path, typer.Option(help="JSON Lines of questions with contexts.")],
    model: Annotated[str, typer.Option(help="Hub id, local folder, or 'builtin'.")] = "builtin",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    methods: Names = "all",
    budgets: Annotated[
        str, typer.Option(help="Kept ratios for the methods that select: 0.1,0.2,...")
    ] = "",
    ablation: Annotated[
        float | None, typer.Option(help="Turn one knob after the other at this kept ratio instead.")
    ] = None,
    kinds: Annotated[str, typer.Option(help="Only these sets or kinds: NAME,NAME,...")] = "",
    limit: Annotated[int | None, typer.Option(help="Most questions.")] = None,
    answerable: Annotated[
        bool, typer.Option(help="Only questions that full prefill answers right.")
    ] = False,
    block_size: Annotated[int | None, typer.Option(help="Tokens a block; else automatic.")] = None,
    chat: Annotated[bool, typer.Option(help="Use the model's chat template.")] = False,
    rows_file: Annotated[
        Path | None, typer.Option("--rows", help="Write a JSON line for every single answer here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Answers of every method to the same questions over the same chunks."""
    names = _names(methods)
    try:
        ratios = [float(part) for part in budgets.split(",") if part.strip()]
    except ValueError as error:
        raise InvalidOption(f"--budgets {budgets!r}; give numbers, as in 0.1,0.2") from error
    chosen = (
        answers.at_budgets(names, ratios)
        if ablation is None
        else {"recompute": METHODS["recompute"], **answers.ablation(ablation)}
    )
    asked = answers.load_questions(questions, [k.strip() for k in kinds.split(",") if k.strip()])
    engine = Engine.from_pretrained(
        model, device=device, dtype=dtype, block_size=block_size or "auto"
    )
    if answerable:
        asked = list(islice(answers.answerable(engine, asked, chat=chat), limit))
        if not asked:
            raise EmptyInput(f"full prefill answers no question of {questions} right")
    found: list[dict[str, Any]] = []
    with rows_file.open("w", encoding="utf-8") if rows_file else nullcontext() as out:
        for question in tqdm(asked[:limit], desc="asking"):
            for row in answers.run(engine, [question], chosen, chat=chat):
                found.append(row)
                if out:
                    out.write(json.dumps(row, ensure_ascii=False) + "\n")
    rows = answers.summarise(found)
    if as_json:
        typer.echo(tables.to_json("bench quality", model, rows))
        return
    columns = (
        "label", "questions", "exact_match", "exact_match_low", "exact_match_high", "f1",
        "same_as_recompute", "kept_ratio", "recompute_ratio", "bytes_read", "ttft_ratio",
    )  # fmt: skip
    _print_table([c for c in columns if c in rows[0]], rows)


def _names(methods: str) -> list[str]:
    if methods == "all":
        return list(METHODS)
    return [name.strip() for name in methods.split(",") if name.strip()]


def _print_table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """A markdown table, ready for docs/results.md."""
    typer.echo("| " + " | ".join(column.replace("_", " ") for column in columns) + " |")
    typer.echo("| --- " + "| ---: " * (len(columns) - 1) + "|")
    for row in rows:
        typer.echo("| " + " | ".join(_cell(name, row[name]) for name in columns) + " |")


def _cell(name: str, value: object) -> str:
    if name.endswith("_bytes") or name == "bytes_read":
        assert isinstance(value, int | float)
        return tables.size(value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)
