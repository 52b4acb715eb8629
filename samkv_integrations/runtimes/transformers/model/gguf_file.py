"""Models in GGUF files: their config, and their weights as plain tensors.

The gguf package reads and dequantises the weights; transformers makes the model.
``from_pretrained(gguf_file=...)`` would do both and computes the same, but it reads the vocabulary
entry by entry, three times (for config, tokenizer and weights): 22 CPU seconds for 135 M
parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from samkv_integrations.errors import MissingExtra, ModelNotFound, UnsupportedModel
from samkv_integrations.runtimes.model_files import parts_of
from samkv_integrations.runtimes.transformers.model.families import refuse_unsupported

_ROPE = ("none", "linear")
_FAMILIES = ("llama", "qwen2", "qwen3")
"""Architectures that can be read, by their names in GGUF; ``llama`` includes Mistral."""

_SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
"""Field of the config -> key of the metadata, after the architecture; every file has these."""


class GgufFile:
    """A model in a GGUF file, or in the parts of a split one.

    Args:
        path: the file, or the first part.

    Raises:
        MissingExtra: the gguf package is not installed.
        ModelNotFound: a file is cut or damaged, or a part is missing.
        UnsupportedModel: the file holds something else than a model of a supported family.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        readers = [_reader(part) for part in parts_of(path)]
        self._fields: Mapping[str, Any] = readers[0].fields
        self._tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
        self.architecture = str(self._value("general.architecture"))
        if self.architecture == "clip":
            raise UnsupportedModel(
                f"{str(path)!r} is a vision projector (mmproj); it must be a language model; give "
                "the GGUF file of the model itself"
            )
        if self.architecture not in _FAMILIES:
            raise UnsupportedModel(
                f"{str(path)!r} is of the family {self.architecture!r}; of GGUF files these are "
                f"supported: {', '.join(_FAMILIES)}"
            )
        if self._value("split.count", 1) > len(readers):
            raise ModelNotFound(
                f"{str(path)!r} is one of {self._value('split.count')} parts and was renamed; "
                "give the parts their names back (NAME-00001-of-0000N.gguf)"
            )

    def _value(self, key: str, default: Any = None) -> Any:  # noqa: ANN401
        """A value of the metadata. Raises ModelNotFound if it and the default are missing."""
        field = self._fields.get(key)
        value = default if field is None else field.contents()
        if value is None:
            raise ModelNotFound(f"{str(self.path)!r} lacks {key!r}; give a GGUF file of a model")
        return value

    def config(self) -> Any:  # noqa: ANN401
        """The transformers config that the metadata describe.

        Raises UnsupportedModel for a model that could not be computed exactly.
        """
        kind = self.architecture
        sizes = {name: self._value(f"{kind}.{key}") for name, key in _SIZES.items()}
        n_heads = sizes["num_attention_heads"]
        n_rotated = self._value(f"{kind}.rope.dimension_count", 0)
        head_dim = self._value(
            f"{kind}.attention.key_length", n_rotated or sizes["hidden_size"] // n_heads
        )
        rope = {
            "rope_type": self._value(f"{kind}.rope.scaling.type", "none"),
            "rope_theta": self._value(f"{kind}.rope.freq_base", 10_000.0),
            "factor": self._value(f"{kind}.rope.scaling.factor", 1.0),
        }
        if rope["rope_type"] not in _ROPE:
            raise UnsupportedModel(
                f"{str(self.path)!r} scales positions by RoPE type {rope['rope_type']!r}, which is "
                f"read from GGUF files only for {', '.join(_ROPE)}; give the checkpoint in "
                "safetensors"
            )
        if rope["rope_type"] == "none":
            rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        if n_rotated not in (0, head_dim):
            rope["partial_rotary_factor"] = n_rotated / head_dim
        if "token_embd.weight" not in self._tensors:
            raise ModelNotFound(
                f"{str(self.path)!r} lacks the weights 'token_embd'; give a GGUF file of a model"
            )
        tokens = {
            f"{name}_token_id": self._value(f"tokenizer.ggml.{key}_token_id", -1)
            for name, key in {"bos": "bos", "eos": "eos", "pad": "padding"}.items()
        }
        n_layers = len({name.split(".")[1] for name in self._tensors if name.startswith("blk.")})
        if sizes["num_hidden_layers"] != n_layers:  # before the model is made, with as many layers
            raise ModelNotFound(
                f"{str(self.path)!r} names {sizes['num_hidden_layers']} layers and holds "
                f"{n_layers}; it is damaged, fetch it again"
            )
        config = AutoConfig.for_model(
            kind,
            **sizes,
            head_dim=head_dim,
            num_key_value_heads=self._value(f"{kind}.attention.head_count_kv", n_heads),
            rope_parameters=rope,
            vocab_size=int(self._tensors["token_embd.weight"].shape[-1]),
            tie_word_embeddings="output.weight" not in self._tensors,
            **{name: None if token < 0 else token for name, token in tokens.items()},
        )
        refuse_unsupported(config)
        return config

    def model(self, dtype: torch.dtype, options: Mapping[str, Any]) -> PreTrainedModel:
        """The model. options: passed on to ``from_pretrained``.

        Raises UnsupportedModel if the tensors of the file are not those of a model of its family.
        """
        config = self.config()
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        with torch.device("meta"):
            names = self._names(config, kind(config).state_dict())
        state = {name: self._weight(here, config, dtype) for here, name in names.items()}
        hf: PreTrainedModel = kind.from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, **options
        )
        hf.config._name_or_path = hf.name_or_path = str(self.path)
        return hf

    def _names(self, config: Any, state: Mapping[str, Tensor]) -> dict[str, str]:  # noqa: ANN401
        """Name in the file -> name in the model."""
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        architectures = {name: each for each, name in MODEL_ARCH_NAMES.items()}
        stems = get_tensor_name_map(architectures[self.architecture], config.num_hidden_layers)
        split = [(name, *name.rsplit(".", 1)) for name in state]
        names = {f"{stems.get_name(stem)}.{suffix}": name for name, stem, suffix in split}
        if config.tie_word_embeddings:
            names.pop("output.weight")
        if others := sorted(self._tensors.keys() ^ names.keys()):
            reason = (
                "; rope_freqs scales positions, which is not supported"
                if "rope_freqs.weight" in others
                else ""
            )
            raise UnsupportedModel(
                f"{str(self.path)!r} does not hold what a {self.architecture} model consists of "
                f"(differing: {', '.join(others[:3])}{', ...' if len(others) > 3 else ''}{reason});"
                " give the checkpoint in safetensors"
            )
        for here, name in names.items():  # before memory is allocated for these shapes
            shape = tuple(reversed(self._tensors[here].shape.tolist()))
            if shape != (expected := tuple(state[name].shape)):
                raise ModelNotFound(
                    f"{here!r} in {str(self.path)!r} has the shape {shape} where its metadata say "
                    f"{expected}; it is damaged, fetch it again"
                )
        return names

    def _weight(self, name: str, config: Any, dtype: torch.dtype) -> Tensor:  # noqa: ANN401
        from gguf import dequantize

        tensor = self._tensors[name]
        try:
            weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=dtype)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"{str(self.path)!r} holds weights of the type {tensor.tensor_type.name}, which "
                "the gguf package does not dequantise; give a file of another type, such as Q4_K_M"
            ) from error
        if self.architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
            # in the file, the two numbers that rotate together are neighbours
            is_query = ".attn_q." in name
            n_heads = config.num_attention_heads if is_query else config.num_key_value_heads
            by_pair = weight.view(n_heads, -1, 2, *weight.shape[1:])
            return by_pair.transpose(1, 2).reshape(weight.shape)
        return weight


