"""Pictures of what answers read, one question of each kind, for docs/inspect.md.

    python -m benchmarks inspection_pictures docs/pictures

Draws the page in a headless Chromium (its driver has to be installed), and the terminal with rich.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By

from benchmarks.datasets import Question, load
from samkv_integrations.cli.ask import show
from samkv_integrations.engine import Engine
from samkv_integrations.lab.inspection import Inspection, inspect

METHOD = "epic"
WIDTH = 900


def first_of_each_kind() -> dict[str, Question]:
    found: dict[str, Question] = {}
    for question in load():
        found.setdefault(question.kind, question)
    return found


def inspected(engine: Engine, question: Question) -> Inspection:
    engine.cache_chunks(question.documents)
    names = {text.strip(): text.split("\n")[0].strip("[] ") for text in question.documents}
    return inspect(
        engine, question.prompt(chat=False), question.documents, method=METHOD, max_new_tokens=16,
        title=question.question, names=names,
    )  # fmt: skip


def page_of(seen: Inspection, driver: Chrome, picture: Path) -> None:
    """A picture of the whole page. Its last line is moved, or it would hide what is under it."""
    with TemporaryDirectory() as folder:
        seen.save_html(file := Path(folder) / "page.html")
        driver.get(f"file://{file}")
        driver.execute_script("document.getElementById('about').style.position = 'static'")
        body = driver.find_element(By.TAG_NAME, "body")
        driver.set_window_size(WIDTH, int(body.size["height"]) + 40)
        driver.save_screenshot(str(picture))


def terminal_of(seen: Inspection, picture: Path) -> None:
    out = Console(
        record=True, force_terminal=True, width=100, markup=False, emoji=False, highlight=False,
        file=io.StringIO(),
    )  # fmt: skip
    show(seen, None, out)
    drawn = out.export_svg(title=f'samkv inspect "{seen.title}"')
    # the fonts of the reader: rich's come from elsewhere
    picture.write_text(re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL), encoding="utf-8")


def main() -> None:
    at = Path(*sys.argv[1:] or ["docs/pictures"])
    at.mkdir(parents=True, exist_ok=True)
    options = ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", f"--window-size={WIDTH},1000"):
        options.add_argument(argument)
    driver = Chrome(options=options, service=ChromeService(shutil.which("chromedriver")))
    try:
        for kind, question in first_of_each_kind().items():
            seen = inspected(Engine.from_pretrained("builtin"), question)
            page_of(seen, driver, at / f"inspect-{kind}.png")
            terminal_of(seen, at / f"inspect-{kind}.svg")
            print(kind, seen.report.ran, repr(seen.answer), repr(seen.full_answer))
    finally:
        driver.quit()


if __name__ == "__main__":
    main()
