"""Bootstrap intervals."""

from __future__ import annotations

from samkv_integrations.evaluation import measures as intervals


def test_an_interval_holds_its_mean_and_narrows() -> None:
    low, high = intervals.interval([0.0, 1.0] * 50)
    assert 0.35 < low < 0.5 < high < 0.65
    assert intervals.interval([1.0, 1.0]) == (1.0, 1.0)


def test_a_ratio_is_resampled_in_pairs() -> None:
    """Apart, figures that differ this much would leave the ratio open."""
    bases = [float(n) for n in range(1, 41)]
    assert intervals.ratio_interval([base / 2 for base in bases], bases) == (0.5, 0.5)
    values = [base * (0.5 if n % 2 else 0.6) for n, base in enumerate(bases)]
    found = intervals.ratio_interval(values, bases)
    assert found is not None
    assert 0.5 < found[0] < sum(values) / sum(bases) < found[1] < 0.6
    assert intervals.ratio_interval([1.0, 1.0], [0.0, 1.0]) is None
    assert intervals.ratio_interval([1.0], [4.0]) == (0.25, 0.25)
