"""What a number of chunks takes and what questions about them cost, worked out and not measured.

Bytes are those of the code that writes and reads files. Seconds are the engine's own cost model, at
the speeds that are given of a machine (docs/scale.md compares both with what was measured).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from samkv_integrations.cache.chunk import BlockScheme, Fingerprint
from samkv_integrations.cache.file_format import FileLayout
from samkv_integrations.cache.quantise import DEFAULT_STORE_BITS, EntryFormat
from samkv_integrations.engine.costs import CostModel, blended_s
from samkv_integrations.errors import InvalidOption
from samkv_integrations.methods import DEFAULT_METHOD, METHODS
from samkv_integrations.model.shape import ModelShape
from samkv_integrations.prompt.layout import ChunkPart, Layout

TEXT_BYTES = 4
"""Bytes of text a token, as in English: a thousandth of a chunk's file."""

CHECK_GB_S = 4.0
"""Checking MACs of whole layers on one thread, measured (docs/format.md)."""

CHUNK_PREFIX = 64
"""Tokens, about, that a chunk is prefilled after: those of `DOCUMENTS_BEFORE`."""

_GIGA = 1e9
_MOST = 1e15  # of any number that is given: far beyond what exists, and no sum overflows


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Chunks that are kept, and questions that are asked about them.

    n_chunks: kept in all. chunk_tokens: of each. store_bits: of a stored number.
    chunks_per_question: all of them cached. question_tokens: computed for each question.
    answer_tokens: of an answer, the first included.

    Raises InvalidOption for what cannot be.
    """

    n_chunks: int
    chunk_tokens: int = 512
    store_bits: int = DEFAULT_STORE_BITS
    chunks_per_question: int = 8
    question_tokens: int = 64
    answer_tokens: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or not 1 <= value < _MOST:
                raise InvalidOption(
                    f"{field.name}={value!r}; give a whole number from 1 to {_MOST:.0e}"
                )
        if self.chunks_per_question > self.n_chunks:
            raise InvalidOption(
                f"chunks_per_question={self.chunks_per_question} of n_chunks={self.n_chunks}; "
                "give at most as many as there are"
            )

    @property
    def prompt_tokens(self) -> int:
        return self.chunks_per_question * self.chunk_tokens + self.question_tokens


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The speeds of one replica, or of one worker that ingests. GB are 10^9 bytes.

    on_gpu: the proportions of which processor are assumed, and its speed unless one is given.
    prefill_tokens_s: tokens a second of caching chunks of the workload's length, as ``python -m
        benchmarks ingest`` measures it; None for what `CostModel` assumes unmeasured.
    decode_tokens_s: tokens a second after the first ones, of all answers of a replica together.
    disk_gb_s: reading whole files; None if they are in the page cache.
    check_gb_s: checking MACs on one thread.
    remote_gb_s: fetching objects from the remote tier, those of a question together; None without
        one. remote_latency_ms: until the first byte of them.
    disk_usd_gb_month, remote_usd_gb_month: what a GB costs a month; None if unknown.

    Raises InvalidOption for what cannot be.
    """

    on_gpu: bool = False
    prefill_tokens_s: float | None = None
    decode_tokens_s: float | None = None
    disk_gb_s: float | None = None
    check_gb_s: float = CHECK_GB_S
    remote_gb_s: float | None = None
    remote_latency_ms: float = 0.0
    disk_usd_gb_month: float | None = None
    remote_usd_gb_month: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name == "on_gpu" or value is None:
                continue
            may_be_zero = name == "remote_latency_ms" or name.endswith("_month")
            if not (math.isfinite(value) and 0 <= value < _MOST and (value or may_be_zero)):
                allowed = "0 or more" if may_be_zero else "above 0"
                raise InvalidOption(f"{name}={value:g}; give a number {allowed}, below {_MOST:.0e}")
        if self.remote_latency_ms and self.remote_gb_s is None:
            raise InvalidOption(
                f"remote_latency_ms={self.remote_latency_ms:g} without remote_gb_s; give that too"
            )


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """What a workload takes of a machine. Seconds and rates are of one replica or worker.

    chunk_bytes: of a chunk's file. chunk_ratio: those over the chunk's keys and values in bfloat16.
    read_bytes: of a chunk's file that an answer reads. total_bytes: of all files, on disk and again
        in the remote tier, where each is an object.
    read_s, check_s, fetch_s: a question's chunks read from disk, their MACs checked after that on
        the same thread, and the chunks fetched from the remote tier.
    recompute_s: those chunks computed again as chunks. full_prefill_s: the whole prompt without
        caches. first_token_s: the prompt with all chunks on disk, by ``epic``, as the default.
    break_even_gb_s: of the remote tier; below it recomputing a question's chunks is faster than
        fetching and checking them. None if it is faster whatever the bandwidth.
    requests_per_s: with all chunks on disk; bound: what takes most of a request then, ``compute``,
        ``disk`` or ``check``. remote_requests_per_s, remote_bound: where all are fetched first.
    ingest_s: computing all chunks.
    disk_usd_month, remote_usd_month: all files, in the one and in the other place.
    """

    chunk_bytes: int
    chunk_ratio: float
    read_bytes: int
    total_bytes: int
    read_s: float
    check_s: float
    fetch_s: float | None
    recompute_s: float
    full_prefill_s: float
    first_token_s: float
    break_even_gb_s: float | None
    requests_per_s: float
    bound: str
    remote_requests_per_s: float | None
    remote_bound: str | None
    ingest_s: float
    disk_usd_month: float | None
    remote_usd_month: float | None


