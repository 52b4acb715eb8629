"""The identity of a model: digests of its weights and its config, and whether they changed.

Digests cover numbers, not code. The caller must know about hooks, about compiled or replaced
forward methods, and about other versions of libraries.
"""

from __future__ import annotations

import copy
import hashlib
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor
from transformers import PreTrainedModel

from samkv_integrations.errors import InvalidOption, UnsupportedModel
from samkv_integrations.runtimes.transformers.model.families import (
    refuse_adapters,
    text_config,
    windows_of,
)

_PIECE_BYTES = 2**25
"""Bytes of a piece, which a thread hashes, and copies from a device, at a time."""

_MAX_THREADS = 8

_NO_INPUT = frozenset({
    # the origin of the model
    "_name_or_path", "_model_name_or_path", "_commit_hash", "architectures", "transformers_version",
    # fields of the fingerprint, and fields that this package sets
    "dtype", "torch_dtype", "_attn_implementation",
    # the results that a forward returns
    "use_cache", "return_dict", "output_hidden_states", "output_attentions", "_output_attentions",
    # tokens that begin, end and pad texts, and fields for training and classifiers
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id",
    "initializer_range", "id2label", "label2id", "problem_type",
})  # fmt: skip
"""Fields of a config that chunk caches do not depend on; all other fields are hashed."""

_PLAIN = (Tensor, torch.nn.Parameter)
_PROBED = (torch.float32, torch.bfloat16, torch.float16)
_MAX_PROBED = 48
_PROBED_VALUES = 16
"""The cheap check compares so many values of each matrix, or of one a layer if they are more."""


def kind_of(hf: PreTrainedModel) -> tuple[torch.dtype, torch.device]:
    """Dtype and device of a model: those of its embeddings, which no quantisation packs."""
    embedding: Any = hf.get_input_embeddings()
    device = embedding.weight.device
    hook = getattr(embedding, "_hf_hook", None)
    if device.type == "meta" and hook is not None:  # accelerate loads it later
        device = torch.device(hook.execution_device)
    return embedding.weight.dtype, device


def _offloaded(hf: PreTrainedModel) -> dict[str, Tensor]:
    """The weights that accelerate loads when their modules run, by name. Raises InvalidOption."""
    found: dict[str, Tensor] = {}
    for place, module in hf.named_modules():
        for name, weight in module._parameters.items():
            if weight is None or not _is_offloaded(module):
                continue
            try:
                found[f"{place}.{name}"] = module._hf_hook.weights_map[name]
            except KeyError:
                raise InvalidOption(
                    f"the device_map puts {place!r} on disk, but not the module that shares its "
                    f"{name}; give both modules the same place"
                ) from None
    return found


def _is_offloaded(module: Any) -> bool:  # noqa: ANN401
    return getattr(getattr(module, "_hf_hook", None), "weights_map", None) is not None


