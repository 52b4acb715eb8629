"""Ways of learning what chunks are prefilled after, from the same prompts, side by side.

    python -m benchmarks.prefix_study --data hotpotqa.jsonl --data 2wikimqa.jsonl --steps 50

Embeddings in several numbers, from the two made-up documents or from tokens drawn by chance, at
several rates, keys and values of each layer in place of embeddings (prefix tuning), and embeddings
after each chunk whose entries are kept in its cache (KV Packet, arXiv 2604.13226). All learn from
one question of the choosing half a step, and are compared with the documents on the reporting half:
KL along full prefill's own answer, by caches of 16 bits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm.auto import tqdm

from benchmarks import fidelity
from benchmarks.datasets import Question, load
from benchmarks.run_settings import hardware
from samkv_integrations.cache.windows import MemoryIndex
from samkv_integrations.cli.tables import markdown_table as table
from samkv_integrations.engine.chunk_prefix import DOCUMENTS_BEFORE
from samkv_integrations.evaluation.measures import ratio_interval
from samkv_integrations.figures import commit
from samkv_integrations.model.attention import attention
from samkv_integrations.model.loading import load_model
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.layout import Occurrence, Run, find_runs
from samkv_integrations.tuning.distil import Prompt, Truth, chunk_entries, student, teacher

FIRSTS = (0, 4, 16)
"""First tokens of each chunk that are recomputed: in turns when learning, all when judging."""

DOCUMENTS = "the two documents"
Entries = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Way:
    """learned: what changes. entries: of chunks, made with it. n: positions before a chunk.

    after: entries that follow those of a chunk in its cache.
    """

    learned: Sequence[Tensor]
    entries: Callable[[Sequence[Occurrence]], Entries]
    n: int
    rate: float
    after: int = 0


def ways(model: Model, rate: float) -> dict[str, Way]:
    """Label -> way; the first learns nothing, and all others are compared with it."""
    bos = model.embed(torch.tensor([model.bos_id])).float()
    base = model.embed(torch.tensor(model.tokenize(DOCUMENTS_BEFORE, special=False))).float()
    drawn = torch.randint(model.hf.config.vocab_size, (16,),
                          generator=torch.Generator().manual_seed(0))  # fmt: skip

    def embeddings(values: Tensor, rate: float) -> Way:
        own = torch.nn.Parameter(values.clone())
        return Way(
            learned=[own], n=1 + len(own), rate=rate,
            entries=lambda chunks: chunk_entries(model, chunks, torch.cat((bos, own))),
        )  # fmt: skip

    line_break = model.embed(torch.tensor(model.tokenize("\n", special=False))).float()

    def between(before: Tensor, n: int, rate: float) -> Way:
        after = torch.nn.Parameter(line_break[:1].repeat(n, 1))
        learned = [after, before] if before.requires_grad else [after]
        return Way(
            learned=learned, n=1 + len(before), rate=rate, after=n,
            entries=lambda chunks: _entries_between(model, chunks, torch.cat((bos, before)), after),
        )  # fmt: skip

    pairs = [torch.nn.Parameter(each) for each in _layers_of(model, torch.cat((bos, base)))]
    return {
        DOCUMENTS: Way(
            learned=[], n=1 + len(base), rate=0,
            entries=lambda chunks: chunk_entries(model, chunks, torch.cat((bos, base))),
        ),
        f"{len(base)} embeddings": embeddings(base, rate),
        f"{len(base)} embeddings, a third of the rate": embeddings(base, rate / 3),
        "16 embeddings": embeddings(base[:16], rate),
        "16 embeddings, drawn by chance": embeddings(model.embed(drawn).float(), rate),
        "4 embeddings": embeddings(base[:4], rate),
        "keys and values of each layer": Way(
            learned=pairs, n=1 + len(base), rate=rate,
            entries=lambda chunks: _entries_after(model, chunks, pairs),
        ),
        "the two documents, and 4 embeddings after the chunk": between(base, 4, rate),
        "the two documents, and 8 embeddings after the chunk": between(base, 8, rate),
        f"{len(base)} embeddings, and 8 after the chunk, a third of the rate": between(
            torch.nn.Parameter(base.clone()), 8, rate / 3
        ),
    }  # fmt: skip


@torch.no_grad()
def _layers_of(model: Model, prefix: Tensor) -> list[Tensor]:
    """Of each layer (2, G, P, D): keys and values of embeddings, keys rotated to 0, 1, ..."""
    found: list[Tensor] = []

    def keep(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        found.append(torch.cat((key, value)).float())
        return attention(query, key, value, scaling, None, True)

    hidden = prefix.to(model.dtype)[None]
    rotation = model.rotation(torch.arange(len(prefix)))
    for layer in range(model.n_layers):
        hidden = model.layer(layer, hidden, *rotation.of(layer), keep)
    return found


def _entries_after(model: Model, chunks: Sequence[Occurrence], pairs: Sequence[Tensor]) -> Entries:
    """As `chunk_entries`, after keys and values in place of embeddings."""
    n, longest = pairs[0].shape[2], max(len(chunk.token_ids) for chunk in chunks)
    ids = torch.zeros(len(chunks), longest, dtype=torch.long)
    for row, chunk in zip(ids, chunks, strict=True):
        row[: len(chunk.token_ids)] = torch.tensor(chunk.token_ids)
    rotation = model.rotation(torch.arange(n, n + longest))
    mask = torch.arange(n + longest)[None] <= torch.arange(n, n + longest)[:, None]

    def layer_after(layer: int, hidden: Tensor, pair: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen: list[Tensor] = []
        before = pair.to(model.dtype)[:, None].expand(-1, len(chunks), -1, -1, -1)

        def attend(_: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            seen.extend((key, value))
            keys, values = torch.cat((before[0], key), 2), torch.cat((before[1], value), 2)
            return attention(query, keys, values, scaling, mask, False)

        output = model.layer(layer, hidden, *rotation.of(layer), attend)
        return output, seen[0], seen[1]

    hidden, entries = model.embed(ids), []
    for layer, pair in enumerate(pairs):
        hidden, keys, values = checkpoint(layer_after, layer, hidden, pair, use_reentrant=False)
        entries.append((keys, values))
    return entries


def _entries_between(
    model: Model, chunks: Sequence[Occurrence], before: Tensor, after: Tensor
) -> Entries:
    """As `chunk_entries`, with those of ``after`` behind each chunk's."""
    bodies = [model.embed(torch.tensor(chunk.token_ids)) for chunk in chunks]
    rows = [torch.cat((before.to(body), body, after.to(body))) for body in bodies]
    hidden, entries = pad_sequence(rows, batch_first=True), []
    rotation = model.rotation(torch.arange(hidden.shape[1]))

    def alone(layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen: list[Tensor] = []

        def attend(_: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            seen.extend((key, value))
            return attention(query, key, value, scaling, None, True)

        output = model.layer(layer, hidden, *rotation.of(layer), attend)
        return output, seen[0], seen[1]

    for layer in range(model.n_layers):
        hidden, keys, values = checkpoint(alone, layer, hidden, use_reentrant=False)
        entries.append((keys[:, :, len(before) :], values[:, :, len(before) :]))
    return entries


def _with_places(prompt: Prompt, n: int) -> Prompt:
    """``prompt`` with ``n`` places behind each chunk, for entries behind the chunk's own."""
    ids, chunks, done = list[int](), list[Occurrence](), 0
    for chunk in prompt.chunks:
        shift, end, size = len(ids) - done, chunk.runs[-1].span.stop, len(chunk.token_ids)
        moved = [replace(run, position=run.position + shift) for run in chunk.runs]
        chunks.append(replace(chunk, runs=(*moved, Run(end + shift, size, size + n))))
        ids += [*prompt.ids[done:end], *[0] * n]
        done = end
    return Prompt(ids=[*ids, *prompt.ids[done:]], chunks=chunks)


def far(
    model: Model, prompt: Prompt, truth: Truth, way: Way, entries: Entries, first: int
) -> Tensor:
    """Mean KL in nats along full prefill's answer."""
    placed = _with_places(prompt, way.after)
    logits = student(model, placed, truth.answer, entries, way.n, first)
    mine, theirs = logits.float().log_softmax(-1), truth.logits.log_softmax(-1)
    return (theirs.exp() * (theirs - mine)).sum(-1).mean()


def prompt_of(model: Model, question: Question, n_documents: int) -> Prompt:
    """The question over so many documents, in the model's chat template."""
    asked = fidelity.with_fewer(question, n_documents)
    ids, index = asked.prompt_ids(model, chat=True), MemoryIndex(b"study")
    for body in asked.documents:
        index.add(body, model.tokenize(body, special=False))
    return Prompt(ids=ids, chunks=find_runs(ids, [index]))


def main() -> None:
    """A table on standard output; its rows with ``--json``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix_study")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", action="append", required=True, help="JSON Lines; again for more")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rate", type=float, default=1e-2)
    parser.add_argument("--documents", type=int, default=5)
    parser.add_argument("--questions", type=int, default=24, help="that judge")
    parser.add_argument("--ways", help="labels, with ';' between; all if left out")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = load_model(args.model, dtype="bfloat16")
    for weight in model.hf.parameters():
        weight.requires_grad_(False)
    every = load(args.data, prompt="rag")
    learning = fidelity.of_part(every, "choose")
    Random(0).shuffle(learning)
    known = ways(model, args.rate)
    labels = [DOCUMENTS, *args.ways.split(";")] if args.ways else list(known)
    if unknown := [label for label in labels if label not in known]:
        parser.error(f"no way {unknown[0]!r}; known: {'; '.join(known)}")
    tried = {label: known[label] for label in labels}
    optimisers = {
        label: torch.optim.Adam(way.learned, lr=way.rate)
        for label, way in tried.items() if way.learned
    }  # fmt: skip
    for step in tqdm(range(args.steps), desc="learning"):
        question = learning[step % len(learning)]
        prompt = prompt_of(model, question, 2 + step % (args.documents - 1))
        truth = teacher(model, prompt, 12)
        for label, optimiser in optimisers.items():
            way = tried[label]
            share = min(1.0, (step + 1) / 10) * max(0.05, 1 - step / args.steps)
            optimiser.param_groups[0]["lr"] = way.rate * share
            optimiser.zero_grad()
            first = FIRSTS[step % len(FIRSTS)]
            far(model, prompt, truth, way, way.entries(prompt.chunks), first).backward()
            torch.nn.utils.clip_grad_norm_(way.learned, 1.0)
            optimiser.step()
    found: dict[tuple[str, int], list[float]] = {}
    with torch.no_grad():
        for question in tqdm(fidelity.of_part(every, "report")[: args.questions], desc="judging"):
            prompt = prompt_of(model, question, args.documents)
            truth = teacher(model, prompt, 24)
            for label, way in tried.items():
                entries = way.entries(prompt.chunks)
                for first in FIRSTS:
                    kl = float(far(model, prompt, truth, way, entries, first))
                    found.setdefault((label, first), []).append(kl)
    if args.json:
        rows = [{"way": label, "first": first, "kl": kl} for (label, first), kl in found.items()]
        args.json.write_text(json.dumps({"hardware": hardware(model), "rows": rows}))
    lines = []
    for label in tried:
        line = [label]
        for first in FIRSTS:
            kl, base = found[label, first], found[DOCUMENTS, first]
            between = ratio_interval(kl, base) if label != DOCUMENTS else None
            line.append(f"{fmean(kl):.4f}" + (
                f", {fmean(kl) / fmean(base):.2f} ({between[0]:.2f} to {between[1]:.2f})"
                if between else ""
            ))  # fmt: skip
        lines.append(line)
    columns = ("before each chunk", *(f"first {n} recomputed" for n in FIRSTS))
    sys.stdout.write(f"{args.steps} steps, {args.questions} questions, {commit()}\n\n"
                     f"{table(columns, lines)}\n")  # fmt: skip


if __name__ == "__main__":
    main()