def file_layout(
    shape: ModelShape,
    *,
    chunk_tokens: int,
    store_bits: int,
    n_text: int | None = None,
    prefix: Sequence[int] = (),
    namespace: str = "",
) -> FileLayout:
    """Where everything sits in the file of a chunk that a model of this shape computes.

    n_text: bytes of the chunk's text; None for `TEXT_BYTES` a token. prefix: token ids that chunks
    are computed after. The label of the model and both of these move a file's size by a few bytes.

    Raises InvalidOption if the model cannot be kept in so many bits.
    """
    digest, scheme = "0" * 32, BlockScheme.auto(chunk_tokens)
    made_by = Fingerprint(
        model=shape.name, weights=digest, config=digest, tokenizer=digest, rope=digest,
        dtype=shape.dtype, n_layers=shape.n_layers, n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads, head_dim=shape.head_dim, prefix=",".join(map(str, prefix)),
        store_bits=store_bits, block_size=scheme.size, n_init=scheme.n_init,
        n_local=scheme.n_local,
    )  # fmt: skip
    EntryFormat(
        bits=store_bits, n_kv_heads=shape.n_kv_heads, head_dim=shape.head_dim,
        dtype=made_by.torch_dtype,
    )  # raises  # fmt: skip
    return FileLayout(
        fingerprint=made_by, n_tokens=chunk_tokens, namespace=namespace,
        n_text=TEXT_BYTES * chunk_tokens if n_text is None else n_text,
    )  # fmt: skip


def file_bytes(layout: FileLayout) -> int:
    """Bytes of a chunk's file."""
    return layout.file_size("0" * 32)


def read_bytes(layout: FileLayout) -> int:
    """Bytes of it that an answer reads: to open the chunk, and all of its entries.

    Not read are its text, and what selections of other methods look at.
    """
    places = layout.tensors
    unread = places["key_range"].start - places["text"].start
    return file_bytes(layout) - unread


def costs_of(shape: ModelShape, machine: Machine, chunk_tokens: int) -> CostModel:
    """The cost model of a machine, reading left out.

    Where a speed is given, a machine that does all in the assumed proportions, at that speed.
    """
    assumed = replace(CostModel.assumed_on(shape, on_gpu=machine.on_gpu), read_s=0.0)
    if machine.prefill_tokens_s is None:
        return assumed
    wanted_s = chunk_tokens / machine.prefill_tokens_s
    factor = wanted_s / (shape.n_layers * assumed.chunks_s([chunk_tokens]))
    return CostModel(**{name: factor * value for name, value in asdict(assumed).items()})


