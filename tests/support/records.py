"""Small records that compete with each other, and questions the built-in model can answer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from samkv_integrations.runtimes.transformers.loading import load_model
from samkv_integrations.runtimes.transformers.runtime import Model
from tests.support.llama_cpp import of_transformers
from tests.support.tested_runtime import ON_LLAMA_CPP

# What the built-in model was trained on: a user message, and the same as a bare completion.
CHAT_TEMPLATE = "Documents:\n\n{context_str}\n\nQuestion: {query_str}"
COMPLETION_TEMPLATE = CHAT_TEMPLATE + "\nAnswer:"


@dataclass(frozen=True, kw_only=True)
class Record:
    """A company and what one document says about it."""

    name: str
    workers: str
    year: str
    field: str
    product: str
    remark: str

    @property
    def text(self) -> str:
        return (
            f"[{self.name}]\nA total of {self.workers} people work at {self.name}. "
            f"It was started in {self.year}. The main field of {self.name} is {self.field}. "
            f"It makes the {self.product}. {self.remark}"
        )

    @property
    def question(self) -> str:
        return f"How many people work at {self.name}?"


# The remarks differ in length, so that no two records are equally near to a question: their order
# in a prompt is then the same every time, and with it the answer.
_ROWS = """
Breltech Shipping, 3208, 1973, music, Flokane scanner, It was a strange autumn.
Krasplex Systems, 4524, 1885, mining, Fivane printer, Old photographs show the gardens in a quiet \
light.
Dunlux Foundry, 1846, 1930, water, Gokio lamp, There is little else to report about the markets, \
and the archive holds many bright notes on the shops.
Tovdyne Motors, 9400, 1879, fashion, Zelora kettle, It was a quiet autumn for everyone involved.
Hesaris Optics, 831, 1902, robotics, Pevity drone, The archive holds many notes on the markets in \
a difficult light.
Rovonic Dairy, 2815, 1957, health, Skirado camera, There is little else to report about the \
gardens in a strange light. It was a difficult autumn for the schools.
"""
RECORDS = [
    Record(name=name, workers=workers, year=year, field=field, product=product, remark=remark)
    for name, workers, year, field, product, remark in (
        line.split(", ", 5) for line in _ROWS.strip().splitlines()
    )
]
TEXTS = [record.text for record in RECORDS]


@cache
def builtin() -> Model:
    """The built-in model, loaded once, the same on every machine.

    It is so small that a second thread only costs time.
    """
    torch.set_num_threads(1)
    model = load_model("builtin", device="cpu", dtype="float32")
    return of_transformers(model.hf, model.tokenizer, model.name) if ON_LLAMA_CPP else model
