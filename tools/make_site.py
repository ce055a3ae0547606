"""Build the documentation as a site in build/site, and check every link: `make docs`.

Zensical renders the pages and checks the links between pages. This program then checks the
links and anchors of the finished pages and of README.md and CONTRIBUTING.md. A page may link to
a file outside docs/: that file becomes part of the site, as text. A page that loads anything
from another host is an error.
"""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
DOCS, SITE = ROOT / "docs", ROOT / "build" / "site"
LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")


class Page(HTMLParser):
    """The anchors of a page, its links, and the resources that a browser loads for the page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.resources: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and values.get("rel") not in ("canonical", "next", "prev"):
            self.resources.append(values.get("href", ""))
        if tag in ("script", "img", "iframe", "source") and "src" in values:
            self.resources.append(values["src"])


def build() -> None:
    """Render the pages; exit with Zensical's code if Zensical finds a problem."""
    shutil.rmtree(SITE, ignore_errors=True)
    command = [Path(sys.executable).with_name("zensical"), "build", "--clean", "--strict"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if ended.returncode:
        # If Zensical fails, its output ends with a traceback of Zensical's own code. Cut that off.
        print((ended.stdout + ended.stderr).partition("Traceback")[0], file=sys.stderr)
        sys.exit(ended.returncode)
    # The links on this page are absolute, so the links only work at the root of a host.
    (SITE / "404.html").unlink()


def outside(page: Page, link: str) -> Path | None:
    """Return the repository file that `link` leads to; None if the file is part of the site."""
    target = (page.path.parent / unquote(urlsplit(link).path)).resolve()
    if target.is_relative_to(SITE):
        return None
    # A page has the same relative path in the site as its source in docs/.
    source = DOCS / page.path.parent.relative_to(SITE)
    return (source / unquote(urlsplit(link).path)).resolve()


def adopt(page: Page, link: str, target: Path) -> None:
    """Copy `target` into the site as text, and make `link` lead to the copy."""
    copy = SITE / "files" / f"{target.relative_to(ROOT)}.txt"
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(target, copy)
    ups = "../" * len(page.path.parent.relative_to(SITE).parts)
    text = page.path.read_text()
    new = f'href="{ups}{copy.relative_to(SITE).as_posix()}"'
    page.path.write_text(text.replace(f'href="{link}"', new))


def problems_of(page: Page, pages: dict[Path, Page]) -> list[str]:
    """Return descriptions of the faulty links on a finished page."""
    found = [f"loads {url}" for url in page.resources if urlsplit(url).scheme in ("http", "https")]
    for link in sorted(set(page.links)):
        parts = urlsplit(link)
        if parts.scheme or link.startswith("//"):
            continue
        target = outside(page, link)
        if target is not None:
            if target.is_relative_to(ROOT) and target.is_file():
                adopt(page, link, target)
            else:
                found.append(f"links to {link}, which is not a file of the repository")
            continue
        target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
        if target.is_dir():
            target /= "index.html"
        if not target.is_file():
            found.append(f"links to {link}, which does not exist")
        elif parts.fragment and unquote(parts.fragment) not in pages[target].anchors:
            found.append(f"links to {link}, which is not an anchor of that page")
    return [f"{page.path.relative_to(SITE)} {problem}" for problem in found]


def problems_of_source(path: Path, pages: dict[Path, Page]) -> list[str]:
    """Return the dead links of a Markdown file outside docs/."""
    found = []
    for link in LINK.findall(path.read_text()):
        parts = urlsplit(link)
        if parts.scheme or not parts.path:
            continue
        target = (path.parent / unquote(parts.path)).resolve()
        dead = not target.exists()
        if parts.fragment and target.is_relative_to(DOCS) and not dead:
            page = pages[SITE / target.relative_to(DOCS).with_suffix(".html")]
            dead = parts.fragment not in page.anchors
        if dead:
            found.append(f"{path.relative_to(ROOT)} links to {link}, which does not exist")
    return found


def main() -> None:
    build()
    pages = {path: Page(path) for path in sorted(SITE.rglob("*.html"))}
    found = [problem for page in pages.values() for problem in problems_of(page, pages)]
    for name in ("README.md", "CONTRIBUTING.md", "mini/README.md"):
        found += problems_of_source(ROOT / name, pages)
    for problem in found:
        print(problem, file=sys.stderr)
    if found:
        sys.exit(1)
    print(f"{len(pages)} pages: open {SITE.relative_to(ROOT)}/index.html")


if __name__ == "__main__":
    main()
