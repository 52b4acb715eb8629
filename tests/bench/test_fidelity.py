"""The fidelity bench: its measures by hand, its questions, and a run on the built-in model."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

from samkv_integrations import METHODS, Engine
from samkv_integrations.bench import data, divergence, fidelity, markdown, quality, variants
from samkv_integrations.cli import bench_commands
from samkv_integrations.cli.app import app
from samkv_integrations.errors import EmptyInput, InvalidOption, PromptTooLong, UnknownOption
from samkv_integrations.eviction import EVICTIONS
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.template import rag_prompt
from tests.support.models import tiny_model
from tests.support.records import RECORDS, TEXTS, builtin

NAMES = ("recompute", "reuse", "samkv-guided")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    builtin()  # sets it, as the command does


def logits(*shares: list[float]) -> Tensor:
    """Of these distributions, each row shifted by another constant."""
    shifts = torch.arange(len(shares))[:, None]
    return torch.tensor(shares).log() + shifts


def slow_kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)


# -- measures ---------------------------------------------------------------------------------


def test_kl_by_hand() -> None:
    p, q = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]
    assert slow_kl(p, q) == pytest.approx(0.25 * math.log(2))
    assert divergence.kl(logits(p, p, q), logits(p, q, p)).tolist() == pytest.approx(
        [0, slow_kl(p, q), slow_kl(q, p)], abs=1e-7
    )


def test_kl_against_loops() -> None:
    torch.manual_seed(0)
    full, other = torch.randn(2, 4, 50).unbind(0)
    expected = [
        slow_kl(p, q)
        for p, q in zip(full.softmax(-1).tolist(), other.softmax(-1).tolist(), strict=True)
    ]
    assert divergence.kl(full, other).tolist() == pytest.approx(expected, rel=1e-5)


def test_kl_looks_from_full_prefill() -> None:
    """What it rules out weighs nothing; what the other rules out weighs infinitely."""
    sure, torn = logits([1.0, 0.0]), logits([0.5, 0.5])
    assert divergence.kl(sure, torn).item() == pytest.approx(math.log(2))
    assert divergence.kl(torn, sure).item() == math.inf
    assert divergence.kl(sure, sure).item() == 0


def test_kl_of_equal_logits_is_nothing() -> None:
    torch.manual_seed(1)
    rows = 30 * torch.randn(8, 1000)
    assert divergence.kl(rows, rows).tolist() == [0] * 8
    assert 0 <= float(divergence.kl(rows, rows + 100).min())
    assert float(divergence.kl(rows, rows + 100).max()) < 1e-4  # the sum is rounded in float32


def test_the_likeliest_token_is_compared() -> None:
    full = logits([0.6, 0.4], [0.6, 0.4], [0.1, 0.9])
    other = logits([0.9, 0.1], [0.4, 0.6], [0.3, 0.7])
    assert divergence.same_top1(full, other).tolist() == [1, 0, 1]


def test_log_likelihood_is_a_mean_a_token() -> None:
    rows = logits([0.5, 0.5], [0.75, 0.25])
    assert divergence.log_likelihood(rows, [0, 1]) == pytest.approx(
        (math.log(0.5) + math.log(0.25)) / 2
    )


def test_a_question_measured_by_hand() -> None:
    p, q, r = [0.75, 0.25], [0.5, 0.5], [0.25, 0.75]
    full = divergence.Forced(own=logits(p, p), reference=logits(q), expected=(0,))
    other = divergence.Forced(own=logits(q, r), reference=logits(r), expected=(0,))
    first, second = slow_kl(p, q), slow_kl(p, r)
    assert divergence.measure(full, other) == pytest.approx(
        {
            "first_kl": first,
            "first_top1": 1,  # of equal ones the first counts
            "kl": (first + second) / 2,
            "top1": 0.5,
            "answer_llr": math.log(0.25 / 0.5),
        }
    )
    itself = divergence.measure(full, full)
    assert itself == {"first_kl": 0, "first_top1": 1, "kl": 0, "top1": 1, "answer_llr": 0}


def test_a_ratio_is_resampled_in_pairs() -> None:
    """Apart, figures that differ this much would leave the ratio open."""
    bases = [float(n) for n in range(1, 41)]
    assert divergence.ratio_interval([base / 2 for base in bases], bases) == (0.5, 0.5)
    values = [base * (0.5 if n % 2 else 0.6) for n, base in enumerate(bases)]
    found = divergence.ratio_interval(values, bases)
    assert found is not None
    assert 0.5 < found[0] < sum(values) / sum(bases) < found[1] < 0.6
    assert divergence.ratio_interval([1.0, 1.0], [0.0, 1.0]) is None
    assert divergence.ratio_interval([1.0], [4.0]) == (0.25, 0.25)


def row(label: str, id: str, kind: str, **measures: float) -> dict[str, Any]:
    empty = dict.fromkeys(divergence.MEASURES, 0.0)
    return {"label": label, "id": id, "kind": kind, "method": label, "eviction": None,
            "tokens": 4, **empty, **measures}  # fmt: skip


def test_summaries_by_hand() -> None:
    rows = [
        row("reuse", "a", "one", first_kl=1, top1=1.0),
        row("epic", "a", "one", first_kl=0.5, top1=0.5, answer_llr=-1),
        row("reuse", "b", "two", first_kl=3, top1=0.0),
        row("epic", "b", "two", first_kl=0.5, top1=0.25, answer_llr=2),
        row("reuse", "c", "two", first_kl=8, top1=0.5),
        row("epic", "c", "two", first_kl=5, top1=0.75, answer_llr=2),
    ]
    found = {(line["kind"], line["label"]): line for line in divergence.summarise(rows)}
    assert list(found) == [(kind, label) for kind in ("all", "one", "two")
                           for label in ("reuse", "epic")]  # fmt: skip
    epic = found["all", "epic"]
    assert (epic["questions"], epic["first_kl"], epic["first_kl_median"]) == (3, 2, 0.5)
    assert epic["first_kl_low"] <= 2 <= epic["first_kl_high"]
    assert (epic["answer_llr"], epic["tokens"]) == (1, 4)
    assert (epic["first_kl_of_reuse"], epic["top1_of_reuse"]) == (0.5, 1)
    assert (epic["kl"], epic["kl_of_reuse"]) == (0, None)  # nothing to divide by
    assert found["two", "epic"]["first_kl_of_reuse"] == pytest.approx(2.75 / 5.5)
    low, high = (epic[f"first_kl_of_reuse_{end}"] for end in ("low", "high"))
    assert (low, high) == pytest.approx((1 / 6, 5 / 8))  # of "b" alone, of "c" alone
    assert epic["kl_of_reuse_low"] is None
    text = markdown.fidelity(list(found.values()))
    for title in ("All questions", "one", "two"):
        assert f"## {title}\n\n| label | first KL |" in text
    assert (
        "| epic | 2.0000 [0.5000, 5.0000] | 0.5000 |" in text
        and "| 0.50 [0.17, 0.62] | - |" in text
    )
    alone = divergence.summarise([line for line in rows if line["label"] == "epic"])
    assert not [key for key in alone[0] if "of_reuse" in key]
    assert "of reuse" not in markdown.fidelity(alone)


# -- logits of the engine ---------------------------------------------------------------------

PROMPT = rag_prompt(RECORDS[1].question, TEXTS[:3])


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = Engine(tiny_model("llama"), block_size=8)
    engine.cache_chunks(TEXTS[:3])
    return engine


def test_logits_of_full_prefill_are_the_model_s(engine: Engine) -> None:
    model, follow = engine.model, [70, 71, 72]
    with engine.resolve(str(PROMPT), TEXTS[:3]) as resolved:
        ids = [token for segment in resolved.segments for token in segment.token_ids]
    found = engine.logits(PROMPT, TEXTS[:3], follow=follow, method="recompute")
    with torch.inference_mode():
        expected = model.hf(torch.tensor([ids + follow])).logits[0, -4:]
    assert (found.dtype, found.device.type) == (torch.float32, "cpu")
    # the same sums in another order
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("eviction", ["none", *EVICTIONS])
@pytest.mark.parametrize("method", METHODS)
def test_logits_are_those_that_an_answer_is_drawn_from(
    engine: Engine, method: str, eviction: str
) -> None:
    how: dict[str, Any] = {"method": method, "eviction": eviction}
    follow: list[int] = []
    rows = []
    for _ in range(4):
        rows.append(engine.logits(PROMPT, TEXTS[:3], follow=follow, **how)[-1])
        follow.append(int(rows[-1].argmax()))
    together = engine.logits(PROMPT, TEXTS[:3], follow=follow[:-1], **how)
    assert together.shape == (4, engine.model.config.vocab_size)
    # room for more tokens may change how sums are split
    torch.testing.assert_close(together, torch.stack(rows), atol=1e-5, rtol=1e-5)
    text = engine.generate(PROMPT, TEXTS[:3], max_new_tokens=4, repetition_penalty=1.0, **how).text
    ended = [n for n, token in enumerate(follow) if token in engine.model.eos_ids]
    assert text == engine.model.detokenize(follow[: min(ended, default=4)])


def test_logits_need_room_in_the_window(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    n_tokens = engine.count_tokens(str(PROMPT)) + 2
    monkeypatch.setattr(Model, "context_window", n_tokens)
    assert len(engine.logits(PROMPT, TEXTS[:3], follow=[70, 71])) == 3
    with pytest.raises(PromptTooLong):
        engine.logits(PROMPT, TEXTS[:3], follow=[70, 71, 72])


# -- the answer that is forced ----------------------------------------------------------------


def test_the_forced_answer_is_full_prefill_s() -> None:
    model = builtin()
    engine = Engine(model, method="recompute")
    ids = model.tokenize(str(PROMPT), special=True)
    prompt = [model.bos_id, *ids]
    found = fidelity.greedy(model, prompt, 32, end_ids=model.eos_ids)  # type: ignore[arg-type]
    assert found[-1] in model.eos_ids and len(found) < 32
    assert model.detokenize(found) == engine.generate(PROMPT, ()).text
    assert model.detokenize(found).strip() == RECORDS[1].workers
    assert fidelity.greedy(model, prompt, 2, end_ids=model.eos_ids) == found[:2]  # type: ignore[arg-type]
    beyond = fidelity.greedy(model, prompt, 12, never=model.eos_ids)  # type: ignore[arg-type]
    assert beyond[: len(found) - 1] == found[:-1]
    assert len(beyond) == 12 and not set(beyond) & model.eos_ids


# -- questions --------------------------------------------------------------------------------


def test_the_halves_are_fixed_and_even() -> None:
    parts = {part: fidelity.questions(part) for part in ("choose", "report", "all")}  # type: ignore[arg-type]
    ids = {part: [q.id for q in found] for part, found in parts.items()}
    assert sorted(ids["choose"] + ids["report"]) == sorted(ids["all"])
    assert len(ids["all"]) == len(set(ids["all"])) == 240
    for part in ("choose", "report"):
        assert Counter(q.dataset for q in parts[part][:30]) == dict.fromkeys(
            ("hotpotqa", "2wikimqa", "musique"), 10
        )
        assert len(ids[part]) == 120
    digit = hashlib.sha256(ids["report"][0].encode()).hexdigest()[0]
    assert digit in "13579bdf"
    assert fidelity.part_of(ids["report"][0]) == "report"
    with pytest.raises(UnknownOption, match="unknown part 'test'; known: "):
        fidelity.questions("test")  # type: ignore[arg-type]


def test_questions_are_asked_as_on_the_command_line() -> None:
    for question in fidelity.questions("all"):
        assert len(question.documents) == 10 and question.supporting
        assert question.prompt() == rag_prompt(question.question, question.documents)
        assert all(document.startswith("[") for document in question.documents)


def test_fewer_documents_keep_what_the_answer_takes() -> None:
    question = data.Question(
        id="q", dataset="d", kind="d", question="?", answers=("a",), documents=tuple("abcdef"),
        supporting=(4, 2),
    )  # fmt: skip
    for n, documents, supporting in [
        (9, "abcdef", (4, 2)),
        (4, "abce", (3, 2)),
        (2, "ce", (1, 0)),
        (1, "e", (0,)),
    ]:
        found = fidelity.with_fewer(question, n)
        assert (found.documents, found.supporting) == (tuple(documents), supporting)
    with pytest.raises(InvalidOption, match="documents=0"):
        fidelity.questions("all", 0)


# -- runs -------------------------------------------------------------------------------------


def plan(*names: str, n: int = 2, **options: Any) -> fidelity.Plan:
    return fidelity.Plan(
        questions=fidelity.questions("report", 3)[:n],
        variants=variants.combine(names or NAMES),
        **options,
    )


def measured(plan: fidelity.Plan, folder: Path) -> fidelity.Result:
    with quality.Journal(folder, plan.settings(builtin())) as journal:
        return fidelity.run(plan, builtin(), journal)


def test_rows_of_a_run(tmp_path: Path) -> None:
    asked = plan(past_end=True, tokens=6)
    found = measured(asked, tmp_path / "run")
    assert [(r["id"], r["label"]) for r in found.rows] == [
        (q.id, label) for q in asked.questions for label in NAMES
    ]
    assert {r["tokens"] for r in found.rows} == {6}
    for line in found.rows:
        figures = {name: line[name] for name in divergence.MEASURES}
        if line["label"] == "recompute":
            assert figures == {"first_kl": 0, "first_top1": 1, "kl": 0, "top1": 1, "answer_llr": 0}
        else:
            assert figures["first_kl"] > 0 and figures["kl"] > 0 and figures["answer_llr"]
    question, line = asked.questions[0], found.rows[1]  # the same by hand
    model = builtin()
    engine = Engine(model, block_size=16)
    engine.cache_chunks(question.documents)
    rows = [engine.logits(question.prompt(), question.documents, method=m) for m in NAMES[:2]]
    # block size changes nothing for reuse; bfloat16 in one batch or another a little
    assert line["first_kl"] == pytest.approx(float(divergence.kl(*rows)), rel=0.05)


def test_a_stopped_run_goes_on_to_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped between questions, and within one, whose full prefill is then computed again."""
    asked = plan("recompute", "reuse", tokens=3)
    expected = measured(asked, tmp_path / "undisturbed").rows
    add = quality.Journal.add
    for n_rows in (1, 2):
        left = iter(range(n_rows))

        def add_or_stop(journal: quality.Journal, line: quality.Row) -> None:
            if next(left, None) is None:  # noqa: B023
                raise KeyboardInterrupt
            add(journal, line)

        monkeypatch.setattr(quality.Journal, "add", add_or_stop)
        with pytest.raises(KeyboardInterrupt):
            measured(asked, tmp_path / "run")
    monkeypatch.setattr(quality.Journal, "add", add)
    assert (tmp_path / "run" / quality.ROWS).read_text("utf-8").count("\n") == 3
    assert measured(asked, tmp_path / "run").rows == expected
    with pytest.raises(InvalidOption, match="holds a run of another tokens"):
        measured(replace(asked, tokens=4), tmp_path / "run")


