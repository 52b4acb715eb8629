"""Trains the built-in model: ``cd examples && python -m reference_model.train --output ...``.

The same command again goes on where the last one stopped, whatever stopped it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the other process has its own work

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException, spawn
from transformers.utils.logging import disable_progress_bar

from reference_model.network import NORM, Network, Shape, padded
from reference_model.optimiser import Optimiser
from reference_model.packing import Batch, Encoded, encode, pack
from reference_model.prompts import Prompt, PromptForms
from reference_model.stages import STAGES
from reference_model.world import World

BUILTIN = Path(__file__).parents[2] / "samkv_integrations" / "assets" / "builtin"
SCRATCH = "scratch"
WARM_STEPS = 60  # the learning rates rise over the first steps of a run
STAGE_STEPS = 40  # at least, so that the running exact match is the stage's own
SAVE_SECONDS = 120.0
LOG_SECONDS = 20.0
# Keep freed memory: a step frees and allocates hundreds of megabytes, and a page that comes back
# from the kernel is cleared first. Half of the time of a step on a CPU went there.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "4000000000", "MALLOC_TRIM_THRESHOLD_": "8000000000"}
LM_WEIGHT = 0.2
HINT_WEIGHT = 0.5
POINTER_WEIGHT = 0.2
HINTS = ("mention", "bridge", "subject")
BUCKETS = ((10, "10+"), (6, "6-9"), (4, "4-5"), (2, "2-3"), (1, "1"))


class DrawnFrom(Protocol):
    """A stage as the training needs it."""

    @property
    def name(self) -> str: ...

    @property
    def gates(self) -> dict[str, float]: ...

    def draw(self, rng: random.Random) -> Prompt: ...


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command was asked for; see ``--help``."""

    output: Path
    start: str = SCRATCH
    tokenizer: Path = BUILTIN
    layers: int = 8
    stage: int = 0
    minutes: float = 60.0
    decay: float = 10.0
    tokens_per_step: int = 2560
    rate: float = 1.0
    mention_layer: int = 3
    bridge_layer: int = 5
    subject_layer: int = 6
    seed: int = 1
    processes: int = 2
    device: str = "cpu"

    @property
    def fixed(self) -> dict[str, object]:
        """What a run cannot change when it goes on."""
        names = ("start", "tokenizer", "layers", *(f"{hint}_layer" for hint in HINTS), "seed")
        return {name: str(getattr(self, name)) for name in names}


@dataclass
class Running:
    """A mean of all values at first, later of about the last 33."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) * max(0.03, 1 / self.count)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a process tells the others after a step.

    means: losses and hint accuracies, by name.
    exact: kind, k and whether every token of the answer was right, of every question.
    tokens: that it learnt from.
    seconds: that the step took.
    stop: whether the process was told to end.
    """

    means: dict[str, float]
    exact: list[tuple[str, int, bool]]
    tokens: int
    seconds: float
    stop: bool


