"""What a model can do in the invented world, and what prefilling documents one by one costs it.

``cd examples && python -m reference_model.evaluate --model builtin --output out.json``

Questions are about names that training never drew, and answered greedily. An answer is right if it
equals the expected one but for case, punctuation, articles and white space. All is full prefill
except ``reuse-costs``. Tables go to standard output, rows to the output file after each cell.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from reference_model.prompts import (
    BOS,
    END,
    EOS,
    PromptForm,
    PromptForms,
    draw_prompt,
    join_documents,
)
from reference_model.questions import style_of
from reference_model.scenes import Kind, Question, Scene, SceneStyle, draw_scene
from reference_model.stages import COMPARED, CONTINUED, LINKED, LONG_RECORDS, NEEDLE, RECORDS
from reference_model.world import World
from samkv_integrations.cli.formatting import commit
from samkv_integrations.engine import Engine
from samkv_integrations.errors import SamkvError
from samkv_integrations.lab.evaluation import f1_words
from samkv_integrations.methods import get_method
from samkv_integrations.option import PrefixPolicy
from samkv_integrations.prompt.rag_template import rag_prompt
from samkv_integrations.runtimes.transformers.loading import load_model
from samkv_integrations.runtimes.transformers.runtime import Model

RECOMPUTE = "recompute"
METHODS = (RECOMPUTE, "reuse", "reuse-local")
PREFIXES: tuple[tuple[PrefixPolicy, str], ...] = (
    ("none", ""),
    ("bos", ""),
    ("bos", "Documents:\n\n"),
)
FORMAT = "[{title}]\n{text}"
PER_SCENE = 4  # questions of a kind
TRIES = 5_000  # scenes drawn in a row without one that fits
LONG_KINDS: tuple[Kind, ...] = ("single-hop", "two-hop", "reference")
NEEDLE_TOKENS = (500, 1000, 2000, 4000)
TOLERANCE = 0.1  # of a prompt's length, where a cell has one
ANSWER_TOKENS, QUESTION_TOKENS = 16, 48  # most new tokens of an answer, of a condensed question


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Questions of one kind about scenes of one style.

    document_tokens: least and most of every document, if that matters.
    prompt_tokens: about so many, if that matters; ``style.idle`` is then made to fit.
    """

    name: str
    case: str
    kind: Kind
    style: SceneStyle
    document_tokens: tuple[int, int] | None = None
    prompt_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question as it is asked.

    kind: a kind of question, or another task of a prompt form.
    documents: as they stand in the prompt.
    gold: indices of the documents that the answer takes.
    """

    kind: str
    k: int
    question: str
    answer: str
    prompt: str
    documents: tuple[str, ...] = ()
    gold: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A method, and what documents are prefilled after; full prefill has no such prefix."""

    method: str = RECOMPUTE
    prefix: PrefixPolicy | None = None
    prefix_text: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant on the questions of one cell.

    documents: of the prompts, "5-8" if they differ. tokens: of the prompts, mean.
    k: likewise "2-4"; by_k: right answers and questions of each k.
    chance: right answers of a reader that takes the value of any entity that states one; None if
        that is not what could make an answer right.
    low, high: 95 % interval of ``exact_match``.
    same_as_recompute: share of answers that equal those of full prefill; None if it did not run.
    """

    name: str
    case: str
    kind: str
    documents: str
    tokens: float
    k: str
    by_k: dict[str, tuple[int, int]]
    chance: float | None
    method: str
    prefix: str | None
    prefix_text: str
    n: int
    right: int
    exact_match: float
    low: float
    high: float
    same_as_recompute: float | None


def single_hop(n: int) -> Cell:
    """Short records that all state the same."""
    style = replace(RECORDS, documents=(n, n), continued=0.0)
    return Cell(name="single-hop", case=f"{n} documents", kind="single-hop", style=style)


def records(n: int) -> Cell:
    """Records of 60 to 120 tokens."""
    style = replace(LONG_RECORDS, documents=(n, n), continued=0.0, linked=0.0, comparisons=0.0)
    return Cell(
        name="records",
        case=f"{n} documents",
        kind="single-hop",
        style=style,
        document_tokens=(60, 120),
    )


def two_hop(n: int) -> Cell:
    """What is asked for stands with an entity that another document names."""
    style = replace(LINKED, documents=(n, n), continued=0.0)
    return Cell(name="two-hop", case=f"{n} documents", kind="two-hop", style=style)


def reference(n: int) -> Cell:
    """What is asked for stands in a document that does not name its entity."""
    style = replace(CONTINUED, documents=(n, n))
    return Cell(name="reference", case=f"{n} documents", kind="reference", style=style)


def needle(tokens: int) -> Cell:
    """A fact in long filler."""
    style = replace(NEEDLE, documents=(5, 8))
    case = f"about {tokens} tokens"
    return Cell(name="needle", case=case, kind="needle", style=style, prompt_tokens=tokens)


def long(kind: Kind, n: int) -> Cell:
    """Documents of 250 to 640 tokens, as those of ``reference_model.questions --length long``."""
    case = f"{kind}, {n} documents"
    return Cell(name="long", case=case, kind=kind, style=style_of(kind, n, "long"))


def comparison(n: int) -> Cell:
    """Which of two entities a fact is true of."""
    style = replace(COMPARED, documents=(n, n))
    return Cell(name="comparison", case=f"{n} documents", kind="comparison", style=style)


def fits(model: Model, cell: Cell) -> bool:
    """Whether the model's window holds the prompts of ``cell``."""
    return cell.prompt_tokens is None or cell.prompt_tokens + ANSWER_TOKENS < model.context_window


