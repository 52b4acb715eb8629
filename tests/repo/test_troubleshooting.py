"""The page about missing hits: every reason is on it, and what it says and quotes holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.engine.report import Report
from samkv_integrations.errors import MISS_REASONS, FingerprintMismatch
from tests.support.costs import ONE_PASS, TOKENS_ONLY
from tests.support.models import tiny_model

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
TEXT = "The mill of Orvik was built in 1871 by two brothers, and it grinds barley."
PROMPT = f"{TEXT}\n\nWho built it?"


def engine_of(folder: Path, *, namespace: str = "", **options: int) -> Engine:
    store = ChunkStore(folder, namespace=namespace)
    return Engine(tiny_model("llama"), store, method="reuse", **options)  # type: ignore[arg-type]


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    engine = engine_of(tmp_path)
    engine.cache_chunks([TEXT])
    return engine


def ask(engine: Engine, **options: str) -> Report:
    return engine.generate(PROMPT, max_new_tokens=1, **options).report  # type: ignore[arg-type]


def file_of(engine: Engine) -> Path:
    (file,) = Path(str(engine.store.path)).rglob("*.safetensors")  # type: ignore[attr-defined]
    return file


@pytest.mark.parametrize("reason", MISS_REASONS)
def test_every_reason_of_a_miss_is_explained(reason: str) -> None:
    assert f"\n| `{reason}` | " in PAGE


class TestNothingIsFound:
    def test_under_another_namespace(self, engine: Engine, tmp_path: Path) -> None:
        assert ask(engine).reused == 1
        other = engine_of(tmp_path, namespace="tenant-7")
        assert (ask(other).found, other.is_cached(TEXT)) == (0, False)

    @pytest.mark.parametrize("options", [{"store_bits": 8}, {"block_size": 16}])
    def test_with_other_settings_and_the_store_names_them(
        self, engine: Engine, tmp_path: Path, options: dict[str, int]
    ) -> None:
        other = engine_of(tmp_path, **options)
        report = ask(other)
        assert (report.found, report.ran, report.chunk_misses) == (0, "recompute", {})
        (name,) = options
        with pytest.raises(FingerprintMismatch, match=name):
            other.store.require(other.fingerprint)
        engine.store.require(engine.fingerprint)

    def test_where_chunks_were_deleted_unless_they_are_announced(self, engine: Engine) -> None:
        file_of(engine).unlink()  # the store knows the text of a cache that was only lost
        assert ask(engine, on_miss="text").chunk_misses == {"absent": 1}
        engine.store.delete(engine.key_of(TEXT))
        assert ask(engine, on_miss="text").found == 0
        engine.expect([TEXT])
        assert ask(engine, on_miss="text").chunk_misses == {"absent": 1}


class TestDamage:
    def test_that_shows_on_opening_is_mended_by_a_question(self, engine: Engine) -> None:
        file = file_of(engine)
        file.write_bytes(file.read_bytes()[:100])
        report = ask(engine)
        assert (dict(report.chunk_misses), report.computed_now) == ({"corrupt": 1}, 1)
        assert ask(engine).reused == 1

    def test_so_is_that_which_shows_while_it_is_read(self, engine: Engine) -> None:
        file = file_of(engine)
        whole = bytearray(file.read_bytes())
        whole[-len(whole) // 4] ^= 255
        file.write_bytes(whole)
        report = ask(engine)
        assert (dict(report.chunk_misses), report.computed_now) == ({"corrupt": 1}, 1)
        assert (ask(engine).reused, ask(engine).chunk_misses) == (1, {})

    @pytest.mark.parametrize("reason", ["tokens", "fingerprint"])
    def test_a_file_that_was_copied_to_another_place(
        self, engine: Engine, tmp_path: Path, reason: str
    ) -> None:
        file = file_of(engine)
        if reason == "tokens":
            engine.cache_chunks([f"{TEXT} It is tall."])
        else:
            engine_of(tmp_path, store_bits=8).cache_chunks([TEXT])
        (stranger,) = set(tmp_path.rglob("*.safetensors")) - {file}
        file.write_bytes(stranger.read_bytes())
        engine.expect([TEXT])
        assert ask(engine, on_miss="text").chunk_misses == {reason: 1}


def test_a_short_context_is_found_and_computed_as_a_whole(engine: Engine) -> None:
    """By `auto` if that is faster, and by `samkv-guided` in any case."""
    for method, costs, ran in (
        ("auto", ONE_PASS, "recompute"),
        ("auto", TOKENS_ONLY, "epic"),
        ("samkv-guided", TOKENS_ONLY, "recompute"),
    ):
        engine.prefixes.clear()  # or the next one goes on from what this one has left
        engine.costs = costs
        report = ask(engine, method=method)
        assert (report.found, report.ran) == (1, ran)
