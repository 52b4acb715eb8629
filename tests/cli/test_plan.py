"""``samkv plan``."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path

import pytest

from samkv_integrations.cli.plan import plan
from samkv_integrations.evaluation import sizing
from samkv_integrations.evaluation.shapes import SHAPES, sizes_of
from tests.cli.running import error_of, ran, run

PLAN = ("plan", "--model", "qwen2.5-0.5b", "--chunks", "1000")


def test_one_row_is_what_the_calculator_says() -> None:
    found = json.loads(ran(*PLAN, "--disk-gb-s", "3", "--remote-gb-s", "1", "--json"))
    assert (found["command"], found["model"]) == ("plan", "qwen2.5-0.5b")
    expected = sizing.row_of(
        sizes_of("qwen2.5-0.5b", layers=None, dtype="auto"),
        sizing.Workload(n_chunks=1000),
        sizing.Machine(disk_gb_s=3.0, remote_gb_s=1.0),
    )
    assert found["rows"] == [expected]
    assert signature(plan).parameters["check_gb_s"].default == sizing.CHECK_GB_S
    shown = ran(*PLAN)
    assert "1.9 MB" in shown and "fetch" not in shown


def test_every_combination_is_a_row() -> None:
    options = ("--store-bits", "4,8", "--disk-gb-s", "0.5,3")
    rows = json.loads(ran(*PLAN, "--model", "llama-3.2-1b", *options, "--json"))["rows"]
    asked = [(row["model"], row["store_bits"], row["disk_gb_s"]) for row in rows]
    models = ("qwen2.5-0.5b", "llama-3.2-1b")
    assert asked == [(m, bits, disk) for m in models for bits in (4, 8) for disk in (0.5, 3.0)]
    table = ran(*PLAN, *options, "--markdown").splitlines()
    assert table[0].startswith("| bits | disk, GB/s | a chunk |") and len(table) == 2 + 4


def test_columns_are_chosen() -> None:
    table = ran(
        "plan", "--model", "all", "--chunks", "9", "--markdown", "--columns", "model,chunk_bytes"
    )
    head, _, *rows = table.strip().splitlines()
    assert head == "| model | a chunk |"
    assert [row.split("|")[1].strip() for row in rows] == list(SHAPES)


def test_a_folder_with_a_config_is_enough(tmp_path: Path) -> None:
    fields = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
              "num_key_value_heads": 2, "num_hidden_layers": 3, "intermediate_size": 96,
              "vocab_size": 100}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    small = ("--chunk-tokens", "100", "--json")
    (row,) = json.loads(ran("plan", "--model", str(tmp_path), "--chunks", "9", *small))["rows"]
    assert (row["model"], row["dtype"]) == (str(tmp_path), "float32")
    (builtin,) = json.loads(ran("plan", "--model", "builtin", "--chunks", "9", *small))["rows"]
    assert builtin["chunk_bytes"] > row["chunk_bytes"] > 100 * 3 * 2 * 2 * 16 // 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("no json", "could not be loaded (It looks like the config file at"),
        ("{}", "could not be loaded (Unrecognized model in"),
        ('{"model_type": "gpt2"}', "model family 'gpt2' is not supported; supported"),
        ('{"model_type": "llama", "num_attention_heads": 0}', "could not be loaded (integer divi"),
        ('{"model_type": "llama", "head_dim": "x"}', "(Validation error for field 'head_dim':)"),
        ('{"model_type": "llama", "dtype": "float8"}', "could not be loaded (module 'torch' has"),
        ('{"model_type": "llama", "num_hidden_layers": 0}', "describes no model: n_layers=0; size"),
        ('{"model_type": "llama", "num_key_value_heads": 5}', "no model: 32 heads over 5 of KV; "),
    ],
)
def test_a_config_of_no_model_is_refused(tmp_path: Path, config: str, message: str) -> None:
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    assert message in error_of("plan", "--model", str(tmp_path), "--chunks", "9")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "qwen2.5-05b"), "unknown model 'qwen2.5-05b'; known shapes: qwen2.5-0.5b, "),
        (("--model", "qwen2.5-05b"), "did you mean 'qwen2.5-0.5b'? Or give a folder with a config"),
        (("--model", "./nowhere"), "the folder './nowhere' does not exist; give one saved with"),
        (("--chunks", "many"), "--chunks 'many'; give whole numbers, as in 4,8"),
        (("--chunks", ","), "--chunks ',' names no number; give one or more, as in 4,8"),
        (("--chunks", "0"), "n_chunks=0; give a whole number from 1 to 1e+15"),
        (("--chunks", "5"), "chunks_per_question=8 of n_chunks=5; give at most as many"),
        (("--chunk-tokens", "-1"), "--chunk-tokens -1; give a whole number from 1"),
        (("--chunk-tokens", "5000"), "exceed the 32768 tokens that 'qwen2.5-0.5b' takes; give few"),
        (("--store-bits", "3"), "--store-bits 3; allowed: 4, 8, 16"),
        (("--layers", "25"), "--layers 25; 'qwen2.5-0.5b' has 1 to 24"),
        (("--dtype", "int4"), "--dtype 'int4'; allowed: auto, float32, bfloat16"),
        (("--device", "tpu"), "--device 'tpu'; allowed: cpu, cuda"),
        (("--disk-gb-s", "0"), "--disk-gb-s 0; give a number above 0"),
        (("--disk-gb-s", "nan"), "--disk-gb-s nan; give a number above 0"),
        (("--disk-gb-s", "fast"), "--disk-gb-s 'fast'; give numbers, as in 0.1,0.2"),
        (("--remote-gb-s", "-1"), "--remote-gb-s -1; give a number above 0"),
        (("--remote-latency-ms", "50"), "--remote-latency-ms 50 without remote_gb_s"),
        (("--prefill-tokens-s", "0"), "--prefill-tokens-s 0; give a number above 0"),
        (("--check-gb-s", "0"), "--check-gb-s 0; give a number above 0"),
        (("--answer-tokens", "9"), "--answer-tokens 9 without decode_tokens_s; give the tokens"),
        (("--disk-usd-gb-month", "-1"), "--disk-usd-gb-month -1; give a number 0 or more"),
        (("--columns", "bytes"), "unknown column 'bytes'; known: answer_tokens, bound, "),
        (("--columns", ","), "--columns names none; give some of model, "),
    ],
)
def test_what_cannot_be_is_refused(options: tuple[str, ...], message: str) -> None:
    given = dict(zip(PLAN[1::2], PLAN[2::2], strict=True)) | {options[0]: options[1]}
    assert message in error_of("plan", *(word for pair in given.items() for word in pair))


def test_model_and_chunks_are_needed() -> None:
    for missing in (("plan", "--chunks", "9"), ("plan", "--model", "builtin")):
        result = run(*missing)
        assert result.exit_code == 2 and "Missing option" in result.stderr