def draw_items(model: Model, world: World, cell: Cell, n: int, seed: int) -> list[Item]:
    """``n`` questions of ``cell``, those of a scene side by side."""
    rng = random.Random(f"{seed} {cell.name} {cell.case}")
    items: list[Item] = []
    idle = _mean_tokens(model, world) if cell.prompt_tokens else 0.0
    tries = 0
    while len(items) < n:
        tries += 1
        if tries > TRIES:
            raise SystemExit(f"{TRIES} scenes in a row are no {cell.name}, {cell.case}")
        style = cell.style
        if cell.prompt_tokens:
            style = _filled(model, world, style, cell.prompt_tokens, idle, rng)
        scene = draw_scene(world, style, rng, held_out=True)
        # A scene may ask the same comparison twice.
        asked = dict.fromkeys(q for q in scene.questions if q.kind == cell.kind)
        found = [plain_item(scene, q) for q in asked]
        if found and _is_long_enough(model, cell, found[0]):
            items += found[:PER_SCENE]
            tries = 0
    return items[:n]


def plain_item(scene: Scene, question: Question) -> Item:
    """``question`` about ``scene`` in the prompt of the command line and of the benchmarks."""
    documents = tuple(join_documents(FORMAT, scene, [""] * len(scene.documents))[0])
    return Item(
        kind=question.kind,
        k=question.k,
        question=question.text,
        answer=question.answer,
        prompt=plain_prompt(question.text, documents),
        documents=documents,
        gold=question.documents,
    )


def plain_prompt(question: str, documents: Sequence[str]) -> str:
    prompt = rag_prompt(question, documents)
    assert isinstance(prompt, str)
    return prompt


def _mean_tokens(model: Model, world: World) -> float:
    """Of an idle sentence."""
    rng = random.Random(0)
    return fmean(_count(model, f" {world.idle(rng)}") for _ in range(200))


def _filled(
    model: Model, world: World, style: SceneStyle, tokens: int, idle: float, rng: random.Random
) -> SceneStyle:
    """``style`` with a number of documents, and idle sentences up to a prompt of ``tokens``."""
    n = rng.randint(*style.documents)
    bare = replace(style, documents=(n, n), idle=(0, 0))
    scene = draw_scene(world, bare, rng, held_out=True)
    rest = tokens - _count(model, plain_item(scene, scene.questions[0]).prompt)
    each = max(0.0, rest / idle / n)
    return replace(bare, idle=(round(0.7 * each), round(1.3 * each)))


def _is_long_enough(model: Model, cell: Cell, item: Item) -> bool:
    if cell.document_tokens:
        least, most = cell.document_tokens
        return all(least <= _count(model, document) <= most for document in item.documents)
    if cell.prompt_tokens:
        room = model.context_window - ANSWER_TOKENS
        length = 1 + _count(model, item.prompt)
        # The questions of a scene differ by a few tokens, hence the distance to the window.
        return abs(length / cell.prompt_tokens - 1) <= TOLERANCE and length + 16 <= room
    return True


