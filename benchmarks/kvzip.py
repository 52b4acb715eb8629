"""Right answers with the KV entries of the context that KVzip keeps: is half of them enough?

    python -m benchmarks kvzip --model MODEL --questions FILE --output RUN

KVzip (arXiv 2505.23416): the model repeats the context, and an entry's score is the most attention
that it gets (section 3, and the authors' code). Entries of all layers and key-value heads compete;
question and answer attend to the best share. Deviation: the documents of one question, computed
together, are the context, repeated in one piece (the code: 2,000 tokens at a time).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from torch.nn.functional import pad
from tqdm.auto import tqdm

from benchmarks.commands import command_line, loaded_model, markdown_table, shares
from benchmarks.datasets import Question
from benchmarks.journal import Journal
from benchmarks.question_sets import questions_of
from samkv_integrations.cli.formatting import commit
from samkv_integrations.errors import InvalidOption
from samkv_integrations.lab.evaluation import Paired, is_right
from samkv_integrations.options import Sampling
from samkv_integrations.runtimes.transformers.runtime import Model

Cache = list[tuple[Tensor, Tensor]]
"""Keys and values (G, S, D) of each layer."""


def compute(
    model: Model, cache: Cache, ids: Sequence[int], kept: Tensor | None = None,
    observe: Callable[[int, Tensor, Tensor, float], None] | None = None,
) -> Tensor:  # fmt: skip
    """Add tokens to the cache; returns the logits of the last one.

    kept: (L, G, n) bool, what they attend to of the first n entries; None for all.
    observe: is given layer, query (G, H/G, R, D), all keys (G, S, D), and scaling.
    """
    n_before = cache[0][0].shape[1] if cache else 0
    at = torch.arange(n_before + len(ids))
    causal = at <= at[n_before:, None]

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        if layer == len(cache):
            cache.append((key[0, :, :0], value[0, :, :0]))
        keys = torch.cat((cache[layer][0], key[0]), 1)
        values = torch.cat((cache[layer][1], value[0]), 1)
        cache[layer] = keys, values
        if observe is not None:
            observe(layer, query[0].unflatten(0, (len(keys), -1)), keys, scaling)
        mask = causal
        if kept is not None:
            mask = causal.repeat(1, model.n_heads, 1, 1)
            of_heads = kept[layer].repeat_interleave(model.n_heads // len(keys), 0)
            mask[..., : kept.shape[2]] &= of_heads[:, None]
        return model.attention(layer, query, keys[None], values[None], scaling, mask, False)

    hidden, rotation = model.embed(torch.tensor([ids])), model.rotation(at[n_before:])
    for layer in range(model.n_layers):
        hidden = model.layer(layer, hidden, *rotation.of(layer), attend)
    return model.logits(hidden[0, -1:])[0]


def importance(model: Model, cache: Cache, context: Sequence[int], suffix: Sequence[int]) -> Tensor:
    """(L, G, C) scores of the context, with which the cache ends. suffix: of a user's message."""
    asked = model.tokenize("\n\nRepeat the previous context exactly.", special=False)
    repeat, scores = [*asked, *suffix, *context], list[Tensor]()
    later = torch.ones(len(repeat), len(repeat), dtype=torch.bool).triu(1)

    def observe(layer: int, query: Tensor, keys: Tensor, scaling: float) -> None:
        logits = (query @ keys[:, None].mT).float() * scaling
        logits[..., -len(repeat) :].masked_fill_(later, -torch.inf)
        first = keys.shape[1] - len(repeat) - len(context)
        scores.append(logits.softmax(-1)[..., first : first + len(context)].amax((1, 2)))

    compute(model, list(cache), repeat, observe=observe)
    return torch.stack(scores)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """First tokens that two prompts share."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


def answers(model: Model, question: Question, keeps: Sequence[float]) -> list[str]:
    """The answer at each share of the context's entries, until it is right."""
    others = replace(question, documents=("#",)), replace(question, question="*")
    ids, no_context, no_question = (
        each.prompt_ids(model, chat=model.has_chat_template) for each in (question, *others)
    )
    first, stop = common(ids, no_context), len(ids) - common(ids[::-1], no_context[::-1])
    suffix, cache, texts = ids[-common(ids[::-1], no_question[::-1]) :], Cache(), list[str]()
    compute(model, cache, ids[:stop])
    scores = importance(model, cache, ids[first:stop], suffix)
    for keep in keeps:
        kept = torch.zeros(scores.numel(), dtype=torch.bool)
        kept[scores.flatten().topk(int(keep * len(kept))).indices] = True
        kept = pad(kept.view_as(scores), (first, 0), value=True)
        own, sampler = list(cache), model.sampler(ids, Sampling.of(), None)
        tokens, text = list[int](), ""
        while len(tokens) < question.max_new_tokens and not is_right(text, question.answers):
            tokens.append(sampler.next(compute(model, own, tokens[-1:] or ids[stop:], kept)))
            if tokens[-1] in model.eos_ids:
                break
            text = model.detokenize(tokens)
        texts.append(text)
    return texts


def kvzip(
    model: Annotated[str, typer.Option(help="Hub id, folder, GGUF file or 'smollm2'.")],
    questions: Annotated[list[str], typer.Option(help="FILE[@FORM][:FIRST-LAST]; again for more.")],
    keep: Annotated[str, typer.Option(help="Shares of the context's entries.")] = ".5,.3",
    dtype: Annotated[str, typer.Option(help="Of the model.")] = "bfloat16",
    output: Annotated[Path, typer.Option(help="Folder of the run.")] = Path(".samkv/kvzip"),
) -> None:
    """Right answers with the KV entries of the context that KVzip keeps."""
    keeps, loaded = [1.0, *shares("--keep", keep)], loaded_model(model, "cpu", dtype)
    labels = [f"kvzip {share:g}" for share in keeps]
    if any(loaded.windows) or not loaded.scores_plainly:
        raise InvalidOption(f"{model!r} has windows, sinks or bounded scores; name another model")
    settings = {"model": loaded.name, "dtype": dtype, "labels": labels}
    with Journal(output, settings) as journal, torch.inference_mode():
        for one in tqdm(questions_of(questions), desc="asking"):
            if (one.question.id, labels[-1]) in journal.rows:
                continue
            for label, text in zip(labels, answers(loaded, one.question, keeps), strict=True):
                right = is_right(text, one.question.answers)
                journal.add({"id": one.question.id, "label": label, "kind": one.kind,
                             "right": right, "text": text, "commit": commit()})  # fmt: skip
        rows = list(journal.rows.values())
    rights = [[row["right"] for row in rows if row["label"] == label] for label in labels]
    pairs = [Paired.of(right, rights[0]) for right in rights]
    cells = [
        [label, f"{pair.right} of {pair.questions}", f"{pair.lost}, {pair.won}", pair.points]
        for label, pair in zip(labels, pairs, strict=True)
    ]
    typer.echo(markdown_table(("kept", "right", "lost, won", "points (95 %)"), cells))


app = command_line(kvzip)
main = app
