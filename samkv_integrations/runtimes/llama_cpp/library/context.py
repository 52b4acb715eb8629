"""A model and a context of llama.cpp: decoding, sequences and their states.

llama.cpp keeps the entries of all sequences in the cells of one cache. A cell belongs to one or
several sequences, so that a copy of a sequence takes no memory.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from ctypes import create_string_buffer
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samkv_integrations.errors import (
    Given,
    InvalidOption,
    ModelFailed,
    ModelNotFound,
    OutOfMemory,
    UnsupportedModel,
)
from samkv_integrations.runtimes.llama_cpp.library.binding import (
    F16,
    FLASH_ATTENTION_AUTO,
    FLASH_ATTENTION_ON,
    NO_CELLS,
    Binding,
)
from samkv_integrations.runtimes.memory import available_bytes

N_BATCH = 2048
"""Most tokens of one call of llama_decode."""

N_UBATCH = 512
"""Tokens that llama.cpp computes at once."""

CELLS = 256
"""llama.cpp has a multiple of so many cells."""

MOST_SEQUENCES = 64
"""Limit of sequences in the cells. llama.cpp allocates logits for each."""

MOST_OUTPUTS = 64
"""Limit of tokens of one decode whose logits are wanted."""

Logits = NDArray[np.float32]


class LlamaContext:
    """A model in a GGUF file, with its cache of cells. For one thread at a time, see `lock`.

    Args:
        binding: the library.
        path: the file, or the first part of a split one.
        model_options, context_options: fields of llama_model_params and llama_context_params that
            differ from their defaults.

    model, vocabulary: pointers of llama.cpp. n_cells: tokens whose entries have room, in all
    sequences together. most_tokens: of one decode. n_vocabulary: tokens that the model knows.
    is_on_card: whether layers run on a graphics card.

    Raises:
        ModelNotFound: llama.cpp cannot load the file.
        UnsupportedModel: the model does not write one token after another.
        InvalidOption: it cannot make such a context.
    """

    def __init__(
        self, binding: Binding, path: str, *, model_options: Mapping[str, Any],
        context_options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.binding, self._library = binding, binding.library
        self.lock = threading.RLock()
        self._pid = os.getpid()
        params = binding.model_params()
        for name, value in model_options.items():
            setattr(params, name, value)
        with binding.told() as lines:
            self.model = self._library.llama_model_load_from_file(os.fsencode(path), params)
        if not self.model:
            raise ModelNotFound(
                f"llama.cpp cannot load {path!r} ({_reason(lines)}); give a whole GGUF file of a "
                f"model that {binding.build} runs"
            )
        weakref.finalize(self, self._library.llama_model_free, self.model).atexit = False
        self.vocabulary = self._library.llama_model_get_vocab(self.model)
        self.n_vocabulary = int(self._library.llama_vocab_n_tokens(self.vocabulary))
        self.is_on_card = binding.has_device and model_options.get("n_gpu_layers") != 0
        self._read_model(context_options)
        self._check_memory(int(context_options.get("n_ctx", 0)))
        self._context = self._new_context(context_options)
        weakref.finalize(self, self._library.llama_free, self._context).atexit = False
        self._memory = self._library.llama_get_memory(self._context)
        self.n_cells = int(self._library.llama_n_ctx(self._context))
        self.most_tokens = int(self._library.llama_n_batch(self._context))
        self.most_sequences = int(self._library.llama_n_seq_max(self._context))
        self.n_threads = 0

    def _read_model(self, options: Mapping[str, Any]) -> None:
        """What the library tells of the model.

        n_trained: tokens that the model was trained to read at once; n_window: those of a sliding
        window, 0 without one. n_rotated: numbers of a head that rotate; 0 for all. can_crop:
        whether a part of a sequence can be used or removed. stores_otherwise: whether the types of
        keys and values are others than F16.
        """
        library, model = self._library, self.model
        if library.llama_model_is_diffusion(model) or library.llama_model_has_encoder(model):
            raise UnsupportedModel(
                "this file holds a model with an encoder, or one that answers by diffusion; give a "
                "model that writes one token after another"
            )
        self.n_trained = int(library.llama_model_n_ctx_train(model))
        self.n_window = max(0, int(library.llama_model_n_swa(model)))
        self.n_layers = int(library.llama_model_n_layer(model))
        self.n_heads = int(library.llama_model_n_head(model))
        self.n_kv_heads = int(library.llama_model_n_head_kv(model))
        self.n_parameters = int(library.llama_model_n_params(model))
        self.n_weight_bytes = int(library.llama_model_size(model))
        self.rope_type = int(library.llama_model_rope_type(model))
        self.architecture = self.meta("general.architecture") or ""
        self.head_dim = int(
            self.meta(f"{self.architecture}.attention.key_length")
            or int(library.llama_model_n_embd(model)) // max(1, self.n_heads)
        )
        self.n_rotated = int(self.meta(f"{self.architecture}.rope.dimension_count") or 0)
        self.can_crop = not (
            library.llama_model_is_recurrent(model) or library.llama_model_is_hybrid(model)
        )
        self.stores_otherwise = {options.get("type_k", F16), options.get("type_v", F16)} != {F16}

    @property
    def device_name(self) -> str:
        """Where layers run."""
        return "gpu" if self.is_on_card else "cpu"

    def meta(self, key: str) -> str | None:
        """A value of the file's metadata; None if it is missing, or is a list."""
        buffer = create_string_buffer(1 << 10)
        n_bytes = self._library.llama_model_meta_val_str(
            self.model, key.encode(), buffer, len(buffer)
        )
        return None if n_bytes < 0 else buffer.value.decode(errors="replace")

    def rope_range(self) -> str:
        """What else decides how keys rotate: some models rotate otherwise in long contexts."""
        trained = self.meta(f"{self.architecture}.rope.scaling.original_context_length")
        is_long = trained is not None and self.n_cells > int(trained)
        return f"llama.cpp{' long' if is_long else ''}"

    def _check_memory(self, n_cells: int) -> None:
        """Raises InvalidOption for more cells than fit: the system would end the process."""
        n_bytes = n_cells * 4 * self.n_layers * self.n_kv_heads * self.head_dim
        available = available_bytes()
        if not self.is_on_card and available is not None and n_bytes > available:
            raise InvalidOption(
                Given("n_ctx", n_cells),
                f"; so many cells take {n_bytes / 1e9:.1f} GB, and {available / 1e9:.1f} GB of "
                "memory are free; give fewer",
            )

    def _new_context(self, options: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """With flash attention, which stores values in rows; without, if the model has none."""
        for flash_attention in (FLASH_ATTENTION_ON, FLASH_ATTENTION_AUTO):
            params = self.binding.context_params()
            given = {
                "n_batch": N_BATCH, "n_ubatch": N_UBATCH, "n_seq_max": MOST_SEQUENCES,
                "n_outputs_max": MOST_OUTPUTS, "n_outputs_max_per_seq": MOST_OUTPUTS,
                "kv_unified": True, "flash_attn_type": flash_attention, **options,
            }  # fmt: skip
            # llama.cpp rounds the cells up, and limits a batch to what was asked for
            given["n_ctx"] = -(-int(given.get("n_ctx", params.n_ctx)) // CELLS) * CELLS
            for name, value in given.items():
                setattr(params, name, value)
            with self.binding.told() as logged:
                context = self._library.llama_init_from_model(self.model, params)
            if context:
                return context
        raise InvalidOption(
            f"llama.cpp cannot make a context of {params.n_ctx} tokens ({_reason(logged)}); give a "
            "smaller n_ctx, or other types of K and V"
        )

    def check_process(self) -> None:
        """Raises InvalidOption in a process that was forked after the model was loaded."""
        if os.getpid() != self._pid:
            raise InvalidOption(
                "this process was forked after llama.cpp had loaded the model, and the threads of "
                "llama.cpp stay in the parent; load the model in this process, or start it by spawn"
            )

    def use_threads(self, n_threads: int) -> None:
        """Let later decodes use so many threads."""
        if n_threads != self.n_threads:
            self._library.llama_set_n_threads(self._context, n_threads, n_threads)
            self.n_threads = n_threads

    # -- decoding -----------------------------------------------------------------------------

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int],
        outputs: Sequence[int] = (),
    ) -> Logits:  # fmt: skip
        """Compute the entries of tokens, at most `most_tokens`; in each sequence without a gap.

        positions, sequences: of each token. outputs: indices of those whose logits are wanted.

        Returns (len(outputs), vocabulary), a copy.

        Raises:
            OutOfMemory: no cells are left.
            ModelFailed: llama.cpp fails; entries of these tokens may be incomplete.
        """
        self.check_process()
        n = len(tokens)
        assert 0 < n <= self.most_tokens and len(outputs) <= MOST_OUTPUTS
        of_tokens, at = np.array(tokens, np.int32), np.array(positions, np.int32)
        assert of_tokens.min() >= 0 and of_tokens.max() < self.n_vocabulary  # else it aborts
        of_sequences = np.array(sequences, np.int32)
        addresses = of_sequences.ctypes.data + 4 * np.arange(n, dtype=np.uint64)
        n_of_token, wanted = np.ones(n, np.int32), np.zeros(n, np.int8)
        wanted[list(outputs)] = 1
        batch = self.binding.batch(
            n_tokens=n, token=of_tokens.ctypes.data, pos=at.ctypes.data,
            n_seq_id=n_of_token.ctypes.data, seq_id=addresses.ctypes.data,
            logits=wanted.ctypes.data,
        )  # fmt: skip
        with self.binding.told() as lines:
            code = self._library.llama_decode(self._context, batch)
        if code == NO_CELLS:
            raise OutOfMemory(
                f"the {self.n_cells} cells of llama.cpp are in use; give a larger n_ctx, retrieve "
                "fewer chunks, or ask for fewer answers at a time"
            )
        if code:
            raise ModelFailed(
                f"llama.cpp could not decode {n} tokens (code {code}: {_reason(lines)}); ask "
                "again, and report it if it fails again"
            )
        found = np.empty((len(outputs), self.n_vocabulary), np.float32)
        for row, index in enumerate(outputs):
            logits = self._library.llama_get_logits_ith(self._context, index)
            found[row] = np.ctypeslib.as_array(logits, (self.n_vocabulary,))
        return found

    # -- sequences ----------------------------------------------------------------------------

    def remove(self, sequence: int, start: int = 0, stop: int = -1) -> bool:
        """Remove tokens at positions from ``start`` up to ``stop``, -1 for the end.

        Returns False, and changes nothing, if the model cannot remove a part.
        """
        self.check_process()
        return bool(self._library.llama_memory_seq_rm(self._memory, sequence, start, stop))

    def copy(self, source: int, target: int, start: int = 0, stop: int = -1) -> None:
        """Let ``target`` share the cells of ``source`` at these positions."""
        self.check_process()
        self._library.llama_memory_seq_cp(self._memory, source, target, start, stop)

    def clear(self) -> None:
        """Remove all sequences."""
        self.check_process()
        self._library.llama_memory_clear(self._memory, True)

    def state(self, sequence: int) -> NDArray[np.uint8]:
        """The state of a sequence, as llama.cpp writes it."""
        self.check_process()
        size = self._library.llama_state_seq_get_size(self._context, sequence)
        state = np.empty(size, np.uint8)
        n_written = self._library.llama_state_seq_get_data(
            self._context, state.ctypes.data, size, sequence
        )
        return state[:n_written]

    def load(self, sequence: int, state: NDArray[np.uint8]) -> None:
        """Replace a sequence by a state. Raises OutOfMemory if no cells are left for it."""
        self.check_process()
        with self.binding.told() as lines:
            n_read = self._library.llama_state_seq_set_data(
                self._context, state.ctypes.data, len(state), sequence
            )
        if n_read != len(state):
            raise OutOfMemory(
                f"llama.cpp could not load cached chunks ({_reason(lines)}); give a larger n_ctx, "
                "or retrieve fewer chunks"
            )


def _reason(lines: Sequence[str]) -> str:
    """What llama.cpp logged, in its own words."""
    return "; ".join(lines[-3:]) or "it says nothing"