def _count(model: Model, text: str) -> int:
    return len(model.tokenize(text, special=True))


def without_documents(item: Item) -> Item:
    """The same question with nothing to read."""
    return replace(item, documents=(), gold=(), prompt=plain_prompt(item.question, ()))


def without_answer(item: Item) -> Item:
    """The same question; its documents lack every sentence that holds the answer."""
    documents = list(item.documents)
    for index in item.gold:
        title, text = documents[index].split("\n", 1)
        kept = [s for s in re.split(r"(?<=\.) ", text) if not holds(s, item.answer)]
        documents[index] = f"{title}\n{' '.join(kept)}"
    prompt = plain_prompt(item.question, documents)
    return replace(item, documents=tuple(documents), prompt=prompt)


def holds(text: str, answer: str) -> bool:
    """Whether ``answer`` stands in ``text`` as whole words."""
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None


def form_modes(forms: PromptForms) -> Iterator[tuple[PromptForm, bool]]:
    """Every form with and without the chat template, as far as it allows either."""
    for form in forms.forms:
        yield from ((form, chat) for chat in (False, True) if (form.chat if chat else form.plain))


def draw_form_items(
    world: World, forms: PromptForms, form: PromptForm, chat: bool, n: int, seed: int
) -> list[Item]:
    """Single-hop questions over 4 documents in one form.

    All forms go through the same scenes; those that take one question of a scene go further.
    """
    only = replace(
        forms,
        forms=[replace(form, plain=not chat, chat=chat)],
        documents=[(1.0, FORMAT)],
    )
    rng = random.Random(f"{seed} scenes")
    items: list[Item] = []
    while len(items) < n:
        scene = draw_scene(world, single_hop(4).style, rng, held_out=True)
        single = tuple(q for q in scene.questions if q.kind == "single-hop")
        scene = replace(scene, questions=single)
        own = random.Random(rng.random())
        prompt = draw_prompt(only, scene, own, n_questions=PER_SCENE, various=True)
        documents = join_documents(FORMAT, scene, [""] * len(scene.documents))[0]
        items += [
            Item(
                kind=asked.kind if form.task == "answer" else form.task,
                k=asked.k,
                question=asked.text,
                answer=asked.answer.removesuffix(END).removesuffix(EOS).strip(),
                prompt=prompt.context + asked.text,
                documents=tuple(d for d in documents if d in prompt.context + asked.text),
            )
            for asked in prompt.questions
        ]
    return items[:n]


def exact_match(answer: str, expected: str) -> float:
    """1 if both have the same `f1_words`, else 0."""
    return float(f1_words(answer) == f1_words(expected))


def answers(
    model: Model, items: Sequence[Item], variants: Sequence[Variant], what: str
) -> dict[Variant, list[str]]:
    """What each variant answers to every item. Caches live until the prefix changes."""
    found: dict[Variant, list[str]] = {variant: [] for variant in variants}
    total = len(items) * len(variants)
    with tqdm(total=total, desc=what, leave=False, mininterval=1.0) as bar:
        for (prefix, text), group in groupby(variants, lambda v: (v.prefix, v.prefix_text)):
            # in the model's dtype: what is measured is prefilling alone, not keeping in few bits
            engine = Engine(model, prefix=prefix or "bos", prefix_text=text, store_bits=16)
            same_prefix = list(group)
            for item in items:
                if prefix:
                    engine.cache_chunks(item.documents)
                for variant in same_prefix:
                    answer = engine.generate(
                        item.prompt,
                        item.documents if prefix else (),
                        method=variant.method,
                        max_new_tokens=(
                            QUESTION_TOKENS if item.kind == "condense" else ANSWER_TOKENS
                        ),
                    )
                    found[variant].append(answer.text.strip())
                    bar.update()
    return found


