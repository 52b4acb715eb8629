"""From the result of a run to the entry of ``samkv.toml``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from samkv_integrations import figures
from samkv_integrations.engine.options import TunedSetting
from samkv_integrations.tuning.candidates import Candidate
from samkv_integrations.tuning.run import Result, TuneConfig


def recommended(
    result: Result, candidates: Sequence[Candidate], config: TuneConfig, collection: str
) -> TunedSetting | None:
    """The setting that is recommended, with what it was measured with; None for full prefill."""
    standing = result.chosen_standing
    if standing is None:
        return None
    (candidate,) = [each for each in candidates if each.label == result.chosen]
    return replace(
        candidate.setting,
        measured={
            "collection": collection,
            "at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "version": figures.version(),
            "target": config.agree,
            "agreed_by": config.by,
            "held_out_questions": standing.n,
            "held_out_tries": len(result.checked),
            "agreement": round(standing.agreement, 4),
            "agreement_low": round(standing.low, 4),
            "agreement_high": round(standing.high, 4),
            "first_token_of_full_prefill": round(standing.ttft_ratio, 4),
        },
    )
