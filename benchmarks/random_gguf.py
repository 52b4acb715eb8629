"""Writes a GGUF file of an 8 B shape with random weights in Q4_0, to time a model of that size.

    python -m benchmarks random_gguf --vocabulary-of FILE.gguf --output 8b.gguf

The file takes 4.5 GB; delete it afterwards. Its answers mean nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import gguf
import numpy as np
import typer
from numpy.typing import NDArray
from tqdm.auto import tqdm

from benchmarks.commands import command_line

WIDTH, INNER, N_LAYERS, N_HEADS, N_KV_HEADS, HEAD_DIM = 4096, 14336, 32, 32, 8, 128
CONTEXT = 8192

BLOCK, BLOCK_BYTES = 32, 18
"""Numbers of a block of Q4_0, and its bytes: a float16 scale, then a half byte each."""


def random_q4_0(n_rows: int, n_columns: int, draw: np.random.Generator) -> NDArray[np.uint8]:
    """(n_rows, bytes of a row) weights with a standard deviation of about ``n_columns ** -.5``."""
    blocks = draw.integers(0, 256, (n_rows * n_columns // BLOCK, BLOCK_BYTES), np.uint8)
    scale = np.float16(n_columns**-0.5 / 4.6)  # of the numbers -8 to 7
    blocks[:, :2] = np.frombuffer(scale.tobytes(), np.uint8)
    return blocks.reshape(n_rows, -1)


def random_gguf(
    vocabulary_of: Annotated[Path, typer.Option(help="A GGUF file whose tokenizer is copied.")],
    output: Annotated[Path, typer.Option(help="The file to write.")],
    n_layers: Annotated[int, typer.Option(help="Layers.")] = N_LAYERS,
) -> None:
    """A GGUF file of an 8 B shape with random weights."""
    source = gguf.GGUFReader(vocabulary_of)
    n_tokens = len(source.fields["tokenizer.ggml.tokens"].data)
    file = gguf.GGUFWriter(output, "llama", use_temp_file=False)
    file.add_block_count(n_layers)
    file.add_context_length(CONTEXT)
    file.add_embedding_length(WIDTH)
    file.add_feed_forward_length(INNER)
    file.add_head_count(N_HEADS)
    file.add_head_count_kv(N_KV_HEADS)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_dimension_count(HEAD_DIM)
    file.add_rope_freq_base(500_000.0)
    file.add_vocab_size(n_tokens)
    for name, field in source.fields.items():
        if name.startswith("tokenizer."):
            value: Any = field.contents()
            kind = field.types[0]
            file.add_key_value(name, value, kind, field.types[-1] if len(field.types) > 1 else None)

    kv_width = N_KV_HEADS * HEAD_DIM
    shapes = {"token_embd.weight": (n_tokens, WIDTH), "output.weight": (n_tokens, WIDTH)}
    for layer in range(n_layers):
        shapes |= {
            f"blk.{layer}.{name}.weight": shape
            for name, shape in {
                "attn_q": (WIDTH, WIDTH), "attn_k": (kv_width, WIDTH), "attn_v": (kv_width, WIDTH),
                "attn_output": (WIDTH, WIDTH), "ffn_gate": (INNER, WIDTH),
                "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER),
            }.items()
        }  # fmt: skip
    norms = ["output_norm.weight"]
    norms += [
        f"blk.{n}.{name}.weight" for n in range(n_layers) for name in ("attn_norm", "ffn_norm")
    ]
    q4_0, f32 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.F32
    for name, (n_rows, n_columns) in shapes.items():
        shape = (n_rows, n_columns // BLOCK * BLOCK_BYTES)
        n_bytes = shape[0] * shape[1]
        file.add_tensor_info(name, shape, np.dtype(np.uint8), n_bytes, q4_0)
    for name in norms:
        file.add_tensor_info(name, (WIDTH,), np.dtype(np.float32), 4 * WIDTH, f32)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_ti_data_to_file()
    draw = np.random.default_rng(0)
    for n_rows, n_columns in tqdm(shapes.values(), desc="writing"):
        file.write_tensor_data(random_q4_0(n_rows, n_columns, draw))
    for _ in norms:
        file.write_tensor_data(np.ones(WIDTH, np.float32))
    file.close()
    typer.echo(f"{output}: {output.stat().st_size / 1e9:.2f} GB")


app = command_line(random_gguf)
main = app
