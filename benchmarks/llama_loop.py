"""llama.cpp's own loop, the anchor of the benchmarks of its runtime.

The weights are those that the runtime has loaded, so file and build are the same. The context is
another one, as llama.cpp makes it by default, and the loop knows nothing of caches: it calls
llama_decode for the tokens of a prompt, and takes the most likely token after it, again and again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from itertools import count, islice

import numpy as np

from samkv_integrations.runtimes.llama_cpp.library.binding import Batch
from samkv_integrations.runtimes.llama_cpp.runtime import LlamaCppModel

N_CTX = 8192
PART = 512
"""Most tokens of one call of llama_decode."""


class LlamaLoop:
    """Decodes with a context of its own.

    model: whose weights it uses, and as many threads. n_sequences: how many it decodes at once.
    """

    def __init__(self, model: LlamaCppModel, *, n_sequences: int = 1) -> None:
        self._model = model  # its weights must stay
        self._library = library = model.context.binding.library
        self._n_vocabulary = model.n_vocabulary
        params = model.context.binding.context_params()
        params.n_ctx, params.n_batch, params.n_ubatch = N_CTX, PART, PART
        params.n_threads = params.n_threads_batch = model.n_threads()
        params.n_seq_max, params.kv_unified = n_sequences, True
        self._context = library.llama_init_from_model(model.context.model, params)
        assert self._context, "llama.cpp has made no context"
        weakref.finalize(self, library.llama_free, self._context).atexit = False
        self._memory = library.llama_get_memory(self._context)

    def answer(self, ids: Sequence[int], new_tokens: int) -> list[int]:
        """The most likely tokens after a prompt, none of which ends the answer."""
        return list(islice(self.tokens(ids), new_tokens))

    def tokens(self, ids: Sequence[int]) -> Iterator[int]:
        """The most likely tokens after a prompt, one after the other."""
        self._library.llama_memory_clear(self._memory, False)
        for start in range(0, len(ids), PART):
            part = ids[start : start + PART]
            self._decode(part, range(start, start + len(part)), [0] * len(part))
        for position in count(len(ids)):
            token = self._most_likely()
            yield token
            self._decode([token], [position], [0])

    def begin(self, prefix: Sequence[int]) -> None:
        """Decode the tokens before every text of `read`."""
        self._library.llama_memory_clear(self._memory, False)
        self._n_prefix = len(prefix)
        if prefix:
            self._decode(prefix, range(len(prefix)), [0] * len(prefix))

    def read(self, texts: Sequence[Sequence[int]]) -> None:
        """Decode the tokens of texts after the prefix, each in a sequence of its own."""
        library, memory, n_prefix = self._library, self._memory, self._n_prefix
        tokens, positions, sequences = list[int](), list[int](), list[int]()
        for number, ids in enumerate(texts, start=1):
            library.llama_memory_seq_cp(memory, 0, number, 0, n_prefix)
            tokens += ids
            positions += range(n_prefix, n_prefix + len(ids))
            sequences += [number] * len(ids)
        for start in range(0, len(tokens), PART):
            part = slice(start, start + PART)
            self._decode(tokens[part], positions[part], sequences[part])
        for number in range(1, len(texts) + 1):
            library.llama_memory_seq_rm(memory, number, -1, -1)

    def _decode(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int]
    ) -> None:
        """One call of llama_decode, with the logits of its last token."""
        n = len(tokens)
        of_tokens, at = np.array(tokens, np.int32), np.array(positions, np.int32)
        of_sequences, n_of_token = np.array(sequences, np.int32), np.ones(n, np.int32)
        addresses = of_sequences.ctypes.data + 4 * np.arange(n, dtype=np.uint64)
        wanted = np.zeros(n, np.int8)
        wanted[-1] = 1
        batch = Batch(
            n_tokens=n, token=of_tokens.ctypes.data, pos=at.ctypes.data,
            n_seq_id=n_of_token.ctypes.data, seq_id=addresses.ctypes.data,
            logits=wanted.ctypes.data,
        )  # fmt: skip
        code = self._library.llama_decode(self._context, batch)
        assert code == 0, f"llama_decode returns {code}"

    def _most_likely(self) -> int:
        logits = self._library.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, (self._n_vocabulary,)).argmax())
