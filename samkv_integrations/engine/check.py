"""One finding of the doctor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check and its outcome. A warning is not a failure: what runs is still exact."""

    name: str
    ok: bool
    detail: str
    is_warning: bool = False

    def to_row(self) -> dict[str, str | bool]:
        """The check as a row of ``samkv doctor --json``."""
        detail = f"warning: {self.detail}" if self.is_warning else self.detail
        return {"check": self.name, "ok": self.ok, "detail": detail}
