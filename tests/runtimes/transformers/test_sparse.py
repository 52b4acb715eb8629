"""What a step of InfLLM and of RetrievalAttention attends to, against loops; and their limits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from samkv_integrations.runtimes.transformers.eviction import InfLLM, Quest, RetrievalAttention
from samkv_integrations.runtimes.transformers.eviction.base import Seen, SparseEviction
from tests.runtimes.transformers.test_eviction import Case, union_of_best

HEADS = [(4, 2), (6, 1), (3, 3)]


def context_of(case: Case) -> Tensor:
    """Slots of the context: all entries but the first two, the last one, and one between."""
    slots = torch.arange(2, case.n_entries - 1)
    return slots[slots != 9]


def logits_of(case: Case, query: Tensor) -> Tensor:
    """(H, n) of a query with the context."""
    keys = case.keys[context_of(case)].repeat_interleave(len(query) // case.keys.shape[1], 1)
    return torch.einsum("hd,nhd->hn", query, keys)


def chosen(rule: SparseEviction, case: Case, budget: int, query: Tensor) -> list[int]:
    """The context tokens that a step attends to, by the code."""
    at = torch.tensor(case.computed)
    keys = case.keys[: case.n_entries]
    seen = Seen(query=case.query[:, at], slots=at, keys=keys, scaling=8**-0.5)
    chooser = rule.chooser(budget, seen, context_of(case))
    tokens, _ = chooser.choose(query, lambda: logits_of(case, query))
    assert len(tokens) == chooser.count <= budget
    assert tokens.tolist() == sorted(set(tokens.tolist()))
    found: list[int] = tokens.tolist()
    return found


def query_of(case: Case, step: int) -> Tensor:
    return case.query[:, case.n_entries + step]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("ends", [(0, 0), (2, 5)])
def test_retrieval_attention_attends_to_the_nearest_keys_of_every_head(
    heads: tuple[int, int], ends: tuple[int, int]
) -> None:
    first, last = ends
    rule = RetrievalAttention(budget_ratio=0.5, first=first, last=last)
    for seed in range(4):
        case = Case.of(seed, 60, 3, heads, 0.5)
        middle = range(first, len(context_of(case)) - last)
        fixed = set(range(len(context_of(case)))) - set(middle)
        for step in range(3):
            query = query_of(case, step)
            scores = [{t: row[t] for t in middle} for row in logits_of(case, query).tolist()]
            expected = fixed | union_of_best(scores, 20 - len(fixed))
            assert set(chosen(rule, case, 20, query)) == expected


def test_one_head_of_retrieval_attention_is_quest() -> None:
    case = Case.of(1, 60, 1, (1, 1), 0.5)
    rule = RetrievalAttention(budget_ratio=0.5, first=0, last=0)
    query = query_of(case, 0)
    assert chosen(rule, case, 20, query) == chosen(Quest(budget_ratio=0.5), case, 20, query)


def slow_infllm(rule: InfLLM, case: Case, budget: int, query: Tensor) -> set[int]:
    context = context_of(case).tolist()
    group = len(query) // case.keys.shape[1]
    middle = list(range(rule.first, len(context) - rule.last))
    blocks = [middle[at : at + rule.block] for at in range(0, len(middle), rule.block)]
    blocks = [block for block in blocks if len(block) == rule.block]
    always = set(range(len(context))) - {token for block in blocks for token in block}
    scores = []
    for block in blocks:
        score = 0.0
        for head in range(len(query)):
            given = dict.fromkeys(block, 0.0)
            for entry in case.computed:
                attention = case.attention(head, entry, list(range(entry + 1)))
                for token in block:
                    given[token] += attention.get(context[token], 0.0)
            best = sorted(block, key=lambda token: -given[token])[: rule.representatives]
            keys = [case.keys[context[token], head // group].double() for token in best]
            score += float(sum(keys) @ query[head].double()) / len(keys)
        scores.append(score)
    ranked = sorted(range(len(blocks)), key=lambda block: -scores[block])
    n_best = (budget - len(always)) // rule.block
    return always | {token for block in ranked[:n_best] for token in blocks[block]}


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("share", [0.4, 1.0])
def test_infllm_attends_to_the_blocks_of_the_slow_version(
    heads: tuple[int, int], share: float
) -> None:
    rule = InfLLM(budget_ratio=0.5, first=3, last=4, block=6, representatives=2)
    for seed, (n_entries, budget) in enumerate([(60, 30), (41, 20), (57, 18)]):
        case = Case.of(seed, n_entries, 3, heads, share)
        # every token is seen by one that was computed, or ties would be broken by place
        case.computed = sorted({*case.computed, n_entries - 1, n_entries - 2})
        for step in range(3):
            query = query_of(case, step)
            expected = slow_infllm(rule, case, budget, query)
            assert set(chosen(rule, case, budget, query)) == expected


def test_infllm_with_blocks_of_one_token_takes_the_largest_products() -> None:
    """A token's own key represents it, whatever attends to it."""
    rule = InfLLM(budget_ratio=0.5, first=0, last=0, block=1)
    case = Case.of(3, 60, 1, (4, 2), 0.3)
    query = query_of(case, 0)
    expected = logits_of(case, query).sum(0).topk(20).indices.tolist()
    assert set(chosen(rule, case, 20, query)) == set(expected)
