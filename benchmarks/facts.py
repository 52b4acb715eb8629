"""Does a method keep what full prefill says? Questions about one fact each, over real paragraphs.

    python -m benchmarks.facts --part report

LlamaIndex retrieves 8 of the quickstart's 78 paragraphs for each of the questions of facts.jsonl;
those that full prefill answers count. The default was chosen by the part ``choose``. First-token
times are CPU seconds over full prefill's: run it with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from tqdm.auto import tqdm

from benchmarks.run_settings import hardware
from llama_index.llms.samkv.quickstart import Quickstart
from samkv_integrations import METHODS, Engine
from samkv_integrations.cli.tables import markdown_table as table
from samkv_integrations.engine.decode import Greedy, decode_greedily, force
from samkv_integrations.engine.first_token import first_token
from samkv_integrations.engine.options import AnswerSettings
from samkv_integrations.engine.request import Request
from samkv_integrations.evaluation.measures import kl
from samkv_integrations.figures import to_json
from samkv_integrations.methods import Method
from samkv_integrations.model.loading import load_model
from samkv_integrations.model.model import Model

QUESTIONS = Path(__file__).with_name("facts.jsonl")
PARAGRAPHS = Path(__file__).parents[1] / "examples" / "paragraphs"
CHOOSING = 23  # the first questions, by which the default was chosen
TOP_K, NEW_TOKENS = 8, 24
FULL = "recompute"


def candidates(learned: str | None = None) -> dict[str, tuple[Method, str]]:
    """Label -> method, and the prefix that its chunks were cached after.

    learned: a file of ``samkv adapt``, for the candidates after it.
    """
    guided, epic = METHODS["samkv-guided"], METHODS["epic"]
    again: Any = guided.recompute
    first: Any = epic.recompute
    after = {"reuse": METHODS["reuse"], "first 16": epic, "samkv-guided": guided}
    return {
        "reuse, after BOS": (METHODS["reuse"], "bos"),
        "first 16, after BOS": (epic, "bos"),
        "reuse": (METHODS["reuse"], "documents"),
        "first 16": (epic, "documents"),
        "first 24": (replace(epic, recompute=replace(first, first=24)), "documents"),
        "cacheblend": (METHODS["cacheblend"], "documents"),
        "samkv-guided": (guided, "documents"),
        "samkv-guided, first 8": (
            replace(guided, recompute=replace(again, first=8)), "documents",
        ),
        "samkv-guided, 192 matched": (
            replace(guided, recompute=replace(again, matched=192)), "documents",
        ),
        **({f"{label}, learned": (m, learned) for label, m in after.items()} if learned else {}),
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question as the query engine puts it, and the paragraphs that it found."""

    question: str
    answer: str
    prompt: Any
    chunks: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A question and a candidate.

    kept: whether the answer is still there. same: whether its tokens are full prefill's. kl: mean
    along full prefill's answer, most_kl: the largest. first_token: CPU seconds over full prefill's.
    """

    label: str
    question: str
    text: str
    kept: bool
    same: bool
    kl: float
    most_kl: float
    recomputed: float
    first_token: float


def asked(model: Model, part: str) -> list[Asked]:
    """The questions of a part, retrieved for."""
    records = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    records = {"choose": records[:CHOOSING], "report": records[CHOOSING:], "all": records}[part]
    engine, found = Engine(model, prefix_bytes=0), []
    given: list[Any] = []
    stream = engine.stream

    def noted(prompt: Any, *rest: Any, **options: Any) -> Any:
        given.append(prompt)
        return stream(prompt, *rest, **options)

    engine.stream = noted  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        run = Quickstart(engine, Path(folder), top_k=TOP_K, max_new_tokens=1)
        run.ingest(sorted(PARAGRAPHS.glob("*.txt")))
        for record in tqdm(records, desc="retrieving"):
            run.ask(record["question"], "reuse")
            chunks = engine.found_in(given[-1])
            found.append(Asked(prompt=given[-1], chunks=chunks, **record))
    return found


def answered(
    engine: Engine, one: Asked, method: Method, work: Callable[[Request], Any]
) -> Any:  # fmt: skip
    """What ``work`` makes of the request."""
    settings = AnswerSettings.of(method=method, eviction="none", on_miss="text")
    with engine.resolve(one.prompt, one.chunks) as resolved:
        request = engine.request(resolved, settings, NEW_TOKENS)
        return engine.scheduler.run(lambda: work(request))


def greedy(request: Request) -> Greedy:
    return decode_greedily(request.model, first_token(request), NEW_TOKENS)


def cpu_s(request: Request) -> float:
    began = time.process_time()
    first_token(request)
    return time.process_time() - began


def measured(
    engines: Mapping[str, Engine], one: Asked, chosen: Mapping[str, tuple[Method, str]]
) -> list[Row]:
    """A row for each candidate; none if full prefill does not know the answer."""
    any_engine = next(iter(engines.values()))
    full = answered(any_engine, one, METHODS[FULL], greedy)
    if one.answer.lower() not in full.text.lower():
        return []
    full_s = min(answered(any_engine, one, METHODS[FULL], cpu_s) for _ in range(2))
    rows = []
    for label, (method, prefix) in chosen.items():
        engine = engines[prefix]
        engine.cache_chunks(one.chunks)
        said = answered(engine, one, method, greedy)
        follow = full.tokens[:-1]
        forced = answered(engine, one, method, lambda request, ids=follow: force(request, ids))
        divergence = kl(full.logits, forced.logits)
        first_s = min(answered(engine, one, method, cpu_s) for _ in range(2))
        rows.append(Row(
            label=label, question=one.question, text=said.text,
            kept=one.answer.lower() in said.text.lower(), same=said.tokens == full.tokens,
            kl=float(divergence.mean()), most_kl=float(divergence.max()),
            recomputed=forced.report.recompute_ratio, first_token=first_s / full_s,
        ))  # fmt: skip
    return rows


def lines(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each label."""
    found = []
    for label in dict.fromkeys(row.label for row in rows):
        mine = [row for row in rows if row.label == label]
        found.append([
            label, f"{sum(row.kept for row in mine)} of {len(mine)}",
            str(sum(row.same for row in mine)), f"{fmean(row.kl for row in mine):.3f}",
            f"{fmean(row.most_kl for row in mine):.2f}",
            f"{100 * fmean(row.recomputed for row in mine):.1f} %",
            f"{median(row.first_token for row in mine):.2f}",
        ])  # fmt: skip
    return found


