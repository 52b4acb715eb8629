"""What a text has at least in tokens is never more than it has."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from samkv_integrations.model.token_bound import TokenBound
from tests.support.models import byte_tokenizer
from tests.support.records import builtin

WORDS = "the mill of Orvik was built; où est le café? 磨坊建于一八七一年。  \n\n    x = 1 " * 9
MARK = "\u2581"


def trained(*, normalizer: Any = None, pre_tokenizer: Any = None, **options: Any) -> Tokenizer:
    """A small tokenizer of WORDS with long tokens."""
    backend = Tokenizer(models.BPE(**options))
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    backend.train_from_iterator([WORDS], trainer)
    return backend


def sentence_piece() -> Tokenizer:
    """Like Llama 2's: a mark for each space, and bytes for what is not in the vocabulary."""
    letters = sorted({*WORDS.replace(" ", MARK), "<unk>"})
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    merges = [(MARK, MARK), (MARK * 2, MARK * 2), ("t", "h"), ("th", "e"), (MARK, "the")]
    tokens = [*letters, *bytes_, *("".join(pair) for pair in merges)]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    backend = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)]
    )
    return backend


def byte_level() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


@cache
def tokenizers() -> dict[str, Any]:
    made = {
        "byte-level": trained(pre_tokenizer=byte_level()),
        "composing": trained(pre_tokenizer=byte_level(), normalizer=normalizers.NFC()),
        "bytes for the rest": sentence_piece(),
        "taking white space along": trained(pre_tokenizer=byte_level()),
    }
    for backend in made.values():
        swallows = backend is made["taking white space along"]
        token = AddedToken("<|end|>", special=True, lstrip=swallows, rstrip=swallows)
        backend.add_special_tokens([token])
    return {
        **{name: PreTrainedTokenizerFast(tokenizer_object=each) for name, each in made.items()},
        "one a byte": byte_tokenizer(bos=True),
        "builtin": builtin().tokenizer,
    }


NAMES = ("byte-level", "composing", "bytes for the rest", "taking white space along", "one a byte",
         "builtin")  # fmt: skip
TEXT = st.lists(
    st.one_of(
        st.text(max_size=9),
        st.sampled_from(
            ["the mill", "    ", "磨坊", "e\u0301" * 9, "<|end|>", " \n\u3000" * 9, MARK * 5, "😀"]
        ),
    ),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("name", NAMES)
@given(text=TEXT)
@example(text=WORDS * 3)
@example(text="<|end|>" + " " * 99)
@settings(max_examples=150, deadline=None)
def test_it_is_never_more(name: str, text: str) -> None:
    text = text.encode(errors="replace").decode()
    tokenizer = tokenizers()[name]
    at_least = TokenBound(tokenizer).at_least(text) if len(text) < 9 else bound(name).at_least(text)
    for special in (True, False):
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=not special)
        assert at_least <= len(ids["input_ids"])


@cache
def bound(name: str) -> TokenBound:
    return TokenBound(tokenizers()[name])


@pytest.mark.parametrize("name", NAMES)
def test_it_is_of_some_use(name: str) -> None:
    assert bound(name).at_least(WORDS * 99) > len(WORDS) * 99 / 40
    assert bound("one a byte").at_least("é" * 50) == 100 - 1  # rounded down


@pytest.mark.parametrize(
    "backend",
    [
        Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
        Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
        Tokenizer(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True)),
        Tokenizer(models.BPE({"a": 0}, [])),  # leaves out what it does not know
        trained(pre_tokenizer=byte_level(), normalizer=normalizers.Strip()),
        trained(pre_tokenizer=byte_level(), normalizer=normalizers.Replace("a", "")),
        trained(
            pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), byte_level()])
        ),
        trained(
            pre_tokenizer=pre_tokenizers.Sequence(
                [pre_tokenizers.Split(" ", "removed"), byte_level()]
            )
        ),
    ],
    ids=["wordpiece", "wordlevel", "unknown", "left out", "strip", "replace", "white space",
         "removed"],
)  # fmt: skip
def test_what_may_leave_text_out_has_none(backend: Tokenizer) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert TokenBound(tokenizer).at_least("a" * 100_000) == 0
