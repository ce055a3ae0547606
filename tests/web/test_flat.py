"""A long visit: memory that does not grow."""

import os

import pytest
from selenium import webdriver

from tests.web.page import Page, eventually
from tests.web.replay import Replay
from tests.web.server import Server
from tests.web.test_smooth import COUNT, END, WATCH, longest, prose

ROUNDS = 4
MOST_BYTES = 2_000_000  # of 4,000,000 with an answer shown; 1,100,000 to 1,500,000 were measured
MOST_NODES = 100  # of 9,500


@pytest.mark.skipif(os.environ.get("BROWSER") == "firefox", reason="it does not tell its memory")
def test_answer_after_answer_takes_no_more_memory(driver: webdriver.Chrome, server: Server) -> None:
    """50,000 tokens in answers that are left behind for new conversations."""
    replay = Replay(server.url, prose()[: 50_000 // ROUNDS])
    try:
        page = Page(driver, server)
        page.open(url=replay.url)
        driver.execute_script(WATCH)
        sizes = []
        for number in range(ROUNDS):
            driver.execute_script("document.getElementById('new').click()")
            eventually(lambda: driver.execute_script(COUNT, ".message") == 0)
            page.send(f"Tell me all of it, {number}.")
            eventually(lambda: driver.execute_script(END) == "false", 120)
            page.wait_for_end()
            sizes.append(kept(page))
        print("after each answer, bytes of JavaScript and nodes:", sizes)
        longest(page, "50,000 tokens")
        (first, nodes), (last, last_nodes) = sizes[1], sizes[-1]  # the first warms caches up
        assert last - first < MOST_BYTES and last_nodes - nodes < MOST_NODES
    finally:
        driver.get("about:blank")
        replay.stop()


def kept(page: Page) -> tuple[int, int]:
    """Memory of JavaScript, and nodes of documents, once what nobody needs is gone."""
    driver = page.driver
    for _ in range(2):
        driver.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
    driver.execute_cdp_cmd("Performance.enable", {})
    found = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    told = {one["name"]: int(one["value"]) for one in found}
    return told["JSHeapUsedSize"], told["Nodes"]
