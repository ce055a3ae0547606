"""The page in a headless browser, as a person uses it."""

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.web.firefox import Firefox
from tests.web.server import Server

STORED = """
const done = arguments[arguments.length - 1];
indexedDB.open("headrace").onsuccess = ({target: {result: database}}) => {
  database.transaction("messages").objectStore("messages").getAll().onsuccess =
    ({target: {result}}) => { database.close(); done(result); };
};
"""

# keeps what the status of the answers has said
SAID = """
window.said = new Set();
const spans = () => document.querySelectorAll(".status span");
const note = () => spans().forEach((span) => said.add(span.textContent));
new MutationObserver(note).observe(document, { subtree: true, childList: true });
"""


MODELS = "#model option:not([value=' get'])"
"""The models in the list, without the entry that gets more."""

# a file that the browser lost (its network changed, say) leaves a page without its script
HAS_BEGUN = "return document.querySelector('#thread')?.childElementCount !== 0"


def eventually(condition: Callable[[], Any], within_s: float = 30.0) -> Any:
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)
    return found


def new_driver(width: int = 1200, height: int = 800) -> webdriver.Remote:
    """Chromium, or Firefox if BROWSER says so."""
    if os.environ.get("BROWSER") == "firefox":
        return Firefox(width, height)
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    # Without a screen, Chromium reports no mouse, so that nothing could be hovered over.
    mouse = "primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4"
    options.add_argument(f"--blink-settings={mouse}")
    options.add_argument(f"--window-size={width},{height}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))


class Page:
    def __init__(self, driver: webdriver.Chrome, server: Server) -> None:
        self.driver = driver
        self.server = server

    def open(self, path: str = "/", url: str = "") -> None:
        """Loads the page, up to three times until its script has begun."""
        for _ in range(3):
            self.driver.get((url or self.server.url) + path)
            with contextlib.suppress(AssertionError):
                return eventually(lambda: self.driver.execute_script(HAS_BEGUN), 10)
            print("the page has not begun:", self.driver.get_log("browser"))
        raise AssertionError("the page did not begin")

    def find(self, css: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def texts(self, css: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map(n => n.textContent)"
        return self.driver.execute_script(script, css)

    def start_load_test(self) -> None:
        eventually(lambda: self.find("#try").is_enabled())
        self.find("#try").click()
        self.find("#ask button[value=run]").click()

    def send(self, text: str) -> None:
        script = "const i = document.getElementById('input'); i.value = arguments[0]; i.focus()"
        self.driver.execute_script(script, text)
        self.find("#input").send_keys(Keys.ENTER)

    def stored(self) -> list[dict[str, Any]]:
        return self.driver.execute_async_script(STORED)

    def answers(self) -> list[dict[str, Any]]:
        found = [one for one in self.stored() if one["role"] == "assistant"]
        return sorted(found, key=lambda one: one["created"])

    def wait_for_end(self, within_s: float = 60.0) -> dict[str, Any]:
        """The last answer, once no answer is due."""

        def ended() -> list[dict[str, Any]]:
            found = self.answers()
            return found if found and not any(one.get("live") for one in found) else []

        return eventually(ended, within_s)[-1]

    def wait_for_text(self) -> None:
        eventually(lambda: any(self.texts(".message.assistant .body")))

    def offline(self, is_offline: bool) -> None:
        conditions = {"offline": is_offline, "latency": 0}
        conditions |= {"downloadThroughput": -1, "uploadThroughput": -1}
        self.driver.execute_cdp_cmd("Network.enable", {})
        self.driver.execute_cdp_cmd("Network.emulateNetworkConditions", conditions)

    def log_text(self, answer: dict[str, Any]) -> str:
        """The answer, as the server's log has it."""
        state = self.server.get(f"/v1/streams/{answer['stream']}")
        return state["response"]["choices"][0]["message"]["content"]

    def complaints(self) -> list[str]:
        """Complaints of the browser's console about the page itself."""
        return [
            line["message"]
            for line in self.driver.get_log("browser")
            if line["level"] == "SEVERE" and "Failed to load resource" not in line["message"]
        ]
