"""What one answer read: every token of its prompt, layer by layer, beside full prefill."""

from __future__ import annotations

from samkv_integrations.inspection.inspect import inspect
from samkv_integrations.inspection.inspection import InspectedChunk, Inspection

__all__ = ["InspectedChunk", "Inspection", "inspect"]
