"""Wilson's interval."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samkv_integrations.evaluation.measures import Z95, wilson


@given(n=st.integers(1, 300), data=st.data())
def test_its_ends_are_where_the_normal_test_turns(n: int, data: st.DataObject) -> None:
    """The interval holds the shares p for which |share - p| <= z * sqrt(p (1 - p) / n)."""
    share = data.draw(st.integers(0, n)) / n
    low, high = wilson(share, n)
    assert 0 <= low <= share + 1e-12 and share - 1e-12 <= high <= 1
    for end in (low, high):
        if 0 < end < 1:
            assert abs(share - end) == pytest.approx(Z95 * math.sqrt(end * (1 - end) / n), abs=1e-5)


def test_it_does_not_take_twenty_of_twenty_for_certain() -> None:
    low, high = wilson(1.0, 20)
    assert (round(low, 2), high) == (0.84, 1.0)
    assert wilson(0.0, 0) == (0.0, 1.0)