def test_what_the_window_does_not_hold_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = plan("recompute", tokens=50)  # longer than the expected answers
    lengths = [quality.prompt_tokens(builtin(), q) for q in asked.questions]
    assert lengths[0] != lengths[1]
    monkeypatch.setattr(Model, "context_window", max(lengths) + 50)
    assert measured(asked, tmp_path / "all").too_long == 0
    monkeypatch.setattr(Model, "context_window", max(lengths) + 49)
    found = measured(asked, tmp_path / "one")
    assert (found.too_long, len(found.rows)) == (1, 1)
    monkeypatch.setattr(Model, "context_window", min(lengths))
    with pytest.raises(EmptyInput, match="all 2 are too long.*allow fewer documents"):
        measured(asked, tmp_path / "none")


def test_full_prefill_is_always_a_variant() -> None:
    with pytest.raises(InvalidOption, match="distances from 'recompute'"):
        plan("reuse")


# -- the command ------------------------------------------------------------------------------


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["bench", "fidelity", *map(str, arguments)])


def test_the_command_from_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = command("--questions", "3", "--documents", "2", "--tokens", "4", "--part", "choose",
                   "--methods", "reuse,epic", "--recompute-ratios", "0.1", "--device", "cpu",
                   "--eviction", "none,snapkv", "--output", tmp_path / "run",
                   "--json", out)  # fmt: skip
    assert done.exit_code == 0, done.stderr
    found = json.loads(out.read_text("utf-8"))
    assert (found["command"], found["left_out"]) == ("bench fidelity", {"too_long": 0})
    assert (found["settings"]["part"], found["settings"]["tokens"]) == ("choose", 4)
    rows = [line for line in found["rows"] if line["kind"] == "all"]
    assert [line["label"] for line in rows] == [
        "recompute", "reuse", "reuse + snapkv", "epic, 10 % recomputed",
        "epic, 10 % recomputed + snapkv",
    ]  # fmt: skip
    assert {line["questions"] for line in rows} == {3}
    assert (rows[0]["kl"], rows[0]["top1"], rows[0]["kl_of_reuse"]) == (0, 1, 0)
    assert rows[1]["kl_of_reuse"] == rows[1]["top1_of_reuse"] == 1
    # what is evicted is gone from the second token on
    assert rows[2]["first_kl"] == rows[1]["first_kl"] and rows[2]["kl"] > rows[1]["kl"]
    assert done.stdout.startswith("## All questions\n\n| label | first KL |")
    assert "3 questions; left out: 0 too long" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--part", "test"], "unknown part 'test'; known: all, choose, report"),
        (["--tokens", "0"], "tokens=0; it must be at least 1"),
        (["--questions", "0"], "most=0; it must be at least 1"),
        (["--documents", "0"], "documents=0; it must be at least 1"),
        (["--methods", "sam"], "unknown method 'sam'; known: "),
        (["--methods", " , "], "no method is named"),
        (["--recompute-ratios", "0.1", "--methods", "reuse"], "recompute ratios do nothing"),
        (["--eviction", "forget"], "unknown eviction 'forget'"),
        (["--json", "nowhere/x.json"], "the folder nowhere of nowhere/x.json does not exist"),
    ],
)
def test_bad_options_are_named_before_a_model_is_loaded(
    arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_commands, "load_model", None)  # calling it would be no error of ours
    done = command(*arguments)
    assert (done.exit_code, len(done.stderr.strip().splitlines())) == (2, 1), done.output
    assert named in done.stderr