@dataclass
class Progress:
    """Where the run stands; the same in every process, as all add the same reports.

    running: means since the stage began: losses, hint accuracies, and exact match as
        "kind 4-5" by the number of competing entities, and "kind" for two or more.
    """

    stage: int
    step: int = 0
    stage_step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    running: dict[str, Running] = field(default_factory=dict)

    def add(self, reports: Sequence[Report]) -> None:
        self.step += 1
        self.stage_step += 1
        self.tokens += sum(report.tokens for report in reports)
        self.seconds += reports[0].seconds
        values: dict[str, list[float]] = {}
        for report in reports:
            for name, mean in report.means.items():
                values.setdefault(name, []).append(mean)
            for kind, k, right in report.exact:
                bucket = next(name for least, name in BUCKETS if k >= least)
                values.setdefault(f"{kind} {bucket}", []).append(float(right))
                if k >= 2:
                    values.setdefault(kind, []).append(float(right))
        for name, found in values.items():
            self.running.setdefault(name, Running()).add(sum(found) / len(found))

    def passes(self, gates: dict[str, float]) -> bool:
        """Whether every kind is answered well enough to leave the stage."""
        if self.stage_step < STAGE_STEPS:
            return False
        return all(
            kind in self.running and self.running[kind].value > least
            for kind, least in gates.items()
        )

    def next_stage(self) -> None:
        self.stage += 1
        self.stage_step = 0
        self.running = {}

    def state(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Progress:
        running = {name: Running(**value) for name, value in state["running"].items()}
        return cls(**(state | {"running": running}))


class Feed:
    """Batches of about as many tokens each."""

    def __init__(self, tokenizer: Tokenizer, positions: int, tokens: int) -> None:
        self._tokenizer, self._positions, self._tokens = tokenizer, positions, tokens
        self._waiting: Encoded | None = None

    def draw(self, stage: DrawnFrom, rng: random.Random) -> list[Encoded]:
        """Prompts that fit together; one that alone is longer comes alone."""
        found: list[Encoded] = []
        while True:
            prompt = self._waiting or self._encoded(stage, rng)
            self._waiting = None
            if found and sum(one.size for one in [*found, prompt]) > self._tokens:
                self._waiting = prompt
                return found
            found.append(prompt)

    def _encoded(self, stage: DrawnFrom, rng: random.Random) -> Encoded:
        encoded = encode(self._tokenizer, stage.draw(rng))
        if encoded.longest > self._positions:
            raise SystemExit(
                f"stage {stage.name} drew a prompt of {encoded.longest} tokens, and the tokenizer's"
                f" folder allows {self._positions}: raise model_max_length in its"
                " tokenizer_config.json, or draw shorter prompts"
            )
        return encoded


class Trainer:
    """One process of a run."""

    def __init__(self, options: Options, stages: Sequence[DrawnFrom], rank: int = 0) -> None:
        self.options, self.stages, self.rank = options, stages, rank
        self.stopping = False
        self._tokenizer = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))
        config = json.loads((options.tokenizer / "tokenizer_config.json").read_text("utf-8"))
        positions = config["model_max_length"]
        if options.start == SCRATCH:
            rows = padded(self._tokenizer.get_vocab_size())
            shape = Shape(vocabulary=rows, positions=positions, layers=options.layers)
            self.network = Network.structured(shape, self._tokenizer, options.seed)
        else:
            self.network = Network.load(
                Path(options.start),
                layers=options.layers,
                tokenizer=self._tokenizer,
                positions=positions,
            )
        self.network.to(options.device)
        # What reads a layer's state as an entity; of use in training only, and never exported.
        self.hints = {
            name: torch.ones(self.network.shape.width, device=options.device, requires_grad=True)
            for name in HINTS
        }
        self.parameters = self.network.parameters | {
            f"hint.{name}": value for name, value in self.hints.items()
        }
        self.optimiser = Optimiser(self.parameters, rank=rank, processes=options.processes)
        self.rng = random.Random(f"{options.seed} {rank}")
        self.feed = Feed(self._tokenizer, positions, options.tokens_per_step)
        self.progress = Progress(stage=options.stage)
        if self._state_file.exists():
            self._restore()

    def run(self) -> None:
        """Train until the time is over or the process is told to end; then save."""
        began = saved = logged = time.monotonic()
        tokens = self.progress.tokens
        stop = False
        while not stop and self.progress.seconds < self.options.minutes * 60:
            reports = self._gathered(self.step())
            self.progress.add(reports)
            stop = any(report.stop for report in reports)
            now = time.monotonic()
            if self.rank == 0 and now - logged >= LOG_SECONDS:
                self._log((self.progress.tokens - tokens) / (now - logged))
                logged, tokens = now, self.progress.tokens
            self._leave_stage()
            if self._agreed(now - saved >= SAVE_SECONDS):
                self.save()
                saved = now
        self.save()
        if self.rank == 0:
            self._say(f"stopped after {(time.monotonic() - began) / 60:.1f} minutes")

    def step(self) -> Report:
        """Learn from one batch."""
        began = time.monotonic()
        stage = self.stages[self.progress.stage]
        batch = pack(self.feed.draw(stage, self.rng), self.rng, device=self.options.device)
        loss, means, exact = losses(
            self.network,
            self.hints,
            batch,
            layers={hint: getattr(self.options, f"{hint}_layer") for hint in HINTS},
        )
        loss.backward()
        self.optimiser.step(self.factor())
        return Report(
            means=means,
            exact=exact,
            tokens=len(batch.tokens),
            seconds=time.monotonic() - began,
            stop=self.stopping,
        )

    def factor(self) -> float:
        """Of the learning rates: up over the first steps, down to 0 over the last minutes."""
        left = self.options.minutes - self.progress.seconds / 60
        warm = (self.progress.step + 1) / WARM_STEPS
        down = left / self.options.decay if self.options.decay else 1.0
        return self.options.rate * max(0.0, min(1.0, warm, down))

    def save(self) -> None:
        """Write the state and the model; all processes must call it together."""
        optimiser = self.optimiser.state()
        generators = self._gathered(self.rng.getstate())
        if self.rank:
            return
        self.options.output.mkdir(parents=True, exist_ok=True)
        state = {
            "fixed": self.options.fixed,
            "parameters": {name: value.detach() for name, value in self.parameters.items()},
            "optimiser": optimiser,
            "generators": generators,
            "progress": self.progress.state(),
        }
        written = self._state_file.with_suffix(".new")
        torch.save(state, written)
        os.replace(written, self._state_file)
        self._export("model")

    @property
    def _state_file(self) -> Path:
        return self.options.output / "state.pt"

    def _restore(self) -> None:
        state = torch.load(self._state_file, map_location=self.options.device, weights_only=True)
        differing = [
            f"--{name.replace('_', '-')} was {state['fixed'][name]}, not {value}"
            for name, value in self.options.fixed.items()
            if state["fixed"][name] != value
        ]
        if differing:
            raise SystemExit(
                f"{self.options.output} holds another run: {'; '.join(differing)}."
                " Go on with the same options, or choose another --output"
            )
        with torch.no_grad():
            for name, value in self.parameters.items():
                value.copy_(state["parameters"][name])
        self.optimiser.restore(state["optimiser"])
        if self.rank < len(state["generators"]):
            version, numbers, gauss = state["generators"][self.rank]
            self.rng.setstate((version, tuple(numbers), gauss))
        self.progress = Progress.restored(state["progress"])

    def _export(self, name: str) -> None:
        self.network.save(self.options.output / name, self.options.tokenizer)

    def _leave_stage(self) -> None:
        stage = self.stages[self.progress.stage]
        last = self.progress.stage == len(self.stages) - 1
        if last or not self.progress.passes(stage.gates):
            return
        if self.rank == 0:
            self._export(f"after-{stage.name}")
            minutes = self.progress.seconds / 60
            self._say(f"stage {stage.name} is passed after {minutes:.1f} minutes")
        self.progress.next_stage()

    def _gathered(self, mine: Any) -> list[Any]:
        """The same from every process, in order of rank."""
        if self.options.processes == 1:
            return [mine]
        found: list[Any] = [None] * self.options.processes
        dist.all_gather_object(found, mine)
        return found

    def _agreed(self, mine: bool) -> bool:
        """What the first process says."""
        return bool(self._gathered(mine)[0])

    def _log(self, rate: float) -> None:
        progress = self.progress
        row = {
            "minutes": round(progress.seconds / 60, 2),
            "step": progress.step,
            "stage": self.stages[progress.stage].name,
            "tokens": progress.tokens,
            "tokens_per_second": round(rate),
            "rate": round(self.factor(), 3),
            **{name: round(mean.value, 3) for name, mean in sorted(progress.running.items())},
        }
        self.options.output.mkdir(parents=True, exist_ok=True)
        with (self.options.output / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self._say("  ".join(f"{name} {value}" for name, value in row.items()))

    def _say(self, text: str) -> None:
        print(text, flush=True)


def losses(
    network: Network, hints: dict[str, Tensor], batch: Batch, *, layers: dict[str, int]
) -> tuple[Tensor, dict[str, float], list[tuple[str, int, bool]]]:
    """Cross entropy of answers, of a share of the other tokens, and of the hints.

    The hints are deep supervision: half way up, where the text says "the same company" or "the
    town where she works", the state is to know the name. Without them a second lookup has nothing
    to build on until the first is perfect, and is not found.

    Args:
        network: predicts.
        hints: weight of the norm before the embedding, by kind of hint.
        batch: its answers are never empty.
        layers: number of layers after which a hint is asked for, by kind of hint.

    Returns:
        The loss; losses and hint accuracies by name; kind, k and exact match of every question.
    """
    last = network.shape.layers
    layers = {name: min(layer, last) for name, layer in layers.items()}
    pointer = min(layers["subject"], last - 1)
    after = [last, pointer, *layers.values()]
    states = network.states(batch.tokens, batch.positions, batch.rows, after)
    norm = network.parameters[NORM]
    parts = {
        "answer": (norm, batch.answers, last, 1.0),
        "other": (norm, batch.others, last, LM_WEIGHT),
        "mention": (hints["mention"], batch.mentions, layers["mention"], HINT_WEIGHT),
        "bridge": (hints["bridge"], batch.bridges, layers["bridge"], HINT_WEIGHT),
        "subject": (hints["subject"], batch.subjects, layers["subject"], HINT_WEIGHT),
    }
    pointed = pointing(network, states[pointer], batch, pointer)
    logits = network.logits(
        [(weight, states[layer][places.places]) for weight, places, layer, _ in parts.values()]
    )
    targets = torch.cat([places.targets for _, places, _, _ in parts.values()])
    sizes = [len(places.targets) for _, places, _, _ in parts.values()]
    each = F.cross_entropy(logits, targets, reduction="none").split(sizes)
    right = (logits.detach().argmax(-1) == targets).split(sizes)

    loss = logits.new_zeros(())
    means: dict[str, float] = {}
    for (name, (_, _, _, share)), values, hits in zip(parts.items(), each, right, strict=True):
        if len(values):
            loss = loss + share * values.mean()
            means[f"{name} loss"] = float(values.detach().mean())
            if name in HINTS:
                means[f"{name} hint"] = float(hits.float().mean())
    if len(pointed):
        loss = loss + POINTER_WEIGHT * -pointed.mean()
        means["pointer"] = float(pointed.detach().exp().mean())
    wrong = torch.zeros(len(batch.questions), device=logits.device)
    wrong.index_add_(0, batch.question_of, 1.0 - right[0].float())
    exact = [
        (kind, k, missed == 0)
        for (kind, k), missed in zip(batch.questions, wrong.tolist(), strict=True)
    ]
    return loss, means, exact


def pointing(network: Network, hidden: Tensor, batch: Batch, layer: int) -> Tensor:
    """Logarithm of the attention that a layer's first head gives to the answer, by question.

    The last hint: once the state knows whom to look up, one head is shown where that stands. All
    facts are looked up there then, whether the question named the entity or led to it.
    """
    found = [hidden.new_zeros(0, dtype=torch.float32)]
    for part in batch.pointers:
        scores = network.scores(layer, hidden, batch.positions, part.asking, part.start, part.stop)
        found.append(-F.cross_entropy(scores, part.sources, reduction="none"))
    return torch.cat(found)


@dataclass(frozen=True, kw_only=True)
class WorldStage:
    """A stage of ``stages.py`` with the world that it draws from."""

    index: int
    world: World
    forms: PromptForms

    @property
    def name(self) -> str:
        return STAGES[self.index].name

    @property
    def gates(self) -> dict[str, float]:
        return STAGES[self.index].gates

    def draw(self, rng: random.Random) -> Prompt:
        return STAGES[self.index].draw(self.world, self.forms, rng)


def work(rank: int, options: Options, rendezvous: str) -> None:
    """One process of a run, from start to end."""
    disable_progress_bar()  # every save would show one
    if options.device == "cpu":
        torch.set_num_threads(1)  # a process a core beats threads that wait for each other
    if options.processes > 1:
        dist.init_process_group(
            "gloo", init_method=rendezvous, rank=rank, world_size=options.processes
        )
    world, forms = World.load(), PromptForms.load()
    stages = [WorldStage(index=index, world=world, forms=forms) for index in range(len(STAGES))]
    trainer = Trainer(options, stages, rank)
    stop_on_signals(trainer)
    if rank == 0:
        count = sum(value.numel() for value in trainer.network.parameters.values())
        print(f"{count:,} parameters; {trainer.progress.step} steps done", flush=True)
    trainer.run()
    if options.processes > 1:
        dist.destroy_process_group()


def stop_on_signals(trainer: Trainer) -> None:
    """End after the step at hand, with everything saved, when told to."""

    def stop(*_: object) -> None:
        trainer.stopping = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def launch(options: Options) -> None:
    """Run all processes, and pass signals on to them."""
    if options.processes == 1:
        work(0, options, "")
        return
    for name, value in ALLOCATOR.items():
        os.environ.setdefault(name, value)  # glibc reads them when a process starts
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{folder}/meeting"
        context = spawn(work, (options, rendezvous), options.processes, join=False)

        def pass_on(*_: object) -> None:
            for process in context.processes:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGTERM)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, pass_on)
        try:
            while not context.join():
                pass
        except ProcessExitedException as error:  # which has said why itself
            raise SystemExit(error.exit_code) from None


