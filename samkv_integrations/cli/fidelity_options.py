"""The options that only ``samkv bench fidelity`` has: names, types and help texts."""

from __future__ import annotations

from typing import Annotated

import typer

Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="Hub id, folder, GGUF file, smollm2 or builtin; again for more. [builtin]",
    ),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        help="'builtin', a JSON Lines file of questions, or a folder of .txt and .md; again for "
        "more. [builtin]",
    ),
]
Part = Annotated[
    str | None,
    typer.Option(
        help="choose (to choose settings on), report (for figures) or all. [report; of --data, all]"
    ),
]
MostDocuments = Annotated[
    int | None, typer.Option(help="Most documents a question. [all; of a folder, 8]")
]
StoreBits = Annotated[
    str,
    typer.Option(help="Bits of the numbers in caches: 4, 8, 16 for its own; or 4,8,16."),
]
ForcedTokens = Annotated[
    int, typer.Option(help="Most tokens of full prefill's answer that are forced on all.")
]
PastEnd = Annotated[
    bool, typer.Option(help="So many tokens whether or not that answer ends before.")
]
Ratios = Annotated[
    str, typer.Option(help="Shares for the methods that recompute one: 0.05,0.1,...")
]
Floor = Annotated[
    bool,
    typer.Option(
        "--floor", help="Measure full prefill in bfloat16 too; in float32 for a bfloat16 model."
    ),
]
