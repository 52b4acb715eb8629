"""The page of an inspection in a real browser."""

from __future__ import annotations

import html
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from IPython.core.formatters import HTMLFormatter
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from samkv_integrations.engine import Engine
from samkv_integrations.lab.inspection import Inspection, inspect
from tests.support.browser import chromium
from tests.support.records import RECORDS, TEXTS

HOSTILE = (
    "A note.</script><script>document.title = 'taken'</script><!-- <b>bold</b> "
    "<img src=x onerror=\"document.title = 'taken'\"> \u2028 \N{GRINNING FACE} $&"
)


@cache
def found() -> Inspection:
    texts = [HOSTILE, *TEXTS[:4]]
    engine = Engine.from_pretrained("builtin")
    engine.cache_chunks(texts[:-1])
    asked = "\n\n".join(texts)
    prompt = f"Documents:\n\n{asked}\n\nQuestion: {RECORDS[1].question}\nAnswer:"
    return inspect(
        engine, prompt, texts, method="samkv-fusion", max_new_tokens=6,
        title=f"<i>{RECORDS[1].question}</i>", names={HOSTILE: "<b>hostile.txt"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def driver() -> Iterator[Chrome]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def page(driver: Chrome, tmp_path: Path) -> Chrome:
    found().save_html(tmp_path / "page.html")
    driver.get_log("browser")
    driver.get(f"file://{tmp_path}/page.html")
    return driver


def text(page: Chrome, id_: str) -> str:
    return page.find_element(By.ID, id_).text


def classes(page: Chrome) -> list[str]:
    script = "return [...document.querySelectorAll('[data-token]')].map((t) => t.className)"
    return list(page.execute_script(script))


def set_to(page: Chrome, id_: str, value: str) -> None:
    script = (
        "const at = document.getElementById(arguments[0]); at.value = arguments[1];"
        "at.dispatchEvent(new Event('input'))"
    )
    page.execute_script(script, id_, value)


def test_every_token_is_there_as_text(page: Chrome) -> None:
    script = "return [...document.querySelectorAll('[data-token]')].map((t) => t.textContent)"
    assert page.execute_script(script) == list(found().pieces)
    assert page.title == "samkv: what an answer read"
    assert text(page, "asked") == f"<i>{RECORDS[1].question}</i>"
    assert page.find_elements(By.CSS_SELECTOR, "#parts b, #parts img, #asked i") == []
    assert page.get_log("browser") == []


def test_the_chunks_have_their_figures(page: Chrome) -> None:
    rows = page.find_elements(By.CSS_SELECTOR, "#chunks tr")
    assert [row.text.split(" ")[0] for row in rows][0] == "<b>hostile.txt"
    assert "no cache: computed" in rows[-1].text
    assert len(rows) == len(found().chunks)
    said = text(page, "verdict")
    assert said == (
        "The same answer." if found().is_same else "Another answer than full prefill's."
    )
    assert found().full_answer in text(page, "answers")


def test_the_slider_goes_through_the_layers(page: Chrome) -> None:
    assert text(page, "layer-name") == "all layers"
    assert classes(page) == [f"t t{int(state)}" for state in found().state_at()]
    for layer in (0, found().n_layers - 1):
        set_to(page, "layer", str(layer))
        assert text(page, "layer-name") == f"{layer} of 0 to {found().n_layers - 1}"
        assert classes(page) == [f"t t{int(state)}" for state in found().state_at(layer)]


def test_in_a_notebook_it_is_a_frame_of_its_own(driver: Chrome, tmp_path: Path) -> None:
    shown = HTMLFormatter()(found())
    assert isinstance(shown, str)
    assert html.unescape(shown.split('srcdoc="')[1].split('"')[0]) == found().to_html()
    (tmp_path / "notebook.html").write_text(f"<meta charset=utf-8><body>{shown}</body>")
    driver.get(f"file://{tmp_path}/notebook.html")
    driver.switch_to.frame(driver.find_element(By.TAG_NAME, "iframe"))
    assert text(driver, "layer-name") == "all layers"
    driver.switch_to.default_content()
    assert driver.title != "taken"
