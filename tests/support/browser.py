"""A headless browser, and the page of the server in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions, ChromeService, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

PATIENCE_S = 120
_PROGRAMS = (("chromium", "chromedriver"), ("google-chrome", "chromedriver"))


@contextmanager
def chromium() -> Iterator[Chrome]:
    """A browser with an empty profile; the test is skipped where there is none."""
    found = [[shutil.which(name) for name in names] for names in _PROGRAMS]
    programs = next((pair for pair in found if all(pair)), None)
    if programs is None:
        pytest.skip(
            "no Chromium with its chromedriver is installed (apt-get install chromium-driver)"
        )
    options = ChromeOptions()
    options.binary_location = str(programs[0])
    for argument in (
        "--headless=new", "--no-sandbox",  # as root, in a container
        "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--window-size=900,1200",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=ChromeService(programs[1]))
    driver.set_script_timeout(PATIENCE_S)
    try:
        yield driver
    finally:
        driver.quit()


class Page:
    """The server's page in a browser, opened anew."""

    def __init__(self, driver: Chrome, address: str) -> None:
        self.driver, self.address = driver, address
        driver.get("about:blank")
        for kind in ("browser", "performance"):
            driver.get_log(kind)  # what came before
        driver.get(address)

    def one(self, id_: str) -> Any:
        return self.driver.find_element(By.ID, id_)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def run(self, script: str, *given: Any) -> Any:
        return self.driver.execute_script(script, *given)

    def wait(self, until: Callable[[], object]) -> None:
        WebDriverWait(self.driver, PATIENCE_S, poll_frequency=0.05).until(lambda _: until())

    def wait_for_choices(self) -> None:
        self.wait(lambda: len(self.choices("method")) > 1)

    def choices(self, id_: str) -> list[str]:
        """The values of a list, read at once: the page may be about to fill it anew."""
        script = "return [...document.getElementById(arguments[0]).options].map((o) => o.value)"
        return list(self.run(script, id_))

    def write(self, id_: str, *keys: str) -> None:
        """Write in place of what is there."""
        self.one(id_).clear()
        self.one(id_).send_keys(*keys)

    def ask(self, question: str) -> None:
        self.write("question", question, Keys.ENTER)

    def wait_for_figures(self) -> None:
        self.wait(lambda: self.one("figures").is_displayed() and not self.is_busy)

    @property
    def is_busy(self) -> bool:
        return bool(self.one("answer").get_attribute("aria-busy") == "true")

    @property
    def error(self) -> str:
        """What is shown as wrong, "" if nothing is."""
        return str(self.one("wrong").text)

    def requested(self) -> set[str]:
        """All addresses that the browser has asked for since the page was opened."""
        messages = [
            json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")
        ]
        return {
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        }

    def complaints(self) -> list[str]:
        """What the browser has written to its console."""
        return [entry["message"] for entry in self.driver.get_log("browser")]
