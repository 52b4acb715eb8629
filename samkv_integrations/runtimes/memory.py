"""How much memory this machine has left."""

from __future__ import annotations

from pathlib import Path


def available_bytes() -> int | None:
    """Memory that programs can still get, within the limit of the container; None if unknown."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            used = int((group / "memory.current").read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            found.append(int(limit) - used + int(stat["inactive_file"]))
    except (OSError, ValueError, KeyError):
        pass  # another system, or no limit
    return min(found, default=None)
