"""A transformers model that is stepped through layer by layer.

Every pass is a loop over the model's own decoder layers.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from samkv_integrations.errors import UnsupportedModel
from samkv_integrations.prompt.quoting import SpecialTokens
from samkv_integrations.prompt.text import ModelText, half_character
from samkv_integrations.runtimes.transformers.model.attention import (
    Attend,
    _samkv_attention,
    attention,
    for_single_token,
)
from samkv_integrations.runtimes.transformers.model.decode_layer import is_plain, run
from samkv_integrations.runtimes.transformers.model.families import (
    Family,
    Rotation,
    context_window_of,
    family_of,
    head_dim_of,
    layer_ropes,
    refuse_adapters,
    refuse_unsupported,
    ropes_of,
    rotated_channels,
    text_config,
    windows_of,
)
from samkv_integrations.runtimes.transformers.model.identity import Identity, kind_of
from samkv_integrations.runtimes.transformers.model.threads import on_all_threads


class LayeredModel(ModelText):
    """A causal language model that is stepped through layer by layer.

    Args:
        hf: a loaded transformers model of a supported family. It stays usable, in evaluation mode
            and with SDPA attention.
        tokenizer: its fast tokenizer, which is copied.
        name: the model's name in reports.
        copies_tokenizer: False for a tokenizer that nobody else uses; a copy takes memory.

    identity: digests of weights and config, and whether those have changed.
    device: that of the embeddings and logits. layer_devices: the device of each layer, its entries
        and its masks; all the same unless accelerate has spread the layers.
    windows: the window of each layer, see `families.windows_of`.
    token_kv_bytes: bytes of one token's keys and values in all layers, in the model's dtype.

    Raises:
        UnsupportedModel: the model could not be computed exactly; the message says why.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        tokenizer: Any,  # noqa: ANN401
        name: str,
        *,
        copies_tokenizer: bool = True,
    ) -> None:
        is_quantised = _accept(hf, tokenizer, name)
        self.hf, self.config, self.name = hf, text_config(hf.config), name
        _prepare(hf, is_quantised=is_quantised)
        # Ours alone: each call sets whether special tokens are read as such, under our lock.
        self.tokenizer = copy.deepcopy(tokenizer) if copies_tokenizer else tokenizer
        self._tokenizing = threading.Lock()
        self.identity = Identity(hf, name)
        self._decoder: Any = hf.get_decoder()  # type: ignore[no-untyped-call]
        self._family = family_of(hf.config)
        self._read_config()
        # keys of the chunks of the latest vote -> the stable layers N*
        self.stable_layers: dict[tuple[str, ...], tuple[int, ...]] = {}
        self.layer_devices = (self.device,) * self.n_layers
        if len(set(getattr(hf, "hf_device_map", {}).values())) > 1:
            self.layer_devices = self._devices_of_layers()

    def _read_config(self) -> None:
        """Note the parts of the config that passes read: numbers, windows, and how heads rotate."""
        config = self.config
        self.n_layers: int = config.num_hidden_layers
        self.n_heads: int = config.num_attention_heads
        self.n_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = head_dim_of(config)
        self.dtype, self.device = kind_of(self.hf)
        n_numbers = 2 * self.n_layers * self.n_kv_heads * self.head_dim
        self.token_kv_bytes: int = n_numbers * self.dtype.itemsize
        self._most_tokens = context_window_of(config)
        self.windows = windows_of(config)
        self.score_cap: float | None = None
        if self._family.score_cap:
            self.score_cap = getattr(config, self._family.score_cap)
        self._ropes = layer_ropes(config)
        self._n_rotated = rotated_channels(config, self.head_dim)
        self._halves = _halves(self._n_rotated, self.head_dim, self._family)
        self._lies_otherwise = self._halves is not None or self._family.turns != "halves"
        self._rotary = self._decoder.rotary_emb
        if any(rope.get("rope_type") == "longrope" for rope in ropes_of(config).values()):
            self._rotary = copy.deepcopy(self._rotary)  # its forward writes to it

    # -- identity ---------------------------------------------------------------------------

    @property
    def weights_digest(self) -> str:
        """Hash of every byte of every weight, see `Identity`."""
        return self.identity.weights

    @cached_property
    def tokenizer_digest(self) -> str:
        text = self.tokenizer.backend_tokenizer.to_str()
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @cached_property
    def layer_parameters(self) -> int:
        """Numbers in the weights of one layer."""
        n_numbers = 0
        for part in self._decoder.layers[0].modules():
            if hasattr(part, "in_features"):  # a linear layer, whose weight may be packed
                n_numbers += part.in_features * part.out_features
            else:
                n_numbers += sum(each.numel() for each in part.parameters(recurse=False))
        return n_numbers

    @property
    def n_parameters(self) -> int:
        """Numbers in the weights of layers and embedding; those of biases are left out."""
        embedding: Any = self.hf.get_input_embeddings()
        return self.n_layers * self.layer_parameters + int(embedding.weight.numel())

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def scores_plainly(self) -> bool:
        """Whether attention is a softmax of scaled products, without bound or sinks."""
        return self.score_cap is None and not self._family.has_sinks

    @property
    def context_window(self) -> int:
        """Most tokens of prompt and answer together."""
        return min(self._most_tokens, int(self.config.max_position_embeddings))

    # -- text -------------------------------------------------------------------------------

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        return list(self._tokenized(text, special=special)["input_ids"])

    def _tokenized(self, text: str, *, special: bool, offsets: bool = False) -> Any:  # noqa: ANN401
        with self._tokenizing:  # split_special_tokens is a state of the one shared tokenizer
            try:
                return self.tokenizer(
                    text,
                    add_special_tokens=False,
                    split_special_tokens=not special,
                    verbose=False,  # the caller checks the length
                    return_offsets_mapping=offsets,
                )
            except TypeError as error:  # of the tokenizers library, without the text
                raise half_character(text) from error

    def token_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = self._tokenized(text, special=False, offsets=True)
        return list(found["input_ids"]), list(found["offset_mapping"])

    def detokenize(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    @property
    def n_vocabulary(self) -> int:
        n_known: int = self.config.vocab_size
        return n_known

    @cached_property
    def longest_token(self) -> int:
        return max(map(len, self.tokenizer.get_vocab()))

    @cached_property
    def special_tokens(self) -> SpecialTokens:
        tokens = self.tokenizer.added_tokens_decoder.values()
        return SpecialTokens({token.content: token for token in tokens if token.special})

    @cached_property
    def added_ids(self) -> tuple[list[int], list[int]]:
        ids, bare = self.tokenizer("a")["input_ids"], self.tokenize("a", special=True)
        at = next(n for n in range(len(ids) + 1) if ids[n : n + len(bare)] == bare)
        return list(ids[:at]), list(ids[at + len(bare) :])

    @property
    def bos_id(self) -> int | None:
        token: int | None = self.tokenizer.bos_token_id
        return token

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Every token that ends an answer: of the generation config, config and tokenizer."""
        found: set[int] = set()
        sources = (self.hf.generation_config, self.config, self.tokenizer)
        for value in (getattr(source, "eos_token_id", None) for source in sources):
            found.update([value] if isinstance(value, int) else value or [])
        return frozenset(found)

    @property
    def fast_tokenizer(self) -> Any:  # noqa: ANN401
        return self.tokenizer.backend_tokenizer

    @property
    def chat_template(self) -> str | None:
        template = self.tokenizer.chat_template  # a dict has several templates
        return str(template) if template else None

    @property
    def chat_template_of_tools(self) -> str | None:
        if not self.has_chat_template:
            return None
        return str(self.tokenizer.get_chat_template(tools=[{}]))  # one of several may be for tools

    def write_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *,
        opens: bool = True,
    ) -> str:  # fmt: skip
        text = self.tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=opens
        )
        assert isinstance(text, str)
        return text

    # -- one pass ---------------------------------------------------------------------------

    def embed(self, ids: Tensor) -> Tensor:
        """(..., R) token ids -> (..., R, hidden)."""
        hidden: Tensor = self._decoder.embed_tokens(ids.to(self.device))
        return self._family.embeddings(self._decoder, hidden)

    def rotation(self, positions: Tensor) -> Rotation:
        """The model's own cos and sin for ``positions`` (R,), of each kind of layer."""
        probe = torch.empty(0, dtype=self.dtype, device=self.device)
        n, positions = len(positions), positions.to(self.device)
        if n == 0:  # longrope fails for no positions
            positions = torch.zeros(1, dtype=torch.long, device=self.device)
        of_layers = list(zip(self._ropes, self.layer_devices, strict=True))
        kinds = list(dict.fromkeys(of_layers))
        turns = []
        for (name, rotates), device in kinds:
            if rotates:
                found = self._rotary(probe, positions[None], *(() if name is None else (name,)))
                cos, sin = found[0][0, :n], found[1][0, :n]
                if self._lies_otherwise:
                    cos, sin = self._of_whole_head(cos, 1), self._of_whole_head(sin, 0)
            else:
                cos = probe.new_ones(n, self.head_dim)
                sin = torch.zeros_like(cos)
            turns.append((cos.to(device), sin.to(device)))
        return Rotation(turns=turns, kinds=[kinds.index(kind) for kind in of_layers])

    def decoding(self, n_tokens: int) -> AbstractContextManager[object]:
        """Inside this block, a pass over ``n_tokens`` tokens uses the faster products of decoding.

        Their results differ in the last bits, so they must not be stored. No other pass may run
        inside the block.
        """
        return for_single_token(self.device, self.dtype) if n_tokens == 1 else nullcontext()

    def layer(self, index: int, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Run decoder layer ``index`` on tokens ``hidden`` (batch, R, hidden).

        cos, sin: (R, D) of the tokens' positions. ``attend`` gets the keys and values. They and the
        result are on the layer's device.
        """
        if hidden.device != self.layer_devices[index]:
            hidden = hidden.to(self.layer_devices[index])
        if (halves := self._halves) is not None:
            of_halves = attend

            def attend(
                layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
            ) -> Tensor | None:
                return of_halves(layer, query[..., halves], key[..., halves], value, scaling)

        if self._lies_otherwise:
            cos, sin = self._of_layer(cos), self._of_layer(sin)
        layer = self._decoder.layers[index]
        if len(hidden) == 1 and is_plain(self.config, layer):
            return run(layer, hidden, cos, sin, attend)
        output: Tensor = on_all_threads(
            partial(
                layer,
                hidden,
                attention_mask=None,
                position_ids=None,
                position_embeddings=(cos[None], sin[None]),
                attend=attend,
            )
        )
        return output

    def ends_at(self, index: int) -> bool:
        """Whether a pass for entries alone ends in the attention of layer ``index``.

        That is so in the last layer, whose output is not needed, unless a hook may see it.
        """
        return index == self.n_layers - 1 and is_plain(self.config, self._decoder.layers[index])

    def _devices_of_layers(self) -> tuple[torch.device, ...]:
        """The device of each layer, found by a pass over one token: hooks of accelerate move it."""
        found: list[torch.device] = []

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            found.append(query.device)
            return query

        with torch.no_grad():
            hidden = self.embed(torch.zeros(1, 1, dtype=torch.long))
            rotation = self.rotation(torch.arange(1))
            for layer in range(self.n_layers):
                hidden = self.layer(layer, hidden, *rotation.of(layer), attend)
        return tuple(found)

    def n_more_rows(self, n_rows: int) -> int:
        """Rows that a pass adds behind its tokens, so that passes have fewer shapes.

        oneDNN compiles a program of .7 MB for each shape of a 16-bit product, and keeps a thousand
        of them. Padding adds at most an eighth of the rows, a sixteenth from 256 rows on, which
        makes 128 different numbers of rows up to 4,096. The results of the other rows stay the
        same to the last bit.
        """
        if n_rows <= 16 or self.device.type != "cpu" or self.dtype.itemsize != 2:
            return 0
        an_eighth = 1 << n_rows.bit_length() - 4
        return -n_rows % min(an_eighth, max(16, an_eighth // 2), 64)

    def n_more_keys(self, n_keys: int) -> int:
        """Entries of zeros, masked, that a pass adds behind ``n_keys``, for the same reason.

        If `attention` added them, it would have to copy all keys and values.
        """
        return -n_keys % 64 if self.device.type == "cpu" and self.dtype.itemsize == 2 else 0

    def attention(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float,
        mask: Tensor | None, causal: bool, *, may_round: bool = False,
    ) -> Tensor:  # fmt: skip
        """`attention` as a layer computes it, with the model's bound of scores and its sinks."""
        return on_all_threads(
            partial(
                attention, query, key, value, scaling, mask, causal, score_cap=self.score_cap,
                sinks=self.sinks(layer), may_round=may_round,
            )
        )  # fmt: skip

    def sinks(self, layer: int) -> Tensor | None:
        """(H,) for each head, the score in the softmax that belongs to no token; None if none."""
        if not self._family.has_sinks:
            return None
        sinks: Tensor = self._decoder.layers[layer].self_attn.sinks
        return sinks

    def window_mask(self, layer: int, n_tokens: int) -> Tensor | None:
        """(n, n) bool: which of the first tokens each one sees at a layer; None for all before."""
        window = self.windows_within(n_tokens)[layer]
        if window is None:
            return None
        at = torch.arange(n_tokens, device=self.layer_devices[layer])
        behind = at[:, None] - at[None]
        return (behind >= 0) & (behind < window)

    def windows_within(self, n_tokens: int) -> tuple[int | None, ...]:
        """`windows`, but also None for a window of ``n_tokens`` or more."""
        if not any(self.windows):
            return self.windows
        return tuple(w if w is not None and w < n_tokens else None for w in self.windows)

    def _of_whole_head(self, side: Tensor, fill: float) -> Tensor:
        """(R, D) from the model's cos or sin (R, .); ``fill`` for channels that do not rotate."""
        step = 2 if self._family.turns == "pairs" else 1
        half = F.pad(
            side[:, ::step][:, : self._n_rotated // 2],
            (0, (self.head_dim - self._n_rotated) // 2),
            value=fill,
        )
        return torch.cat((half, half), -1)

    def _of_layer(self, side: Tensor) -> Tensor:
        """Cos or sin in the form that a layer takes, from the result of `_of_whole_head`."""
        half = side[:, : self._n_rotated // 2]
        if self._family.turns == "half":
            return half
        if self._family.turns == "pairs":
            return half.repeat_interleave(2, -1)
        return torch.cat((half, half), -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, hidden) after the last layer -> (R, vocabulary)."""
        scores: Tensor = self.hf.lm_head(self._decoder.norm(hidden))
        return self._family.logits(self.hf, self.config, scores.to(self.device))


def _accept(hf: Any, tokenizer: Any, name: str) -> bool:  # noqa: ANN401
    """Whether a model's weights are quantised. Raises UnsupportedModel if it cannot be served.

    Weights of a GGUF file are not, because transformers has dequantised them. The config's note of
    their former quantisation is removed.
    """
    if not isinstance(hf, PreTrainedModel):
        raise UnsupportedModel(
            f"the model is a {type(hf).__name__}; it must be a transformers model; give the result "
            "of AutoModelForCausalLM.from_pretrained, with adapters merged into it"
        )
    quantised: Any = getattr(hf.config, "quantization_config", None)
    is_gguf = getattr(quantised, "quant_method", None) == "gguf"
    if is_gguf:
        if not all(weight.is_floating_point() for weight in hf.parameters()):
            raise UnsupportedModel(
                f"{name!r} holds packed weights of a GGUF file; load it with dtype='float32', "
                "which dequantises them"
            )
        del hf.config.quantization_config
    refuse_unsupported(hf.config)
    refuse_adapters(hf, name)
    if not getattr(tokenizer, "is_fast", False):
        raise UnsupportedModel(
            f"{name!r} has no fast tokenizer, which chunk boundaries need; give a tokenizer with a "
            "tokenizer.json"
        )
    return quantised is not None and not is_gguf


def _prepare(hf: PreTrainedModel, *, is_quantised: bool) -> None:
    """Put a model into the state that every later pass sees: our attention, no training."""
    AttentionInterface.register("samkv", _samkv_attention)
    AttentionMaskInterface.register("samkv", sdpa_mask)
    hf.set_attn_implementation("samkv")
    hf.train(False)
    if is_quantised:
        # The first forward changes tensors: AWQ and Marlin convert their scales there, and
        # compressed-tensors unpacks weights in a hook of the whole model, whose forward no
        # later pass calls. Digests must cover the numbers that later passes compute with.
        with torch.no_grad():
            hf(torch.zeros(1, 1, dtype=torch.long, device=kind_of(hf)[1]))


def _halves(n_rotated: int, head_dim: int, family: Family) -> Tensor | None:
    """(D,) an order of a head's channels in which RoPE pairs the first half with the second.

    A family that rotates a part of a head pairs the first half of that part with the second. The
    order of channels makes no difference to the product of a query and a key.
    """
    if family.turns == "pairs":
        return torch.cat((torch.arange(0, head_dim, 2), torch.arange(1, head_dim, 2)))
    if n_rotated == head_dim:
        return None
    rotated, rest = torch.arange(n_rotated), torch.arange(n_rotated, head_dim)
    first, second = zip(rotated.chunk(2), rest.chunk(2), strict=True)
    return torch.cat((*first, *second))
