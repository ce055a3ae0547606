"""The dashboard beside a running server."""

import pytest
from selenium import webdriver

from tests.web.page import Page, eventually
from tests.web.server import Server
from tests.web.test_everybody import look_like

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

LIVE = (
    *("tokens_in_per_s", "tokens_out_per_s", "cached_share", "ttft_p50_ms", "ttft_p99_ms"),
    *("gap_p50_ms", "gap_p99_ms", "queue_p50_ms", "queue_p99_ms"),
)

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
  const shown = (one) => one.hidden ? "" : one.textContent;
  const words = (tile) => [...tile.children].slice(0, 4).map(shown);
  const tiles = [...box.children].map(words);
  const charts = [...box.querySelectorAll("canvas")];
  const labels = charts.map((one) => !one.hidden && one.getAttribute("aria-label"));
  const {width, height} = charts[0];
  const pen = charts[0].getContext("2d");
  const at = (k) => pen.getImageData((k * width) / 10 + 1, height / 2, 2, 1).data;
  const filled = (k) => at(k).some((value) => value);
  const ink = [...Array(10).keys()].map(filled).map(Number).join("");
  box.remove();
  done({width, before, tiles, labels, asked, cells: inCells(rateOf("a/b")), ink});
});
"""
"""The tiles before and after a look, and which tenths of the first chart have a high bar."""


def test_one_slow_step_leaves_the_others_to_be_seen(page: Page) -> None:
    bars, middle = page.driver.execute_async_script(SLOW_STEP)
    assert bars > 0.3 and middle > 0.01


def test_live_figures_and_the_last_hour_are_shown_as_the_server_counts_them(page: Page) -> None:
    live = {"tokens_in_per_s": 1234.5, "tokens_out_per_s": 7.25, "cached_share": 0.5}
    live |= {"ttft_p50_ms": 1250, "ttft_p99_ms": 30400, "gap_p50_ms": 7.94, "gap_p99_ms": 81.2}
    live |= {"queue_p50_ms": None, "queue_p99_ms": None}
    points = [live | {"ago_s": ago} for ago in (1800, 1790, 900, 10)]
    points[0]["tokens_out_per_s"] = points[3]["tokens_out_per_s"] = 12.3
    found = page.driver.execute_async_script(TILES, live, points)
    assert found["before"].count("not measured yet") == 6
    assert found["tiles"] == [
        ["Tokens out", "7.3/s", "answers, last 10 s", "max 12/s in the last hour"],
        ["Tokens in", "1235/s", "prompts processed, last 10 s", "max 1235/s in the last hour"],
        ["Time to first token", "1.3 s", "99 % within 30 s", "99 %: max 30 s in the last hour"],
        ["Gaps", "7.9 ms", "99 % within 81 ms", "99 %: max 81 ms in the last hour"],
        ["Time in the queue", "–", "none in the last hour", ""],
        ["Cache hits", "50 %", "of prompt tokens, last minute", "max 50 % in the last hour"],
    ]
    assert found["labels"][3:5] == ["Gaps in the last hour: at most 81 ms", False]
    assert found["ink"] == "1000010001" and found["cells"] == ["7.3/s", "1235/s", "1.3 s", "81 ms"]
    assert found["asked"] == [  # the hour once, for it changes slowly
        "/manage/live?model=a%2Fb",
        "/manage/history?model=a%2Fb",
        "/manage/live?model=a%2Fb",
    ]


@pytest.mark.parametrize(
    ("agos", "bars"), [((20, 10), "0000000111"), ((120, 60), "1000010000"), ((), "")]
)
def test_few_points_fill_a_chart(page: Page, agos: tuple[int, ...], bars: str) -> None:
    live = dict.fromkeys(LIVE, 5.0)
    points = [live | {"ago_s": ago} for ago in agos]
    found = page.driver.execute_async_script(TILES, live, points)
    assert found["ink"].startswith(bars), (found["ink"], found["width"])
    assert found["tiles"][0][1] == "5/s"
    said = "max 5/s in the last hour" if bars else "collecting the last hour"
    assert found["tiles"][0][3] == said
    assert bool(found["labels"][0]) == bool(bars)


def test_a_high_value_of_this_moment_counts_as_the_maximum(page: Page) -> None:
    live = dict.fromkeys(LIVE, 50.0)
    points = [dict.fromkeys(LIVE, 5.0) | {"ago_s": 10}]
    found = page.driver.execute_async_script(TILES, live, points)
    assert found["tiles"][0][1:] == ["50/s", "answers, last 10 s", "max 50/s in the last hour"]


def test_a_load_test_says_what_it_does_and_asks_first(page: Page) -> None:
    page.open("/dashboard")
    eventually(lambda: page.find("#try").is_enabled())
    assert not page.texts("header .primary")
    num_before = page.server.get("/manage/state")["num_steps"]
    page.find("#try").click()
    said = page.find("#ask").text
    for part in (
        "5 requests to headrace-mini",
        "1,000 tokens each",
        "prompt of about 2,000 tokens",
    ):
        assert part in said
    assert "at most 2 minutes" in said and "other requests wait longer" in said
    assert "Now: 0 sequences running, 0 requests waiting." in said
    page.driver.switch_to.active_element.click()
    assert not page.find("#ask").is_displayed() and not page.texts("#rows strong")
    assert page.server.get("/manage/state")["num_steps"] == num_before


def test_a_load_test_is_stopped(page: Page) -> None:
    page.open("/dashboard")
    page.start_load_test()
    eventually(lambda: page.server.get("/manage/state")["running"] >= 4)
    eventually(lambda: page.find("#try").text == "Stop the load test")
    page.find("#try").click()
    eventually(lambda: page.server.get("/manage/state")["running"] == 0, 5)
    eventually(lambda: page.find("#try").text == "Load test…")
    assert all("stopped; " in text for text in page.texts("#rows span"))


def test_a_long_prompt_beside_four_streams(page: Page) -> None:
    page.open("/dashboard")
    eventually(lambda: "headrace-mini" in page.find("#facts").text)
    eventually(lambda: "not measured yet" not in page.texts("#live .soft"))
    page.start_load_test()
    eventually(lambda: int(page.texts('[data-name="Running"]')[0]) >= 4)
    eventually(lambda: len(page.texts("#rows strong")) == 5)
    eventually(lambda: len(page.texts("#requests tbody tr")) >= 4)
    eventually(lambda: any(" more" in text for text in page.texts("#requests td:nth-child(4)")))
    assert "answering" in page.texts("#requests td:nth-child(2)")
    assert "sequences are running" in page.find("#requests-text").text
    eventually(lambda: page.find("#try").text == "Load test…", 120)
    assert all("tokens, longest gap" in text for text in page.texts("#rows span"))
    eventually(lambda: "prompt tokens" in page.find("#steps-text").text)
    assert "99 %" in page.find("#gaps-text").text
    eventually(lambda: page.texts('[data-name="Time to first token"]')[0].endswith("s"))
    eventually(lambda: page.texts('[data-name="Gaps"]')[0].endswith("ms"))
    eventually(lambda: page.texts('[data-name="Tokens in"]')[0] != "–")
    assert page.driver.execute_script(INK, "steps") and page.driver.execute_script(INK, "gaps")


def test_what_requests_do_is_in_sight_on_a_phone(page: Page) -> None:
    look_like(page, "light", 390)
    page.open("/dashboard")
    page.start_load_test()
    eventually(lambda: len(page.texts("#requests tbody tr")) >= 4)
    shown = "return document.querySelector(arguments[0]).getBoundingClientRect().right"
    titles = page.texts("#requests th")
    assert titles[:4] == ["Request", "State", "Prompt", "Answer"]
    edges = [page.driver.execute_script(shown, f"#requests th:nth-child({k})") for k in (1, 4)]
    assert 0 < edges[0] < edges[1] < 390
    page.find("#try").click()
    look_like(page, "light")


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
        eventually(lambda: page.texts("dd"))
        page.start_load_test()
        eventually(lambda: page.texts("#requests td:nth-child(2)").count("waiting") >= 3)
        eventually(lambda: "1 of at most 1 sequences are" in page.find("#requests-text").text)
        assert not page.complaints()
    finally:
        driver.get("about:blank")
        server.stop()
