"""Does `recompute` answer as the LLM that it takes the place of? Counted over the same prompts.

    pip install langchain-huggingface llama-index-llms-huggingface  # into an environment of its own
    python -m benchmarks.same_as_transformers --model FOLDER --sets "package descriptions"

Every row asks a class of this package with ``method="recompute"`` and the class of the framework
that runs the same model by transformers. All chunks are cached before, and found in the prompts, so
that finding them and cutting the prompt there is part of what must change nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from llama_index.core.llms import ChatMessage

from benchmarks.commands import markdown_table as table
from benchmarks.datasets import Question, load
from benchmarks.question_sets import PACKAGES, questions_of
from langchain_samkv import ChatSamKV, SamKV
from llama_index.llms.samkv import SamKVLLM
from samkv_integrations import Engine, collect_reports
from samkv_integrations.cli.formatting import to_json
from samkv_integrations.prompt import rag_prompt
from samkv_integrations.runtimes.transformers.loading import builtin_path, load_model
from samkv_integrations.runtimes.transformers.runtime import Model

MAX_TOKENS = 32
"""Longest answer. To real text the model's are nonsense of this length, which is a harder test."""

BUILTIN = str(builtin_path())
DTYPE = torch.float32

chosen = argparse.Namespace(model=BUILTIN)
"""The command line: the folder of the model, that the classes of others can read as well."""

Answer = Callable[[str], str]
Turn = dict[str, str]

SETS: Mapping[str, Callable[[int], list[Question]]] = {
    "sample questions": lambda number: load(kinds=["single-hop", "reference"])[:number],
    "package descriptions": lambda number: [
        asked.question for asked in questions_of([str(PACKAGES)])[:number]
    ],
}
"""What is asked: questions as in training, and real ones over retrieved text."""


# -- the classes of others -------------------------------------------------------------------


@cache
def model() -> Model:
    """The model, by this package."""
    return load_model(chosen.model, device="cpu", dtype="float32")


def generate(turns: Sequence[Turn]) -> str:
    """Greedy: transformers' own ``generate``, with the chat template, as all of them call it."""
    loaded = model()
    ids = loaded.tokenizer.apply_chat_template(
        list(turns), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    made = loaded.hf.generate(**ids, max_new_tokens=MAX_TOKENS, do_sample=False)
    answer = made[0, ids["input_ids"].shape[1] :]
    return str(loaded.tokenizer.decode(answer, skip_special_tokens=True))


@cache
def _pipeline() -> Any:
    from langchain_huggingface import HuggingFacePipeline

    options = {"max_new_tokens": MAX_TOKENS, "do_sample": False, "return_full_text": False}
    return HuggingFacePipeline.from_model_id(
        model_id=chosen.model,
        task="text-generation",
        model_kwargs={"dtype": DTYPE},
        pipeline_kwargs=options,
    )


def _chat_huggingface() -> Answer:
    from langchain_huggingface import ChatHuggingFace

    llm = ChatHuggingFace(llm=_pipeline())
    return lambda question: str(llm.invoke(question).content)


@cache
def _huggingface_llm() -> Any:
    from llama_index.llms.huggingface import HuggingFaceLLM

    return HuggingFaceLLM(
        model_name=chosen.model,
        tokenizer_name=chosen.model,
        device_map="cpu",
        model_kwargs={"dtype": DTYPE},
        max_new_tokens=MAX_TOKENS,
        generate_kwargs={"do_sample": False},
        is_chat_model=True,
    )


def _completion(prompt: str) -> str:
    """Nothing but the string."""
    return f"{prompt}\nAnswer:"


# -- rows ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two ways to ask, which must answer alike. ours: of an engine, by a method."""

    ours: Callable[[Engine, str], Answer]
    other: Callable[[], Answer]


def _chat_samkv(engine: Engine, method: str) -> Answer:
    llm = ChatSamKV(engine=engine, method=method, max_tokens=MAX_TOKENS)
    return lambda question: str(llm.invoke(question).content)


def _samkv(engine: Engine, method: str) -> Answer:
    llm = SamKV(engine=engine, method=method, max_tokens=MAX_TOKENS)
    return lambda question: str(llm.invoke(_completion(question)))


def _chat_of(llm: Any) -> Answer:
    return lambda question: str(llm.chat([ChatMessage(content=question)]).message.content)


def _completion_of(llm: Any) -> Answer:
    return lambda question: str(llm.complete(_completion(question), formatted=True).text)


def _samkv_llm(engine: Engine, method: str) -> SamKVLLM:
    return SamKVLLM(engine=engine, method=method, max_new_tokens=MAX_TOKENS)


def _generated() -> Answer:
    return lambda question: generate([{"role": "user", "content": question}])


PAIRS: Mapping[str, Pair] = {
    "ChatSamKV and transformers' generate": Pair(ours=_chat_samkv, other=_generated),
    "ChatSamKV and ChatHuggingFace": Pair(ours=_chat_samkv, other=_chat_huggingface),
    "SamKV and HuggingFacePipeline": Pair(
        ours=_samkv, other=lambda: lambda question: str(_pipeline().invoke(_completion(question)))
    ),
    "SamKVLLM and HuggingFaceLLM, chat": Pair(
        ours=lambda engine, method: _chat_of(_samkv_llm(engine, method)),
        other=lambda: _chat_of(_huggingface_llm()),
    ),
    "SamKVLLM and HuggingFaceLLM, complete": Pair(
        ours=lambda engine, method: _completion_of(_samkv_llm(engine, method)),
        other=lambda: _completion_of(_huggingface_llm()),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """How many answers are the same, letter by letter.

    different: how many different answers there are, so that being the same says something.
    found, given: chunks that were found in our prompts, and those that prompts held.
    """

    pair: str
    asked: str
    questions: int
    same: int
    different: int
    found: int
    given: int


def measure(pair: str, asked: str, number: int, method: str = "recompute") -> Row:
    """One row: every question to both, by the same prompt."""
    questions = SETS[asked](number)
    engine = Engine(model())
    ours, other = PAIRS[pair].ours(engine, method), PAIRS[pair].other()
    answers: list[tuple[str, str]] = []
    found = 0
    for question in questions:
        engine.cache_chunks(question.documents)
        prompt = rag_prompt(question.question, question.documents, chat=True)
        text = prompt[-1]["content"]
        with collect_reports() as reports:
            mine = ours(text)
        found += reports.total.found
        answers.append((mine, other(text)))
    return Row(
        pair=pair,
        asked=asked,
        questions=len(questions),
        same=sum(mine == theirs for mine, theirs in answers),
        different=len({mine for mine, _ in answers}),
        found=found,
        given=sum(len(question.documents) for question in questions),
    )


def main() -> None:
    """The table, on standard output."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.same_as_transformers")
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--model", default=BUILTIN, help="a folder, as transformers loads it")
    parser.parse_args(namespace=chosen)
    wanted = product(chosen.pairs, chosen.sets)
    rows = [measure(pair, asked, chosen.questions) for pair, asked in wanted]
    if chosen.json:
        text = to_json("same as transformers", chosen.model, [asdict(row) for row in rows])
        chosen.json.write_text(f"{text}\n", encoding="utf-8")
    cells = [[str(value) for value in asdict(row).values()] for row in rows]
    sys.stdout.write(table(tuple(asdict(rows[0])), cells, left=2) + "\n")


if __name__ == "__main__":
    main()
