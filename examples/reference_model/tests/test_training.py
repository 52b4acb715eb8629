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
from reference_model.optimiser import orthogonal
from reference_model.packing import Batch, Encoded, encode, pack
from reference_model.prompts import Asked, Prompt
from reference_model.scenes import Mention, Value

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


LAYERS = {"mention": 1, "bridge": 2, "subject": 2}


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


def test_rows_attended_a_few_at_a_time_give_the_same(tokenizer: Tokenizer) -> None:
    network = tiny(tokenizer)
    prompts = [encode(tokenizer, prompt(number, questions=5)) for number in range(2)]
    whole, sliced = packed(prompts, rows=10_000), packed(prompts, rows=7)
    assert [len(parts) for parts in whole.rows] == [2, 2]
    assert all(len(parts) > 20 for parts in sliced.rows)
    found = {}
    for name, batch in (("whole", whole), ("sliced", sliced)):
        hints = {hint: torch.ones(64) for hint in train.HINTS}
        loss, _, _ = train.losses(network, hints, batch, layers=LAYERS)
        loss.backward()
        found[name] = {key: value.grad for key, value in network.parameters.items()}
        for value in network.parameters.values():
            value.grad = None
    torch.testing.assert_close(logits(network, sliced), logits(network, whole))
    torch.testing.assert_close(found["sliced"], found["whole"], atol=1e-5, rtol=1e-4)


def test_added_layers_and_tokens_leave_the_function_unchanged(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    network = tiny(tokenizer)
    network.save(tmp_path / "model", BUILTIN)
    more = json.loads((BUILTIN / "tokenizer.json").read_text("utf-8"))
    pieces = tokenizer.encode(" Quixotania", add_special_tokens=False).ids
    assert len(pieces) > 1
    vocabulary = more["model"]["vocab"]
    vocabulary["ĠQuixotania"] = len(vocabulary)
    for number in range(40):  # past the padding
        vocabulary[f"<new {number}>"] = len(vocabulary)
    grown = Tokenizer.from_str(json.dumps(more))

    def load(layers: int, chosen: Tokenizer) -> Network:
        return Network.load(
            tmp_path / "model",
            layers=layers,
            tokenizer=chosen,
            positions=2048,
            dtype=torch.float32,
        )

    before, after = load(3, tokenizer), load(5, grown)
    assert after.shape.layers == 5 and after.shape.vocabulary == VOCABULARY + 32
    batch = packed([encode(tokenizer, prompt())])
    same = tokenizer.get_vocab_size()
    torch.testing.assert_close(logits(after, batch)[:, :same], logits(before, batch)[:, :same])

    embedding = after.parameters[EMBEDDING].detach()
    mean = before.parameters[EMBEDDING].detach()[pieces].mean(0)
    torch.testing.assert_close(embedding[vocabulary["ĠQuixotania"]], mean)
    queries = "model.layers.{}.self_attn.q_proj.weight"
    for copied, added in ((1, 3), (2, 4)):
        first = after.parameters[queries.format(copied)]
        assert torch.equal(first, after.parameters[queries.format(added)])
    with pytest.raises(ValueError, match="--layers may be 3 to 6, not 7"):
        load(7, tokenizer)


def test_hints_and_answers_stand_at_the_right_tokens(tokenizer: Tokenizer) -> None:
    prompts = [encode(tokenizer, prompt(number, questions=2)) for number in range(2)]
    batch = packed(prompts)
    tokens = batch.tokens.tolist()

    def shown(places: Any) -> list[tuple[str, str]]:
        """The text before a place and at it, and the token that is to be predicted there."""
        return [
            (tokenizer.decode(tokens[place - 1 : place + 1]), tokenizer.id_to_token(target))
            for place, target in zip(places.places.tolist(), places.targets.tolist(), strict=True)
        ]

    berlin, ann = (
        tokenizer.encode(" " + name, add_special_tokens=False).tokens[0]
        for name in ("Berlin", "Ann")
    )
    assert berlin.startswith("Ġ") and ann.startswith("Ġ")
    assert [(text.strip(), target) for text, target in shown(batch.mentions)] == [
        ("same company", berlin)
    ] * 2
    assert [text.endswith("Ann") and target == ann for text, target in shown(batch.bridges)] == [
        True,
        True,
    ]
    assert shown(batch.subjects) == [("Answer:", ann)] * 2
    answers: list[str] = []
    for question in range(4):
        ids = batch.answers.targets[batch.question_of == question].tolist()
        answers.append(tokenizer.decode(ids, skip_special_tokens=False))
    assert answers == [" tea 0<|eos|>", " tea 1<|eos|>"] * 2
    assert shown(batch.answers)[0][0] == "Answer:"
    for place, target in zip(
        batch.others.places.tolist(), batch.others.targets.tolist(), strict=True
    ):
        assert tokens[place + 1] == target
    assert not set(batch.others.places.tolist()) & set(batch.answers.places.tolist())


def test_a_loss_is_the_weighted_sum_of_its_parts(tokenizer: Tokenizer) -> None:
    network = tiny(tokenizer)
    hints = {name: torch.ones(64, requires_grad=True) for name in train.HINTS}
    batch = packed([encode(tokenizer, prompt(questions=3))])
    loss, means, exact = train.losses(network, hints, batch, layers=LAYERS)
    expected = (
        means["answer loss"]
        + 0.2 * means["other loss"]
        + 0.5 * (means["mention loss"] + means["bridge loss"] + means["subject loss"])
    )
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    assert [(kind, k) for kind, k, _ in exact] == [
        ("single-hop", 2),
        ("two-hop", 3),
        ("single-hop", 4),
    ]
    predicted = logits(network, batch)
    answers = batch.answers
    right = predicted[answers.places].argmax(-1) == answers.targets
    for question, (_, _, hit) in enumerate(exact):
        assert hit == bool(right[batch.question_of == question].all())
    own = torch.nn.functional.cross_entropy(predicted[answers.places], answers.targets)
    assert means["answer loss"] == pytest.approx(float(own), rel=1e-5)


@pytest.mark.parametrize("subject_layer", [2, 3])  # 3: the last layer's head, as none follows
def test_the_pointer_is_the_attention_of_a_head_to_where_the_answer_stands(
    tokenizer: Tokenizer, tmp_path: Path, subject_layer: int
) -> None:
    network = tiny(tokenizer)
    network.save(tmp_path / "model", BUILTIN)
    encoded = []
    for number in range(2):
        one = prompt(number, questions=4)
        value = Value(end=one.context.index("tea") + 1, name="Ann", fact="product")
        asked = tuple(replace(q, fact="product" if q.subject else "") for q in one.questions)
        encoded.append(encode(tokenizer, replace(one, values=(value,), questions=asked)))
    batch = packed(encoded)
    hints = {name: torch.ones(64) for name in train.HINTS}
    layers = LAYERS | {"subject": subject_layer}
    _, means, _ = train.losses(network, hints, batch, layers=layers)

    model = LlamaForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, attn_implementation="eager"
    )
    state = {name: value.detach() for name, value in network.parameters.items()}
    model.load_state_dict(state | {"lm_head.weight": state[EMBEDDING]})
    expected = []
    for one in encoded:
        for question in one.questions:
            if question.source is None:
                continue
            assert tokenizer.decode([one.context[question.source]]) == " tea"
            ids = torch.tensor([one.context + question.ids])
            with torch.no_grad():
                attention = model(ids, output_attentions=True).attentions[2][0, 0]
            row = attention[len(one.context) + question.answer - 1, : len(one.context)]
            expected.append(float(row[question.source] / row.sum()))
    assert len(expected) == 4
    assert means["pointer"] == pytest.approx(sum(expected) / 4, rel=1e-3)


