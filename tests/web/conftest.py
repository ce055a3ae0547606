"""One server and one browser for all tests; each test begins with an empty page."""

from collections.abc import Iterator

import pytest
from selenium import webdriver

from tests.web.page import Page, new_driver
from tests.web.server import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def driver() -> Iterator[webdriver.Chrome]:
    found = new_driver()
    yield found
    found.quit()


@pytest.fixture
def page(server: Server, driver: webdriver.Chrome) -> Iterator[Page]:
    origin = {"origin": server.url, "storageTypes": "all"}
    driver.get("about:blank")
    driver.execute_cdp_cmd("Storage.clearDataForOrigin", origin)
    shown = Page(driver, server)
    shown.open()
    yield shown
    shown.offline(False)
    assert not shown.complaints()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with the longest file, so that no worker is left alone with it at the end."""
    items.sort(key=lambda item: item.path.name != "test_states.py")
