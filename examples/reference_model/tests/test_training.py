"""The recipe of the built-in model trains what it says, and goes on where it stopped."""

from __future__ import annotations

import json
import os
import random
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from reference_model import train
from reference_model.network import EMBEDDING, NORM, Network, Shape, padded
from reference_model.packing import Batch, Encoded, encode, pack
from reference_model.prompts import Asked, Prompt
from reference_model.scenes import Mention

BUILTIN = train.BUILTIN
VOCABULARY = padded(Tokenizer.from_file(str(BUILTIN / "tokenizer.json")).get_vocab_size())
SIZES: dict[str, Any] = {
    "vocabulary": VOCABULARY,
    "positions": 2048,
    "width": 64,
    "head_width": 16,
    "feed_forward": 96,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUILTIN / "tokenizer.json"))


def tiny(tokenizer: Tokenizer, layers: int = 3) -> Network:
    """A network in float32, with biases and norms that are not what they start as."""
    network = Network.structured(Shape(layers=layers, **SIZES), tokenizer, seed=5)
    generator = torch.Generator().manual_seed(6)
    parameters = {
        name: value.detach() + 0.1 * torch.randn(value.shape, generator=generator)
        if value.ndim == 1
        else value
        for name, value in network.parameters.items()
    }
    return Network(network.shape, parameters, dtype=torch.float32)


def prompt(number: int = 0, questions: int = 3) -> Prompt:
    """Two facts; the second names its company only by reference, after letters of two bytes."""
    text = (
        f"<|bos|>Documents:\n\n[Żółw Café {number}]\nIt is in Berlin.\n\n[Note]\nThe same company"
    )
    context = text + " sells tea.\n\n"
    asked = "\nQuestion: What does the company of Ann sell?\nAnswer:"
    return Prompt(
        context=context,
        mentions=(Mention(end=len(text), name="Berlin"),),
        questions=tuple(
            Asked(
                kind="two-hop" if at % 2 else "single-hop",
                k=2 + at,
                text=asked,
                answer=f" tea {at}<|eos|>",
                subject="Ann" if at % 2 else "",
                bridge=Mention(end=asked.index(" sell"), name="Ann") if at % 2 else None,
            )
            for at in range(questions)
        ),
    )


def packed(prompts: list[Encoded], rows: int = 256) -> Batch:
    return pack(prompts, random.Random(3), dtype=torch.float32, rows=rows)


def logits(network: Network, batch: Batch) -> Tensor:
    """Of every token of a batch."""
    last = network.shape.layers
    states = network.states(batch.tokens, batch.positions, batch.rows, [last])
    return network.logits([(network.parameters[NORM], states[last])]).detach()


def reference(network: Network, folder: Path, ids: list[int]) -> Tensor:
    """What transformers computes with the same weights."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    state = {name: value.detach() for name, value in network.parameters.items()}
    model.load_state_dict(state | {"lm_head.weight": state[EMBEDDING]})
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def test_packed_questions_are_computed_as_if_each_were_alone(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """And as transformers does it, for every token of every question and context."""
    network = tiny(tokenizer)
    network.save(tmp_path / "model", BUILTIN)
    prompts = [encode(tokenizer, prompt(number, questions=4)) for number in range(2)]
    found = logits(network, packed(prompts))
    at = 0
    for one in prompts:
        length = len(one.context)
        context, at = found[at : at + length], at + length
        for question in one.questions:
            expected = reference(network, tmp_path / "model", one.context + question.ids)
            torch.testing.assert_close(context, expected[:length], atol=1e-4, rtol=1e-4)
            packed_question, at = found[at : at + len(question.ids)], at + len(question.ids)
            torch.testing.assert_close(packed_question, expected[length:], atol=1e-4, rtol=1e-4)
    assert at == len(found)


def test_an_exported_folder_loads_as_any_other(tokenizer: Tokenizer, tmp_path: Path) -> None:
    network = tiny(tokenizer)
    network.save(tmp_path / "model", BUILTIN)
    network.save(tmp_path / "model", BUILTIN)  # over the one before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert AutoTokenizer.from_pretrained(tmp_path / "model").bos_token == "<|bos|>"
    exported = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert exported.dtype == torch.bfloat16
    assert exported.config.max_position_embeddings == 2048
    for name, value in network.parameters.items():
        assert torch.equal(exported.state_dict()[name], value.detach().bfloat16()), name
    again = Network.load(tmp_path / "model", layers=3, tokenizer=tokenizer, positions=2048)
    assert again.shape == network.shape


@dataclass
class OneFact:
    """A stage with one prompt, in which the run is told to stop at a draw of choice."""

    name: str
    gates: dict[str, float] = field(default_factory=dict)
    stop_at: int = -1
    drawn: int = 0

    def draw(self, rng: random.Random) -> Prompt:
        self.drawn += 1
        if self.drawn == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return prompt(rng.randrange(3))


def trainer(options: train.Options, stages: list[OneFact]) -> train.Trainer:
    made = train.Trainer(options, stages)
    train.stop_on_signals(made)
    return made


@pytest.fixture
def options(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> train.Options:
    """Of a tiny run in one process, in which a stage may be left at once."""
    tiny(tokenizer, layers=2).save(tmp_path / "start", BUILTIN)
    monkeypatch.setattr(train, "STAGE_STEPS", 2)
    monkeypatch.setattr(train, "LOG_SECONDS", 0.0)
    return train.Options(
        output=tmp_path / "run",
        start=str(tmp_path / "start"),
        layers=2,
        tokens_per_step=150,
        processes=1,
        mention_layer=1,
        bridge_layer=2,
        subject_layer=2,
    )


def test_a_run_that_is_stopped_goes_on_from_its_step_and_stage(options: train.Options) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        first = trainer(options, [OneFact("easy"), OneFact("hard", stop_at=6)])
        first.run()
        again = trainer(options, [OneFact("easy"), OneFact("hard", stop_at=3)])
        assert again.progress == first.progress
        assert again.progress.stage == 1 and again.progress.step >= 4
        assert again.rng.getstate() == first.rng.getstate()
        for name, value in first.parameters.items():
            assert torch.equal(value, again.parameters[name]), name
        momenta = [one.optimiser.state()["momenta"] for one in (first, again)]
        torch.testing.assert_close(momenta[1], momenta[0], atol=0, rtol=0)
        again.run()
        assert again.progress.step > first.progress.step
        assert again.progress.seconds > first.progress.seconds
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

    rows = [json.loads(row) for row in (options.output / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, again.progress.step + 1))
    assert rows[0]["stage"] == "easy" and rows[-1]["stage"] == "hard"
    assert {"single-hop 2-3", "two-hop", "mention hint", "bridge hint", "subject hint"} <= set(
        rows[-1]
    )
    names = {path.name for path in options.output.iterdir()}
    assert names == {"state.pt", "log.jsonl", "model", "after-easy"}
    exported = LlamaForCausalLM.from_pretrained(options.output / "model").state_dict()
    for name, value in again.network.parameters.items():
        assert torch.equal(exported[name], value.detach().bfloat16()), name

    with pytest.raises(SystemExit, match="--seed was 1, not 2"):
        train.Trainer(replace(options, seed=2), [OneFact("easy")])


def test_learning_lowers_the_loss(options: train.Options) -> None:
    one = train.Trainer(options, [OneFact("easy")])
    reports = []
    for _ in range(60):
        reports.append(one.step())
        one.progress.add(reports[-1:])
    for name in ("answer loss", "other loss", "mention loss", "bridge loss", "subject loss"):
        assert reports[-1].means[name] < 0.8 * reports[0].means[name], name
