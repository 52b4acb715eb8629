"""A user's file that names arguments by any of their names passes a strict type checker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

USER = """
from langchain_samkv import ChatSamKV, SamKV
from llama_index.llms.samkv import SamKVLLM

ChatSamKV(model="builtin", max_tokens=16, stop=["x"], api_key="k")
chat = ChatSamKV(
    model_name="builtin", max_new_tokens=16, stop_sequences=["x"], api_key="k", timeout=5,
    temperature=0.5, kv_dir="kv", method="auto", on_miss="text", streaming=True, tags=["a"],
)
SamKV(model_name="builtin", max_new_tokens=16, stop_sequences="x", api_key="k", top_k=3)
SamKV(engine=chat.engine)
name: str = chat.model + chat.model_name
most: int | None = chat.max_new_tokens

llm = SamKVLLM(
    model_name="builtin", max_new_tokens=16, context_window=600, timeout=5, kv_dir="kv",
    generate_kwargs={"stop": ["x"]}, stopping_ids=[5], system_prompt="Be brief.",
)
SamKVLLM(engine=llm.engine, query_wrapper_prompt="<{query_str}>")
"""
WRONG = """
ChatSamKV(model="builtin", max_token=16)
SamKVLLM(model_name="builtin", contxt_window=16)
"""

# What holds no argument is left out, or checking it would take minutes.
SETTINGS = """
[mypy]
strict = True
{plugins}
namespace_packages = True
explicit_package_bases = True
mypy_path = {root}/connectors:{root}
[mypy-torch.*,transformers.*,chromadb.*]
follow_imports = skip
[pydantic-mypy]
init_forbid_extra = True
"""


@pytest.mark.parametrize("plugins", ["", pytest.param("pydantic.mypy", marks=pytest.mark.slow)])
def test_mypy(tmp_path: Path, plugins: str) -> None:
    (tmp_path / "user.py").write_text(USER + WRONG)
    settings = SETTINGS.format(plugins=f"plugins = {plugins}" if plugins else "", root=ROOT)
    (tmp_path / "mypy.ini").write_text(settings)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "user.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("user.py:")]
    first_wrong = len(USER.splitlines()) + 1
    assert [line for line in found if int(line.split(":")[1]) <= first_wrong] == [], done.stdout
    assert "max_token" in found[0] and "contxt_window" in found[1], done.stdout  # it looked
    assert len(found) == 2


def test_names_that_type_checkers_know_can_be_read() -> None:
    from langchain_samkv import ChatSamKV

    llm = ChatSamKV(model_name="builtin", max_new_tokens=3, stop_sequences=["x"], api_key="k")
    assert (llm.model, llm.max_new_tokens, llm.stop_sequences) == ("builtin", 3, ["x"])
    assert (llm.model_name, llm.max_tokens, llm.stop) == ("builtin", 3, ["x"])