def gguf_tokenizer(path: Path, options: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """The tokenizer in a GGUF file, with its chat template; other files of the folder are ignored.

    Raises UnsupportedModel if transformers cannot read it, ModelNotFound for a damaged file.
    """
    _reader(path)  # transformers would read without end if a header is damaged
    kind: Any = PreTrainedTokenizerFast
    try:
        return kind(name_or_path=str(path.parent), gguf_file=path.name, **options)
    except Exception as error:  # tokenizers raises errors of many types
        if isinstance(error, TypeError) and options:
            raise
        raise UnsupportedModel(
            f"transformers cannot read the tokenizer in {str(path)!r} ({error!r}); give another as "
            "tokenizer, such as that of the checkpoint that the file was made from"
        ) from error


def _reader(path: Path) -> Any:  # noqa: ANN401
    try:
        from gguf import GGUFEndian, GGUFReader, GGUFValueType
    except ImportError:
        raise MissingExtra.of("gguf", "gguf") from None

    class Reader(GGUFReader):
        """A reader of plain bytes, whose slices take a sixth of the time of a memory map's."""

        @property
        def data(self) -> Any:  # noqa: ANN401
            return self._bytes

        @data.setter
        def data(self, mapped: Any) -> None:  # noqa: ANN401
            self._bytes = np.asarray(mapped)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:  # noqa: ANN401
            """As in the base class, but skips arrays: a vocabulary would take 200 MB."""
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            of = int(self._get(orig_offs, np.uint32)[0])
            n_left, at = int(self._get(orig_offs + 4, np.uint64)[0]), orig_offs + 12
            if (number := self.gguf_scalar_to_np.get(GGUFValueType(of))) is not None:
                at += n_left * np.dtype(number).itemsize
            else:
                order: Any = "big" if self.endianess == GGUFEndian.BIG else "little"
                memory: Any = memoryview(self._bytes)  # type: ignore[arg-type]
                while n_left and at <= len(memory):
                    if of == GGUFValueType.STRING:
                        at += 8 + int.from_bytes(memory[at : at + 8], order)
                    else:
                        at += self._get_field_parts(at, of)[0]
                    n_left -= 1
            if at > len(self._bytes):
                raise ValueError(f"an array of {n_left} more entries ends behind the file")
            return at - orig_offs, [], [], [GGUFValueType.ARRAY]

    try:
        return Reader(path)
    except (OSError, ValueError, LookupError, ArithmeticError, TypeError, MemoryError) as error:
        raise ModelNotFound(
            f"{str(path)!r} must be a whole GGUF file ({error}); fetch it again"
        ) from error
