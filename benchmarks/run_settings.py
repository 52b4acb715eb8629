"""The settings that every run over questions depends on."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.datasets import Question
from benchmarks.variants import Variant
from samkv_integrations.figures import commit, version
from samkv_integrations.model.model import Model


def common_settings(
    model: Model, questions: Sequence[Question], variants: Mapping[str, Variant]
) -> dict[str, Any]:
    """Model, data, variants, version and hardware of a run, as JSON-able values."""
    text = json.dumps([asdict(q) for q in questions], ensure_ascii=False)
    return {
        "model": model.name,
        "weights": model.weights_digest,
        "tokenizer": model.tokenizer_digest,
        "data": hashlib.sha256(text.encode()).hexdigest(),
        "variants": {label: v.describe() for label, v in variants.items()},
        "version": version(),
        "commit": commit(),
        "hardware": hardware(model),
    }


def hardware(model: Model) -> dict[str, Any]:
    """The hardware of a run: `machine`, and the device and dtype of its model."""
    on_gpu = model.device.type == "cuda"
    return {
        **machine(),
        "device": torch.cuda.get_device_name(model.device) if on_gpu else str(model.device),
        "dtype": model.dtype_name,
    }


def machine() -> dict[str, Any]:
    """This machine: name of the processor, threads, torch."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    names = re.findall(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
