"""The page of batches: a file is sent, followed to its end, and its results are taken."""

import json
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By

from tests.web.page import Page, eventually

KEEPING = """
const make = URL.createObjectURL.bind(URL);
window.saved = [];
URL.createObjectURL = (blob) => (saved.push(blob), make(blob));
"""
"""Keeps what is downloaded."""


OUTSIDE = """
const cells = [...document.querySelectorAll("#batches tbody tr:first-child td")];
const boxes = cells.map((cell) => {
  const inside = document.createRange();
  inside.selectNodeContents(cell);
  return [cell.className, inside.getBoundingClientRect()];
}).filter(([, { width }]) => width);
const meet = ([, a], [, b]) =>
  a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
return boxes.flatMap((one, i) => [
  ...(one[1].left < 0 || one[1].right > innerWidth ? [`${one[0]} is out of sight`] : []),
  ...boxes.slice(i + 1).filter((other) => meet(one, other)).map(([name]) => [name, one[0]]),
]);
"""
"""What of the first row cannot be read."""

TOO_WIDE = """
const table = document.querySelector(".table");
return table.scrollWidth > table.clientWidth;
"""

UNALIGNED = """
const left = (css) => document.querySelector(css).getBoundingClientRect().left;
const ofBatches = (kind, name) => left(`#batches ${kind}.${name}`);
return ["what", "state", "done", "failed"].filter((name) => {
  const [head, cell] = ["th", "td"].map((kind) => ofBatches(kind, name));
  return head < 0 || Math.abs(head - cell) > 1;
});
"""
"""The important columns whose title is out of sight, or not above the cells."""


def line(number: int, max_tokens: int) -> str:
    body = {"messages": [{"role": "user", "content": f"{number}?"}], "max_tokens": max_tokens}
    wish = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions"}
    return json.dumps({**wish, "body": {**body, "ignore_eos": True}})


def sent(page: Page, tmp_path: Path, name: str, num_lines: int, max_tokens: int) -> None:
    file = tmp_path / name
    file.write_text("\n".join(line(number, max_tokens) for number in range(num_lines)))
    page.driver.find_element(By.ID, "given").send_keys(str(file))


def row_of(page: Page, name: str) -> str:
    rows = [it for it in page.texts("#batches tbody tr") if it.startswith(name)]
    return rows[0] if rows else ""


def test_a_file_is_answered_and_its_results_are_downloaded(page: Page, tmp_path: Path) -> None:
    page.open("/batches")
    sent(page, tmp_path, "short.jsonl", 3, 4)
    eventually(lambda: "completed" in row_of(page, "short.jsonl"), 60)
    assert "3 of 3" in row_of(page, "short.jsonl")
    page.driver.execute_script(KEEPING)
    page.find('[aria-label="Download the results of short.jsonl"]').click()
    eventually(lambda: page.driver.execute_script("return saved.length"))
    text = page.driver.execute_async_script("saved[0].text().then(arguments[0])")
    assert {json.loads(it)["custom_id"] for it in text.splitlines()} == {"0", "1", "2"}


@pytest.mark.parametrize("width", [320, 390, 704, 720, 1280])
def test_a_row_can_be_read_at_every_width(page: Page, tmp_path: Path, width: int) -> None:
    page.open("/batches")
    sent(page, tmp_path, "a-file-with-a-longer-name.jsonl", 40, 1)
    eventually(lambda: "40 of 40" in row_of(page, "a-file-with-a-longer-name.jsonl"), 60)
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        assert page.driver.execute_script(OUTSIDE) == []
        assert page.driver.execute_script(UNALIGNED) == []
        assert page.driver.execute_script(TOO_WIDE) is False
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_batch_is_stopped(page: Page, tmp_path: Path) -> None:
    page.open("/batches")
    sent(page, tmp_path, "long.jsonl", 200, 1000)
    eventually(lambda: "in progress" in row_of(page, "long.jsonl"), 60)
    page.find('[aria-label="Stop long.jsonl"]').click()
    eventually(lambda: "cancelled" in row_of(page, "long.jsonl"), 60)


def test_what_is_no_request_is_told(page: Page, tmp_path: Path) -> None:
    page.open("/batches")
    file = tmp_path / "wrong.jsonl"
    file.write_text("not JSON\n")
    page.driver.find_element(By.ID, "given").send_keys(str(file))
    eventually(lambda: "not a request" in page.find("#news").text)


def test_a_batch_that_fails_says_why_below_its_name(page: Page, tmp_path: Path) -> None:
    page.open("/batches")
    sent(page, tmp_path, "refused.jsonl", 2, -5)
    eventually(lambda: "failed" in row_of(page, "refused.jsonl"))
    assert "Line 1: max_tokens is -5" in page.texts("#batches .what .trouble")[0]
    assert page.texts("#batches td.state")[0] == "failed"