def test_updates_of_matrices_are_about_orthogonal() -> None:
    for size in ((2, 48, 96), (2, 96, 48)):
        found = orthogonal(torch.randn(size, generator=torch.Generator().manual_seed(1))).float()
        values = torch.linalg.svdvals(found)
        assert values.min() > 0.6 and values.max() < 1.3


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


def test_a_gate_holds_until_its_kind_is_answered(options: train.Options) -> None:
    one = train.Trainer(options, [OneFact("easy", gates={"two-hop": 0.5}), OneFact("hard")])
    wrong = [("two-hop", 3, False), ("two-hop", 1, True), ("single-hop", 4, True)]
    report = train.Report(means={}, exact=wrong, tokens=9, seconds=1.0, stop=False)
    for _ in range(5):
        one.progress.add([report])
    assert one.progress.running["two-hop"].value == 0  # alone with its answer, it does not count
    assert one.progress.running["two-hop 1"].value == 1
    assert not one.progress.passes(one.stages[0].gates)
    right = replace(report, exact=[("two-hop", 3, True)])
    for _ in range(40):
        one.progress.add([right, right])
    assert one.progress.passes(one.stages[0].gates)
    assert not one.progress.passes({"two-hop": 0.5, "reference": 0.1})  # not met yet


def test_the_learning_rate_rises_at_the_start_and_falls_to_nothing(options: train.Options) -> None:
    one = train.Trainer(replace(options, minutes=20, decay=10, rate=0.5), [OneFact("easy")])
    assert one.factor() == pytest.approx(0.5 / 60)
    one.progress.step = 100
    assert one.factor() == 0.5
    one.progress.seconds = 15 * 60
    assert one.factor() == pytest.approx(0.25)
    one.progress.seconds = 21 * 60
    assert one.factor() == 0


def test_learning_lowers_the_loss(options: train.Options) -> None:
    one = train.Trainer(options, [OneFact("easy")])
    reports = []
    for _ in range(60):
        reports.append(one.step())
        one.progress.add(reports[-1:])
    for name in ("answer loss", "other loss", "mention loss", "bridge loss", "subject loss"):
        assert reports[-1].means[name] < 0.8 * reports[0].means[name], name
