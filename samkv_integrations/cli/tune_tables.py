"""What ``samkv tune`` shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from samkv_integrations.cli import tables
from samkv_integrations.engine.options import TUNED_FILE, TunedSetting
from samkv_integrations.figures import ratio, seconds, size
from samkv_integrations.tuning.retrieval import Retrieval
from samkv_integrations.tuning.run import Result, TuneConfig
from samkv_integrations.tuning.standing import Standing

BAR = 40
"""Characters of a bar of agreement."""

STATES = """\
out: cannot reach {target:g}, or slower than full prefill; refused: did not reach it on held-out
questions; shelved: might, but others came first; in: might. KL, top-1: of the first token; log-lik
gap: how much more likely full prefill finds its own answer, a token; first token, KV: of full
prefill's."""


def show(
    out: Console,
    result: Result,
    config: TuneConfig,
    retrieval: Retrieval,
    folder: Path,
) -> None:
    """The table of all candidates, and the check."""
    standings = sorted(result.race.standings.values(), key=lambda each: each.ttft_ratio)
    out.print(_table(standings, result))
    out.print(STATES.format(target=config.agree))
    out.print(f"\n{_plot(standings, config.agree)}")
    out.print(
        f"\n{len(standings)} settings on up to {max(each.n for each in standings)} questions, "
        f"{seconds(result.seconds)}; every figure against full prefill on the same prompts. "
        f"Rows are kept in {folder}; the same command with more --minutes goes on."
    )
    if left_out := retrieval.too_long + retrieval.uncached:
        out.print(
            f"{left_out} questions were left out: {retrieval.too_long} too long, "
            f"{retrieval.uncached} with chunks that have no cache."
        )
    for checked in result.checked:
        each = checked.standing
        verdict = "is enough" if checked.is_enough else "is not enough"
        out.print(
            f"On {each.n} held-out questions {each.label} {verdict}: agreement "
            f"{_agreement(each)}, first token {ratio(each.ttft_ratio)} of full prefill."
        )


def show_end(
    out: Console,
    setting: TunedSetting | None,
    why: str,
    written: Path | None,
    bits: int,
    model: str,
) -> None:
    """What is recommended, and where it was written."""
    if setting is None:
        out.print(f"\nRecommended: full prefill, --method recompute: {why}.")
        if written is None:
            out.print("Nothing was written; --fall-back writes it.")
        else:
            out.print(f"Written to {written}.")
        return
    out.print(f"\nRecommended: {setting.line}")
    if setting.store_bits != bits:
        out.print(
            f"It was measured on caches of {setting.store_bits} bits, and yours have {bits}: "
            f"ingest again with --store-bits {setting.store_bits}."
        )
    if written is not None:
        out.print(f"Written to {written}, for {model!r}; explicit arguments win.")
    else:
        out.print(f"Not written: --write keeps it in {TUNED_FILE} beside the caches.")


def show_check(out: Console, entry: TunedSetting, standing: Standing) -> None:
    """A setting on questions of now, beside what was said of it when it was written."""
    out.print(
        f"{entry.line}\nOn {standing.n} questions: agreement {_agreement(standing)}, F1 "
        f"{ratio(standing.f1)}, first token {ratio(standing.ttft_ratio)} of full prefill."
    )
    low, high = entry.measured.get("agreement_low"), entry.measured.get("agreement_high")
    if not isinstance(low, float | int) or not isinstance(high, float | int):
        out.print(f"{TUNED_FILE} does not say what was measured when it was written.")
        return
    if low <= standing.agreement <= high:
        verdict = "within"
    else:
        verdict = "below" if standing.agreement < low else "above"
    out.print(
        f"That is {verdict} its interval, [{low:.2f}, {high:.2f}] on "
        f"{entry.measured.get('held_out_questions', '?')} questions."
    )
    if verdict == "below":
        out.print("Documents or questions are others now: tune again.")


def _table(standings: Sequence[Standing], result: Result) -> Table:
    columns = (
        "setting", "agreement", "asked", "F1", "KL", "top-1", "log-lik\ngap", "first\ntoken",
        "read", "KV", "",
    )  # fmt: skip
    return tables.table(
        columns,
        [
            (
                each.label, _agreement(each), str(each.n), ratio(each.f1),
                f"{each.first_kl:.3f}", ratio(each.first_top1), f"{each.loglik_gap:.3f}",
                ratio(each.ttft_ratio), size(each.bytes_read), ratio(each.kv_ratio),
                _state(each, result),
            )
            for each in standings
        ],
        gap=1,
    )  # fmt: skip


def _plot(standings: Sequence[Standing], target: float) -> str:
    """Agreement over first token, a line a setting."""
    mark = round(BAR * target)
    lines = [f"first token, of full prefill; agreement ({target:g} is asked for); setting"]
    for each in standings:
        full = round(BAR * each.agreement)
        bar = "".join(
            "|" if place == mark else ("=" if place < full else " ") for place in range(BAR + 1)
        )
        lines.append(f"{ratio(each.ttft_ratio)} {bar} {ratio(each.agreement)} {each.label}")
    return "\n".join(lines)


def _agreement(each: Standing) -> str:
    return f"{each.agreement:.2f} [{each.low:.2f}, {each.high:.2f}]"


def _state(each: Standing, result: Result) -> str:
    if each.label == result.chosen:
        return "chosen"
    if each.label in [one.standing.label for one in result.checked]:
        return "refused"
    return result.race.state_of(each.label)
