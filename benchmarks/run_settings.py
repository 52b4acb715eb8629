"""Where and how a run was measured."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path
from typing import Any

import torch

from samkv_integrations.cli.formatting import commit
from samkv_integrations.runtimes.base import Runtime


def run_of(model: Runtime) -> dict[str, Any]:
    """The command of a run, its commit and its hardware."""
    return {"command": " ".join(sys.argv), "commit": commit(), "hardware": hardware(model)}


def hardware(model: Runtime) -> dict[str, Any]:
    """The hardware of a run: `machine`, and the device, dtype and build of its model."""
    device = model.device_name
    return {
        **machine(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "dtype": model.dtype_name,
        **build_of(model),
    }


def build_of(model: Runtime) -> dict[str, str]:
    """The build of llama.cpp that runs a model, and what it was built with; none for others."""
    if (build := getattr(model, "build", None)) is None:
        return {}
    told = model.context.binding.library.llama_print_system_info().decode()  # type: ignore[attr-defined]
    return {"build": build, "built_with": " ".join(re.findall(r"(\w+) = 1", told))}


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