def rows_of(
    model: Model,
    name: str,
    case: str,
    items: Sequence[Item],
    variants: Sequence[Variant] = (Variant(),),
    *,
    guessable: bool = True,
) -> list[Row]:
    """Ask all ``items`` and count. guessable: whether one of ``k`` stated values is right."""
    found = answers(model, items, variants, f"{name}, {case}")
    truth = next((found[variant] for variant in variants if variant.method == RECOMPUTE), None)
    tokens = fmean(_count(model, i.prompt) + (not i.prompt.startswith(BOS)) for i in items)
    rows = []
    for variant in variants:
        right = [
            exact_match(text, item.answer) for text, item in zip(found[variant], items, strict=True)
        ]
        by_k = {
            str(k): (
                int(sum(hit for hit, i in zip(right, items, strict=True) if i.k == k)),
                sum(i.k == k for i in items),
            )
            for k in sorted({item.k for item in items})
        }
        low, high = interval(right)
        same = None
        if truth is not None:
            same = fmean(a == b for a, b in zip(found[variant], truth, strict=True))
        rows.append(
            Row(
                name=name,
                case=case,
                kind=items[0].kind,
                documents=_span([len(item.documents) for item in items]),
                tokens=round(tokens, 1),
                k=_span([item.k for item in items]),
                by_k=by_k,
                chance=fmean(1 / item.k for item in items) if guessable else None,
                method=variant.method,
                prefix=variant.prefix,
                prefix_text=variant.prefix_text,
                n=len(items),
                right=int(sum(right)),
                exact_match=fmean(right),
                low=low,
                high=high,
                same_as_recompute=same,
            )
        )
    return rows


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the mean: 2,000 resamples, fixed seed."""
    drawn = np.random.default_rng(0).integers(0, len(values), (2_000, len(values)))
    low, high = np.quantile(np.asarray(values)[drawn].mean(axis=-1), (0.025, 0.975))
    return float(low), float(high)


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A model and how it is asked."""

    model: Model
    world: World
    forms: PromptForms
    questions: int
    seed: int
    methods: tuple[str, ...] = METHODS

    def items(self, cell: Cell) -> list[Item]:
        return draw_items(self.model, self.world, cell, self.questions, self.seed)

    def cells(self, *cells: Cell) -> Iterator[list[Row]]:
        """Full prefill."""
        for cell in cells:
            if fits(self.model, cell):
                yield rows_of(self.model, cell.name, cell.case, self.items(cell))

    def prompt_forms(self) -> Iterator[list[Row]]:
        for form, chat in form_modes(self.forms):
            items = draw_form_items(self.world, self.forms, form, chat, self.questions, self.seed)
            case = f"{form.name}{' (chat template)' if chat else ''}"
            guessable = form.task == "answer"
            yield rows_of(self.model, "prompt-forms", case, items, guessable=guessable)

    def controls(self) -> Iterator[list[Row]]:
        """The questions of other cells with what answers them taken away: right by luck only."""
        for cell in (single_hop(4), needle(1000)):
            items = self.items(cell)
            for take_away in (without_documents, without_answer):
                case = f"{cell.name}, {cell.case}, {take_away.__name__.replace('_', ' ')}"
                left = [take_away(item) for item in items]
                yield rows_of(self.model, "controls", case, left, guessable=False)

    def reuse_costs(self) -> Iterator[list[Row]]:
        """The questions of other cells, each with every variant."""
        reusing = [method for method in self.methods if method != RECOMPUTE]
        variants = [Variant()] if RECOMPUTE in self.methods else []
        variants += [
            Variant(method=method, prefix=prefix, prefix_text=text)
            for prefix, text in PREFIXES
            for method in reusing
        ]
        for cell in (single_hop(8), two_hop(6), reference(8), needle(1000)):
            case = f"{cell.name}, {cell.case}"
            yield rows_of(self.model, "reuse-costs", case, self.items(cell), variants)


MEASURES: dict[str, Callable[[Run], Iterator[list[Row]]]] = {
    "single-hop": lambda run: run.cells(*(single_hop(n) for n in (2, 4, 8, 12))),
    "records": lambda run: run.cells(records(4), records(8)),
    "two-hop": lambda run: run.cells(two_hop(4), two_hop(6), two_hop(8)),
    "reference": lambda run: run.cells(reference(4), reference(8), reference(12)),
    "needle": lambda run: run.cells(*map(needle, NEEDLE_TOKENS)),
    "long": lambda run: run.cells(*(long(kind, n) for kind in LONG_KINDS for n in (4, 6, 8))),
    "comparison": lambda run: run.cells(comparison(2), comparison(4), comparison(8)),
    "prompt-forms": Run.prompt_forms,
    "controls": Run.controls,
    "reuse-costs": Run.reuse_costs,
}


