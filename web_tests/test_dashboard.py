"""The dashboard beside a running server."""

from selenium import webdriver
from selenium.webdriver.common.by import By

from web_tests.page import Page, eventually
from web_tests.server import Server

INK = """
const canvas = document.getElementById(arguments[0]);
const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
return data.some((value) => value);
"""


def test_a_long_prompt_beside_four_streams(page: Page) -> None:
    page.open("/dashboard")
    eventually(lambda: "headrace-mini" in page.texts("dd"))
    page.driver.find_element(By.ID, "try").click()
    eventually(lambda: int(page.texts('[data-name="Running"]')[0]) >= 4)
    eventually(lambda: len(page.texts("#rows strong")) == 5)
    eventually(lambda: len(page.texts("#requests tbody tr")) >= 4)
    eventually(lambda: any(" more" in text for text in page.texts("#requests td:nth-child(6)")))
    assert "answers" in page.texts("#requests td:nth-child(3)")
    assert "places are taken" in page.find("#requests-text").text
    eventually(lambda: page.find("#try").is_enabled(), 120)
    assert all("tokens, longest gap" in text for text in page.texts("#rows span"))
    eventually(lambda: "prompt tokens" in page.find("#steps-text").text)
    assert "99 %" in page.find("#gaps-text").text
    assert page.driver.execute_script(INK, "steps") and page.driver.execute_script(INK, "gaps")


def test_each_of_several_engines_is_shown(driver: webdriver.Chrome) -> None:
    server = Server("--replicas", "2")
    try:
        page = Page(driver, server)
        page.open("/dashboard")
        eventually(lambda: len(page.texts("#replicas tbody tr")) == 2)
        eventually(lambda: page.texts("#replicas td:nth-child(3)") == ["up", "up"], 60)
        assert page.texts("#replicas td:nth-child(5)") == ["0 of 64"] * 2
        assert not page.complaints()
    finally:
        server.stop()


def test_requests_that_wait_are_shown(driver: webdriver.Chrome) -> None:
    server = Server("--max-num-seqs", "1")
    try:
        page = Page(driver, server)
        page.open("/dashboard")
        eventually(lambda: page.find("#try").is_enabled() and page.texts("dd"))
        page.find("#try").click()
        eventually(lambda: page.texts("#requests td:nth-child(3)").count("waits") >= 3)
        eventually(lambda: "1 of 1 places are taken; " in page.find("#requests-text").text)
        assert not page.complaints()
    finally:
        driver.get("about:blank")
        server.stop()
