"""The only module that knows transformers: load, tokenise, step through layers, sample.

No model code is patched. An attention function is registered under the name ``samkv``; a decoder
layer hands it the layer's queries, keys and values after RoPE, together with the ``attend``
callable of the pass in progress (prefill, probe, blend or decode), which travels as a keyword
argument. Every pass is then a loop over the model's own decoder layers.
"""

from __future__ import annotations

import copy
import hashlib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface
from transformers.utils import logging as transformers_logging

from samkv_integrations.errors import InvalidOption, ModelNotFound, UnsupportedModel

SUPPORTED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SUPPORTED_DTYPES = ("float32", "bfloat16")
DTYPES = ("auto", *SUPPORTED_DTYPES)
SMALLEST = 1e-5
"""The smallest number that logits may be divided by: none becomes infinite."""
SUPPORTED_ROPE = ("default", "linear", "llama3")

# Arguments of from_pretrained that are decided here -> what to do instead.
_DECIDED = {
    "dtype": "give dtype as an argument of its own",
    "torch_dtype": "give dtype as an argument of its own",
    "device_map": "the whole model goes to one device, which is an argument of its own",
    "attn_implementation": "attention to chunk caches is computed by this package; leave it out",
    **dict.fromkeys(
        ("quantization_config", "load_in_4bit", "load_in_8bit"),
        "quantised weights are not supported; leave it out",
    ),
}


class Attend(Protocol):
    """What a pass does inside one attention layer."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """Attention output for the rows being computed.

        query (batch, H, R, D), key and value (batch, G, R, D), after RoPE, of these rows only;
        returns (batch, H, R, D).
        """
        ...


def _samkv_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attend: Attend | None = None,
    **kwargs: Any,  # noqa: ANN401  (transformers' interface; passed on as it came)
) -> tuple[Tensor, Tensor | None]:
    if attend is None:  # the user calls the model directly: behave as transformers does
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(layer, query, key, value, scaling).transpose(1, 2), None


def attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None, causal: bool
) -> Tensor:
    """Scaled dot-product attention of (batch, H, R, D) over (batch, G, S, D), grouped heads."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and mask is not None and query.is_cuda:
        # with a mask, CUDA's grouped-head path falls back to the slow math kernel
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        groups = 1
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=causal, scale=scaling, enable_gqa=groups > 1
    )


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    temperature: 0 takes the likeliest token, and top_k and top_p change nothing then.
    top_k: how many of the likeliest tokens stay in the draw; 0 for all.
    repetition_penalty: above 1 makes tokens of prompt and answer less likely; None for that of the
        generation config.
    seed: makes sampling repeatable.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, kind in _SAMPLING_KINDS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind):
                words = "a whole number" if kind is int else "a number"
                raise InvalidOption(f"{name}={value!r}; it must be {words}")
        if self.max_new_tokens < 1:
            raise InvalidOption(f"max_new_tokens={self.max_new_tokens}; it must be at least 1")
        if self.temperature != 0 and not self.temperature >= SMALLEST:
            raise InvalidOption(
                f"temperature={self.temperature}; it must be 0 (greedy), or {SMALLEST} or more"
            )
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise InvalidOption(f"seed={self.seed}; it must fit into 64 bits")
        if not 0 < self.top_p <= 1:
            raise InvalidOption(f"top_p={self.top_p}; it must be above 0 and at most 1")
        if self.top_k < 0:
            raise InvalidOption(f"top_k={self.top_k}; it must be 0 (all tokens) or more")
        if self.repetition_penalty is not None and not self.repetition_penalty >= SMALLEST:
            raise InvalidOption(
                f"repetition_penalty={self.repetition_penalty}; it must be {SMALLEST} or more "
                "(1 for none)"
            )


_SAMPLING_KINDS = {
    "max_new_tokens": int,
    "temperature": int | float,
    "top_p": int | float,
    "top_k": int,
    "repetition_penalty": int | float | None,
    "seed": int | None,
}


