"""The text of a model in llama.cpp: its own tokenizer, and the chat template of its GGUF file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from ctypes import create_string_buffer
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unicodedata import category

import numpy as np

from samkv_integrations.prompt.quoting import SpecialTokens
from samkv_integrations.prompt.text import ModelText, half_character
from samkv_integrations.runtimes.llama_cpp.library.binding import (
    CONTROL,
    LSTRIP,
    RSTRIP,
    SPM,
    USER_DEFINED,
    Binding,
)
from samkv_integrations.runtimes.llama_cpp.template import write_chat

_ROLES = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding",
}  # fmt: skip
"""Name of a special token in chat templates -> its name in a GGUF file."""

_MOST_OF_A_KIND = 1000  # characters that one regular expression may match, see `_parts`


class LlamaText(ModelText):
    """The tokenizer and the chat template of a loaded model.

    Args:
        binding: the library that has loaded it.
        model: its address, as ``llama_model_load_from_file`` returns it. The caller frees it, when
            this object is not used any more.
        name: the model's name in reports.
    """

    def __init__(self, binding: Binding, model: Any, name: str = "") -> None:  # noqa: ANN401
        self.name = name
        self._library, self._model = binding.library, model
        self._vocabulary = self._library.llama_model_get_vocab(model)
        self._is_spm = self._library.llama_vocab_type(self._vocabulary) == SPM
        self._pieces = _Pieces(self._library, self._vocabulary)
        self._mask_vocabularies: dict[frozenset[int], Any] = {}

    # -- token ids ------------------------------------------------------------------------------

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        ids = list[int]()
        for part in [text] if self._is_spm else _parts(text):
            ids += self._tokenized(_encoded(part), special=special)
        return ids

    def _tokenized(self, data: bytes, *, special: bool) -> list[int]:
        most = len(data) + 8  # some tokenizers put a space before a text
        while True:
            ids = np.empty(most, np.int32)
            n = self._library.llama_tokenize(
                self._vocabulary, data, len(data), ids.ctypes.data, most, False, special
            )
            if n >= 0:
                return list(map(int, ids[:n].tolist()))
            most = -n

    def token_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a text in which no special token counts, and the characters of each.

        Tokens that have parts of one character between them all have the whole of it.
        """
        data, ids = _encoded(text), self.tokenize(text, special=False)
        begins = (np.frombuffer(data, np.uint8) & 0xC0) != 0x80
        character = [*(np.cumsum(begins) - 1).tolist(), len(text)]  # of each byte
        spans, at = list[tuple[int, int]](), 0
        for piece in map(self._pieces.__getitem__, ids):
            if not data.startswith(piece, at):
                if self._adds_space and data.startswith(piece.removeprefix(b" "), at):
                    piece = piece.removeprefix(b" ")
                else:  # bytes without a token were left out
                    at = max(at, data.find(piece, at))
            end = min(at + len(piece), len(data))
            last = character[end - 1] + 1 if end > at else character[at]
            spans.append((character[at], last))
            at = end
        return ids, spans

    def detokenize(self, ids: Sequence[int]) -> str:
        text = b"".join(map(self._pieces.__getitem__, ids)).decode(errors="replace")
        return text.removeprefix(" ") if self._adds_space else text

    @cached_property
    def _adds_space(self) -> bool:
        """Whether the tokenizer puts a space before a text, which it is then read without."""
        first = self.tokenize("a", special=False)[:1]
        return self._is_spm and any(self._pieces[token].startswith(b" ") for token in first)

    # -- the vocabulary -------------------------------------------------------------------------

    @cached_property
    def n_vocabulary(self) -> int:
        return int(self._library.llama_vocab_n_tokens(self._vocabulary))

    @cached_property
    def longest_token(self) -> int:
        return max(map(len, map(self._name_of, range(self.n_vocabulary))))

    @cached_property
    def special_tokens(self) -> SpecialTokens:
        attributes = map(self._attributes_of, range(self.n_vocabulary))
        return SpecialTokens(
            {
                self._name_of(token): _Special(bool(found & LSTRIP), bool(found & RSTRIP))
                for token, found in enumerate(attributes)
                if found & CONTROL
            }
        )

    def _name_of(self, token: int) -> str:
        text: bytes = self._library.llama_vocab_get_text(self._vocabulary, token)
        return text.decode(errors="replace")

    def _attributes_of(self, token: int) -> int:
        return int(self._library.llama_vocab_get_attr(self._vocabulary, token))

    @property
    def bos_id(self) -> int | None:
        token = int(self._library.llama_vocab_bos(self._vocabulary))
        return None if token < 0 else token

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Every token that llama.cpp takes for the end of an answer."""
        is_end, vocabulary = self._library.llama_vocab_is_eog, self._vocabulary
        return frozenset(token for token in range(self.n_vocabulary) if is_end(vocabulary, token))

    @cached_property
    def added_ids(self) -> tuple[list[int], list[int]]:
        before, after = list[int](), list[int]()
        if self._library.llama_vocab_get_add_bos(self._vocabulary) and self.bos_id is not None:
            before.append(self.bos_id)
        end = int(self._library.llama_vocab_eos(self._vocabulary))
        if self._library.llama_vocab_get_add_eos(self._vocabulary) and end >= 0:
            after.append(end)
        return before, after

    def mask_vocabulary(self, end_ids: frozenset[int]) -> Any:  # noqa: ANN401
        """See `Runtime.mask_vocabulary`."""
        if end_ids not in self._mask_vocabularies:
            self._mask_vocabularies[end_ids] = llguidance_tokenizer(self, end_ids)
        return self._mask_vocabularies[end_ids]

    def bytes_of_tokens(self) -> tuple[list[bytes], list[int]]:
        """The bytes of every token, and the ids of those that no grammar may write as text.

        These are the special tokens, whose bytes are their names, and others that look like tags,
        such as ``<tool_call>``.
        """
        pieces, special = list[bytes](), list[int]()
        for token in range(self.n_vocabulary):
            piece, found = self._pieces.read(token), self._attributes_of(token)
            if found & CONTROL:
                piece = self._name_of(token).encode()
            is_tag = found & USER_DEFINED and piece[:1] == b"<" and piece[-1:] == b">"
            if found & CONTROL or is_tag:
                special.append(token)
            pieces.append(piece)
        return pieces, special

    # -- the chat template ----------------------------------------------------------------------

    @cached_property
    def chat_template(self) -> str | None:
        return self._template(None)

    @cached_property
    def chat_template_of_tools(self) -> str | None:
        return self._template(b"tool_use") or self.chat_template

    def _template(self, name: bytes | None) -> str | None:
        found: bytes | None = self._library.llama_model_chat_template(self._model, name)
        return found.decode(errors="replace") if found else None

    def write_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *,
        opens: bool = True,
    ) -> str:  # fmt: skip
        template = self.chat_template_of_tools if tools else self.chat_template
        return write_chat(template or "", messages, tools, self._names_of_roles, opens=opens)

    @cached_property
    def _names_of_roles(self) -> dict[str, str]:
        """The special tokens that a template may write by their roles."""
        found = {}
        for role, key in _ROLES.items():
            token = create_string_buffer(16)
            n = self._library.llama_model_meta_val_str(
                self._model, f"tokenizer.ggml.{key}_token_id".encode(), token, len(token)
            )
            if n > 0 and int(token.value) < self.n_vocabulary:
                found[role] = self._name_of(int(token.value))
        return found


@dataclass
class _Special:
    """A special token, see `SpecialToken`."""

    lstrip: bool
    rstrip: bool


class _Pieces(dict[int, bytes]):
    """Token id -> its bytes, none for special tokens. Answers read them again and again."""

    def __init__(self, library: Any, vocabulary: Any) -> None:  # noqa: ANN401
        self._library, self._vocabulary = library, vocabulary

    def __missing__(self, token: int) -> bytes:
        self[token] = self.read(token)
        return self[token]

    def read(self, token: int) -> bytes:
        """The bytes of a token that is not to be remembered."""
        n_bytes = 64
        while True:
            piece = create_string_buffer(n_bytes)
            n = self._library.llama_token_to_piece(
                self._vocabulary, token, piece, n_bytes, 0, False
            )
            if n >= 0:
                return piece.raw[:n]
            n_bytes = -n


def _parts(text: str) -> Iterator[str]:
    """The text, cut within words, gaps and rules of thousands of characters.

    llama.cpp splits texts by regular expressions. Those of many vocabularies need memory of the
    thread's stack for each character of a match, and end the process where the stack ends.
    """
    start = 0
    for stop in range(_MOST_OF_A_KIND, len(text), _MOST_OF_A_KIND):
        if _is_of_a_kind(text[stop - _MOST_OF_A_KIND : stop]):
            yield text[start:stop]
            start = stop
    yield text[start:]


def _is_of_a_kind(text: str) -> bool:
    """Whether one match may have all of a text; most texts differ after some characters."""
    first = ""
    for character in text:
        if category(character)[0] in "MC" and character not in "\t\n\v\f\r":
            continue  # accents and control characters, which may be in any match
        if character.isspace():
            kind = "space"
        else:
            kind = "word" if character.isalnum() else "sign"
        if (first := first or kind) != kind:
            return False
    return True


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise half_character(text) from error


def llguidance_tokenizer(text: LlamaText, end_ids: frozenset[int]) -> Any:  # noqa: ANN401
    """The tokenizer of a model as llguidance needs it. Takes about a second."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(
        TokenizerWrapper(_ForGuidance(text, end_ids)), n_vocab=text.n_vocabulary,
        eos_token=sorted(end_ids),
    )  # fmt: skip


class _ForGuidance:
    """A tokenizer with the members that llguidance reads."""

    def __init__(self, text: LlamaText, end_ids: frozenset[int]) -> None:
        self._text = text
        self.eos_token_id, self.bos_token_id = min(end_ids), text.bos_id
        self.tokens, self.special_token_ids = text.bytes_of_tokens()

    def __call__(self, text: str) -> list[int]:
        return self._text.tokenize(text, special=False)
