"""Where a run was measured."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Any

import torch

from samkv_integrations.runtimes.base import Runtime


def hardware(model: Runtime) -> dict[str, Any]:
    """The hardware of a run: `machine`, and the device and dtype of its model."""
    device = model.device_name
    return {
        **machine(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
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
