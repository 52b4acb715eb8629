"""Sampling from NumPy arrays: the tokens that transformers' logits processors would keep."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from samkv_integrations.options import Sampling
from samkv_integrations.runtimes.llama_cpp.sampling import NumpySampler, likely

PROMPT = (3, 5, 5)
WARPERS = {
    "temperature": (TemperatureLogitsWarper, 1.0),
    "top_k": (TopKLogitsWarper, 0),
    "top_p": (TopPLogitsWarper, 1.0),
    "min_p": (MinPLogitsWarper, 0.0),
}


class Only:
    """Allows some tokens, whatever came before."""

    def __init__(self, *allowed: int) -> None:
        self._allowed, self.taken = allowed, list[Sequence[int]]()

    def allowed(self, n_vocabulary: int, token_ids: Sequence[int]) -> NDArray[np.bool_]:
        self.taken.append(list(token_ids))
        mask = np.zeros(n_vocabulary, np.bool_)
        mask[[*self._allowed]] = True
        return mask


def by_transformers(logits: NDArray[np.float32], sampling: Sampling) -> NDArray[np.float64]:
    """(vocabulary,) the probability of each token."""
    scores = torch.from_numpy(logits)[None]
    for name, (warper, unset) in WARPERS.items():
        if (value := getattr(sampling, name)) != unset:
            scores = warper(value)(None, scores)
    return scores[0].double().softmax(-1).numpy()


def by_us(logits: NDArray[np.float32], sampling: Sampling) -> NDArray[np.float64]:
    ids, probabilities = likely(logits, sampling)
    found = np.zeros(len(logits))
    found[ids] = probabilities
    return found


LOGITS = st.one_of(
    arrays.arrays(np.float32, st.integers(1, 40), elements=st.floats(-30, 30, width=32)),
    # many that are equal, and many that are very unlikely
    arrays.arrays(np.float32, st.integers(1, 40), elements=st.sampled_from([-20, 0, 1, 1.5])),
    st.builds(
        lambda seed, n: (np.random.default_rng(seed).normal(size=n) * 3).astype(np.float32),
        st.integers(0, 99), st.integers(100, 3000),
    ),
)  # fmt: skip
SAMPLING = st.builds(
    Sampling.of,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 5, 50, 5000]),
    top_p=st.sampled_from([1.0, 0.97, 0.71, 0.313, 0.01]),
    min_p=st.sampled_from([0.0, 0.03, 0.37, 1.0]),
)


@settings(max_examples=500, deadline=None)
@given(logits=LOGITS, sampling=SAMPLING)
def test_the_probabilities_are_those_of_transformers(
    logits: NDArray[np.float32], sampling: Sampling
) -> None:
    mine, theirs = by_us(logits, sampling), by_transformers(logits, sampling)
    # of equal logits, top_p keeps those that a sort puts last, and torch's sort is not stable
    np.testing.assert_allclose(
        mine[np.lexsort((mine, logits))], theirs[np.lexsort((theirs, logits))], 1e-5
    )


@settings(max_examples=50, deadline=None)
@given(logits=LOGITS.filter(lambda logits: len(logits) > 9), penalty=st.sampled_from([0.5, 1.3]))
def test_the_repetition_penalty_is_that_of_transformers(
    logits: NDArray[np.float32], penalty: float
) -> None:
    """Each token counts once, those of the answer too."""
    sampler, ids = NumpySampler(PROMPT, Sampling.of(repetition_penalty=penalty)), [*PROMPT]
    process, before = RepetitionPenaltyLogitsProcessor(penalty), logits.copy()
    for _ in range(5):
        expected = process(torch.tensor([ids]), torch.from_numpy(logits)[None])[0]
        ids.append(sampler.next(logits))
        assert ids[-1] == int(expected.argmax())
    assert np.array_equal(logits, before)


def test_greedy_takes_the_first_of_the_largest() -> None:
    sampler = NumpySampler(PROMPT, Sampling.of())
    assert sampler.next(np.array([0, 2, 1, 2], np.float32)) == 1


@pytest.mark.parametrize("options", [{}, {"temperature": 2.0, "top_k": 2}])
def test_a_mask_comes_before_all_else(options: dict[str, float]) -> None:
    mask = Only(0, 2)
    sampler = NumpySampler(PROMPT, Sampling.of(**options), mask)
    logits = np.array([0, 9, 1, 8, 7], np.float32)
    taken = [sampler.next(logits) for _ in range(20)]
    assert set(taken) == ({0, 2} if options else {2})
    assert mask.taken == [taken[:n] for n in range(20)]


@pytest.mark.parametrize("seed", [0, 7, -1, 2**64 - 1])
def test_a_seed_repeats_an_answer(seed: int) -> None:
    logits = np.zeros(50_000, np.float32)
    first, second = (NumpySampler(PROMPT, Sampling.of(temperature=1, seed=seed)) for _ in range(2))
    other = NumpySampler(PROMPT, Sampling.of(temperature=1))
    taken = [first.next(logits) for _ in range(4)]
    assert [second.next(logits) for _ in range(4)] == taken
    assert [other.next(logits) for _ in range(4)] != taken


def test_tokens_are_drawn_as_often_as_is_likely() -> None:
    sampler = NumpySampler(PROMPT, Sampling.of(temperature=0.5, top_p=0.99, seed=1))
    logits = np.log(np.array([0.4, 0.2, 0.4, 0.01], np.float32))
    counts = np.bincount([sampler.next(logits) for _ in range(4000)], minlength=4)
    np.testing.assert_allclose(counts / 4000, [4 / 9, 1 / 9, 4 / 9, 0], atol=0.03)


def test_errors_of_logits_may_leave_a_token_open() -> None:
    logits = np.array([1, 2, 2.25], np.float32)
    sampler = NumpySampler((), Sampling.of())
    assert sampler.next_if_sure(logits, 0.25) is None
    assert sampler.next_if_sure(logits, 0.125) == 2
    assert sampler.next_if_sure(logits, 0.0) == 2
    drawing = NumpySampler((), Sampling.of(temperature=1, seed=3))
    assert drawing.next_if_sure(logits, 0.125) is None
    untouched = NumpySampler((), Sampling.of(temperature=1, seed=3))
    assert drawing.next(logits) == untouched.next(logits)
    forced = NumpySampler((), Sampling.of(), Only(1))
    assert forced.next_if_sure(logits, 0.25) == 1
    repeated = NumpySampler((2,), Sampling.of(repetition_penalty=3.0))
    assert repeated.next_if_sure(logits, 0.25) == 1
