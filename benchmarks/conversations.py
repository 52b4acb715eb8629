"""Conversations over documents: right answers and seconds, turn by turn.

    python -m benchmarks conversations answers --model MODEL --output RUN
    python -m benchmarks conversations times --model MODEL --output RUN

A conversation is a system message, documents with a first question, and four more questions; all
of it stays in the history, with the answers of the way itself. The ways take turns at every
question, backwards in every second conversation. Each has an engine of its own, with nothing of
earlier conversations in memory; they share the chunk caches, which are made anew for each
conversation, in memory too (the server's in a folder). A run that was interrupted goes on. Seconds
are CPU seconds of the process, so that other work on the machine counts little; run it with
OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer
from tqdm.auto import tqdm

from benchmarks.chats import (
    AgentChat,
    Chat,
    Document,
    EngineChat,
    LangChainChat,
    LlamaIndexChat,
    NotingEngine,
    OpenAIChat,
    Place,
    TransformersChat,
)
from benchmarks.commands import TRUTH, command_line, loaded_model, markdown_table
from benchmarks.journal import Journal
from benchmarks.right_table import rows_of
from benchmarks.run_settings import hardware
from samkv_integrations.cli.formatting import Row, commit
from samkv_integrations.cli.loading import words
from samkv_integrations.errors import UnknownOption
from samkv_integrations.ingest.documents import read_text
from samkv_integrations.lab.evaluation import Paired, is_right
from samkv_integrations.methods import get_method
from samkv_integrations.methods.base import with_option
from samkv_integrations.runtimes.base import Runtime
from samkv_integrations.serving.scheduler import Scheduler
from samkv_integrations.store.memory import MemoryStore

CONVERSATIONS = Path(__file__).with_name("data") / "conversations.jsonl"
SEARCH_AGAIN = 4
"""The turn of an agent that brings another search result."""
_RESAMPLES = 10_000


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Questions, with their right answers, about documents.

    more: the document that an agent's second search brings.
    """

    id: str
    documents: tuple[Document, ...]
    more: Document
    questions: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def texts(self) -> list[str]:
        """The chunks."""
        return [text for _, text in (*self.documents, self.more)]


def conversations_of(path: Path, most: int | None) -> list[Conversation]:
    """The conversations of a JSON Lines file; ``more`` is the first document of the next one."""
    records = [json.loads(line) for line in read_text(path).split("\n") if line.strip()]
    documents = [tuple((d["title"], d["text"]) for d in each["documents"]) for each in records]
    return [
        Conversation(
            id=record["id"], documents=own, more=following[0],
            questions=tuple((q["question"], tuple(q["answers"])) for q in record["questions"]),
        )
        for record, own, following in zip(
            records, documents, [*documents[1:], documents[0]], strict=True
        )
    ][:most]  # fmt: skip


Way = Callable[[Place], Chat]

KEPT, PLAIN = "kept", "match_text=False"
NOTHING_KEPT = "auto, nothing kept"
WAYS: Mapping[str, Way] = {
    TRUTH: partial(EngineChat, method="recompute"),
    "reuse": partial(EngineChat, method="reuse"),
    "auto": EngineChat,
    "auto, matched_again=0": partial(
        EngineChat, method=with_option(get_method("auto"), "recompute.matched_again=0")
    ),
    NOTHING_KEPT: partial(EngineChat, prefix_bytes=0),
}
FRONT_ENDS: Mapping[str, Mapping[str, Way]] = {
    "langchain": {KEPT: LangChainChat, PLAIN: partial(LangChainChat, match_text=False),
                  "transformers": TransformersChat},
    "llama_index": {KEPT: LlamaIndexChat, PLAIN: partial(LlamaIndexChat, match_text=False)},
    "agent": {KEPT: AgentChat, PLAIN: partial(AgentChat, match_text=False)},
    "openai": {KEPT: OpenAIChat},  # no request says that texts are not to be matched
}  # fmt: skip


def measured(
    model: Runtime, scheduler: Scheduler, conversation: Conversation, ways: Mapping[str, Way], *,
    searches_again: bool,
) -> Iterator[Row]:  # fmt: skip
    """A row for each turn and way."""
    with ExitStack() as opened:
        place = Place(
            model=model, scheduler=scheduler, store=MemoryStore(), texts=conversation.texts,
            opened=opened,
        )  # fmt: skip
        NotingEngine.at(place).cache_chunks(place.texts)
        chats = {label: make(place) for label, make in ways.items()}
        for number, (question, gold) in enumerate(conversation.questions, start=1):
            again = [conversation.more] if searches_again and number == SEARCH_AGAIN else []
            for label, chat in chats.items():
                turn = chat.ask(conversation.documents if number == 1 else again, question)
                yield {
                    "label": label, "conversation": conversation.id, "turn": number,
                    "right": is_right(turn.text, gold), **asdict(turn),
                }  # fmt: skip


