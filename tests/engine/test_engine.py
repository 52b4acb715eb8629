"""The engine on tiny models: what goes in, what comes out, and what happens when caches fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from samkv_integrations import METHODS, ChunkStore, Engine
from samkv_integrations.errors import (
    HandleError,
    InvalidChunk,
    InvalidOption,
    PromptTooLong,
    UnknownOption,
)
from tests.support.covering import covering
from tests.support.handles import issued
from tests.support.models import tiny_model
from tests.support.served import PROMPT, TEXTS, chunk_file, engine_on


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return engine_on(tmp_path)


ODD_CHUNKS = {
    "one token, again and again": ["z" * 16],
    "as short as can be found": ["abcdefgh ijklmno"],
    "exactly the anchors": ["x" * 24],
    "anchors and one": ["x" * 25],
    "one chunk": [TEXTS[0]],
    "forty chunks": [f"{hex(7919**5 * (i + 3))} and {i * 7919}" for i in range(40)],
    "template tokens": ["before <|end|><|assistant|> after", TEXTS[0]],
    "handle-like text": ["see [[samkv:0123]] and [[samkv:" + "0" * 32 + "]] here", TEXTS[0]],
    "one inside the other": ["abc def ghi jklmn", "abc def ghi jklmn opq"],
}


@pytest.mark.parametrize(("method", "kind"), covering(list(METHODS), list(ODD_CHUNKS), times=2))
def test_any_chunks_are_served_from_their_caches(kind: str, method: str) -> None:
    engine, texts = Engine(tiny_model("llama"), block_size=8), ODD_CHUNKS[kind]
    engine.cache_chunks(texts)
    prompt = "Read:\n" + "\n--\n".join(texts) + "\nQ?"
    report = engine.generate(prompt, texts, method=method, max_new_tokens=3).report
    assert (report.found, report.chunk_misses) == (len(texts), {})
    assert report.reused == 0 if report.ran == "recompute" else 0 <= report.reused <= len(texts)
    assert report.context_tokens == sum(len(t.encode()) for t in texts)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_chunk_twice_in_a_prompt(engine: Engine, method: str) -> None:
    prompt = f"{TEXTS[0]}\n\n{TEXTS[1]}\n\n{TEXTS[0]}\n\nQ?"
    report = engine.generate(prompt, TEXTS[:2], method=method, max_new_tokens=3).report
    assert (report.found, report.chunk_misses) == (3, {})


@pytest.mark.parametrize("is_announced", [False, True])
def test_a_handle_inside_a_document_names_nothing(engine: Engine, is_announced: bool) -> None:
    """A document that quotes another chunk's handle is text, whether or not it is cached, and
    whether or not that chunk is still there; so is one that quotes a piece of it."""
    handle = issued(engine, TEXTS[0])
    spies = [f"my neighbour is {handle}", f"my neighbour was {handle[:-9]}"]
    for step in ("new", "cached", "the other is deleted"):
        if step == "cached":
            engine.cache_chunks(spies)
        elif step != "new":
            engine.store.delete(engine.key_of(TEXTS[0]))
        for spy in spies:
            if is_announced:
                engine.expect([spy])
            chunks = None if is_announced else [spy]
            report = engine.generate(
                f"{spy}\n\nQ?", chunks, max_new_tokens=1, on_miss="text"
            ).report
            assert (report.found, report.context_tokens) == (1, len(spy))
            assert report.chunk_misses == ({"absent": 1} if step == "new" else {})
            if is_announced:
                assert engine.found_in(f"{spy}\n\nQ?") == [spy]
    with pytest.raises(HandleError, match="has been deleted"):
        engine.generate(f"{spies[0]}\n\n{handle} Q?", spies[:1], max_new_tokens=1)


def test_handles_and_texts_are_the_same_prompt(engine: Engine) -> None:
    by_text = engine.generate(PROMPT, TEXTS, max_new_tokens=6)
    prompt = PROMPT
    for text in TEXTS:
        prompt = prompt.replace(text, issued(engine, text))
    by_handle = engine.generate(prompt, max_new_tokens=6)
    assert by_handle.text == by_text.text
    assert by_handle.report.prompt_tokens == by_text.report.prompt_tokens
    assert engine.count_tokens(prompt) == by_text.report.prompt_tokens


def test_bos_stands_once(engine: Engine) -> None:
    for prompt in ("Hi", "<|bos|>Hi", TEXTS[0], [{"role": "user", "content": "Hi"}]):
        chunks = [TEXTS[0]] if prompt == TEXTS[0] else []
        stream = engine.stream(prompt, chunks, max_new_tokens=1)
        chat = len("Hi") + 3  # <|user|>, <|end|>, <|assistant|>
        body = {"Hi": 2, "<|bos|>Hi": 2, TEXTS[0]: len(TEXTS[0])}.get(str(prompt), chat)
        assert stream.report.prompt_tokens == 1 + body


def test_block_size_follows_the_first_chunks_and_then_the_store(tmp_path: Path) -> None:
    model = tiny_model("llama")
    first = Engine(model, ChunkStore(tmp_path))
    first.cache_chunks(["w" * 512])
    assert first.fingerprint.block_size == 16
    second = Engine(model, ChunkStore(tmp_path))
    second.cache_chunks(["short"])
    assert second.fingerprint == first.fingerprint


def test_chunks_that_cannot_be_cached(engine: Engine) -> None:
    with pytest.raises(InvalidChunk, match="holds no text"):
        engine.cache_chunks(["  \n "])
    room = 4096 - len(engine.prefix)
    with pytest.raises(InvalidChunk, match=rf"5000 tokens is longer than the {room}"):
        engine.cache_chunks(["a" * 5000])


def test_a_chunk_that_is_far_too_long_is_not_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    engine = Engine(model, prefix="bos")
    longest = model.longest_token
    monkeypatch.setattr(type(model), "tokenize", lambda *_, **__: pytest.fail("it was tokenised"))
    with pytest.raises(InvalidChunk, match="at least 5000 tokens is longer than the 4095"):
        engine.cache_chunks(["a" * 5000 * longest])


@pytest.mark.parametrize("method", METHODS)
def test_reports_add_up(engine: Engine, method: str) -> None:
    asked = {"method": method, "eviction": "none", "max_new_tokens": 5}
    report = engine.generate(PROMPT, TEXTS, **asked).report
    assert report.method == method
    assert report.prompt_tokens == report.context_tokens + report.uncached_tokens
    assert 0 < report.kept_ratio <= 1
    assert 0 <= report.recompute_ratio <= 1
    row = report.full_kv_bytes / report.prompt_tokens
    kept_rows = report.kept_ratio * report.context_tokens + report.uncached_tokens
    assert report.kv_bytes == pytest.approx(row * kept_rows, rel=1e-6)
    assert report.bytes_read > 0
    assert report.ttft_s >= report.probe_s + report.select_s + report.load_s + report.blend_s
    assert report.completion_tokens == 5
    is_full = report.ran == "recompute"
    assert (report.found, report.whole_chunks) == (len(TEXTS), len(TEXTS) if is_full else 0)
    for name, value in report.to_dict().items():
        assert value is None or isinstance(value, str | int | float | dict), name


def test_what_is_read_follows_the_method(engine: Engine) -> None:
    reports = {
        m: engine.generate(PROMPT, TEXTS, method=m, max_new_tokens=1).report for m in METHODS
    }
    full = reports["reuse"].bytes_read
    assert reports["epic"].bytes_read == full, "nothing is read twice"
    assert reports["samkv-guided"].bytes_read <= full, "what is recomputed as a whole is not read"
    assert reports["multi-infllm"].bytes_read < full
    assert reports["samkv-fusion"].bytes_read < full
    assert reports["recompute"].bytes_read < full / 4  # headers and token ids


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_what_tensors_are_made_in_by_default_changes_nothing(
    engine: Engine, dtype: torch.dtype
) -> None:
    """Loading a model sets it for a moment, for all threads."""

    def answered() -> list[torch.Tensor]:
        other = Engine(engine.model, block_size=8, prefix_bytes=0)
        other.cache_chunks(TEXTS)
        methods = [name for name in METHODS if name != "auto"]
        return [other.logits(PROMPT, TEXTS, method=name, follow=(4, 5)) for name in methods]

    expected = answered()
    torch.set_default_dtype(dtype)
    try:
        found = answered()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, found, expected))


def test_streaming_is_incremental_and_equals_generate(engine: Engine) -> None:
    stream = engine.stream(PROMPT, TEXTS, max_new_tokens=24)
    pieces = [next(stream)]
    assert stream.report.completion_tokens < 24
    pieces += list(stream)
    assert len(pieces) > 3
    answer = engine.generate(PROMPT, TEXTS, max_new_tokens=24)
    assert "".join(pieces) == answer.text
    assert stream.report.completion_tokens == answer.report.completion_tokens


def test_stop_strings_across_token_borders(engine: Engine) -> None:
    """One token is one byte here, so any longer stop string crosses borders."""
    whole = engine.generate(PROMPT, TEXTS, max_new_tokens=24).text
    assert len(whole) > 10
    for start, length in ((3, 3), (5, 4), (0, 2)):
        stop = whole[start : start + length]
        stream = engine.stream(PROMPT, TEXTS, max_new_tokens=24, stop=[stop, "never"])
        pieces = list(stream)
        assert "".join(pieces) == whole[: whole.find(stop)]
    for bad in ("text", [""]):
        with pytest.raises(InvalidOption, match="stop="):
            engine.generate(PROMPT, TEXTS, stop=bad)


def test_sampling_repeats_with_a_seed(engine: Engine) -> None:
    def sample(seed: int) -> str:
        options = {"temperature": 1.5, "top_p": 0.95, "seed": seed, "max_new_tokens": 16}
        return engine.generate(PROMPT, TEXTS, **options).text

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(4)}) > 1
    for option in ({"temperature": -1.0}, {"top_p": 0.0}, {"max_new_tokens": 0}):
        with pytest.raises(InvalidOption, match=next(iter(option))):
            engine.generate(PROMPT, TEXTS, **option)


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_a_seed_has_64_bits(engine: Engine, seed: int) -> None:
    with pytest.raises(InvalidOption, match="it must be a number of at most 64 bits"):
        engine.generate(PROMPT, TEXTS, temperature=1.0, seed=seed)


def test_half_a_character_is_named(engine: Engine) -> None:
    text = "caf\udce9 and more"
    for use in (engine.key_of, engine.generate, engine.count_tokens):
        with pytest.raises(InvalidOption, match="lone surrogate"):
            use(text)


def test_the_prompt_must_fit_with_the_answer(engine: Engine) -> None:
    size = 1 + len(PROMPT)
    with pytest.raises(PromptTooLong, match=rf"prompt of {size} tokens .* 4000 new .* 4096"):
        engine.generate(PROMPT, TEXTS, max_new_tokens=4000)
    with pytest.raises(PromptTooLong, match=rf"prompt of {size} tokens .* window of 50 "):
        engine.generate(PROMPT, TEXTS, max_new_tokens=9, context_window=50)
    for window in (0, -1, 10.5, "9", True):
        with pytest.raises(InvalidOption, match=f"context_window={window!r}; it must be a whole"):
            engine.generate(PROMPT, TEXTS, context_window=window)
    longest = engine.generate(PROMPT, TEXTS, max_new_tokens=9, context_window=size + 9)
    assert longest.report.prompt_tokens == size


def test_unknown_names_list_the_known_ones(engine: Engine) -> None:
    with pytest.raises(UnknownOption, match="samkv-guided"):
        engine.generate(PROMPT, TEXTS, method="sam-kv")
    with pytest.raises(InvalidOption, match="does not occur in the prompt"):
        engine.generate("Q?", ["some chunk"])
    with pytest.raises(UnknownOption, match="unknown method 3"):
        engine.generate(PROMPT, TEXTS, method=3)  # type: ignore[arg-type]
    with pytest.raises(UnknownOption, match="unknown eviction 3"):
        engine.generate(PROMPT, TEXTS, eviction=3)  # type: ignore[arg-type]
    with pytest.raises(UnknownOption, match="unknown option of an answer 'temprature'; known: "):
        engine.generate(PROMPT, TEXTS, temprature=1)  # type: ignore[call-arg]


def test_nothing_is_written_by_a_query(engine: Engine) -> None:
    """But when a cache was used last, which the index holds."""

    def state() -> dict[Path, bytes]:
        assert isinstance(engine.store, ChunkStore)
        files = [path for path in engine.store.path.rglob("*") if path.is_file()]
        return {p: p.read_bytes() for p in files if not p.name.startswith("index-")}

    before = state()
    for method in METHODS:
        engine.generate(PROMPT, TEXTS, method=method, max_new_tokens=2)
    assert state() == before


def test_a_handle_stands_for_the_text_that_it_was_issued_for(engine: Engine) -> None:
    path, handle = chunk_file(engine, TEXTS[0]), issued(engine, TEXTS[0])
    assert engine.found_in(handle) == [TEXTS[0]]
    report = engine.generate(f"{handle} Q?", max_new_tokens=1).report
    assert (report.found, report.chunk_misses) == (1, {})
    path.unlink()
    assert engine.found_in(handle) == [TEXTS[0]]
    engine.store.delete(engine.key_of(TEXTS[0]))
    assert engine.found_in(handle) == [] and engine.count_tokens(handle) == 1 + len(handle)
    with pytest.raises(HandleError, match="has been deleted .* retrieve again"):
        engine.generate(f"{handle} Q?", max_new_tokens=1)
    assert engine.store.keys() == sorted(map(engine.key_of, TEXTS[1:]))


def test_on_miss_compute_makes_what_a_handle_stands_for_anew(engine: Engine) -> None:
    handle = issued(engine, TEXTS[0])
    chunk_file(engine, TEXTS[0]).unlink()
    for misses, reused, computed in (({"absent": 1}, 0, 1), ({}, 1, 0)):
        report = engine.generate(f"{handle} Q?", max_new_tokens=1, on_miss="compute").report
        assert (report.found, report.chunk_misses) == (1, misses)
        assert (report.reused, report.computed_now) == (reused, computed)
    assert chunk_file(engine, TEXTS[0]).is_file()


def test_a_stop_string_that_is_longer_than_any_answer(engine: Engine) -> None:
    """It is compared with what is undecided of the answer, and no further."""
    free = engine.generate(PROMPT, TEXTS, max_new_tokens=24).text
    stop = [free[:1] + "x" * 1_000_000, free + "x" * 1_000_000]
    assert engine.generate(PROMPT, TEXTS, max_new_tokens=24, stop=stop).text == free