def options_from(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="reference_model.train", description=__doc__)
    cuda = torch.cuda.is_available()
    default = Options(output=Path())

    def option(name: str, kind: type, text: str, value: object = None) -> None:
        found = getattr(default, name.replace("-", "_")) if value is None else value
        parser.add_argument(f"--{name}", type=kind, default=found, help=f"{text} ({found})")

    parser.add_argument("--output", type=Path, required=True, help="folder of state, log and model")
    option("start", str, "'scratch', or the folder of a model to go on from")
    option("tokenizer", Path, "folder with tokenizer.json and its company")
    option("layers", int, "of the network; more than a model has are added to it")
    option("stage", int, f"to begin at, 0 to {len(STAGES) - 1}")
    option("minutes", float, "of training, over all runs")
    option("decay", float, "minutes at the end over which the learning rates fall to 0")
    option("tokens-per-step", int, "in every process; a longer prompt makes a step of its own")
    option("rate", float, "factor of the learning rates")
    option("mention-layer", int, "layers that have run where a mention is to be understood")
    option("bridge-layer", int, "layers that have run where a question's bridge is to be")
    option("subject-layer", int, "layers that have run where it is to be clear whom to look up")
    option("seed", int, "of the weights and of the data")
    option("processes", int, "that share a step; one on a GPU", 1 if cuda else 2)
    option("device", str, "cpu or cuda", "cuda" if cuda else "cpu")
    chosen = Options(**vars(parser.parse_args(arguments)))
    if not 0 <= chosen.stage < len(STAGES):
        parser.error(f"--stage must be 0 to {len(STAGES) - 1}, not {chosen.stage}")
    if chosen.processes < 1 or (chosen.device != "cpu" and chosen.processes > 1):
        parser.error(f"--processes {chosen.processes}: 1 or more on a CPU, 1 on a GPU")
    return chosen


if __name__ == "__main__":
    launch(options_from())
