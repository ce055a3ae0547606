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

RATES = """
const done = arguments[arguments.length - 1];
import("/web/rates.js").then(async ({lookAtRates, meanWait, tokenRate}) => {
  const page = (count, sum) => ["ann", "bob"].map((model) => ["ttft", "inter_token", "queue"].map(
    (name) => `headrace_${name}_seconds_count{model="${model}"} ${count}.0\\n` +
      `headrace_${name}_seconds_sum{model="${model}"} ${sum}`).join("\\n")).join("\\n");
  let [now, text] = [0, ""];
  performance.now = () => now;
  window.fetch = async () => new Response(text);
  const said = [];
  for (const [at, count, sum] of arguments[0]) {
    [now, text] = [1000 * at, page(count, sum)];
    await lookAtRates();
    said.push([...tokenRate(), ...meanWait("ttft")]);
  }
  done(said);
});
"""


def test_one_slow_step_leaves_the_others_to_be_seen(page: Page) -> None:
    bars, middle = page.driver.execute_async_script(SLOW_STEP)
    assert bars > 0.3 and middle > 0.01


def test_rates_and_waits_are_those_of_the_last_moments(page: Page) -> None:
    seen = [(0, 10, 5.0), (4, 20, 5.5), (14, 120, 15.5), (90, 120, 15.5), (92, 1, 1.0)]
    said = page.driver.execute_async_script(RATES, seen)
    assert said[0] == ["–", "not measured yet", "500 ms", "mean of 20 since the start"]
    assert said[1] == ["10", "in the last 4 s", "50 ms", "mean of 20 in the last minute"]
    assert said[2][:2] == ["40", "in the last 10 s"]
    assert said[3] == ["0", "in the last 76 s", "129 ms", "mean of 240 since the start"]
    assert said[4][2:] == ["1.0 s", "mean of 2 since the start"]  # another server


def test_a_long_prompt_beside_four_streams(page: Page) -> None:
    page.open("/dashboard")
    eventually(lambda: "headrace-mini" in page.find("#facts").text)
    eventually(lambda: "not measured yet" not in page.texts("#figures div:nth-child(5) .soft"))
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
    eventually(lambda: page.texts('[data-name="Tokens/s"]')[0] not in ("–", "0"))
    eventually(lambda: page.texts('[data-name="Time to first token"]')[0].endswith("s"))
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