def size_up(shape: ModelShape, work: Workload, machine: Machine) -> Sizing:
    """What the workload takes of the machine.

    Raises InvalidOption if a prompt exceeds the model's context window, if the model cannot be kept
    in so many bits, or if tokens after the first are asked for without their speed.
    """
    if work.prompt_tokens + work.answer_tokens > shape.context_window:
        raise InvalidOption(
            f"{work.chunks_per_question} chunks of {work.chunk_tokens} tokens, a question of "
            f"{work.question_tokens} and an answer of {work.answer_tokens} exceed the "
            f"{shape.context_window} tokens that {shape.name!r} takes; give fewer "
            "chunks_per_question or chunk_tokens"
        )
    steps, decode_s = work.answer_tokens - 1, 0.0
    if steps:
        if machine.decode_tokens_s is None:
            raise InvalidOption(
                f"answer_tokens={work.answer_tokens} without decode_tokens_s; give the tokens a "
                "second that a replica decodes, which 'python -m benchmarks serve' measures"
            )
        decode_s = steps / machine.decode_tokens_s
    layout = file_layout(shape, chunk_tokens=work.chunk_tokens, store_bits=work.store_bits)
    costs, n_chunks = costs_of(shape, machine, work.chunk_tokens), work.chunks_per_question

    chunk_bytes = file_bytes(layout)
    total_bytes = work.n_chunks * chunk_bytes
    bf16_bytes = 4 * shape.n_layers * shape.n_kv_heads * shape.head_dim * work.chunk_tokens
    question_gb, read_gb = (n_chunks * n / _GIGA for n in (chunk_bytes, read_bytes(layout)))
    read_s = 0.0 if machine.disk_gb_s is None else read_gb / machine.disk_gb_s
    check_s = read_gb / machine.check_gb_s

    def chunks_s(n: int) -> float:
        """Computing ``n`` chunks."""
        return shape.n_layers * costs.chunks_s([work.chunk_tokens] * n, CHUNK_PREFIX)

    # the pass of the default method, as the engine estimates it to choose a way
    chunks = [ChunkPart.whole(layout.blocks, work.chunk_tokens * at) for at in range(n_chunks)]
    prompt = Layout.of([0] * work.prompt_tokens, chunks, ())
    pass_s = shape.n_layers * blended_s(METHODS[DEFAULT_METHOD], costs, prompt)

    # an engine reads, checks and computes on one thread; chunks are fetched beside it
    on_thread = {"compute": pass_s + decode_s, "disk": read_s, "check": check_s}
    rate, bound = 1 / sum(on_thread.values()), max(on_thread, key=on_thread.__getitem__)
    latency_s = machine.remote_latency_ms / 1000
    fetch_s = remote_rate = remote_bound = None
    if machine.remote_gb_s is not None:
        fetch_s = latency_s + question_gb / machine.remote_gb_s
        remote_rate, remote_bound = min(
            (rate, bound), (machine.remote_gb_s / question_gb, "remote")
        )  # fmt: skip
    left_s = chunks_s(n_chunks) - latency_s - check_s

    def usd(gb_month: float | None) -> float | None:
        return None if gb_month is None else total_bytes / _GIGA * gb_month

    return Sizing(
        chunk_bytes=chunk_bytes, chunk_ratio=chunk_bytes / bf16_bytes,
        read_bytes=read_bytes(layout), total_bytes=total_bytes,
        read_s=read_s, check_s=check_s, fetch_s=fetch_s, recompute_s=chunks_s(n_chunks),
        full_prefill_s=shape.n_layers * costs.full_prefill_s(work.prompt_tokens),
        first_token_s=pass_s + read_s + check_s,
        break_even_gb_s=question_gb / left_s if left_s > 0 else None,
        requests_per_s=rate, bound=bound,
        remote_requests_per_s=remote_rate, remote_bound=remote_bound,
        ingest_s=work.n_chunks * chunks_s(1),
        disk_usd_month=usd(machine.disk_usd_gb_month),
        remote_usd_month=usd(machine.remote_usd_gb_month),
    )  # fmt: skip


def row_of(shape: ModelShape, work: Workload, machine: Machine) -> dict[str, Any]:
    """What was asked for and what it comes to, as one row."""
    settings = {**asdict(work), **asdict(machine)}
    settings["device"] = "cuda" if settings.pop("on_gpu") else "cpu"
    return {
        "model": shape.name, "dtype": shape.dtype, **settings,
        **asdict(size_up(shape, work, machine)),
    }  # fmt: skip
