"""A learned prefix: chunks are prefilled after it, its caches are its own; a bad file is named."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.engine.chunk_prefix import LEARNED_FILE, LearnedPrefix
from samkv_integrations.errors import InvalidOption
from samkv_integrations.model.model import Model
from tests.support.models import tiny_model

TEXTS = ["The mill stands by the river, and its wheel is green.", "A baker lives next to it."]
PROMPT = f"Read: {TEXTS[0]} And: {TEXTS[1]} Where?"


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model("llama")


def learned(model: Model, embeddings: Tensor, **changes: Any) -> LearnedPrefix:
    return LearnedPrefix(embeddings=embeddings, weights=(model.weights_digest,), **changes)


def test_embeddings_of_tokens_are_as_the_tokens(model: Model, tmp_path: Path) -> None:
    """What is learned begins as the embeddings of a text: then it does what the text does."""
    text = "[A]\nSome words.\n\n"
    embeddings = model.embed(torch.tensor(model.tokenize(text, special=False)))
    file = learned(model, embeddings).save(tmp_path / "of-a-text.safetensors")
    answers = []
    for options in ({"prefix": file}, {"prefix": str(file)}, {"prefix_text": text}):
        engine = Engine(model, method="reuse", store_bits=16, **options)
        engine.cache_chunks(TEXTS)
        answers.append(engine.logits(PROMPT, TEXTS))
    torch.testing.assert_close(answers[0], answers[1], rtol=0, atol=0)
    torch.testing.assert_close(answers[0], answers[2], rtol=1e-5, atol=1e-5)


def test_no_chunk_is_exact_and_caches_of_two_prefixes_are_apart(
    model: Model, tmp_path: Path
) -> None:
    files = [
        learned(model, torch.full((4, 64), value)).save(tmp_path / f"{value}.safetensors")
        for value in (0.1, 0.2)
    ]
    store = ChunkStore(tmp_path / "kv")
    engines = [
        Engine(model, store, method="reuse", prefix=prefix)
        for prefix in (*files, "documents", "bos")
    ]
    assert len({engine.fingerprint.digest for engine in engines}) == 4
    engines[0].cache_chunks(TEXTS)
    assert [engine.generate(PROMPT, max_new_tokens=1).report.reused for engine in engines] == [
        2, 0, 0, 0,
    ]  # fmt: skip
    first = engines[0].generate(TEXTS[0] + " Where?", max_new_tokens=1, method="epic").report
    assert first.recompute_ratio > 0


def test_it_is_found_beside_the_caches(model: Model, tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    usual = Engine(model, store).fingerprint
    with pytest.raises(InvalidOption, match="prefix='learned', but there is no samkv-prefix"):
        Engine(model, store, prefix="learned")
    learned(model, torch.ones(3, 64)).save(tmp_path / LEARNED_FILE)
    found = Engine(model, store)
    assert found.fingerprint != usual
    assert found.fingerprint == Engine(model, store, prefix="learned").fingerprint
    assert Engine(model, store, prefix="documents").fingerprint == usual


def test_a_folder_that_holds_only_a_prefix_becomes_a_store(model: Model, tmp_path: Path) -> None:
    learned(model, torch.ones(3, 64)).save(tmp_path / LEARNED_FILE)
    engine = Engine(model, ChunkStore(tmp_path), prefix="learned")
    engine.cache_chunks(TEXTS)
    assert engine.store.stats().n_chunks == 2


def test_a_file_that_is_written_over_changes_no_open_engine(model: Model, tmp_path: Path) -> None:
    """As a copy of another one does, in place: the file was mapped."""
    file = learned(model, torch.ones(3, 64)).save(tmp_path / "p.safetensors")
    engine = Engine(model, prefix=file)
    file.write_bytes(learned(model, torch.zeros(3, 64)).save(tmp_path / "q").read_bytes())
    assert engine.chunks.prefix.learned is not None
    assert torch.equal(engine.chunks.prefix.learned.embeddings, torch.ones(3, 64))
    file.write_bytes(b"")
    assert engine.cache_chunks(TEXTS)


def test_notes_are_kept(model: Model, tmp_path: Path) -> None:
    made = learned(model, torch.ones(3, 64), recipe={"steps": 7}, figures={"judged": [1.5]})
    found = LearnedPrefix.load(made.save(tmp_path / "p.safetensors"), model)
    assert (found.recipe, found.figures) == ({"steps": 7}, {"judged": [1.5]})
    assert torch.equal(found.embeddings, made.embeddings)


def test_an_interruption_leaves_the_former_file_alone(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It left what was being written beside it."""
    made = learned(model, torch.ones(3, 64))
    before = made.save(tmp_path / "p.safetensors").read_bytes()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        learned(model, torch.zeros(3, 64)).save(tmp_path / "p.safetensors")
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [before]


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def of_no_prefix(file: Path) -> None:
    save_file({"embeddings": torch.ones(3, 64)}, file)


