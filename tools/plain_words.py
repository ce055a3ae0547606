"""Find constructions that a stranger has to read twice in the docs, comments and commit subjects.

`python -m tools.plain_words [FILE...]` prints each finding as `file:line: reason: text`, and
exits with 1 if there is a finding. The rules are few, because people ignore rules that are
often wrong.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Commit subjects are checked from this commit on.
FIRST = "dfe1fab"
MAX_WORDS, MAX_SUBJECT, MAX_LINE = 30, 72, 120

RULES = {
    "opens with a clause in place of a verb": r"^(What|Whatever|Who|Whoever|Whose|Which|Those"
    r"|All that) \w+(?!.*\?)",
    "an action as a noun": r"^The (\w+ing|doing|making|giving) of ",
    "a relative clause without its noun": r"\b([Ww]ho comes|[Ww]hat came of|[Ww]hat comes of)\b"
    r"|\bthat which\b|(?<!\w, )\b(of|from|by|for|to) (who|whoever) (is|are|was|were|comes?|has)\b",
    "an idiom of another language": r"\bof (ours|theirs)\b|\bthe former\b|\bor up to as many\b"
    r"|\b(goes|go|went) before (it|them|both|all)\b|\b(is|are|was|were) not there\b"
    r"|\b(stands|lies) (in|on|at|beside|under)\b|\b(is|are) no (longer )?\w+ that\b",
}
"""Why a text is hard to read, and the pattern that finds it."""

Text = tuple[Path, int, str]
"""A file, the line number at which a paragraph starts, and the paragraph."""


def python_texts(path: Path) -> Iterator[Text]:
    """Yield the docstrings of a Python file by paragraph, and its comments."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
            # Examples of commands start with a backspace, formulas with spaces, and rows of tables
            # contain wide gaps.
            if paragraph and not re.search(r"^[\x08 ]|\S   ", paragraph):
                yield path, node.body[0].lineno, " ".join(paragraph.split())
    comments: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            number, text = token.start[0], token.string.lstrip("# ")
            goes_on = token.line.lstrip().startswith("#") and comments
            if goes_on and number == comments[-1][0] + 1:
                comments[-1] = number, f"{comments[-1][1]} {text}"
            else:
                comments.append((number, text))
    for number, text in comments:
        yield path, number, text


def markdown_texts(path: Path) -> Iterator[Text]:
    """Yield the paragraphs and list items of a Markdown file.

    Code, tables, headings and definitions of link targets are left out.
    """
    lines: list[str] = []
    is_code = False
    for number, line in enumerate([*path.read_text().splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        starts_item = re.match(r"\s*([-*+]|\d+\.) ", line)
        is_other = re.match(r"\s*(\||#|!|<|```|=== |:::|\[[^]]+\]: )", line)
        is_prose = not is_code and line.strip() and not is_other
        if lines and (not is_prose or starts_item):
            text = re.sub(r"\]\([^)]*\)", "]", " ".join(lines))
            yield path, number - len(lines), text
            lines = []
        if is_prose:
            lines.append(re.sub(r"^\s*([-*+]|\d+\.) ", "", line).strip())


def faults(text: str) -> Iterator[str]:
    """Yield the reason of each fault in a paragraph."""
    text = re.sub(r"`[^`]*`", "`code`", text)
    for reason, pattern in RULES.items():
        if found := re.search(pattern, text):
            yield f"{reason} ({found[0].strip()!r})"
    for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z0-9`*\"(\[])|(?<=[:;])\s+", text):
        if len(sentence.split()) > MAX_WORDS:
            yield f"{len(sentence.split())} words in a sentence"


def findings(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        shown = path.relative_to(ROOT)
        if path.suffix == ".md":
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if (
                    len(line) > MAX_LINE
                    and not line.lstrip().startswith(("|", "[", "![", "<"))
                    and " " in line[80:]
                ):
                    yield f"{shown}:{number}: {len(line)} columns"
        texts = markdown_texts(path) if path.suffix == ".md" else python_texts(path)
        for _, number, text in texts:
            for fault in faults(text):
                yield f"{shown}:{number}: {fault}: {text[:100]}"


def long_subjects() -> Iterator[str]:
    """Yield the commit subjects that are too long; nothing if a shallow clone lacks FIRST."""
    log = subprocess.run(
        ["git", "log", "--format=%h %s", f"{FIRST}.."], cwd=ROOT, capture_output=True, text=True
    )
    for line in log.stdout.splitlines():
        subject = line.partition(" ")[2]
        if len(subject) > MAX_SUBJECT:
            yield f"commit {line}: {len(subject)} characters, and {MAX_SUBJECT} are the limit"


def main() -> None:
    named = [Path(name).resolve() for name in sys.argv[1:]]
    # The pages of prose in tests/trained are inputs whose tokens are measured.
    listing = ["git", "ls-files", "*.py", "*.md", ":!docs/contribute/benchmarks"]
    listing += [":!src/headrace/web/vendor", ":!tests/trained/*.md"]
    tracked = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True)
    chosen = [ROOT / name for name in tracked.stdout.splitlines() if (ROOT / name).exists()]
    found = [*findings(named or chosen), *long_subjects()]
    print("\n".join(found) or "No text breaks the rules for plain words.")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
