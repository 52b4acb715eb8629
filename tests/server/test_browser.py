"""The page in a real browser."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, Keys

from samkv_integrations.methods import METHODS
from tests.support.browser import Page, chromium
from tests.support.live_server import answering
from tests.support.records import RECORDS, TEXTS
from tests.support.served_town import BLUE, KEYS, RED, Town, fill
from tests.support.steps import Steps

HOSTILE = (
    "[Zanzig Works]\nA total of 7713 people work at Zanzig Works. It makes the "
    "<img src=x onerror=\"document.title='taken'\"></script><script>document.title='taken'</script>"
    '<a href="javascript:alert(1)">lamp</a> &lt;b&gt;.'
)
QUESTION = RECORDS[0].question


@pytest.fixture(scope="module")
def driver() -> Iterator[Chrome]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def town(driver: Chrome, tmp_path_factory: pytest.TempPathFactory) -> Town:
    folder = tmp_path_factory.mktemp("town")
    fill(folder, "town", texts=[*TEXTS, HOSTILE])
    fill(folder, "small", texts=TEXTS[:2])
    return Town(folder, collections=["town", "small"], method="samkv-guided")


@pytest.fixture(scope="module")
def address(town: Town) -> Iterator[str]:
    with answering(town.asgi, town.keys) as at:
        yield at


@pytest.fixture
def page(driver: Chrome, address: str) -> Page:
    opened = Page(driver, address)
    opened.wait_for_choices()
    return opened


def figure(page: Page, name: str) -> str:
    """The value beside a name, in the table or the list below it."""
    rows = {row.text.split("\n")[0]: row for row in page.all("#bars tr")}
    (found,) = [row for text, row in rows.items() if text.startswith(name)]
    return str(found.find_elements("css selector", "td")[0].text)


def test_a_question_is_answered_with_sources_and_figures(page: Page) -> None:
    assert page.choices("collection") == ["town", "small"]
    assert page.choices("method") == ["", *METHODS]
    page.write("top-k", "3")
    page.ask(QUESTION)
    page.wait_for_figures()
    assert page.one("answer").text.startswith(RECORDS[0].workers)
    sources = page.all("#sources details")
    assert len(sources) == 3
    assert not page.all("#sources details[open]")
    sources[0].find_element("css selector", "summary").click()
    assert sources[0].find_element("css selector", "p").text == TEXTS[0]
    assert figure(page, "Chunk hits") == "3 of 3"
    assert figure(page, "Attended to").endswith("%")
    assert figure(page, "Recomputed").endswith("%")
    assert figure(page, "First token").endswith("s")
    assert page.one("ran").text == "Method samkv-guided, on town-model"
    assert "samkv doctor --dir" in page.one("more").text
    widths = page.run("return [...document.querySelectorAll('.bar i')].map(i => i.offsetWidth)")
    assert widths[0] == page.run("return document.querySelector('.bar').offsetWidth")  # all hits
    assert page.error == ""
    assert page.complaints() == []


def test_choices_are_sent(page: Page) -> None:
    page.run("document.getElementById('collection').value = 'small'")
    page.run("document.getElementById('method').value = 'recompute'")
    page.one("chat").click()
    page.ask(QUESTION)
    page.wait_for_figures()
    assert len(page.all("#sources details")) == 2
    assert page.one("ran").text == "Method recompute, on town-model"
    assert figure(page, "Recomputed") == "100 %"


def test_the_answer_is_seen_while_it_grows(page: Page, steps: Steps, town: Town) -> None:
    page.write("top-k", "1")
    steps.hold()
    page.ask(QUESTION)
    page.wait(lambda: page.one("answer").text)
    assert page.is_busy
    assert page.all("#sources details")
    assert not page.one("figures").is_displayed()
    begun = page.one("answer").text
    steps.release()
    page.wait_for_figures()
    assert page.one("answer").text.startswith(begun)
    assert len(page.one("answer").text) > len(begun)


@pytest.mark.parametrize("by_key", [True, False])
def test_an_answer_is_stopped(page: Page, steps: Steps, town: Town, by_key: bool) -> None:
    assert not page.one("stop").is_enabled()
    steps.hold()
    page.ask(QUESTION)
    page.wait(lambda: page.one("answer").text)
    steps.wait_until_held()
    assert town.tenancy.scheduler.load.running == 1
    if by_key:
        page.one("question").send_keys(Keys.ESCAPE)
    else:
        page.one("stop").click()
    page.wait(lambda: page.one("ended").text == "Stopped.")
    n_steps = steps.n
    steps.allow(1)  # the one that was held may have begun
    page.wait(lambda: town.tenancy.scheduler.load.running == 0)
    assert steps.n <= n_steps + 1
    steps.release()
    assert not page.is_busy
    assert not page.one("stop").is_enabled()
    page.ask(RECORDS[1].question)
    page.wait_for_figures()
    assert page.one("answer").text.startswith(RECORDS[1].workers)
    assert page.one("ended").text == page.error == ""


def test_texts_of_documents_are_texts(page: Page) -> None:
    title = page.driver.title
    page.ask("How many people work at Zanzig Works?")
    page.wait_for_figures()
    source = page.all("#sources details")[0]
    source.find_element("css selector", "summary").click()
    assert source.find_element("css selector", "p").get_attribute("textContent") == HOSTILE
    assert not page.all("#sources img, #sources script, #sources a, #sources b, #answer *")
    assert page.driver.title == title
    assert page.complaints() == []


def test_names_of_documents_neither_turn_what_stands_beside_nor_fill_the_page(page: Page) -> None:
    """An override of the direction in a name reached the distance; a long name took ten screens."""
    page.run("document.getElementById('reply').hidden = false")
    names = ["\u202etxt.exe", "x" * 20_000]
    page.run(
        "showSources(arguments[0].map((source) => ({source, text: '', distance: 0.5})))", names
    )
    turned, long = page.all("#sources summary")
    isolated = turned.find_element("css selector", "bdi")
    assert isolated.get_attribute("textContent") == names[0]
    assert isolated.value_of_css_property("unicode-bidi") == "isolate"
    assert long.get_attribute("title") == names[1]
    assert long.size["height"] < 200


def test_nothing_is_asked_for_elsewhere(page: Page) -> None:
    page.ask(QUESTION)
    page.wait_for_figures()
    asked = {url for url in page.requested() if not url.startswith("data:")}
    assert {url.removeprefix(page.address) for url in asked} == {
        "/", "/v1/samkv/collections", "/v1/samkv/methods", "/v1/samkv/ask",
    }  # fmt: skip
    entries = page.run("return performance.getEntriesByType('resource').map(e => e.name)")
    assert all(name.startswith(page.address) for name in entries)


def test_the_policy_is_kept_by_the_browser(page: Page) -> None:
    """Guards the tests above: what they look for would have been stopped as well."""
    elsewhere = socket.create_server(("127.0.0.1", 0))
    page.run(
        """
        window.refused = [];
        addEventListener("securitypolicyviolation", (event) => {
          refused.push(event.effectiveDirective);
        });
        fetch(arguments[0]).catch(() => {});
        const image = document.createElement("img");
        image.src = arguments[0] + "x.png";
        const script = document.createElement("script");
        script.append("document.title = 'taken'");
        document.body.append(image, script);
        try { document.body.innerHTML = "<p>gone</p>"; } catch {}
        """,
        f"http://127.0.0.1:{elsewhere.getsockname()[1]}/",
    )
    expected = {"connect-src", "img-src", "require-trusted-types-for"}
    page.wait(lambda: expected <= set(page.run("return refused")))
    assert page.one("form").is_displayed()
    assert page.driver.title != "taken"
    elsewhere.setblocking(False)
    with elsewhere, pytest.raises(BlockingIOError):  # nobody has come
        elsewhere.accept()


def test_an_error_is_shown(page: Page) -> None:
    page.run("document.getElementById('question').value = 'Why? '.repeat(5000)")
    page.one("ask").click()
    page.wait(lambda: "context window" in page.error)
    assert not page.is_busy
    assert not page.one("reply").is_displayed()
    page.ask(QUESTION)
    page.wait_for_figures()
    assert page.error == ""


def test_a_key_is_asked_for_and_kept_for_the_tab_alone(driver: Chrome, tmp_path: Path) -> None:
    fill(tmp_path, "red-town", "red", TEXTS[:3])
    fill(tmp_path, "blue-town", "blue", TEXTS[3:])
    town = Town(tmp_path, keys=KEYS, method="reuse")
    with answering(town.asgi, town.keys) as address:
        page = Page(driver, address)
        page.wait(lambda: "API key" in page.error)
        assert page.one("key").is_displayed()
        page.write("key", "sk-a-wrong-key-of-nobody")
        page.ask(QUESTION)
        page.wait(lambda: page.run("return document.activeElement.id") == "key")
        page.wait(lambda: not page.is_busy and "API key" in page.error)
        assert page.run("return sessionStorage.length") == 0
        assert page.choices("collection") == []
        page.write("key", BLUE, Keys.TAB)
        page.wait_for_choices()
        assert page.choices("collection") == ["blue-town"]
        page.ask(RECORDS[4].question)
        page.wait_for_figures()
        assert page.one("answer").text.startswith(RECORDS[4].workers)
        assert page.error == ""
        assert page.run("return Object.values(sessionStorage)") == [BLUE]
        assert page.run("return localStorage.length + document.cookie.length") == 0
        assert not [url for url in page.requested() if BLUE in url]
        page.driver.refresh()  # the tab still has it
        page.wait_for_choices()
        page.write("key", RED, Keys.TAB)
        page.wait(lambda: page.choices("collection") == ["red-town", "shared"])
