"""GGUF files that hold a vocabulary and no weights, and loaded ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf

from samkv_integrations.runtimes.llama_cpp.library.binding import load_binding
from samkv_integrations.runtimes.llama_cpp.text import LlamaText

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
"""Types of tokens in a GGUF file."""


def write_vocabulary(
    path: Path,
    tokens: Mapping[str, int],
    *,
    merges: Sequence[str] = (),
    scores: Sequence[float] = (),
    pre: str | None = "gpt-2",
    template: str | None = None,
    of_tools: str | None = None,
    **ids: int | bool,
) -> Path:
    """Write a file. It is one for SentencePiece if it has scores, else byte-level with merges.

    tokens: name -> type, in the order of ids. pre: how texts are cut before they are merged. ids:
    metadata of the tokenizer, such as ``bos_token_id``.
    """
    file = gguf.GGUFWriter(path, "llama")
    file.add_block_count(1)
    file.add_context_length(512)
    file.add_embedding_length(8)
    file.add_feed_forward_length(8)
    file.add_head_count(1)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_tokenizer_model("llama" if scores else "gpt2")
    if pre:
        file.add_tokenizer_pre(pre)
    file.add_token_list([*tokens])
    file.add_token_types([*tokens.values()])
    if scores:
        file.add_token_scores([*scores])
    if merges:
        file.add_token_merges([*merges])
    for name, value in ids.items():
        if isinstance(value, bool):
            file.add_bool(f"tokenizer.ggml.{name}", value)
        else:
            file.add_uint32(f"tokenizer.ggml.{name}", value)
    if template is not None:
        file.add_chat_template(template)
    if of_tools is not None:
        file.add_chat_template([{"name": "tool_use", "template": of_tools}])
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


def llama_text(path: Path) -> LlamaText:
    """The text of a file, whose weights are not read. Its memory is never freed."""
    binding = load_binding()
    params = binding.model_params()
    params.vocab_only = True
    with binding.told() as lines:
        model = binding.library.llama_model_load_from_file(str(path).encode(), params)
    assert model, lines
    return LlamaText(binding, model, path.stem)