class Model:
    """A causal language model that can be stepped through layer by layer.

    Args:
        hf: a loaded transformers model of a supported family. It goes on working, in evaluation
            mode and with SDPA attention.
        tokenizer: its fast tokenizer, which is copied.
        name: what a report calls it.

    Raises:
        UnsupportedModel: something about the model could not be served exactly; says what.
    """

    def __init__(self, hf: PreTrainedModel, tokenizer: Any, name: str) -> None:  # noqa: ANN401
        if not isinstance(hf, PreTrainedModel):
            raise UnsupportedModel(
                f"a {type(hf).__name__} is no transformers model; give what "
                "AutoModelForCausalLM.from_pretrained returns, adapters merged into it"
            )
        _refuse_unsupported(hf.config)
        if len(places := set(getattr(hf, "hf_device_map", {}).values())) > 1:
            raise UnsupportedModel(
                f"{name!r} is spread over {', '.join(sorted(map(str, places)))}; load it onto one "
                "device"
            )
        if not getattr(tokenizer, "is_fast", False):
            raise UnsupportedModel(
                f"{name!r} has no fast tokenizer; chunk boundaries need one (tokenizer.json)"
            )
        AttentionInterface.register("samkv", _samkv_attention)
        AttentionMaskInterface.register("samkv", sdpa_mask)
        hf.set_attn_implementation("samkv")
        self.hf = hf.train(False)
        # A copy: for each text it is told anew whether special tokens count, under our lock.
        self.tokenizer = copy.deepcopy(tokenizer)
        self.name = name
        self.config = hf.config
        self.n_layers: int = self.config.num_hidden_layers
        self.n_heads: int = self.config.num_attention_heads
        self.n_kv_heads: int = self.config.num_key_value_heads
        self.head_dim: int = (
            getattr(self.config, "head_dim", None) or self.config.hidden_size // self.n_heads
        )
        self.dtype: torch.dtype = hf.dtype
        self.device: torch.device = hf.device
        self._tokenizing = threading.Lock()

    @classmethod
    def load(
        cls,
        name: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        tokenizer: Any = None,  # noqa: ANN401
        model_kwargs: Mapping[str, Any] | None = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
    ) -> Model:
        """Load by hub id, local folder, or ``"builtin"`` (the reference model in this package).

        device: ``auto`` (CUDA if there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: ``float32``, ``bfloat16``, or ``auto`` for the checkpoint's; where that is bfloat16
            and this processor computes it slowly, float32 (see `bfloat16_is_slow`).
        tokenizer: a loaded one in place of the model's own.
        model_kwargs, tokenizer_kwargs: passed on to ``from_pretrained``, such as ``revision``,
            ``token``, ``cache_dir``, ``local_files_only``.
        """
        if dtype not in DTYPES:
            raise InvalidOption(f"dtype={dtype!r}; allowed: {', '.join(DTYPES)}")
        place, further = _device(device), dict(model_kwargs or {})
        for decided in _DECIDED.keys() & further.keys():
            raise InvalidOption(f"model_kwargs holds {decided!r}: {_DECIDED[decided]}")
        source = _source(name)
        if name.startswith((".", "/", "~")) and not Path(source).is_dir():  # no hub id begins so
            raise ModelNotFound(
                f"the folder {name!r} does not exist; give one saved with save_pretrained, a hub "
                "id, or 'builtin'"
            )
        if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
            raise ModelNotFound(
                f"{source!r} holds no config.json; give a folder saved with save_pretrained, "
                "a hub id, or 'builtin'"
            )
        with _loading("model", name, further), _quiet(name == "builtin"):
            config = AutoConfig.from_pretrained(source, **further)
            _refuse_unsupported(config)
            if dtype == "auto" and config.dtype == torch.bfloat16 and bfloat16_is_slow(place):
                dtype = "float32"
            hf: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **further)
        if tokenizer is None:
            tokenizer = load_tokenizer(name, tokenizer_kwargs)
        return cls(hf.to(place), tokenizer, name)

    # -- identity ---------------------------------------------------------------------------

    @cached_property
    def weights_digest(self) -> str:
        """Hash over every parameter's name, shape and up to 65,536 evenly spread values."""
        digest = hashlib.blake2b(digest_size=16)
        for name, parameter in sorted(self.hf.state_dict().items()):
            flat = parameter.detach().reshape(-1)
            step = max(1, flat.numel() // 65_536)
            sample = flat[::step].contiguous().cpu().view(torch.uint8)
            digest.update(f"{name}{tuple(parameter.shape)}".encode() + sample.numpy().tobytes())
        return digest.hexdigest()

    @cached_property
    def tokenizer_digest(self) -> str:
        text = self.tokenizer.backend_tokenizer.to_str()
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @cached_property
    def rope_digest(self) -> str:
        parameters = json.dumps(self.config.rope_parameters, sort_keys=True, default=str).encode()
        frequencies = self.hf.model.rotary_emb.inv_freq.float().cpu().numpy().tobytes()
        return hashlib.blake2b(parameters + frequencies, digest_size=16).hexdigest()

    @cached_property
    def layer_parameters(self) -> int:
        """Numbers in the weights of one layer."""
        return sum(weight.numel() for weight in self.hf.model.layers[0].parameters())

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def context_window(self) -> int:
        """Most tokens of prompt and answer together."""
        window = getattr(self.config, "sliding_window", None)
        if window and getattr(self.config, "use_sliding_window", True):
            return int(min(self.config.max_position_embeddings, window))
        return int(self.config.max_position_embeddings)

    # -- text -------------------------------------------------------------------------------

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Token ids of ``text`` alone, nothing added.

        special: whether ``<|names|>`` of special tokens in the text count as such. True for a
        rendered chat template; False for a chunk, whose words must not steer the conversation.
        """
        with self._tokenizing:  # split_special_tokens is a state of the one shared tokenizer
            try:
                ids = self.tokenizer(
                    text,
                    add_special_tokens=False,
                    split_special_tokens=not special,
                    verbose=False,  # whether a text is too long is for the caller to say
                )
            except TypeError as error:  # of the tokenizers library, without the text
                raise InvalidOption(
                    f"the text that begins {text[:40]!r} holds half a character (a lone "
                    "surrogate); clean it with text.encode(errors='replace').decode()"
                ) from error
        return list(ids["input_ids"])

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens."""
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

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

    def end_ids(self, more: Iterable[int]) -> frozenset[int]:
        """`eos_ids` and ``more``. Raises InvalidOption if one of ``more`` is no token."""
        ids, size = list(more), self.config.vocab_size
        for found in ids:
            if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < size:
                raise InvalidOption(
                    f"stop id {found!r} is no token of {self.name!r}, whose ids are 0 to "
                    f"{size - 1}; tokenizer.convert_tokens_to_ids knows the id of a token"
                )
        return self.eos_ids | frozenset(ids)

    @property
    def has_chat_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        """The prompt string of ``messages`` (``role``, ``content``), ready for an answer."""
        if not self.has_chat_template:
            raise InvalidOption(
                f"{self.name!r} has no chat template; pass a plain prompt string instead"
            )
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise whatever their author chose
            raise InvalidOption(f"the chat template of {self.name!r} refused: {error}") from error
        assert isinstance(text, str)
        return text

    # -- one pass ---------------------------------------------------------------------------

    def embed(self, ids: Tensor) -> Tensor:
        """(..., R) token ids -> (..., R, hidden)."""
        hidden: Tensor = self.hf.model.embed_tokens(ids.to(self.device))
        return hidden

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The model's own cos and sin, (R, D) each in its dtype, for ``positions`` (R,)."""
        probe = torch.empty(0, dtype=self.dtype, device=self.device)
        cos, sin = self.hf.model.rotary_emb(probe, positions.to(self.device)[None])
        return cos[0], sin[0]

    def layer(self, index: int, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Run decoder layer ``index`` on rows ``hidden`` (batch, R, hidden).

        cos, sin: (R, D) of the rows' positions. Keys and values go to ``attend``.
        """
        output: Tensor = self.hf.model.layers[index](
            hidden,
            attention_mask=None,
            position_ids=None,
            past_key_values=None,
            position_embeddings=(cos[None], sin[None]),
            attend=attend,
        )
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, hidden) after the last layer -> (R, vocabulary)."""
        scores: Tensor = self.hf.lm_head(self.hf.model.norm(hidden))
        return scores

    # -- choosing tokens --------------------------------------------------------------------

    def sampler(self, prompt_ids: Sequence[int], sampling: Sampling) -> Sampler:
        """A sampler for one answer to the prompt of ``prompt_ids``."""
        return Sampler(self, prompt_ids, sampling)


class Sampler:
    """Chooses one token after another for one answer; remembers what it chose."""

    def __init__(self, model: Model, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        self._ids = torch.tensor([list(prompt_ids)], device=model.device)
        self._greedy = sampling.temperature == 0
        self._generator = torch.Generator(device=model.device)
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)
        self._processors = LogitsProcessorList()
        penalty = sampling.repetition_penalty
        if penalty is None:
            penalty = model.hf.generation_config.repetition_penalty
        if penalty not in (None, 1.0):
            self._processors.append(RepetitionPenaltyLogitsProcessor(float(penalty)))
        if not self._greedy:
            self._processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
            if sampling.top_k:
                self._processors.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                self._processors.append(TopPLogitsWarper(sampling.top_p))

    def next(self, logits: Tensor) -> int:
        """The token chosen from ``logits`` (vocabulary,)."""
        scores = self._processors(self._ids, logits[None].float())  # type: ignore[arg-type]
        if self._greedy:
            token = scores.argmax(dim=-1, keepdim=True)
        else:
            token = torch.multinomial(scores.softmax(-1), 1, generator=self._generator)
        self._ids = torch.cat((self._ids, token), dim=1)
        return int(token)


@contextmanager
def _quiet(wanted: bool) -> Iterator[None]:
    """Without transformers' progress bar, which is noise for a model that loads in no time."""
    progress: Any = transformers_logging
    hide = wanted and progress.is_progress_bar_enabled()
    if hide:
        progress.disable_progress_bar()
    try:
        yield
    finally:
        if hide:
            progress.enable_progress_bar()


@contextmanager
def _loading(kind: str, name: str, further: Mapping[str, Any]) -> Iterator[None]:
    """Turns what transformers raises for a ``kind`` that it cannot load into errors of ours."""
    try:
        yield
    except TypeError as error:
        if not further:
            raise
        raise InvalidOption(
            f"{kind} {name!r} could not be loaded with {kind}_kwargs={sorted(further)} ({error}); "
            "leave out what from_pretrained does not know"
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ModelNotFound(
            f"{kind} {name!r} could not be loaded ({first_line}); give a local folder, a hub id "
            "that this machine can reach, or 'builtin'"
        ) from error


def load_tokenizer(name: str, options: Mapping[str, Any] | None = None) -> Any:  # noqa: ANN401
    """The tokenizer of a hub id, a local folder, or ``"builtin"``.

    options: passed on to ``from_pretrained``.
    """
    further = dict(options or {})
    with _loading("tokenizer", name, further):
        return AutoTokenizer.from_pretrained(_source(name), **further)


def bfloat16_is_slow(device: torch.device) -> bool:
    """Whether products in bfloat16 run without vector instructions on this device.

    So they do on processors without AVX-512 or Arm's bfloat16: 60 times slower than float32 was
    measured (docs/decisions.md), where float32 takes twice the memory.
    """
    return device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _device(name: str) -> torch.device:
    """The device called ``name``, if it is one of this machine."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise InvalidOption(f"device={name!r}; allowed: auto, cpu, cuda, cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidOption(
            f"device={name!r}, but torch finds {torch.cuda.device_count()} CUDA devices here; "
            "give 'auto' or 'cpu'"
        )
    return device


def _source(name: str) -> str:
    return str(builtin_path()) if name == "builtin" else name


def builtin_path() -> Path:
    """Folder of the reference model shipped with the package."""
    return Path(str(resources.files("samkv_integrations"))) / "assets" / "builtin"


def random_model(
    shape: Mapping[str, Any], *, name: str, dtype: str, device: str, seed: int
) -> Model:
    """A model with random weights and the reference model's tokenizer, for timings.

    shape: fields of a transformers config, ``model_type`` among them. Nothing is downloaded.
    dtype: ``float32``, ``bfloat16``, or ``auto`` as in `Model.load`, bfloat16 where it is fast.

    Raises InvalidOption for a device that this machine lacks, before anything is built.
    """
    place, fields = _device(device), dict(shape)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    if dtype == "auto":
        dtype = "float32" if bfloat16_is_slow(place) else "bfloat16"
    torch.manual_seed(seed)
    with place:
        auto: Any = AutoModelForCausalLM
        hf = auto.from_config(config, dtype=getattr(torch, dtype))
    return Model(hf, AutoTokenizer.from_pretrained(str(builtin_path())), name)


def _refuse_unsupported(config: Any) -> None:  # noqa: ANN401
    """Raise UnsupportedModel, before anything is cached, for what could not be exact."""
    family = config.model_type
    if family not in SUPPORTED_FAMILIES:
        raise UnsupportedModel(
            f"model family {family!r} is not supported; supported: {', '.join(SUPPORTED_FAMILIES)}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in SUPPORTED_ROPE:
        reason = {
            "yarn": "it scales attention with the context length",
            "longrope": "it scales attention with the context length",
            "dynamic": "its frequencies change with the prompt length",
        }.get(kind, "its rotation is not known to be exact here")
        raise UnsupportedModel(
            f"RoPE type {kind!r} cannot be re-aligned exactly: {reason}; "
            f"supported: {', '.join(SUPPORTED_ROPE)}"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(
            f"partial_rotary_factor={rope['partial_rotary_factor']}: only models that rotate the "
            "whole head are supported"
        )
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if len(layers) > 1 or layers - {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(f"layer types {sorted(layers)}: every layer must use full attention")
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(
            "quantised weights are not supported; load the model in float32 or bfloat16"
        )