def markdown(rows: Sequence[Row]) -> str:
    """A table of rows that share a name."""
    columns = ["case", "k", "tokens", "chance", "questions", "exact match", "95 %"]
    paired = any(row.method != RECOMPUTE for row in rows)
    if paired:
        columns[1:1] = ["method", "prefix"]
        columns.append("same as recompute")
    several = any(len(row.by_k) > 1 for row in rows)
    if several:
        columns.append("right by k")
    lines = [f"| {' | '.join(columns)} |", f"| --- {'| ---: ' * (len(columns) - 1)}|"]
    for row in rows:
        cells = [
            row.case,
            row.k,
            f"{row.tokens:.0f}",
            _share(row.chance),
            str(row.n),
            _share(row.exact_match),
            f"{_share(row.low)} to {_share(row.high)}",
        ]
        if paired:
            prefix = f"{row.prefix or '-'}{' + text' if row.prefix_text else ''}"
            cells[1:1] = [row.method, prefix]
            cells.append(_share(row.same_as_recompute))
        if several:
            cells.append(", ".join(f"{k}: {hits}/{n}" for k, (hits, n) in row.by_k.items()))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def hardware(model: Model) -> str:
    """The device that computed, in words."""
    if model.device.type == "cuda":
        return torch.cuda.get_device_name(model.device)
    names = re.findall(r"^model name\s*:\s*(.+)$", _cpu_info(), re.MULTILINE)
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, threads: {torch.get_num_threads()}"


def _cpu_info() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main(arguments: Sequence[str]) -> None:
    """The command: tables to standard output, rows to a file."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    try:
        for method in options.methods:
            get_method(method)
        model = load_model(options.model, device=options.device, dtype=options.dtype)
        run = Run(
            model=model,
            world=World.load(),
            forms=PromptForms.load(),
            questions=options.questions,
            seed=options.seed,
            methods=options.methods,
        )
        _measure(run, options.only, options.output, arguments)
    except SamkvError as error:
        raise SystemExit(f"{error}") from error


def _measure(run: Run, names: Sequence[str], output: Path, arguments: Sequence[str]) -> None:
    model = run.model
    common: dict[str, Any] = {
        "model": model.name,
        "weights": model.weights_digest,
        "seed": run.seed,
        "command": shlex.join(["python", "-m", "reference_model.evaluate", *arguments]),
        "commit": commit(),
        "dtype": model.dtype_name,
        "hardware": hardware(model),
        "torch": torch.__version__,
    }
    written: list[dict[str, Any]] = []
    for name in names:
        rows: list[Row] = []
        for found in MEASURES[name](run):
            rows += found
            written += [asdict(row) | common for row in found]
            output.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n", "utf-8")
        print(f"\n## {name}\n\n{markdown(rows) if rows else 'No cell fits.'}", flush=True)
        if name == "needle":
            window = model.context_window
            for tokens in (n for n in NEEDLE_TOKENS if not fits(model, needle(n))):
                print(f"\nLeft out: {tokens} tokens, as the model's window is {window}.")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="reference_model.evaluate", description=__doc__)
    parser.add_argument("--model", default="builtin", help="a folder, or 'builtin' (the default)")
    parser.add_argument("--questions", type=int, default=100, help="a cell (100)")
    parser.add_argument("--seed", type=int, default=1, help="of the questions (1)")
    parser.add_argument("--output", type=Path, required=True, help="JSON file of rows")
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument(
        "--methods",
        type=lambda text: tuple(name.strip() for name in text.split(",")),
        default=METHODS,
        help=f"of reuse-costs, with commas between them ({','.join(METHODS)})",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 (auto)")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU (1)")
    options = parser.parse_args(arguments)
    for name in ("questions", "threads"):
        if (value := getattr(options, name)) < 1:
            parser.error(f"--{name} {value}: at least 1")
    if not options.output.parent.is_dir():
        parser.error(f"--output {options.output}: the folder {options.output.parent} is not there")
    return options


if __name__ == "__main__":
    main(sys.argv[1:])
