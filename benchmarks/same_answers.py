"""Whether a change of code changes any answer or report: 500 requests, recorded and compared.

    python -m benchmarks.same_answers record before.jsonl      # at one commit
    python -m benchmarks.same_answers record after.jsonl       # at the other
    python -m benchmarks.same_answers compare before.jsonl after.jsonl

The built-in model answers its own questions by every method and eviction, over caches that are
sound, missing, cut, changed in a byte, or of another namespace. Only public names are used. Times
are left out. Run it with OMP_NUM_THREADS=1, and both records on one machine. The store's secret is
fixed, because it decides at which tokens of a prompt the runs that are looked up begin.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from samkv_integrations import EVICTIONS, METHODS, ChunkStore, Engine, SamkvError

DAMAGES = ("none", "none", "missing", "cut", "changed", "none", "shuffled", "text")
"""What happens to caches before a request; ``text``: none of its chunks were ever cached."""


def questions() -> list[dict[str, Any]]:
    """The built-in model's questions, short and long in turns."""
    folder = Path(__file__).with_name("data")
    lines = [
        [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]
        for name in ("questions.jsonl", "questions-long.jsonl")
    ]
    return [question for pair in zip(*lines, strict=False) for question in pair]


def damage(engine: Engine, folder: Path, texts: list[str], kind: str, dice: random.Random) -> None:
    """Damage the cache file of one of ``texts``. kind: one of `DAMAGES`."""
    (path,) = folder.rglob(f"{engine.key_of(dice.choice(texts))}*.safetensors")
    content = bytearray(path.read_bytes())
    path.unlink()  # never into a file that is mapped
    if kind == "missing":
        return
    if kind == "cut":
        del content[dice.randrange(len(content)) :]
    else:
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)


def requests(n: int) -> Iterator[dict[str, Any]]:
    """The outcome of each of ``n`` requests."""
    dice = random.Random(0)
    os.environ["SAMKV_STORE_SECRET"] = "5a" * 32
    rules, methods = [None, "none", *EVICTIONS], list(METHODS)
    with tempfile.TemporaryDirectory() as root:
        for prefix in ("documents", "bos"):
            folder = Path(root) / prefix
            engine = Engine.from_pretrained(
                "builtin", ChunkStore(folder), dtype="float32", prefix=prefix
            )
            for number, question in enumerate(islice(cycle(questions()), n // 2)):
                texts = [
                    f"{document['title']}\n{document['text']}" if document.get("title")
                    else document["text"]
                    for document in question["contexts"]
                ]  # fmt: skip
                kind = DAMAGES[number % len(DAMAGES)]
                engine.forget(texts)
                if kind != "text":
                    engine.cache_chunks(texts)
                if kind in ("missing", "cut", "changed"):
                    damage(engine, folder, texts, kind, dice)
                if kind == "shuffled":
                    dice.shuffle(texts)
                body = "\n\n".join(texts)
                prompt: Any = f"{body}\n\nQuestion: {question['question']}\nAnswer:"
                if number % 3:
                    prompt = [{"role": "user", "content": prompt}]
                options: dict[str, Any] = {
                    "method": methods[number % len(methods)],
                    "eviction": rules[(number + number // len(methods)) % len(rules)],
                    "max_new_tokens": 8,
                    "on_miss": ("compute", "text", "error")[number % 7 % 3],
                    "temperature": 1.0 if number % 5 == 0 else 0.0, "seed": number,
                }  # fmt: skip
                found: dict[str, Any] = {"prefix": prefix, "damage": kind, "request": options}
                try:
                    answer = engine.generate(prompt, None if number % 2 else texts, **options)
                except SamkvError as error:
                    yield found | {"error": type(error).__name__}
                    continue
                figures = answer.report.to_dict()
                figures = {k: v for k, v in figures.items() if not k.endswith(("_s", "_per_step"))}
                yield found | {"text": answer.text, "report": figures}


def compare(before: Path, after: Path) -> int:
    """Requests that differ, on standard output; how many there are."""
    sides = [path.read_text(encoding="utf-8").splitlines() for path in (before, after)]
    differing = [pair for pair in zip(*sides, strict=True) if pair[0] != pair[1]]
    for pair in differing[:10]:
        sys.stdout.write("\n".join(pair) + "\n\n")
    sys.stdout.write(f"{len(differing)} of {len(sides[0])} requests differ\n")
    return len(differing)


def main() -> None:
    """Record or compare."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.same_answers")
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record")
    record.add_argument("file", type=Path)
    record.add_argument("--requests", type=int, default=500)
    two = commands.add_parser("compare")
    two.add_argument("before", type=Path)
    two.add_argument("after", type=Path)
    args = parser.parse_args()
    if args.command == "compare":
        sys.exit(compare(args.before, args.after) > 0)
    with args.file.open("w", encoding="utf-8") as file:
        for found in tqdm(requests(args.requests), total=args.requests):
            file.write(json.dumps(found, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
