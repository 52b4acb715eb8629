"""How far methods are from full prefill on a model that people use: what the default is chosen by.

    python -m benchmarks.default_choice --model smollm2 --data hotpotqa.jsonl --documents 5

KL and top-1 along full prefill's own answer; with --stray the method's own answer, too: how
unlikely full prefill finds it, and how near it is to full prefill's; with --floor what bfloat16
alone changes. --ask puts another question in place of each, --prompt longbench another prompt.
Run it with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from benchmarks import fidelity
from benchmarks.datasets import Question, load, with_fewer
from benchmarks.run_settings import hardware
from samkv_integrations import METHODS, Engine
from samkv_integrations.cache.memory import MemoryStore
from samkv_integrations.cli.tables import markdown_table as table
from samkv_integrations.engine.chunk_prefix import ChunkPrefix
from samkv_integrations.engine.decode import decode_greedily, force
from samkv_integrations.engine.first_token import first_token
from samkv_integrations.engine.options import AnswerSettings
from samkv_integrations.engine.prefill import entries_before, prefill
from samkv_integrations.engine.request import Request
from samkv_integrations.evaluation.measures import f1_score, kl, ratio_interval, same_top1
from samkv_integrations.figures import to_json
from samkv_integrations.methods import Method
from samkv_integrations.model.loading import load_model
from samkv_integrations.model.model import Model

BASE = "reuse, after BOS"
"""What ratios are to."""

NEIGHBOUR, STRANGER = "the document before", "a document of another question"
"""What FusionRAG (arXiv 2601.12904) prefills a chunk after: a document that is likely to stand in
the same prompt, and what becomes of it where that one does not."""


def candidates(learned: str | None = None) -> dict[str, tuple[Method, str]]:
    """Label -> method, and the prefix that its chunks were cached after.

    learned: a file of ``samkv adapt``, for the candidates after it.
    """
    guided, epic = METHODS["samkv-guided"], METHODS["epic"]
    again: Any = guided.recompute
    select: Any = guided.select
    first: Any = epic.recompute
    ours = {
        "samkv-guided": guided,
        "samkv-guided, no hits": replace(guided, recompute=replace(again, hits=0.0)),
        "samkv-guided, hits in all chunks": replace(guided, select=replace(select, long=0)),
    }
    counts = {
        f"first {n}": replace(epic, recompute=replace(first, first=n)) for n in (4, 8, 16, 24, 48)
    }
    papers = {name: METHODS[name] for name in METHODS if name not in ("recompute", "auto", *ours)}
    after = {"reuse": METHODS["reuse"], **counts, "samkv-guided": guided} if learned else {}
    return {
        BASE: (METHODS["reuse"], "bos"),
        "first 16, after BOS": (epic, "bos"),
        "samkv-guided, after BOS": (guided, "bos"),
        **{label: (m, "documents") for label, m in {**papers, **ours, **counts}.items()},
        **{f"{label}, learned": (m, str(learned)) for label, m in after.items()},
        **{
            f"{label}, after {before}": (METHODS[name], before)
            for before in (NEIGHBOUR, STRANGER)
            for label, name in (("reuse", "reuse"), ("first 16", "epic"))
        },
    }


def cut(question: Question, n: int) -> Question:
    """``question`` over the first ``n`` characters of each document."""
    documents = tuple(body[:n].strip() for body in question.documents)
    context = None if question.context is None else "\n".join(documents)
    return replace(question, documents=documents, context=context)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A question and a candidate.

    first_kl, kl, top1: of the first token, and means along the answer. recomputed: share of the
    context. first_token: CPU seconds over full prefill's. Of the method's own answer, NaN if not
    asked for: straying: mean over its tokens of full prefill's best log-probability less that of
    the token; same: whether its tokens are those of full prefill's; f1: of its words against them.
    """

    label: str
    id: str
    prompt_tokens: int
    first_kl: float
    kl: float
    top1: float
    recomputed: float = math.nan
    first_token: float = math.nan
    straying: float = math.nan
    same: float = math.nan
    f1: float = math.nan


