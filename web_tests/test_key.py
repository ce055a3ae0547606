"""A server that asks for a key: the page opens, asks for it, and uses it."""

from collections.abc import Iterator

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

from web_tests.page import Page, eventually
from web_tests.server import Server


@pytest.fixture
def locked() -> Iterator[Server]:
    running = Server("--api-key", "secret")
    running.key = "secret"
    yield running
    running.stop()


def test_a_key_is_asked_for_once(locked: Server, driver: webdriver.Chrome) -> None:
    page = Page(driver, locked)
    page.open()
    eventually(lambda: page.find("#choices").get_attribute("open"))
    page.find("#choices [name=key]").send_keys("secret")
    driver.find_element(By.CSS_SELECTOR, "#choices [value=yes]").click()
    page.driver.refresh()
    page.send("Spell the word banana.")
    answer = page.wait_for_end()
    assert answer["outcome"] == "done" and answer["text"] == page.log_text(answer)