def main() -> None:
    """The table, on standard output."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.facts")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--part", default="report", choices=["choose", "report", "all"])
    parser.add_argument("--labels", help="of the candidates, with ';' between; all if left out")
    parser.add_argument("--prefix", help="a file of samkv adapt: candidates after it, too")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    known = candidates(args.prefix)
    labels = args.labels.split(";") if args.labels else list(known)
    if unknown := [label for label in labels if label not in known]:
        parser.error(f"no candidate {unknown[0]!r}; known: {'; '.join(known)}")
    model = load_model(args.model, dtype="float32")
    chosen = {label: known[label] for label in labels}
    engines: dict[str, Engine] = {}
    for _, prefix in chosen.values():
        found: Any = prefix
        engines.setdefault(prefix, Engine(model, prefix=found, prefix_bytes=0))
    rows: list[Row] = []
    for one in tqdm(asked(model, args.part), desc="asking"):
        rows += measured(engines, one, chosen)
    if args.json:
        settings = {"hardware": hardware(model), "part": args.part}
        text = to_json("facts", model.name, [asdict(row) for row in rows], settings)
        args.json.write_text(f"{text}\n", encoding="utf-8")
    columns = (
        "method", "answer kept", "same answer", "KL along", "largest KL", "recomputed",
        "first token, of full prefill",
    )  # fmt: skip
    sys.stdout.write(table(columns, lines(rows), left=1) + "\n")


if __name__ == "__main__":
    main()
