"""95 % bootstrap intervals of means and of ratios of means: 2,000 resamples, fixed seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from samkv_integrations.errors import MissingExtra


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The interval of the mean. Raises MissingExtra without scipy."""
    bootstrap = _bootstrap()
    if len(set(values)) < 2:  # nothing to resample
        return values[0], values[0]
    found = bootstrap(
        (values,), np.mean, n_resamples=2_000, vectorized=True, method="percentile", rng=0
    ).confidence_interval
    return float(found.low), float(found.high)


def ratio_interval(
    values: Sequence[float],
    bases: Sequence[float],
    middle: Callable[..., Any] = np.mean,
) -> tuple[float, float] | None:
    """The interval of the ratio of two means, or other ``middle``, over questions that they share.

    The two figures of a question are drawn together: what makes a question hard for both cancels.
    None if a base is 0, because a resample may hold nothing else. Raises MissingExtra without
    scipy.
    """
    bootstrap = _bootstrap()
    if not all(bases):
        return None
    ratios = {value / base for value, base in zip(values, bases, strict=True)}
    if len(ratios) < 2:  # nothing to resample
        return (only := ratios.pop()), only
    found = bootstrap(
        (values, bases), lambda v, b, axis: middle(v, axis=axis) / middle(b, axis=axis),
        paired=True, n_resamples=2_000, vectorized=True, method="percentile", rng=0,
    ).confidence_interval  # fmt: skip
    return float(found.low), float(found.high)


def require_extras() -> None:
    """Raise MissingExtra if the package that the intervals take is not installed."""
    _bootstrap()


def _bootstrap() -> Any:  # noqa: ANN401
    try:
        from scipy.stats import bootstrap
    except ImportError as error:
        raise MissingExtra.of("scipy", "bench") from error
    return bootstrap
