"""Learn a prefix from the choosing half of questions, as `samkv adapt` does from a user's own.

    python -m benchmarks.learned_prefix --data hotpotqa.jsonl --data 2wikimqa.jsonl --out FILE

`python -m benchmarks.default_choice --prefix FILE` measures what was learned on the other half.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

import torch
from tqdm.auto import tqdm

from benchmarks import fidelity
from benchmarks.datasets import load
from samkv_integrations.evaluation.questions import Question
from samkv_integrations.figures import to_json
from samkv_integrations.model.loading import load_model
from samkv_integrations.tuning.adapt import Recipe, learn
from samkv_integrations.tuning.mixed_prompts import Source

DTYPES = ("float32", "bfloat16")
"""A prefix that was learned in one serves the other, too."""


def main() -> None:
    """Write the file, and what it does on held-out prompts to standard output."""
    own = Recipe()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learned_prefix")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--data", action="append", required=True, help="JSON Lines; again for more")
    parser.add_argument("--most", type=int, default=80, help="questions of a file")
    parser.add_argument("--most-tokens", type=int, default=1400, help="of a prompt")
    parser.add_argument("--steps", type=int, default=own.steps)
    parser.add_argument("--embeddings", type=int, help="default: those of the made-up documents")
    parser.add_argument("--learning-rate", type=float, default=own.learning_rate)
    parser.add_argument("--first", type=int, action="append", help="recomputed; again for turns")
    parser.add_argument("--seed", type=int, default=own.seed)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    questions: list[Question] = []
    for name in args.data:
        questions += fidelity.of_part(load([name], prompt="rag"), "choose")[: args.most]
    Random(args.seed).shuffle(questions)
    model = load_model(args.model, dtype=args.dtype)
    recipe = replace(
        own, steps=args.steps, n=args.embeddings, learning_rate=args.learning_rate, seed=args.seed,
        firsts=tuple(args.first or own.firsts),
    )  # fmt: skip
    with tqdm() as bar:

        def told(stage: str, done: int, of: int, kl: float | None) -> None:
            bar.n, bar.total = done, of
            bar.set_description(stage, refresh=False)
            bar.set_postfix_str("" if kl is None else f"KL {kl:.3f}")

        source = Source(questions=questions, most_tokens=args.most_tokens)
        partial = args.out.with_suffix(".partial")
        found = learn(model, source, recipe, partial=partial, told=told)
    digests = [load_model(args.model, dtype=one).weights_digest for one in DTYPES]
    replace(found.prefix, weights=tuple(digests)).save(args.out)
    partial.unlink()
    rows = [asdict(one) for one in found.figures]
    sys.stdout.write(f"{to_json('learned prefix', model.name, rows, asdict(recipe))}\n")


if __name__ == "__main__":
    main()
