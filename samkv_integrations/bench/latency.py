"""Time to first token and bytes read, at the shape of a model that people use, random weights."""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from samkv_integrations.engine import Engine
from samkv_integrations.errors import UnknownOption
from samkv_integrations.methods import Method
from samkv_integrations.model import Model, random_model
from samkv_integrations.prompt import rag_prompt
from samkv_integrations.store import ChunkStore

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4_864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4_096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8_192,
        },
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True, kw_only=True)
class LatencyConfig:
    """What to time. Texts and weights are random with ``seed``; answers mean nothing here."""

    shape: str = "qwen2.5-0.5b"
    dtype: str = "bfloat16"
    device: str = "cpu"
    n_chunks: int = 8
    chunk_tokens: int = 512
    repeats: int = 5
    seed: int = 0

    def model(self) -> Model:
        """The model of this shape, random weights."""
        if self.shape not in SHAPES:
            raise UnknownOption.among("shape", self.shape, SHAPES)
        return random_model(
            SHAPES[self.shape], name=f"{self.shape} (random weights)", dtype=self.dtype,
            device=self.device, seed=self.seed,
        )  # fmt: skip


def random_chunk(model: Model, n_tokens: int, rng: random.Random) -> str:
    """Random words of ``n_tokens`` tokens (a word's last pieces may add a few)."""
    words: list[str] = []
    count = 0
    while count < n_tokens:
        word = "".join(rng.choice("abcdefghijklmnoprstuvw") for _ in range(rng.randint(2, 9)))
        words.append(word)
        count += len(model.tokenize(" " + word, special=False))
    return " ".join(words)


def run(
    config: LatencyConfig, methods: Mapping[str, Method], kv_dir: Path | None = None
) -> Iterator[dict[str, Any]]:
    """A row a method: medians over repeats, the methods taking turns in one process.

    ``ttft_ratio`` is the median over repeats of the ratio to ``recompute`` in the same round.
    """
    model = config.model()
    rng = random.Random(config.seed)
    chunks = [random_chunk(model, config.chunk_tokens, rng) for _ in range(config.n_chunks)]
    prompt = rag_prompt("What is the name of the river?", chunks)
    assert isinstance(prompt, str)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(model, ChunkStore(kv_dir or Path(folder) / "kv"))
        engine.cache_chunks(chunks)
        reports: dict[str, list[dict[str, Any]]] = {label: [] for label in methods}
        for round_ in range(config.repeats + 1):
            for label, method in methods.items():
                answer = engine.generate(prompt, chunks, method=method, max_new_tokens=1)
                if round_:  # the first round warms caches and allocators
                    reports[label].append(answer.report.to_dict())
    base = [r["ttft_s"] for r in reports.get("recompute", [])]
    for label, rows in reports.items():
        medians = {
            name: statistics.median(row[name] for row in rows)
            for name in rows[0]
            if name.endswith("_s")
        }
        ratios = [row["ttft_s"] / full for row, full in zip(rows, base, strict=False)]
        yield {
            **rows[-1],
            **medians,
            "label": label,
            "shape": config.shape,
            "dtype": config.dtype,
            "device": config.device,
            "n_chunks": config.n_chunks,
            "chunk_tokens": config.chunk_tokens,
            "repeats": config.repeats,
            "threads": torch.get_num_threads(),
            "ttft_ratio": statistics.median(ratios) if ratios else None,
        }