def gone(file: Path) -> None:
    file.unlink()


def a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def noted(**notes: str) -> Callable[[Path], None]:
    """Notes of whoever made the file, who may be anybody."""

    def damage(file: Path) -> None:
        fine = {"format": "samkv-prefix-1", "weights": "[]", "recipe": "{}", "figures": "{}"}
        save_file({"embeddings": torch.ones(3, 64)}, file, fine | notes)

    return damage


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (cut, "is no learned prefix"),
        (of_no_prefix, "its format is None"),
        (gone, "there is no prefix"),
        (a_pipe, "it is no file"),  # it was waited for
        (noted(weights="5"), "it does not list the weights"),  # these were errors of Python
        (noted(recipe="[" * 100_000), "maximum recursion depth"),
        (torch.full((3, 64), 1e300, dtype=torch.float64), "no finite numbers"),  # not in float32
        (torch.ones(3, 63), r"shape \(3, 63\)"),
        (torch.ones(0, 64), r"shape \(0, 64\)"),
        (torch.ones(64), r"shape \(64,\)"),
        (torch.full((3, 64), torch.nan), "no finite numbers"),
        (torch.ones(3, 64, dtype=torch.int32), "no finite numbers"),
    ],
)
def test_a_wrong_file_is_named(
    model: Model, tmp_path: Path, damage: Callable[[Path], None] | Tensor, says: str
) -> None:
    file = tmp_path / "p.safetensors"
    wrong = damage if isinstance(damage, Tensor) else torch.ones(3, 64)
    learned(model, wrong).save(file)
    if not isinstance(damage, Tensor):
        damage(file)
    with pytest.raises(InvalidOption, match=rf"p\.safetensors.*{says}|{says}.*p\.safetensors"):
        Engine(model, prefix=file)
    with pytest.raises(InvalidOption, match="'samkv adapt --model"):
        Engine(model, prefix=file)


def test_another_model_and_another_policy_are_named(model: Model, tmp_path: Path) -> None:
    file = learned(model, torch.ones(3, 64)).save(tmp_path / "p.safetensors")
    with pytest.raises(InvalidOption, match="learned for other weights"):
        Engine(tiny_model("llama", seed=1), prefix=file)
    store, other = ChunkStore(tmp_path / "kv"), tiny_model("llama", seed=1)
    file.rename(store.path / LEARNED_FILE)
    after = Engine(other, store, prefix="documents")
    assert Engine(other, store).fingerprint == after.fingerprint  # of several models over it
    with pytest.raises(InvalidOption, match="learned for other weights"):
        Engine(other, store, prefix="learned")
    with pytest.raises(InvalidOption, match=r"prefix='magic'; allowed: auto, documents, .*"):
        Engine(model, prefix="magic")
    with pytest.raises(InvalidOption, match="cannot be written"):
        learned(model, torch.ones(3, 64)).save(tmp_path / "none" / "p.safetensors")
