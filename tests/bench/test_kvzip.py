"""``python -m benchmarks kvzip``: its scores against transformers' attention, and its limits."""

from __future__ import annotations

import copy

import torch

from benchmarks.datasets import load
from benchmarks.kvzip import Cache, answers, compute, importance
from samkv_integrations.engine import Engine
from samkv_integrations.lab.evaluation import is_right
from samkv_integrations.runtimes.transformers.loading import load_model
from tests.support.models import tiny_model


def test_scores_are_the_most_attention_while_the_context_is_repeated() -> None:
    model, suffix, first = tiny_model("llama"), [7, 8], 5
    ids = model.tokenize("He said that the ferry leaves at nine.", special=True)
    repeat = [*model.tokenize("\n\nRepeat the previous context exactly.", special=False), *suffix]
    cache = Cache()
    with torch.inference_mode():
        compute(model, cache, ids)
        found = importance(model, cache, ids[first:], suffix)
        hf = copy.deepcopy(model.hf)
        hf.set_attn_implementation("eager")
        out = hf(torch.tensor([[*ids, *repeat, *ids[first:]]]), output_attentions=True)
    seen = torch.stack(out.attentions)[:, 0, :, len(ids) :, first : len(ids)]  # (L, H, R, C)
    expected = seen.unflatten(1, (model.n_kv_heads, -1)).amax((2, 3))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_entries_that_are_not_kept_are_not_attended_to() -> None:
    """Against a cache without them; every head keeps the same ones here."""
    model = tiny_model("llama")
    cache, kept = Cache(), torch.arange(20) % 3 > 0
    with torch.inference_mode():
        compute(model, cache, range(40, 60))
        of_heads = kept.expand(model.n_layers, model.n_kv_heads, -1)
        short = [(keys[:, kept], values[:, kept]) for keys, values in cache]
        found = compute(model, list(cache), [9], of_heads)
        # same position: padding of kept entries that are not seen at all
        padded = [(torch.cat((k, k[:, :7]), 1), torch.cat((v, v[:, :7]), 1)) for k, v in short]
        few = torch.arange(20) < len(short[0][0][0])
        expected = compute(model, padded, [9], few.expand_as(of_heads))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_all_entries_are_full_prefill() -> None:
    model = load_model("builtin", device="cpu", dtype="float32")
    engine = Engine(model, prefix_bytes=0)
    for question in load()[:3]:
        prompt = question.prompt(chat=model.has_chat_template)
        options = {"method": "recompute", "max_new_tokens": question.max_new_tokens}
        whole = engine.generate(prompt, list(question.documents), **options).text
        with torch.inference_mode():
            text, few = answers(model, question, [1.0, 0.1])
        # an answer ends as soon as it is right
        right = is_right(text, question.answers)
        assert whole.startswith(text) if right else text.strip() == whole.strip()
        assert few != text or right
