"""Whether the entropy of a first token tells the answers that a method loses from those it keeps.

    python -m benchmarks hesitation RUN --half choose --then auto

RUN is the folder of a run of `right_answers`; only rows with the entropy of the first token count.
The first line has the share of pairs, of an answer that `reuse` loses and one that it keeps, in
which the lost one has the higher entropy. The table has the right answers if the questions with the
highest entropy are answered by ``--then`` instead, and if as many are drawn by chance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.commands import TRUTH, command_line, markdown_table
from benchmarks.right_table import rows_of
from samkv_integrations.cli.formatting import Row
from samkv_integrations.errors import InvalidOption

FIRST = "reuse"
SHARES = (0.1, 0.2, 0.3, 0.5)


def hesitation(
    run: Annotated[Path, typer.Argument(help="Folder of a run of right_answers.")],
    then: Annotated[str, typer.Option(help="Label that answers where it hesitates.")] = TRUTH,
    half: Annotated[str, typer.Option(help="choose, report or all.")] = "all",
) -> None:
    """Right answers if the questions at which `reuse` hesitates are answered with more work."""
    by_question: dict[str, dict[str, Row]] = {}
    for row in rows_of(run):
        if half in (row["half"], "all"):
            by_question.setdefault(row["id"], {})[row["label"]] = row
    asked = [
        found for found in by_question.values()
        if {TRUTH, FIRST, then} <= {*found} and "entropy_first" in found[FIRST]
    ]  # fmt: skip
    if not asked:
        raise InvalidOption(f"{run} has no question with {then!r} and the entropy of {FIRST!r}")
    full, first, second = (
        np.array([one[label]["right"] for one in asked]) for label in (TRUTH, FIRST, then)
    )
    entropy = np.array([one[FIRST]["entropy_first"] for one in asked])
    lost, kept = entropy[full & ~first], entropy[full & first]
    higher = (lost[:, None] > kept).mean() if lost.size and kept.size else np.nan
    typer.echo(
        f"{len(asked)} questions; of {lost.size} lost and {kept.size} kept answers the lost one "
        f"has the higher entropy in {higher:.2f} of all pairs"
    )
    cells = []
    for share in SHARES:
        goes_on = entropy >= np.quantile(entropy, 1 - share)
        right = np.where(goes_on, second, first).sum()
        chance = first.sum() + (second.sum() - first.sum()) * goes_on.mean()
        cells.append([f"{goes_on.mean():.2f}", str(right), f"{chance:.1f}"])
    cells = [["0.00", str(first.sum()), "-"], *cells, ["1.00", str(second.sum()), "-"]]
    typer.echo(markdown_table((f"share to {then}", "right", "by chance"), cells, left=0))


app = command_line(hesitation)
main = app
