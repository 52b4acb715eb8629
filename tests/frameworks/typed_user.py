"""A user's file, which `make check` looks at: arguments by any of their names, and wrong ones.

An error that is not found any more is one too: mypy is strict, and warns of an unused "ignore".
"""

from __future__ import annotations

from langchain_samkv import ChatSamKV, SamKV
from llama_index.llms.samkv import SamKVCacheTransform, SamKVLLM


def right() -> tuple[str, int | None]:
    ChatSamKV(model="builtin", max_tokens=16, stop=["x"], api_key="k")
    chat = ChatSamKV(
        model_name="builtin", max_new_tokens=16, stop_sequences=["x"], api_key="k", timeout=5,
        temperature=0.5, kv_dir="kv", method="auto", on_miss="text", streaming=True, tags=["a"],
    )  # fmt: skip
    SamKV(model_name="builtin", max_new_tokens=16, stop_sequences="x", api_key="k", top_k=3)
    SamKV(engine=chat.engine)
    llm = SamKVLLM(
        model_name="builtin", max_new_tokens=16, context_window=600, timeout=5, kv_dir="kv",
        generate_kwargs={"stop": ["x"]}, stopping_ids=[5], system_prompt="Be brief.",
    )  # fmt: skip
    SamKVCacheTransform(llm=llm, show_progress=True)
    SamKVLLM(engine=llm.engine, query_wrapper_prompt="<{query_str}>")
    return chat.model + chat.model_name, chat.max_new_tokens


def wrong() -> None:
    ChatSamKV(model="builtin", max_token=16)  # type: ignore[call-arg]
    SamKVLLM(model_name="builtin", contxt_window=16)  # type: ignore[call-arg]
