import gzip
import hashlib
import re
from typing import Any
from urllib.parse import urljoin

import pytest

from headrace.gateway.web_routes import FOLDER, PAGES, TYPES
from tests.gateway.test_app import client_of, error_of

FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in TYPES)
VENDOR = sorted(path for path in (FOLDER / "vendor").iterdir() if path.suffix in TYPES)
NAMES = [path.relative_to(FOLDER).as_posix() for path in (*FILES, *VENDOR)]
PATHS = [*PAGES, *(f"/web/{name}" for name in NAMES if not name.endswith(".html"))]
MAX_BYTES = 400_000  # of a first visit, packed
BROWSER = "text/html,application/xhtml+xml,*/*;q=0.8"
LATER = {"temml.js", "pdf.js", "pdf.worker.js"}  # loaded when they are used


def get(path: str, **headers: str) -> Any:
    return client_of(api_key=("k",)).get(path, headers={"Accept": "text/html,*/*", **headers})


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_client_other_than_a_browser_gets_ollamas_greeting(method: str) -> None:
    answer = client_of(api_key=("k",)).request(method, "/", headers={"Accept": "*/*"})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    assert answer.text == ("Ollama is running" if method == "GET" else "")


@pytest.mark.parametrize("path", PATHS)
def test_page_files_need_no_key_and_forbid_foreign_scripts(path: str) -> None:
    answer = get(path)
    policy = answer.headers["content-security-policy"]
    assert answer.status_code == 200
    assert "default-src 'none'" in policy and "unsafe-" not in policy and "http" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"


def test_files_have_the_right_content_types() -> None:
    found = {path: get(path).headers["content-type"].partition(";")[0] for path in PATHS}
    assert {found["/"], found["/dashboard"]} == {"text/html"}
    assert found["/web/chat.js"] == "text/javascript"
    assert found["/web/style.css"] == "text/css"


def test_an_unchanged_file_is_answered_with_304() -> None:
    etag = get("/").headers["etag"]
    again = get("/", **{"If-None-Match": f'"other", W/{etag}'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert "content-security-policy" in again.headers
    assert get("/", **{"If-None-Match": '"other"'}).status_code == 200


def test_no_page_file_refers_to_another_host() -> None:
    allowed = {"http://www.w3.org/2000/svg", "http://www.w3.org/1998/"}  # names, never fetched
    for path in FILES:
        found = set(re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z0-9./-]+", path.read_text()))
        assert found <= allowed, (path.name, found - allowed)


def test_no_page_file_builds_html_from_strings() -> None:
    for path in FILES:
        found = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|\beval\b|\bon\w+=", path.read_text()
        )
        assert not found, (path.name, found)


def test_every_file_that_a_page_refers_to_exists() -> None:
    for path in FILES:
        text = path.read_text()
        for name in re.findall(r"""(?:src|href)="([^"#]+)["#]|from "\./([^"]+)\"""", text):
            wanted = f"/web/{name[1]}" if name[1] else urljoin("/", name[0])
            assert not name[0].startswith("/"), "the server may lie below a path"
            assert wanted in (*PATHS, "/openapi.json"), (path.name, wanted)


def test_the_page_is_small() -> None:
    first = [path for path in (*FILES, *VENDOR) if path.name not in LATER]
    assert sum(len(gzip.compress(path.read_bytes(), 6)) for path in first) < MAX_BYTES


def test_a_file_is_compressed_if_the_client_accepts_gzip() -> None:
    plain = get("/web/chat.js", **{"Accept-Encoding": "identity"})
    packed = get("/web/chat.js", **{"Accept-Encoding": "br, gzip"})
    assert packed.headers["content-encoding"] == "gzip" and packed.content == plain.content
    assert int(packed.headers["content-length"]) < len(plain.content) / 2
    assert packed.headers["etag"] != plain.headers["etag"]
    assert packed.headers["vary"] == plain.headers["vary"] == "Accept-Encoding"


def test_vendored_files_are_unmodified_and_have_their_licences() -> None:
    known = dict(re.findall(r"^(\w{64})  (\S+)$", (FOLDER / "vendor/README").read_text(), re.M))
    found = {hashlib.sha256(path.read_bytes()).hexdigest(): path.name for path in VENDOR}
    assert found == known
    for path in VENDOR:
        licence = path.with_name(f"{path.name.split('.')[0]}.LICENSE").read_text()
        assert "Copyright" in licence and '"AS IS"' in licence


WRONG = ("/web/", "/web/index.html", "/web/../app.py", "/web/none.js", "/nosuch", "/v1/none")


def test_unknown_paths_get_404() -> None:
    for path in WRONG:
        answer = get(path, Accept="*/*")
        assert error_of(answer) == (404, "route_not_found") and answer.headers["vary"] == "Accept"


@pytest.mark.parametrize("prefix", ["", "/srv/llm"])
@pytest.mark.parametrize("path", [*WRONG, "/a/b/", "/a%2Fb/c?d/e/f"])
def test_a_browser_at_an_unknown_path_gets_a_page_with_links(prefix: str, path: str) -> None:
    client = client_of(api_key=("k",), api_prefix=prefix)
    address = f"http://localhost{prefix}{path}"
    answer = client.get(address, headers={"Accept": BROWSER})
    assert answer.status_code == 404 and answer.headers["content-type"] == TYPES[".html"]
    assert answer.headers["vary"] == "Accept" and answer.headers["x-request-id"]
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "/openapi.json lists all routes" in answer.text
    # A proxy may serve this server below another path.
    seen = address.replace("localhost", "localhost/proxied")
    links = [urljoin(seen, name) for name in re.findall('(?:href|src)="([^"]*)"', answer.text)]
    found = ["web/icon.svg", "web/theme.js", "web/style.css", "", "dashboard", "openapi.json"]
    assert links == [f"http://localhost/proxied{prefix}/{name}" for name in found]


def test_the_404_page_outside_the_prefix_links_below_the_prefix() -> None:
    answer = client_of(api_prefix="/llm").get("/nosuch/x", headers={"Accept": BROWSER})
    assert answer.status_code == 404 and "below /llm/." in answer.text
    assert 'href="../llm/dashboard"' in answer.text


def test_the_405_page_lists_the_accepted_methods() -> None:
    client = client_of()
    answer = client.get("/v1/chat/completions", headers={"Accept": BROWSER})
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert "This route only accepts POST." in answer.text and "<html" in answer.text
    sent = client.post("/nosuch", headers={"Accept": BROWSER})
    assert error_of(sent) == (404, "route_not_found")


def test_the_404_page_repeats_nothing_from_the_request() -> None:
    marked = "MARK%22%3E%3Cscript%3E"
    headers = {"Accept": f"{BROWSER}, MARK/x", "Host": "localhost", "X-Forwarded-Prefix": "/MARK"}
    for path in (f"/{marked}", f"/v1/{marked}", f"/api/{marked}", f"/a?{marked}"):
        answer = client_of().get(path, headers=headers)
        assert answer.status_code == 404 and "MARK" not in answer.text
