"""The page while the server loads its only model."""

from tests.web.page import Page, eventually

LOADS = """
window.load = { stage: "compiling kernels", progress: null, detail: "attend", since_s: 41.4 };
window.later = 0;
const [send, clock, timer] = [window.fetch, Date.now, setTimeout];
Date.now = () => clock() + later;
// no try but the one after the load
window.setTimeout = (act, ms) => timer(act, ms < 4000 ? ms : 1e9);
const refusal = { status: 503, headers: { "Retry-After": "600" } };
window.fetch = async (url, options) => {
  const { pathname } = new URL(url, location);
  if (!window.load) return send(url, options);
  if (pathname === "/health") return Response.json({ loading: window.load }, refusal);
  const error = { code: "model_loading", message: "Loading model" };
  return Response.json({ error }, refusal);
};
"""
WARM = "later = 20000; Object.assign(load, { stage: 'warming up', progress: 0.4 });"
BAR = "return document.querySelector('#loading progress')?.getAttribute('value')"


def test_a_load_is_shown_and_answers_follow_it_at_once(page: Page) -> None:
    eventually(lambda: page.texts("#model option"))
    page.driver.execute_script(LOADS)
    page.send("Spell the word banana.")
    eventually(lambda: "compiling kernels: attend" in page.find("#loading").text)
    assert "41 s" in page.find("#loading").text and page.driver.execute_script(BAR) is None
    assert page.texts("#presence") == ["Loading the model"]
    waits = ["Waiting until the server has loaded its model"]
    eventually(lambda: page.texts(".message.assistant .status span") == waits)
    page.driver.execute_script(WARM)
    eventually(lambda: "warming up: 40 %" in page.find("#loading").text)
    assert page.driver.execute_script(BAR) == "0.4"
    assert page.texts(".message.assistant .status span") == waits  # and no count of silence
    page.driver.execute_script("window.load = null")
    assert page.wait_for_end(10)["outcome"] == "done"
    eventually(lambda: not page.find("#loading").is_displayed())
    assert page.texts("#presence") == ["Connected"]