class Identity:
    """Digests of the numbers that a model computes with; made again when the numbers change.

    Thread-safe. name: the model's name in errors.
    """

    def __init__(self, hf: PreTrainedModel, name: str) -> None:
        self._hf = hf
        self._name = name
        self._kind = kind_of(hf)
        self._windows = windows_of(text_config(hf.config))
        self._lock = threading.RLock()
        self._generation = 0
        self._digests: dict[str, str] = {}
        self._remember()

    @property
    def generation(self) -> int:
        """A number that grows when `look` finds changed weights or a changed config."""
        return self._generation

    @property
    def weights(self) -> str:
        """Hash of every byte of every weight, as it is in memory."""
        return self._digest("weights", lambda: weights_digest(self._hf))

    @property
    def config(self) -> str:
        """Hash of the config's fields and the modules' numbers that results may depend on."""
        return self._digest("config", lambda: _config_digest(self._hf))

    @property
    def rope(self) -> str:
        return self._digest("rope", lambda: _rope_digest(self._hf))

    def look(self) -> int:
        """`generation`, after a check whether the model has changed since the last look.

        The check takes some 0.2 ms. It finds writes that PyTorch counts, replaced tensors and
        modules, and changes of many values, such as a merged adapter. It may miss a few values
        that were written behind PyTorch's back (``weight.data``, or a mapped file of weights):
        call `refresh` after that.

        Raises:
            UnsupportedModel: the model was moved or converted, or has a new adapter or attention.
            InvalidOption: the default device of this thread is not the CPU.
        """
        if (device := torch.get_default_device()).type != "cpu":
            raise InvalidOption(
                f"torch.set_default_device({str(device)!r}) was called in this thread; the default "
                "device must be the CPU, where prompts are read; call "
                "torch.set_default_device(None) once models are loaded"
            )
        with self._lock:
            stamp, settings = self._stamp()
            if stamp != self._seen[0] or settings != self._seen[1]:
                self._refuse_changed()
                # a change of the config alone needs no new hash of the weights
                kept = {"weights"} if stamp == self._seen[0] else set()
                for kind in self._digests.keys() - kept:
                    del self._digests[kind]
                self._remember()
                self._generation += 1
            return self._generation

    def refresh(self) -> None:
        """Forget all digests; the next use hashes every byte again."""
        with self._lock:
            self.look()
            self._digests.clear()
            self._generation += 1

    def _digest(self, kind: str, make: Callable[[], str]) -> str:
        with self._lock:
            if kind not in self._digests:
                self.look()
                self._digests[kind] = make()
            return self._digests[kind]

    def _refuse_changed(self) -> None:
        refuse_adapters(self._hf, self._name)
        if (kind := kind_of(self._hf)) != self._kind:
            was, now = (
                f"{str(dtype).removeprefix('torch.')} on {device}"
                for dtype, device in (self._kind, kind)
            )
            raise UnsupportedModel(
                f"{self._name!r} was {was} when it was given, and is {now} now; make a new Model "
                "and Engine of it"
            )
        if windows_of(text_config(self._hf.config)) != self._windows:
            raise UnsupportedModel(
                f"the sliding window of {self._name!r} was changed after its Model was made; make "
                "a new Model and Engine of it"
            )
        if (attention := self._hf.config._attn_implementation) != "samkv":
            raise UnsupportedModel(
                f"the attention of {self._name!r} was changed to {attention!r}; it must be "
                "'samkv', which reads chunk caches; call set_attn_implementation('samkv') on it"
            )

    def _remember(self) -> None:
        """Keep the objects that `look` compares, so that it finds them fast."""
        # The dictionaries themselves, so that later additions to them are found.
        parts = [module.__dict__ for module in self._hf.modules()]
        self._modules = [members for of in parts if (members := of["_modules"])]
        # Without accelerate's, in which other tensors are put while a forward runs.
        self._tensors = [
            members
            for module in self._hf.modules()
            if not _is_offloaded(module)
            for kind in ("_parameters", "_buffers")
            if (members := module.__dict__[kind])
        ]
        self._seen = copy.deepcopy(self._stamp())

    @torch.no_grad()
    def _stamp(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The data that `look` compares: modules, tensors and the fields of the config.

        For a tensor: its address, the number of writes that PyTorch has counted, and some values.
        """
        tensors: list[Tensor] = []
        for x in (x for members in self._tensors for x in members.values() if x is not None):
            if x.is_meta:
                continue  # without data to compare; a model that was moved there is refused
            if type(x) in _PLAIN:
                tensors.append(x)
            elif hasattr(x, "__tensor_flatten__"):  # other types pack themselves again at each use
                tensors += _parts(x)[0].values()
        try:
            writes = [x._version for x in tensors]
        except RuntimeError:  # tensors made in inference mode count no writes
            writes = [-1 if x.is_inference() else x._version for x in tensors]
        matrices = [x for x in tensors if x.ndim >= 2 and x.dtype in _PROBED]
        if len(matrices) > _MAX_PROBED:  # one for each layer, of different kinds
            n_layers: int = self._hf.config.get_text_config().num_hidden_layers
            per_layer = max(1, len(matrices) // n_layers)  # fewer where most are on disk
            n_probed = min(n_layers, len(matrices))
            matrices = [matrices[at * per_layer + at % per_layer] for at in range(n_probed)]
        some = [
            # an odd step, so that the values come from many rows and columns
            matrix.as_strided((_PROBED_VALUES,), ((matrix.numel() - 1) // _PROBED_VALUES - 1 | 1,))
            for matrix in matrices
            if matrix.numel() > 2 * _PROBED_VALUES and matrix.is_contiguous()
        ]
        values = []
        for device in dict.fromkeys(each.device for each in some):
            here = torch.cat([each for each in some if each.device == device])
            values.append(here.float().cpu().numpy().tobytes())
        modules = [id(module) for members in self._modules for module in members.values()]
        config = vars(self._hf.config).items()
        unseen = _NO_INPUT | {"quantization_config"}  # a change of it shows in the packed weights
        settings = {name: value for name, value in config if name not in unseen}
        return (modules, [x.data_ptr() for x in tensors], writes, values), settings


def _parts(tensor: Tensor) -> tuple[dict[str, Tensor], str]:
    """The plain tensors of a parameter, by name, and a text with all else needed to read them.

    A quantised weight has codes, scales and zero points. Raises TypeError for a type that does not
    expose its numbers.
    """
    if type(tensor) in _PLAIN and not tensor.is_quantized:
        return {"": tensor}, ""
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        parts: dict[str, Tensor] = {}
        how = repr(context)
        for name in names:
            inner, more = _parts(getattr(tensor, name))
            parts |= {f".{name}{rest}": part for rest, part in inner.items()}
            how += more
        return parts, how
    if not type(tensor).__module__.startswith("bitsandbytes."):
        if tensor.is_quantized or type(tensor.cpu()) not in _PLAIN:
            raise TypeError(type(tensor).__name__)
        return {"": tensor}, ""
    return {"": tensor.detach().as_subclass(Tensor)}, ""  # the state dict has the rest


def _state(hf: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every parameter and buffer, and the rest of the state dict, by name; and how to read some.

    Frequencies of RoPE are left to `rope`. Raises UnsupportedModel for state without a digest.
    """
    named: dict[str, Any] = {
        **hf.state_dict(),
        **dict(hf.named_buffers(remove_duplicate=False)),
        **dict(hf.named_parameters(remove_duplicate=False)),
    }
    named |= _offloaded(hf)
    state: dict[str, Tensor] = {}
    readings: dict[str, str] = {}
    for name in sorted(named):
        if ".rotary_emb." in name:
            continue
        try:
            parts, readings[name] = _parts(named[name])
        except (AttributeError, TypeError) as error:
            raise UnsupportedModel(
                f"{name!r} of the model's state is a {type(named[name]).__name__}, whose numbers "
                "cannot be read for a digest that identifies the model; load the model in another "
                "quantisation, or in float32 or bfloat16"
            ) from error
        state |= {f"{name}{rest}": part for rest, part in parts.items()}
    kept = {name.rpartition(".")[0] for name in named} | {
        name.split(".weight")[0] for name in named
    }
    for name, _ in hf.named_modules():
        if name.endswith(("_proj", "lm_head")) and name not in kept:
            raise UnsupportedModel(
                f"the model's state lacks the weight of {name!r}, which a digest of the model "
                "needs; load the model in another quantisation, or in float32 or bfloat16"
            )
    return state, {name: how for name, how in readings.items() if how}


def weights_digest(hf: PreTrainedModel) -> str:
    """Hash of every byte of every weight (see `_state`), piece by piece in a few threads."""
    state, readings = _state(hf)
    once = {_place(tensor): tensor for tensor in state.values()}  # tied weights are one tensor
    pieces = [(place, piece) for place, tensor in once.items() for piece in _pieces(tensor)]
    hashes: dict[tuple[Any, ...], list[str]] = {place: [] for place in once}
    n_threads = max(1, min(_MAX_THREADS, torch.get_num_threads()))
    with ThreadPoolExecutor(n_threads) as threads:
        for first in range(0, len(pieces), n_threads):
            some = pieces[first : first + n_threads]  # copied from a device together
            digests = threads.map(hash_piece, [piece for _, piece in some])
            for (place, _), digest in zip(some, digests, strict=True):
                hashes[place].append(digest)
    found: list[Any] = [
        (name, str(tensor.dtype), list(tensor.shape), hashes[_place(tensor)])
        for name, tensor in state.items()
    ]
    return _hash([*found, readings] if readings else found)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    flat = tensor.detach().reshape(-1)
    return torch.split(flat, _PIECE_BYTES // flat.element_size()) if flat.numel() else ()


def hash_piece(piece: Tensor) -> str:
    """Hash of the bytes of a piece."""
    data: Any = piece.cpu().view(torch.uint8).numpy()
    return blake3(data).hexdigest()


def _config_digest(hf: PreTrainedModel) -> str:
    fields = {k: v for k, v in hf.config.to_dict().items() if k not in _NO_INPUT}
    # modules keep copies of the config's numbers, which are the ones that a forward reads
    numbers = {
        f"{name}.{attribute}": value
        for name, module in hf.named_modules()
        for attribute, value in vars(module).items()
        if type(value) is float
    }
    return _hash([fields, numbers])


def _rope_digest(hf: Any) -> str:  # noqa: ANN401
    rotary = hf.get_decoder().rotary_emb
    parameters = text_config(hf.config).rope_parameters
    if parameters.get("rope_type") == "longrope":  # longrope overwrites its frequencies
        return _hash([parameters, rotary.original_inv_freq.float().cpu().numpy().tobytes().hex()])
    frequencies = {
        name: values.float().cpu().numpy().tobytes().hex()
        for name, values in rotary.named_buffers()
        if name.endswith("inv_freq") and "original" not in name
    }
    return _hash([parameters, frequencies.get("inv_freq") or frequencies])


def _hash(value: Any) -> str:  # noqa: ANN401
    """32 hex digits that name a value of JSON."""
    canonical = json.dumps(value, sort_keys=True, default=str).encode()
    return hashlib.blake2b(canonical, digest_size=16).hexdigest()
