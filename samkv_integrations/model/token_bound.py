"""How many tokens a text has at least, without tokenising it."""

from __future__ import annotations

import json
import math
import re
import sys
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

_ROUNDING = 1 - 1e-9
# Scripts are added there, and what of them is composed depends on the version of Unicode.
_ASTRAL = re.compile("[\U00010000-\U0010ffff]+")
# These keep every character: they cut between them, or write a space in another way.
_KEEPING = ("ByteLevel", "Digits", "Metaspace", "Prepend", "NFC")
_SPACE = "\u2581"  # how SentencePiece writes a space


class TokenBound:
    """Each byte of a text counts as its part of the longest token that it occurs in.

    So no token counts as more than one, and the sum is never more than there are tokens. A
    tokenizer that may leave something of a text out, or stand one token for any number of
    characters, has no such bound: it is 0.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        made_of = json.loads(tokenizer.backend_tokenizer.to_str())
        self._is_composed = "NFC" in (part["type"] for part in _parts(made_of["normalizer"]))
        self._weights = _weights(made_of) if _keeps_all(made_of) else np.zeros(256)

    def at_least(self, text: str) -> int:
        """A number of tokens that ``text`` does not go below."""
        if self._is_composed:
            text = _ASTRAL.sub("", unicodedata.normalize("NFC", text))
        data = np.frombuffer(text.encode(errors="surrogatepass"), np.uint8)
        counts = np.bincount(data, minlength=256)
        return math.floor(float(counts @ self._weights) * _ROUNDING)


def _parts(step: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """A normalizer or pre-tokenizer, and those that it is a sequence of."""
    if step is not None:
        yield step
        for inner in (*step.get("normalizers", ()), *step.get("pretokenizers", ())):
            yield from _parts(inner)


def _is_keeping(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Replace":
        return bool(step["pattern"] == {"String": " "} and step["content"] == _SPACE)
    if step["type"] in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return step["type"] in ("Sequence", *_KEEPING)


def _keeps_all(made_of: Mapping[str, Any]) -> bool:
    """Whether every byte of a text is part of a token, and each token of as many as it is long."""
    model = made_of["model"]
    if model["type"] != "BPE" or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return False
    steps = [*_parts(made_of["normalizer"]), *_parts(made_of["pre_tokenizer"])]
    if not all(map(_is_keeping, steps)):
        return False
    vocabulary = model["vocab"]
    if any(step["type"] == "ByteLevel" for step in steps):
        return all(letter in vocabulary for letter in ByteLevel.alphabet())
    return bool(model["byte_fallback"]) and all(f"<0x{n:02X}>" in vocabulary for n in range(256))


def _weights(made_of: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """(256,): one through the bytes of the longest token with that byte."""
    steps = [*_parts(made_of["normalizer"]), *_parts(made_of["pre_tokenizer"])]
    letters = _byte_letters() if any(step["type"] == "ByteLevel" for step in steps) else {}
    added = made_of["added_tokens"]
    longest = [1] * 256
    tokens = [(token, letters) for token in made_of["model"]["vocab"]]
    for token, bytes_of in [*tokens, *((token["content"], {}) for token in added)]:
        if all(letter in bytes_of for letter in token):
            data = bytes(bytes_of[letter] for letter in token)
        else:
            data = token.encode(errors="surrogatepass")
        for byte in {*data, *(b" " if _SPACE in token else b"")}:
            longest[byte] = max(longest[byte], len(data))
    weights = 1 / np.array(longest, dtype=np.float64)
    if any(token["lstrip"] or token["rstrip"] for token in added):  # it takes any white space along
        spaces = "".join(char for char in map(chr, range(sys.maxunicode)) if char.isspace())
        weights[list(spaces.encode())] = 0
    return weights


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level tokenizers write bytes as."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + number): byte for number, byte in enumerate(hidden)
    }
