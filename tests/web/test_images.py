"""Pictures in messages, where the model says that it takes them."""

import base64
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver

from tests.web.page import Page, eventually
from tests.web.replay import Replay
from tests.web.server import PYTHON, ROOT, Server
from tests.web.test_choices import choose
from tests.web.test_everybody import fill

DOT = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAFhAGAWjR9awAAAABJRU5ErkJggg=="
)
PASTE = """
const bytes = Uint8Array.from(atob(arguments[0]), (char) => char.charCodeAt(0));
const given = new DataTransfer();
given.items.add(new File([bytes], "dot.png", { type: "image/png" }));
const name = arguments[1] === "paste" ? "clipboardData" : "dataTransfer";
const event = new Event(arguments[1], { bubbles: true, cancelable: true });
Object.defineProperty(event, name, { value: given });
document.getElementById("input").dispatchEvent(event);
"""
LARGE = """
const done = arguments[arguments.length - 1];
const canvas = Object.assign(document.createElement("canvas"), { width: 3000, height: 1000 });
const pen = canvas.getContext("2d");
const noise = pen.createImageData(3000, 1000);
for (let k = 0; k < noise.data.length; k += 65536)
  crypto.getRandomValues(noise.data.subarray(k, Math.min(k + 65536, noise.data.length)));
pen.putImageData(noise, 0, 0);
canvas.toBlob(async (blob) => {
  const { readImage } = await import("/web/images.js");
  const image = new Image();
  image.src = await readImage(blob);
  await image.decode();
  done([blob.size, image.src.length, image.naturalWidth, image.naturalHeight]);
});
"""

GRADIENT = """
const canvas = Object.assign(document.createElement("canvas"), { width: 64, height: 48 });
const pen = canvas.getContext("2d");
const shade = pen.createLinearGradient(0, 0, 64, 48);
arguments[0].forEach((color, k) => shade.addColorStop(k, color));
pen.fillStyle = shade;
pen.fillRect(0, 0, 64, 48);
return canvas.toDataURL().split(",")[1];
"""
MAKE = """
import pathlib, sys
from tools.harness.tiny_models import make_tiny_image_model
make_tiny_image_model(pathlib.Path(sys.argv[1]), "Qwen3.5")
"""


@pytest.fixture
def seeing(driver: webdriver.Chrome, server: Server) -> Iterator[tuple[Page, Replay]]:
    replay = Replay(server.url, ["A ", "dot."], "text", "image")
    page = Page(driver, server)
    page.open(url=replay.url)
    yield page, replay
    driver.get("about:blank")
    replay.stop()


def num_shown(page: Page, css: str) -> int:
    script = "return [...document.querySelectorAll(arguments[0])].map((one) => one.naturalWidth)"
    return sum(width > 0 for width in page.driver.execute_script(script, css))


def test_pictures_are_attached_shown_sent_and_kept(
    seeing: tuple[Page, Replay], tmp_path: Path
) -> None:
    page, replay = seeing
    eventually(lambda: page.texts("#model option"))
    file = tmp_path / "dot.png"
    file.write_bytes(DOT)
    page.find("#given").send_keys(str(file))
    for kind in ("paste", "drop"):
        page.driver.execute_script(PASTE, base64.b64encode(DOT).decode(), kind)
    eventually(lambda: num_shown(page, "#attached img") == 3)
    page.find("#attached [aria-label='Remove dot.png']").click()
    eventually(lambda: num_shown(page, "#attached img") == 2)
    page.driver.refresh()
    eventually(lambda: num_shown(page, "#attached img") == 2)
    page.send("What is it?")
    assert page.wait_for_end()["text"] == "A dot."
    uri = "data:image/png;base64," + base64.b64encode(DOT).decode()
    part = {"type": "image_url", "image_url": {"url": uri}}
    text = {"type": "text", "text": "What is it?"}
    (asked,) = replay.asked
    assert asked["messages"] == [{"role": "user", "content": [part, part, text]}]
    assert num_shown(page, "#attached img") == 0
    page.driver.refresh()
    eventually(lambda: num_shown(page, ".message.user img") == 2)
    page.send("And now?")
    eventually(lambda: len(replay.asked) == 2)
    assert page.wait_for_end()["outcome"] == "done"
    assert replay.asked[1]["messages"][0] == asked["messages"][0]


def test_a_large_picture_is_made_smaller(page: Page) -> None:
    before, after, width, height = page.driver.execute_async_script(LARGE)
    assert (width, height) == (1600, 533) and after < before


def test_a_model_without_eyes_is_shown_nothing(page: Page) -> None:
    eventually(lambda: page.texts("#model option"))
    page.driver.execute_script(PASTE, base64.b64encode(DOT).decode(), "paste")
    notice = eventually(lambda: page.find("#notice").text)
    assert notice == "The model headrace-mini does not accept images."
    assert not page.texts("#attached img")


def test_the_server_says_that_it_takes_no_pictures(page: Page, tmp_path: Path) -> None:
    fill(page, tmp_path)
    page.send("What is it?")
    refused = page.wait_for_end()
    assert refused["outcome"] == "failed" and "image" in refused["error"]
    eventually(lambda: refused["error"] in page.texts(".message.assistant .status")[-1])


@pytest.mark.timeout(500)  # on a busy machine the worker for images starts slowly
def test_a_model_that_sees_is_sent_pictures(driver: webdriver.Chrome, tmp_path: Path) -> None:
    """Its weights are random: other pictures, other words, is all that it can show."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    subprocess.run([PYTHON, "-c", MAKE, str(tmp_path)], cwd=ROOT, env=environment, check=True)
    server = Server(str(tmp_path), "--block-size", "8")
    try:
        page = Page(driver, server)
        page.open()
        eventually(lambda: page.texts("#model option"))
        choose(page, "#settings", temperature="0", max_tokens="40")
        answers = []
        for colors in (["red", "white"], ["white", "red"], ["red", "white"]):
            page.find("#new").click()
            eventually(lambda: not page.texts(".message"))
            picture = page.driver.execute_script(GRADIENT, colors)
            page.driver.execute_script(PASTE, picture, "paste")
            eventually(lambda: num_shown(page, "#attached img") == 1)
            page.send("What is it?")
            eventually(lambda: len(page.answers()) == len(answers) + 1)
            answers.append(page.wait_for_end(240))
            assert answers[-1]["text"] == page.log_text(answers[-1])
        first, other, again = [answer["text"] for answer in answers]
        assert first == again != other
        assert not page.complaints()
    finally:
        driver.get("about:blank")
        server.stop()