def run(
    model: str, dtype: str, runtime: str, output: Path, asked: Sequence[Conversation],
    kinds: Mapping[str, Mapping[str, Way]],
) -> list[Row]:  # fmt: skip
    """All rows of the conversations, measured now or before. kinds: ways of each front end."""
    loaded = loaded_model(model, "auto", dtype, runtime)
    scheduler, place, version = Scheduler.of(loaded, None), hardware(loaded), commit()
    settings = {"model": re.split(r"[/\\]", model)[-1], "dtype": loaded.dtype_name}
    if runtime != "transformers":
        settings |= {"runtime": runtime, "build": loaded.build}
    with Journal(output, settings) as journal:
        wanted: dict[tuple[str, str], list[tuple[str, str]]] = {
            (kind, one.id): [
                (f"{kind} {one.id} {turn}", label)
                for turn in range(1, len(one.questions) + 1)
                for label in ways
            ]
            for kind, ways in kinds.items()
            for one in asked
        }
        is_warm = set[str]()
        for at, one in enumerate(tqdm(asked, desc="conversations")):
            for kind, ways in kinds.items():
                if all(key in journal.rows for key in wanted[kind, one.id]):
                    continue
                ordered = dict(list(ways.items())[:: -1 if at % 2 else 1])
                case = partial(measured, loaded, scheduler, ways=ordered,
                               searches_again=kind == "agent")  # fmt: skip
                if kind not in is_warm:  # the first call of a library does not count
                    is_warm.add(kind)
                    list(case(replace(one, questions=one.questions[:1])))
                for row in case(one):
                    key = f"{kind} {one.id} {row['turn']}"
                    if (key, row["label"]) not in journal.rows:
                        journal.add({
                            "id": key, "front_end": kind, **row, "commit": version,
                            "hardware": place,
                        })  # fmt: skip
        return [journal.rows[key] for key in chain.from_iterable(wanted.values())]


# -- tables ------------------------------------------------------------------------------------


def paired(rows: Sequence[Row], mine: str, other: str) -> Paired:
    """Two ways, question by question; the interval is of a bootstrap over conversations."""
    right = {(row["conversation"], row["turn"], row["label"]): row["right"] for row in rows}
    asked = [key[:2] for key in right if key[2] == mine]
    own, theirs = ([right[*key, label] for key in asked] for label in (mine, other))
    names = list(dict.fromkeys(name for name, _ in asked))
    gained, counted = np.zeros(len(names)), np.zeros(len(names))
    for (name, _), one, another in zip(asked, own, theirs, strict=True):
        gained[names.index(name)] += one - another
        counted[names.index(name)] += 1
    drawn = np.random.default_rng(0).integers(len(names), size=(_RESAMPLES, len(names)))
    differences = gained[drawn].sum(1) / counted[drawn].sum(1)
    low, high = np.quantile(differences, (0.025, 0.975))
    return replace(Paired.of(own, theirs), low=float(low), high=float(high))


def answer_tables(rows: Sequence[Row], labels: Sequence[str]) -> str:
    """Right answers by turn, and `auto` beside the others."""
    turns = sorted({row["turn"] for row in rows})

    def cells(label: str) -> Iterator[str]:
        own = [row for row in rows if row["label"] == label]
        later = [row for row in own if row["turn"] > 1] or own
        yield label
        for some in (*([row for row in own if row["turn"] == turn] for turn in turns), own):
            yield f"{sum(row['right'] for row in some)} of {len(some)}"
        yield f"{median(row['computed_tokens'] for row in later):.0f}"
        yield f"{median(row['first_s'] for row in later):.3f}"

    columns = ("way", *(f"turn {turn}" for turn in turns), "all", "computed later", "first s later")
    tables = [markdown_table(columns, [list(cells(label)) for label in labels])]
    found = {
        other: paired(rows, "auto", other)
        for other in labels
        if "auto" in labels and other != "auto"
    }
    pairs = [
        [f"auto / {other}", f"{one.lost}, {one.won}", one.points] for other, one in found.items()
    ]
    columns = ("pair", "lost, won", "difference, points (95 %)")
    return "\n\n".join([*tables, markdown_table(columns, pairs)])


