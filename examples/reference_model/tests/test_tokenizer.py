"""The tokenizer of the recipe: texts come back as they were, and transformers loads its folder."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig

from reference_model import tokenizer as recipe
from reference_model.network import TOKENIZER_FILES
from reference_model.prompts import PromptForms
from reference_model.stages import STAGES
from reference_model.tokenizer import SPECIAL, main, train_tokenizer
from reference_model.world import World

WORLD = World.load()
FORMS = PromptForms.load()


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_tokenizer(WORLD, FORMS, seed=0, samples=60)


def test_text_comes_back_as_it_was(trained: Tokenizer) -> None:
    texts = ["Żółw Café 🐢\t1896\r\n  two  spaces \n", "", "Xylophone-ish: €12.50 (50%)"]
    rng = random.Random(1)
    for stage in STAGES:
        prompt = stage.draw(WORLD, FORMS, rng)
        texts += [prompt.context, *(q.text + q.answer for q in prompt.questions)]
    for text in texts:
        ids = trained.encode(text, add_special_tokens=False).ids
        assert trained.decode(ids, skip_special_tokens=False) == text


def test_the_same_seed_gives_the_same_tokenizer() -> None:
    one, again, other = (train_tokenizer(WORLD, FORMS, seed, samples=10) for seed in (0, 0, 1))
    assert one.to_str() == again.to_str() != other.to_str()


def test_the_folder_is_what_transformers_and_the_training_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = partial(train_tokenizer, samples=10)
    monkeypatch.setattr(recipe, "train_tokenizer", few)
    main(["--output", str(tmp_path / "a" / "b"), "--positions", "3000", "--seed", "7"])
    folder = tmp_path / "a" / "b"
    assert {path.name for path in folder.iterdir()} == set(TOKENIZER_FILES)
    expected = few(WORLD, FORMS, 7)
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).to_str() == expected.to_str()

    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded.model_max_length == 3000
    assert (loaded.bos_token, loaded.eos_token, loaded.pad_token) == (
        "<|bos|>",
        "<|eos|>",
        "<|pad|>",
    )
    assert set(loaded.all_special_tokens) == set(SPECIAL)
    ids = loaded("Who founded Dakon?")["input_ids"]
    assert ids == expected.encode("Who founded Dakon?").ids
    assert loaded.decode(ids) == "Who founded Dakon?"
    turns = [("system", "Be brief."), ("user", "Why?"), ("assistant", "Tea"), ("user", "When?")]
    messages = [{"role": role, "content": text} for role, text in turns]
    text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|bos|><|system|>Be brief.<|end|><|user|>Why?<|end|><|assistant|> Tea<|end|>"
        "<|user|>When?<|end|><|assistant|>"
    )
    generation = GenerationConfig.from_pretrained(folder)
    stops = [loaded.convert_tokens_to_ids(token) for token in ("<|eos|>", "<|end|>")]
    assert generation.eos_token_id == stops
    assert (generation.bos_token_id, generation.pad_token_id) == (
        loaded.bos_token_id,
        loaded.pad_token_id,
    )
    assert generation.do_sample is False and generation.max_new_tokens == 16
