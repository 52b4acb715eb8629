"""Options of ``samkv tune`` alone."""

from __future__ import annotations

from typing import Annotated

import typer

Agree = Annotated[float, typer.Option(help="Least agreement with full prefill, 0 to 1.")]
AgreedBy = Annotated[
    str,
    typer.Option(help="What agreement is: exact (the same answer) or f1 (tokens in common)."),
]
Minutes = Annotated[
    float, typer.Option(help="That measuring may take, an interrupted part included.")
]
AskedBy = Annotated[
    str,
    typer.Option(
        help="Who asks without --questions: chunks (their sentences, cut) or model (as it reads)."
    ),
]
Seed = Annotated[int, typer.Option(help="Of the order of questions.")]
MostTuned = Annotated[int, typer.Option("--most", help="Most questions.")]
CheckOnly = Annotated[
    bool,
    typer.Option("--check", help="Measure the setting that was written, on all these questions."),
]
Writes = Annotated[
    bool, typer.Option("--write/--no-write", help="Write the setting beside the caches.")
]
FallBack = Annotated[
    bool, typer.Option("--fall-back", help="Write full prefill if no setting is enough.")
]
