"""Functions and files of ours that one question to the LangChain chat model passes.

    python -m benchmarks.query_path

Four cached chunks, the built-in model, the second question of an engine; the model's thread is
counted too.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

from langchain_samkv import ChatSamKV
from samkv_integrations import Engine

ROOTS = tuple(
    f"{Path(__file__).parents[1] / name}/" for name in ("samkv_integrations", "connectors")
)
TEXTS = [
    f"Lena Harman {n}\nLena Harman {n} is a glazier. She lives in Zenoburg, where her workshop "
    "stands by the old bridge, and her lamp is green."
    for n in range(4)
]


def main() -> None:
    """Both counts, and the functions in the order of their first call with ``--list``."""
    engine = Engine.from_pretrained("builtin", method="reuse")
    engine.cache_chunks(TEXTS)
    prompt = "\n\n".join(TEXTS) + "\n\nQuestion: Where does Lena Harman 2 live?"
    passed: dict[tuple[str, str], None] = {}
    counts = False

    def see(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if counts and event == "call" and code.co_filename.startswith(ROOTS):
            passed.setdefault((code.co_filename, code.co_qualname))

    threading.setprofile(see)
    # without memory, from which the second question would take the whole prompt
    asked = Engine(engine.model, engine.store, method="reuse", prefix_bytes=0)
    llm = ChatSamKV(engine=asked, max_tokens=4)
    llm.invoke(prompt)
    sys.setprofile(see)
    counts = True
    llm.invoke(prompt)
    counts = False  # the model's thread goes on, and is seen no more
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]
    report = llm.last_report
    assert report is not None and report.reused == len(TEXTS), report
    if "--list" in sys.argv:
        for file, name in passed:
            sys.stdout.write(f"{Path(file).relative_to(Path(__file__).parents[1])} {name}\n")
    files = {file for file, _ in passed}
    sys.stdout.write(f"{len(passed)} functions in {len(files)} files\n")


if __name__ == "__main__":
    main()