@torch.inference_mode()
def logits_along(model: Model, ids: Sequence[int], follow: Sequence[int]) -> Tensor:
    """(n, vocabulary) float32 of plain transformers: before each of the n tokens of ``follow``."""
    fed = torch.tensor([[*ids, *follow[:-1]]], device=model.device)
    return model.hf(input_ids=fed, logits_to_keep=len(follow)).logits[0].float().cpu()  # type: ignore[no-any-return]


def engine_over(
    model: Model, documents: Sequence[str], prefix: str, strangers: Sequence[str]
) -> Engine:
    """An engine with caches of the documents, each prefilled after ``prefix``."""
    if prefix not in (NEIGHBOUR, STRANGER):
        chosen: Any = prefix
        engine = Engine(model, MemoryStore(), prefix=chosen, prefix_bytes=0)
        engine.cache_chunks(documents)
        return engine
    engine = Engine(model, MemoryStore(), prefix="bos", prefix_bytes=0)
    befores = documents[-1:] + documents[:-1] if prefix == NEIGHBOUR else cycle(strangers)
    refs = engine.chunks.agree(engine.chunks.refer(documents))
    for ref, before in zip(refs, befores, strict=False):
        after = ChunkPrefix.of(model, engine.store, "bos", f"{before}\n\n")
        entries = engine.scheduler.run(partial(entries_before, model, after))
        made = partial(prefill, model, [ref], engine.fingerprint, entries)
        engine.store.put(engine.scheduler.run(made)[0])
    return engine


def measured(
    model: Model, question: Question, chosen: Mapping[str, tuple[Method, str]], n: int, *,
    stray: bool, other: Model | None, strangers: Sequence[str],
) -> Iterator[Row]:  # fmt: skip
    """A row for each candidate.

    other: the model in bfloat16, for the floor. strangers: documents of another question.
    """
    ids, prompt = question.prompt_ids(model, chat=True), question.prompt(chat=True)
    own = fidelity.greedy(model, ids, n, end_ids=model.eos_ids)
    truth = logits_along(model, ids, own)
    full_s = min(_cpu_s(lambda: logits_along(model, ids, own[:1])) for _ in range(2))
    row = partial(Row, id=question.id, prompt_tokens=len(ids))

    def far(logits: Tensor) -> dict[str, Any]:
        divergence = kl(truth, logits)
        return {
            "first_kl": float(divergence[0]), "kl": float(divergence.mean()),
            "top1": float(same_top1(truth, logits).mean()),
        }  # fmt: skip

    def own_answer(said: Sequence[int]) -> dict[str, Any]:
        scores = logits_along(model, ids, said).log_softmax(-1)
        of_token = scores.gather(1, torch.tensor(said)[:, None])[:, 0]
        words, expected = (model.detokenize(tokens) for tokens in (said, own))
        return {
            "straying": float((scores.amax(-1) - of_token).mean()),
            "same": float(list(said) == own), "f1": f1_score(words, [expected]),
        }  # fmt: skip

    if stray:
        yield row(label="full prefill", first_kl=0, kl=0, top1=1, recomputed=1, first_token=1,
                  **own_answer(own))  # fmt: skip
    if other is not None:
        figures = own_answer(fidelity.greedy(other, ids, n, end_ids=model.eos_ids)) if stray else {}
        yield row(label="full prefill, bfloat16", **far(logits_along(other, ids, own)), **figures)
    engines: dict[str, Engine] = {}
    for label, (method, prefix) in chosen.items():
        if prefix not in engines:
            engines[prefix] = engine_over(model, question.documents, prefix, strangers)
        engine = engines[prefix]
        settings = AnswerSettings.of(method=method, eviction="none", on_miss="text")

        def asked(work: Callable[[Request], Any], engine: Engine = engine,
                  settings: AnswerSettings = settings) -> Any:  # fmt: skip
            with engine.resolve(prompt, question.documents) as resolved:
                request = engine.request(resolved, settings, n)
                return engine.scheduler.run(lambda: work(request))

        first_s = min(asked(lambda request: _cpu_s(lambda: first_token(request))) for _ in range(2))
        answer = asked(lambda request: force(request, own[:-1]))
        said = asked(_greedy_ids(model, n)) if stray else ()
        yield row(
            label=label, **far(answer.logits), recomputed=answer.report.recompute_ratio,
            first_token=first_s / full_s, **(own_answer(said) if said else {}),
        )  # fmt: skip