def time_rows(rows: Sequence[Row]) -> Iterator[list[str]]:
    """The cells of each front end and way; figures are medians over conversations."""
    found: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        own = found.setdefault((row["front_end"], row["label"]), {})
        own.setdefault(row["conversation"], []).append(row)
    for (front_end, label), own in found.items():
        plain = found.get((front_end, PLAIN))
        sums = {name: sum(row["first_s"] for row in each) for name, each in own.items()}
        ratios = [
            seconds / sum(row["first_s"] for row in plain[name])
            for name, seconds in sums.items()
            if plain
        ]
        later = [pair for each in own.values() for pair in pairwise(each)]
        computed = [row["computed_tokens"] for _, row in later]
        new = [
            row["prompt_tokens"] - before["prompt_tokens"] - before["completion_tokens"]
            for before, row in later
        ]
        over = [each - fresh for each, fresh in zip(computed, new, strict=True)]
        yield [
            front_end, label,
            *(f"{median(row['first_s'] for row in turn):.3f}"
              for turn in zip(*own.values(), strict=True)),
            f"{median(sums.values()):.2f}", f"{median(ratios):.2f}" if ratios else "-",
            f"{median(sum(row['whole_s'] for row in each) for each in own.values()):.2f}",
            *(f"{median(some):.0f}, {max(some)}" for some in (computed, new, over)),
        ]  # fmt: skip


def time_table(rows: Sequence[Row]) -> str:
    """The table of `time_rows`."""
    turns = sorted({row["turn"] for row in rows})
    columns = (
        "front end", "way", *(f"first s, turn {turn}" for turn in turns), "sum s", "ratio",
        "whole turns s", "computed later, most", "new, most", "computed beyond new, most",
    )  # fmt: skip
    return markdown_table(columns, time_rows(rows), left=2)


# -- the commands ------------------------------------------------------------------------------

ModelName = Annotated[str, typer.Option(help="Hub id, folder, GGUF file or 'smollm2'.")]
File = Annotated[Path, typer.Option(help="JSON Lines, as data/conversations.jsonl.")]
Dtype = Annotated[str, typer.Option(help="Of the model.")]
Runs = Annotated[str, typer.Option(help="What runs the model, such as llama_cpp.")]
Most = Annotated[int | None, typer.Option(help="At most so many conversations.")]


def answers(
    model: ModelName,
    conversations: File = CONVERSATIONS,
    most: Most = None,
    way: Annotated[
        list[str] | None, typer.Option(help=f"One of {'; '.join(WAYS)}. Again for more.")
    ] = None,
    dtype: Dtype = "bfloat16",
    runtime: Runs = "transformers",
    output: Annotated[Path, typer.Option(help="Folder of the run.")] = Path(".samkv/conversations"),
) -> None:
    """Right answers of every question, by turn."""
    labels = way or list(WAYS)
    for label in labels:
        if label not in WAYS:
            raise UnknownOption.among("way", label, WAYS)
    asked = conversations_of(conversations, most)
    rows = run(
        model, dtype, runtime, output, asked, {"engine": {each: WAYS[each] for each in labels}}
    )
    typer.echo(answer_tables(rows, labels))


def times(
    model: ModelName,
    front_ends: Annotated[
        str, typer.Option(help=f"Some of {', '.join(FRONT_ENDS)}, with commas between.")
    ] = ",".join(FRONT_ENDS),
    conversations: File = CONVERSATIONS,
    most: Most = 20,
    dtype: Dtype = "bfloat16",
    runtime: Runs = "transformers",
    output: Annotated[Path, typer.Option(help="Folder of the run.")] = Path(
        ".samkv/conversation_times"
    ),
) -> None:
    """Seconds and computed tokens of every turn, by front end."""
    names = words(front_ends)
    for name in names:
        if name not in FRONT_ENDS:
            raise UnknownOption.among("front end", name, FRONT_ENDS)
    asked = conversations_of(conversations, most)
    rows = run(model, dtype, runtime, output, asked, {name: FRONT_ENDS[name] for name in names})
    typer.echo(time_table(rows))


def pooled(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs of answers, a model each.")],
) -> None:
    """The table of answers over several runs."""
    rows = [
        {**row, "conversation": f"{folder} {row['conversation']}"}
        for folder in runs for row in rows_of(folder)
    ]  # fmt: skip
    answered = [{row["label"] for row in rows if row["conversation"].startswith(f"{folder} ")}
                for folder in runs]  # fmt: skip
    typer.echo(answer_tables(rows, [way for way in WAYS if all(way in each for each in answered)]))


app = command_line(answers, times, pooled)
main = app
