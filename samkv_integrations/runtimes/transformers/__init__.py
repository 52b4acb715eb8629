"""Models of transformers. Importing it without its packages raises MissingExtra."""

from __future__ import annotations

from samkv_integrations.runtimes import require_runtime

require_runtime()
