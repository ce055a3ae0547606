"""The dashboard beside a running server."""

from selenium import webdriver
from selenium.webdriver.common.by import By

from tests.web.page import Page, eventually
from tests.web.server import Server

INK = """
const canvas = document.getElementById(arguments[0]);
const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
return data.some((value) => value);
"""

SLOW_STEP = """
const done = arguments[arguments.length - 1];
import("/web/charts.js").then(({drawSteps, drawGaps}) => {
  const canvas = document.createElement("canvas");
  document.body.append(canvas);
  const times = [...Array(99).fill(10), 2000];
  const steps = times.map(ms => ({actual_ms: ms, predicted_ms: 0, prompt_tokens: 0}));
  const inked = (x, width) => {
    const pen = canvas.getContext("2d");
    const {data} = pen.getImageData(x, 0, width, canvas.height);
    return data.filter((value, k) => k % 4 === 3 && value).length / canvas.height / width;
  };
  drawSteps(canvas, steps, 200);
  const bars = inked(canvas.width / 2, canvas.width / 4);
  drawGaps(canvas, times, 200);
  const middle = inked(canvas.width / 2, canvas.width / 3);
  canvas.remove();
  done([bars, middle]);
});
"""
"""How much of the part of a chart that shows ordinary steps is ink."""

SILENT = """
const [send, wait] = [window.fetch, window.setTimeout];
window.setTimeout = (act, ms) => wait(act, ms === 30000 ? 300 : ms);
window.fetch = (url, options) => String(url).endsWith("/manage/stream") ?
  new Promise((_, end) => options.signal.addEventListener("abort", () =>
    ((window.fetch = send), end(options.signal.reason)))) : send(url, options);
window.news = new Set();
new MutationObserver(([{ target }]) => news.add(target.textContent))
  .observe(document.getElementById("news"), { childList: true });
import("/web/dashboard.js?another");
"""
"""Another watcher, whose first connection says nothing; the seconds of its patience are short."""

TILES = """
const done = arguments[arguments.length - 1];
const [live, points] = arguments;
import("/web/rates.js").then(async ({inCells, lookAtRates, rateOf, seenGateways, showTiles}) => {
  const asked = [];
  window.fetch = async (url) => {
    asked.push(url.pathname + url.search);
    const now = {live, models: [{model: "a/b", ...live}], gateways: []};
    const found = url.pathname.endsWith("live") ? now : {every_s: 10, points};
    return new Response(JSON.stringify(found));
  };
  const box = document.createElement("dl");
  box.className = "figures live";
  document.body.append(box);
  showTiles(box);
  const before = box.innerText;
  await lookAtRates("a/b");
  await lookAtRates("a/b");
  showTiles(box);
  const words = (tile) => [...tile.children].slice(0, 3).map((one) => one.textContent);
  const tiles = [...box.children].map(words);
  const labels = [...box.querySelectorAll("canvas")].map((one) => one.getAttribute("aria-label"));
  const {width, height} = box.querySelector("canvas");
  const pen = box.querySelector("canvas").getContext("2d");
  const ink = pen.getImageData(width / 2 - 20, 20, 40, height - 45).data.some((value) => value);
  box.remove();
  done({before, tiles, labels, asked, cells: inCells(rateOf("a/b")), ink});
});
"""
"""The tiles as they are before a look and after it, and whether there is ink half an hour ago."""


def test_one_slow_step_leaves_the_others_to_be_seen(page: Page) -> None:
    bars, middle = page.driver.execute_async_script(SLOW_STEP)
    assert bars > 0.3 and middle > 0.01


def test_live_figures_and_the_last_hour_are_shown_as_the_server_counts_them(page: Page) -> None:
    live = {"tokens_in_per_s": 1234.5, "tokens_out_per_s": 7.25, "cached_share": 0.5}
    live |= {"ttft_p50_ms": 1250, "ttft_p99_ms": 30400, "gap_p50_ms": 7.94, "gap_p99_ms": 81.2}
    live |= {"queue_p50_ms": None, "queue_p99_ms": None}
    points = [live | {"ago_s": ago} for ago in (1810, 1800, 1790)]
    found = page.driver.execute_async_script(TILES, live, points)
    assert found["before"].count("not measured yet") == 6
    assert found["tiles"] == [
        ["Tokens out", "7.3/s", "answers, last 10 s"],
        ["Tokens in", "1235/s", "prompts computed, last 10 s"],
        ["Time to first token", "1.3 s", "99 % within 30 s"],
        ["Gaps", "7.9 ms", "99 % within 81 ms"],
        ["Time in the queue", "–", "none in the last minute"],
        ["Cache hits", "50 %", "of prompt tokens, last minute"],
    ]
    assert found["labels"][3] == "Gaps in the last hour: at most 81 ms"
    assert found["labels"][4] == "Time in the queue: nothing in the last hour"
    assert found["ink"] and found["cells"] == ["7.3/s", "1235/s", "1.3 s", "81 ms"]
    assert found["asked"] == [  # the hour once, for it changes slowly
        "/manage/live?model=a%2Fb",
        "/manage/history?model=a%2Fb",
        "/manage/live?model=a%2Fb",
    ]


def test_a_long_prompt_beside_four_streams(page: Page) -> None:
    page.open("/dashboard")
    eventually(lambda: "headrace-mini" in page.find("#facts").text)
    eventually(lambda: "not measured yet" not in page.texts("#live .soft"))
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
    eventually(lambda: page.texts('[data-name="Time to first token"]')[0].endswith("s"))
    eventually(lambda: page.texts('[data-name="Gaps"]')[0].endswith("ms"))
    eventually(lambda: page.texts('[data-name="Tokens in"]')[0] != "–")
    assert page.driver.execute_script(INK, "steps") and page.driver.execute_script(INK, "gaps")


def test_a_connection_that_falls_silent_is_made_anew(page: Page) -> None:
    page.open("/dashboard")
    eventually(lambda: "headrace-mini" in page.find("#facts").text)
    page.driver.execute_script(SILENT)
    news = "return [...window.news]"
    told = ["The server cannot be reached; trying again.", ""]
    eventually(lambda: page.driver.execute_script(news) == told)


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
