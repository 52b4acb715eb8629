"""Makes the tokenizer: byte-level BPE in which no token reaches across a line or a document.

``cd examples && python -m reference_model.tokenizer --output tokenizer``

Trains one from the recipe's text, or gives another one more words (``--extend``), and writes the
folder that the training takes as ``--tokenizer``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from reference_model.prompts import BOS, END, EOS, PromptForms
from reference_model.stages import STAGES
from reference_model.world import World

PAD = "<|pad|>"
TURNS = ["<|system|>", "<|user|>", "<|assistant|>", END]
SPECIAL = [PAD, BOS, EOS, *TURNS]
VOCABULARY = 2800
SAMPLES = 4000
POSITIONS = 4096
ANSWER_TOKENS = 16  # most new tokens, unless told otherwise
# A new line is always a token of its own, so the tokens of a document are the same alone and in
# a prompt. Two digits at most, so that numbers are few pieces and no number is one.
WORDS = r"\n| ?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|[^\S\n]+"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role']=='assistant' %}<|assistant|> {{ m['content'] }}<|end|>"
    "{% else %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(
    world: World, forms: PromptForms, seed: int, samples: int = SAMPLES
) -> Tokenizer:
    """A tokenizer for the text of all stages, from about so many prompts."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(f"{stems_of_names(world, forms)}|{WORDS}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1")
    rng = random.Random(seed)
    special = re.compile("|".join(map(re.escape, SPECIAL)))  # never reaches the merges
    texts: list[str] = []
    for stage, _ in itertools.product(STAGES, range(samples // len(STAGES))):
        prompt = stage.draw(world, forms, rng)
        text = prompt.context + "".join(asked.text + asked.answer for asked in prompt.questions)
        texts += special.split(text)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return with_words(tokenizer, world, forms)


def stems_of_names(world: World, forms: PromptForms) -> str:
    """A pattern for the stem of a name, in a text or in a path, if one ending ends the word.

    Names come apart there, whether training draws them or not: merges that were learnt from other
    words would cut one name in thirty elsewhere, and names that are drawn could become one token.
    A name that is a word of the prompts too, such as "Here", stays whole.
    """
    endings = sorted({*itertools.chain(*world.endings.values())})
    names = {stem + ending for stem in world.stems for ending in endings}
    words = {word.strip() for word in _words_of(forms)} | set(world.first_names)
    whole = sorted(words & (names | {name.lower() for name in names}))
    stem, ending, word = ("|".join(each) for each in (world.stems, endings, whole))
    other = rf"(?!(?:{word})(?!\p{{L}}))" if word else ""
    found = rf"(?: ?{other}(?:{stem})|(?<=[/-]){other}(?:{stem.lower()}))"
    return rf"{found}(?=(?:{ending})(?!\p{{L}}))"


def with_words(tokenizer: Tokenizer, world: World, forms: PromptForms) -> Tokenizer:
    """``tokenizer`` with a token for every word of the prompts, first name and stem.

    Tokens that it has keep their ids.
    """
    words = _words_of(forms)
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


def save_tokenizer(tokenizer: Tokenizer, folder: Path, positions: int) -> None:
    """Write a folder for ``AutoTokenizer``, and what a model that has it generates by default.

    Args:
        tokenizer: has all of `SPECIAL`.
        folder: is made if it is not there.
        positions: of the longest prompt, in tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "backend": "tokenizers",
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "extra_special_tokens": TURNS,
        "model_max_length": positions,
        "pad_token": PAD,
        "tokenizer_class": "TokenizersBackend",
    }
    generation = {
        "bos_token_id": tokenizer.token_to_id(BOS),
        "do_sample": False,
        "eos_token_id": [tokenizer.token_to_id(token) for token in (EOS, END)],
        "max_new_tokens": ANSWER_TOKENS,
        "pad_token_id": tokenizer.token_to_id(PAD),
    }
    for name, text in (
        ("tokenizer_config.json", json.dumps(config, indent=2) + "\n"),
        ("generation_config.json", json.dumps(generation, indent=2) + "\n"),
        ("chat_template.jinja", CHAT_TEMPLATE),
    ):
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


def _words_of(forms: PromptForms) -> dict[str, None]:
    """Every word of the prompts, in order, with the space before it if there is one."""
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    fixed = [text for form in forms.forms for _, text in form.messages]
    fixed += [*forms.system, *forms.folders, *forms.endings, *(text for _, text in forms.documents)]
    fixed += ["user: assistant:", "yes no"]
    return dict.fromkeys(
        word
        for text in fixed
        for part in _outside_braces(text)
        for word, _ in split.pre_tokenize_str(part)
    )


def _outside_braces(text: str) -> list[str]:
    """What stands between the {placeholders} of a template."""
    parts, rest = [], text
    while "{" in rest:
        before, _, rest = rest.partition("{")
        parts.append(before)
        rest = rest.partition("}")[2]
    return [*parts, rest]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(prog="reference_model.tokenizer", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--extend", type=Path, help="folder of a tokenizer that keeps its tokens")
    parser.add_argument(
        "--positions",
        type=int,
        default=POSITIONS,
        help=f"tokens of the longest prompt ({POSITIONS})",
    )
    parser.add_argument("--seed", type=int, help="of the text that a tokenizer is trained from (0)")
    options = parser.parse_args(arguments)
    if options.positions < 1:
        parser.error(f"--positions {options.positions}: at least 1 is needed")
    if options.output.exists() and not options.output.is_dir():
        parser.error(f"--output {options.output}: it is a file, and must be a folder or new")
    world, forms = World.load(), PromptForms.load()
    if options.extend is None:
        tokenizer = train_tokenizer(world, forms, options.seed or 0)
    else:
        if options.seed is not None:
            parser.error(f"--seed {options.seed}: --extend trains nothing, so leave it out")
        if not (options.extend / "tokenizer.json").is_file():
            parser.error(f"--extend {options.extend}: it must be a folder with a tokenizer.json")
        tokenizer = Tokenizer.from_file(str(options.extend / "tokenizer.json"))
        missing = [token for token in SPECIAL if tokenizer.token_to_id(token) is None]
        # Words that were added would never be met if merges had to lead to them.
        if missing or not getattr(tokenizer.model, "ignore_merges", False):
            parser.error(
                f"--extend {options.extend}: only a tokenizer that this command made can be"
                " extended: a BPE that ignores merges for whole words, with the tokens "
                + " ".join(SPECIAL)
            )
        tokenizer = with_words(tokenizer, world, forms)
    save_tokenizer(tokenizer, options.output, options.positions)


if __name__ == "__main__":
    main()
