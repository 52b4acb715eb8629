"""``samkv`` in this process, watched from the moment that its first answer is queued.

    python -m benchmarks.watched_ask FILE ask QUESTION [OPTIONS]

FILE gets a JSON object: ``before_cpu_s``, CPU seconds of the process before llama.cpp computes the
first token of the prompt, and the most bytes of memory while it answers: ``anonymous_bytes``, and
``file_bytes`` of mapped files.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from samkv_integrations.cli.app import main
from samkv_integrations.runtimes.llama_cpp.library.context import LlamaContext
from samkv_integrations.serving.answers import RunningAnswer
from samkv_integrations.serving.scheduler import Scheduler


class Watch:
    """What is seen of the decodes after an answer was queued."""

    def __init__(self) -> None:
        self.before_cpu_s: float | None = None
        self.most = {"RssAnon": 0, "RssFile": 0}

    def begin(self) -> None:
        """Watch decodes from now on; those before are the self-test of the model."""
        decode = LlamaContext.decode

        def watched(context: LlamaContext, *args: Any, **options: Any) -> Any:  # noqa: ANN401
            if self.before_cpu_s is None:
                self.before_cpu_s = time.process_time()
            found = decode(context, *args, **options)
            status = Path("/proc/self/status").read_text(encoding="ascii")
            for name, kilobytes in re.findall(r"(RssAnon|RssFile):\s*(\d+) kB", status):
                self.most[name] = max(self.most[name], 1024 * int(kilobytes))
            return found

        LlamaContext.decode = watched  # type: ignore[method-assign, assignment]


def watched_samkv() -> None:
    """Run the command line, and tell what was seen."""
    _, file, *arguments = sys.argv
    watch, submit = Watch(), Scheduler.submit

    def submitted(scheduler: Scheduler, answer: RunningAnswer) -> None:
        watch.begin()
        submit(scheduler, answer)

    Scheduler.submit = submitted  # type: ignore[method-assign, assignment]
    sys.argv = ["samkv", *arguments]
    try:
        main()
    finally:
        seen = {
            "before_cpu_s": watch.before_cpu_s, "anonymous_bytes": watch.most["RssAnon"],
            "file_bytes": watch.most["RssFile"],
        }  # fmt: skip
        Path(file).write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    watched_samkv()