def _greedy_ids(model: Model, n: int) -> Callable[[Request], tuple[int, ...]]:
    return lambda request: decode_greedily(model, first_token(request), n).tokens


def _cpu_s(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each label: means, KL over reuse's with its interval, median of first tokens."""
    base = {row.id: row.kl for row in rows if row.label == BASE}
    lines = []
    for label in dict.fromkeys(row.label for row in rows):
        mine = [row for row in rows if row.label == label]
        mean = {
            name: fmean(getattr(row, name) for row in mine)
            for name in ("first_kl", "kl", "top1", "recomputed")
        }
        own = [row for row in mine if not math.isnan(row.straying)]
        found = ratio_interval([row.kl for row in mine], [base[row.id] for row in mine])
        ratio = f"{mean['kl'] / fmean(base.values()):.2f}"
        ratio += f" ({found[0]:.2f} to {found[1]:.2f})" if found else ""
        lines.append([
            label, f"{mean['first_kl']:.3f}", f"{mean['kl']:.4f}", ratio,
            f"{median(row.kl for row in mine):.4f}", f"{mean['top1']:.3f}",
            f"{100 * mean['recomputed']:.1f} %", f"{median(row.first_token for row in mine):.3f}",
            *([f"{fmean(row.straying for row in own):.3f}", f"{sum(row.same for row in own):.0f}",
               f"{fmean(row.f1 for row in own):.3f}"] if own else ["", "", ""]),
        ])  # fmt: skip
    return lines


def main() -> None:
    """The table, on standard output."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.default_choice")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", action="append", required=True, help="JSON Lines; again for more")
    parser.add_argument("--documents", type=int, default=5)
    parser.add_argument("--characters", type=int, help="of a document, which is cut after them")
    parser.add_argument("--questions", type=int, default=30)
    parser.add_argument("--part", default="report", choices=["choose", "report", "all"])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--labels", help="of the candidates, with ';' between; all if left out")
    parser.add_argument("--prefix", help="a file of samkv adapt: candidates after it, too")
    parser.add_argument("--stray", action="store_true", help="of each candidate's own answer")
    parser.add_argument("--floor", action="store_true", help="full prefill in bfloat16, too")
    parser.add_argument("--ask", help="in place of each question")
    parser.add_argument("--prompt", default="rag", choices=["rag", "longbench"])
    parser.add_argument(
        "--weights", default="float32", choices=["float32", "bfloat16", "float16", "int8"],
        help="int8: by torchao, of a model that is no GGUF file",
    )  # fmt: skip
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    known = candidates(args.prefix)
    labels = list(dict.fromkeys([BASE, *args.labels.split(";")])) if args.labels else list(known)
    if unknown := [label for label in labels if label not in known]:
        parser.error(f"no candidate {unknown[0]!r}; known: {'; '.join(known)}")
    dtype, further = args.weights, {}
    if args.weights == "int8":
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        dtype, further = "float32", {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig())}
    model = load_model(args.model, dtype=dtype, model_kwargs=further)
    other = load_model(args.model, dtype="bfloat16") if args.floor else None
    found = [
        with_fewer(question, args.documents)
        for question in fidelity.of_part(load(args.data, prompt=args.prompt), args.part)
    ][: args.questions]
    if args.characters:
        found = [cut(question, args.characters) for question in found]
    if args.ask:
        found = [replace(question, question=args.ask) for question in found]
    settings = {"hardware": hardware(model), "part": args.part, "documents": args.documents}
    rows: list[Row] = []
    for at, question in enumerate(tqdm(found, desc="questions")):
        rows += measured(
            model, question, {k: known[k] for k in labels}, args.tokens, stray=args.stray,
            other=other, strangers=found[at - 1].documents,
        )  # fmt: skip
        if args.json:  # hours of work: keep what there is
            text = to_json("default choice", model.name, [asdict(row) for row in rows], settings)
            args.json.write_text(f"{text}\n", encoding="utf-8")
    columns = (
        "candidate", "first KL", f"KL along {args.tokens}", "of reuse's", "median", "top-1",
        "recomputed", "first token, of full prefill", "straying", "same answer", "F1",
    )  # fmt: skip
    sys.stdout.write(f"{len(found)} questions\n\n{table(columns, cells(rows), left=1)}\n")


if __name__ == "__main__":
    main()
