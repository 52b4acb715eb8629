"""The tokenizer: byte-level BPE in which no token reaches across a line or a document."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from reference_model.prompts import BOS, END, EOS, PromptForms
from reference_model.stages import STAGES
from reference_model.world import World

SPECIAL = ["<|pad|>", BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>", END]
VOCABULARY = 2800
SAMPLES = 4000
# A new line is always a token of its own, so the tokens of a document are the same alone and in
# a prompt. Two digits at most, so that numbers are few pieces and no number is one.
WORDS = r"\n| ?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|[^\S\n]+"


def train_tokenizer(world: World, forms: PromptForms, seed: int) -> Tokenizer:
    """A tokenizer for the text of all stages.

    Names must come apart into their stem and their ending, as names of the held-out kind would:
    so whole names are kept away from it, and it sees stems and endings apart.
    """
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1")
    rng = random.Random(seed)
    endings = [*itertools.chain(*world.endings.values())]
    names = {stem + ending for stem in world.stems for ending in endings}
    pieces = [*world.first_names, *world.stems, *endings]
    texts = []
    for stage, _ in itertools.product(STAGES, range(SAMPLES // len(STAGES))):
        prompt = stage.draw(world, forms, rng)
        text = prompt.context + "".join(asked.text + asked.answer for asked in prompt.questions)
        words = (word for word in text.split(" ") if word.strip(".,?\n]") not in names)
        texts.append(" ".join(words))
    texts += [f"{piece} {piece}" for piece in pieces for _ in range(SAMPLES // 100)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return with_words(tokenizer, world, forms)


def with_words(tokenizer: Tokenizer, world: World, forms: PromptForms) -> Tokenizer:
    """``tokenizer`` with a token for every word of the prompts and for every piece of a name."""
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    fixed = [text for form in forms.forms for _, text in form.messages]
    fixed += [*forms.system, *forms.folders, *forms.endings, *(text for _, text in forms.documents)]
    fixed += ["user: assistant:", "yes no"]
    words = dict.fromkeys(
        word
        for text in fixed
        for part in _outside_braces(text)
        for word, _ in split.pre_tokenize_str(part)
    )
    words |= dict.fromkeys(
        word for piece in [*world.first_names, *world.stems] for word in (piece, f" {piece}")
    )
    data: dict[str, Any] = json.loads(tokenizer.to_str())
    vocabulary: dict[str, int] = data["model"]["vocab"]
    for word in words:
        pieces = tokenizer.encode(word, add_special_tokens=False).tokens
        if len(pieces) > 1:
            vocabulary.setdefault("".join(pieces), len(vocabulary))
    return Tokenizer.from_str(json.dumps(data))


def _outside_braces(text: str) -> list[str]:
    """What stands between the {placeholders} of a template."""
    parts, rest = [], text
    while "{" in rest:
        before, _, rest = rest.partition("{")
        parts.append(before)
        rest = rest.partition("}")[2]
    return [*parts, rest]


def save_tokenizer(tokenizer: Tokenizer, folder: Path, like: Path) -> None:
    """Write ``tokenizer`` with the settings and the chat template of the folder ``like``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((like / name).read_bytes())
