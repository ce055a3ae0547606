"""Writes the generated pages of docs/reference: `python -m tools.make_reference_docs`."""

import tomllib
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from headrace.gateway.openapi import Operation
from headrace.gateway.routes import ADMIN, ANY, KEY, OPERATOR, ROUTES
from headrace.metrics.families import Families
from headrace.metrics.history import History
from headrace.metrics.metrics import EngineFigures, Metrics
from headrace.protocols.dialect import DIALECTS
from headrace.protocols.fields.common import NO_EFFECT, UNSUPPORTED
from headrace_common.config.sources import Setting, settings

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
EFFECTS = Path(__file__).parent / "fields.toml"
BY = "This page is written by `python -m tools.make_reference_docs` from the code.\n"

CONFIGURATION = """# Configuration

Every setting of `headrace serve` can be given in three ways. A flag takes precedence over the environment, the
environment over the file, and the file over the default.

| source | form | example |
|---|---|---|
| flag | `--name value` | `headrace serve Qwen/Qwen3-0.6B --max-num-seqs 8` |
| environment | `HEADRACE_` and the name in capitals | `HEADRACE_MAX_NUM_SEQS=8` |
| file | a key of `[serve]` in the TOML file that `--config FILE` (or `HEADRACE_CONFIG`) names | `max_num_seqs = 8` |

A key in the file is the flag's name with `_` in place of `-`. A list is a repeated flag, a comma-separated variable, or
an array in the file. Sizes are in bytes. The variable for API keys is `HEADRACE_API_KEYS`. Clients read their API key
from `HEADRACE_API_KEY` and the server's address from `HEADRACE_URL`.

In the file, each model may have a table `[[models]]`. A setting in `[serve]` applies to all models. A setting in
`[[models]]` applies to one model and takes precedence:

```toml
[serve]
max_models = 2
threads = 4

[[models]]
model = "Qwen/Qwen3-0.6B"
served_model_name = ["small", "default"]

[[models]]
model = "./large-model"
max_model_len = 8192
```

`LLM`, `headrace doctor` and `headrace generate` take the settings of a model, too.

`headrace config` takes the arguments of `headrace serve`, and prints the settings that the server would use and where
each comes from. Keys and passwords are hidden.
"""  # noqa: E501  # a line of Markdown

TITLES = {
    ("models",): (
        "A model and its engine",
        "These settings may also appear in `[[models]]` and in `PUT /manage/desired`.",
    ),
    ("models", "scheduler"): (
        "Scheduling",
        "These settings may also appear in `[[models]]`. [Scheduling](../concepts/scheduling.md) "
        "explains the settings.",
    ),
    ("models", "prefix_cache"): (
        "Prefixes on disk",
        "These settings may also appear in `[[models]]`.",
    ),
    (): ("The server", ""),
    ("loading",): ("Several models", ""),
    ("batches",): ("Files and batches", ""),
    ("http",): ("HTTP and keys", ""),
    ("streams",): ("Streams and clients", ""),
}

METRICS = """# Metrics

`GET /metrics` shows the metrics below in the format of Prometheus. The route needs the admin key, except on a server
without keys that listens on loopback. [Operations](../guides/operations.md) shows how to scrape the metrics. See also
[state, logs and traces](observability.md).

Start with these six questions:

| question | metric |
|---|---|
| Do users wait for their first token? | `headrace_ttft_seconds`; its parts are `headrace_queue_seconds` and `headrace_prompt_seconds` |
| Do streams stall? | `headrace_max_gap_seconds` and `headrace_inter_token_seconds` |
| Does the stall target hold? | `headrace_stall_target_missed_total` by cause, compared with `headrace_step_seconds_count` |
| Is the server full? | `headrace_waiting`, `headrace_blocks` by state, `headrace_rejections_total` by reason |
| Does the prefix cache help? | `headrace_cached_tokens_total` / `headrace_prompt_tokens_total` |
| Does the server still compute? | `headrace_last_step_age_seconds` and `headrace_silent_stream_age_seconds`: if both rise while streams exist, nothing is being computed |

- A request is counted when its stream ends. Sums of tokens equal the sums of the usage that clients received, even
  after crashes of the engine. Only `ttft` and `inter_token` are observed before the stream ends.
- Lines of batches are counted but not timed, because such lines wait for all other requests.
- On a server with several models, the metrics of a model and its engine have the label `model`. If the server started
  with one model, that model's metrics have no label `model`.
- No metric contains a prompt, a text, a key or the id of a stream.

Steps that missed the stall target have a `cause`:

| cause | meaning |
|---|---|
| `decode` | the streams alone need more time than the target |
| `token` | even one token of a prompt does not fit, because the prompt is long |
| `model` | the step took longer than predicted |
| `tail`, `span`, `whole` | the next part of a prompt could not be cut further |
| `preempted` | a stream lost its memory |
| `quarantine` | a sequence that had made a step fail ran alone |

`headrace_disk_prefix_misses_total` counts files that were not used, by reason: `late`, `slower` (processing the tokens
is faster), `gone`, `damaged`, `foreign` (another model or version), `older` (another prefix) or `failed`.
"""  # noqa: E501  # a line of Markdown

ROUTES_TEXT = """# Routes

This page lists every route with its key and its parameters; [fields of a request](fields.md) lists the bodies.
`GET /openapi.json` of a running server describes both, with types and limits. Each API has a page:
[OpenAI](openai.md), [Responses](responses.md), [Messages](messages.md), [Ollama](ollama.md), and
[streams](../guides/streams.md).

On a server with keys, `client` means any key, and `operator` the admin key; without keys, these routes are open.
`admin` always means the admin key. Only a server without keys that listens on loopback answers `admin` routes without
the admin key.

In addition, [`/v1/responses`](responses.md#the-stream) and [`/v1/realtime-text`](../guides/streams.md) are WebSockets,
and `/`, `/dashboard` and `/batches` are pages for a browser. A GET of a wrong path answers with a page if `Accept`
names `text/html`.
"""  # noqa: E501  # a line of Markdown

FIELDS_TEXT = """# Fields of a request

The tables say what each field does, and on which routes:

| name | routes |
|---|---|
{groups}

On Ollama's routes, `options` holds the samplers, the lengths and the stop strings.

Unknown fields are ignored, and the header `X-Headrace-Ignored` lists their names. A null field counts as missing. A
value of a wrong type or beyond a limit causes a 400, with the field's path in `param`.

A model's own sampling defaults (`generation_config.json`, or `general.sampling` in a GGUF file) apply to all fields
that a request leaves out; `--generation-config none` turns these defaults off. `/props` shows the defaults.
"""  # noqa: E501  # a line of Markdown

GROUPS = {
    "Chat": ("/v1/chat/completions", "/chat/completions", "/api/v0/chat/completions"),
    "Completions": ("/v1/completions",),
    "llama.cpp": ("/completion", "/completions", "/infill"),
    "Responses": ("/v1/responses",),
    "Messages": ("/v1/messages",),
    "Ollama": ("/api/chat", "/api/generate"),
}

SECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Anthropic", ("/v1/messages",)),
    ("Ollama and LM Studio", ("/api/",)),
    ("Streams", ("/v1/streams", "/v1/stream", "/v1/durable")),
    ("Models and adapters", ("/models", "/v1/models", "/v1/load_lora", "/v1/unload_lora")),
    (
        "Operation",
        ("/health", "/v1/health", "/ping", "/version", "/metrics", "/manage", "/openapi.json"),
    ),
    ("OpenAI", ("/v1/", "/v2/")),
    ("llama.cpp", ("/",)),
)
ORDER = (
    "OpenAI",
    "Anthropic",
    "Ollama and LM Studio",
    "llama.cpp",
    "Streams",
    "Models and adapters",
    "Operation",
)
MOST_VALUES = 2
UNLIMITED = 1_000_000
NAMES_OF_TYPES = {
    "boolean": "true or false",
    "integer": "integer",
    "number": "number",
    "string": "text",
    "array": "list",
    "object": "object",
}
KEYS: dict[Any, str] = {ANY: "none", KEY: "client", OPERATOR: "operator", ADMIN: "admin"}


class Page(NamedTuple):
    """A generated page: the page's file and the function that renders the page."""

    path: Path
    render: Callable[[], str]


def configuration() -> str:
    """Return a page with all settings of a server, in one table per group."""
    parts = [CONFIGURATION, BY]
    by_group: dict[tuple[str, ...], list[Setting]] = {}
    for setting in settings():
        by_group.setdefault(setting.path[:-1], []).append(setting)
    for group, (title, text) in TITLES.items():
        parts.append(f"## {title}\n" + (f"\n{text}\n" if text else ""))
        rows = (
            (_code(*one.flags), _code(one.variable), _default(one), one.description)
            for one in by_group.pop(group)
        )
        parts.append(_table(("flag", "variable", "default", "meaning"), rows))
    assert not by_group, f"give {list(by_group)} a title"
    return "\n".join(parts)


def metrics() -> str:
    """Return a page with all metrics, their labels and help texts."""
    families = Families()
    parts = [METRICS, BY]
    kinds: tuple[tuple[str, str, Iterable[Any]], ...] = (
        ("Counters", "_total", families.totals.values()),
        ("Histograms", "", families.times.values()),
        ("Gauges", "", families.gauges.values()),
    )
    own = EngineFigures(Families(), History()).collect()
    for title, suffix, found in kinds:
        rows = []
        collectors = [*found, *(one for one in own if one.type == title.lower()[:-1])]
        for collector in collectors:
            for family in collector.describe() if hasattr(collector, "describe") else (collector,):
                labels = _code(*collector._labelnames)
                rows.append((_code(family.name + suffix), labels, family.documentation))
        parts.append(f"## {title}\n")
        parts.append(_table(("name", "labels", "meaning"), sorted(rows)))
    parts.append("## Names of vLLM\n")
    parts.append(
        "With `--vllm-metrics`, `GET /metrics` also shows the names below, with vLLM's labels.\n"
        "Dashboards that were made for vLLM need these names:\n"
    )
    text = Metrics().text("ok", (), vllm_model="model").decode()
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE vllm:")]
    parts.append(_table(("name",), ((_code(name),) for name in sorted(names))))
    return "\n".join(parts)


def routes() -> str:
    """Return a page with all routes by API."""
    parts = [ROUTES_TEXT, BY]
    by_section: dict[str, list[Operation]] = {name: [] for name in ORDER}
    for operation in ROUTES:
        by_section[_section(operation.path)].append(operation)
    for name in ORDER:
        parts.append(f"## {name}\n")
        rows = (
            (_route(one), KEYS[one.guard], one.summary, _code(*one.query, *one.headers))
            for one in by_section[name]
        )
        parts.append(_table(("route", "key", "does", "query and headers"), rows))
    return "\n".join(parts)


def fields() -> str:
    """Return a page with the effect of each field of a generation request.

    The page also lists the fields of all other bodies.
    """
    groups = ((name, _code(*paths)) for name, paths in GROUPS.items())
    listed = "\n".join(list(_lines(("name", "routes"), groups))[2:])
    parts = [FIELDS_TEXT.format(groups=listed), BY]
    tables = {one.path: one.table or {} for one in ROUTES if one.path in DIALECTS}
    unexplained = {name for table in tables.values() for name in table}
    for topic, effects in tomllib.loads(EFFECTS.read_text()).items():
        rows: list[tuple[str, ...]] = []
        for names, effect in effects.items():
            unexplained -= set(names.split(", "))
            by_where: dict[str, list[str]] = {}
            for name in names.split(", "):
                by_where.setdefault(_where(name, tables), []).append(name)
            rows += [
                (_code(*group), _values(group, tables), effect, where)
                for where, group in by_where.items()
            ]
        parts.append(f"## {topic}\n")
        parts.append(_table(("field", "value", "effect", "on"), rows))
    assert not unexplained, f"explain {sorted(unexplained)} in {EFFECTS}"
    parts.append("## Fields of other bodies\n")
    others = [one for one in ROUTES if one.table and one.path not in DIALECTS]
    same = {frozenset(table): f"as `{path}`" for path, table in tables.items()}
    bodies = (
        (_route(one), same.get(frozenset(one.table or ())) or _code(*one.table or ()))
        for one in others
    )
    parts.append(_table(("route", "fields"), bodies))
    parts.append("## Fields without effect\n")
    parts.append(
        "OpenAI's routes accept these fields silently, because the fields change no answer:\n"
    )
    parts.append(_paragraph(sorted(set(NO_EFFECT) - {"parallel_tool_calls"})))
    parts.append("## Refused fields\n")
    parts.append(
        "A route refuses each of these fields with a 400, unless a table above lists the field\n"
        "for the route or the value is neutral:\n"
    )
    parts.append(_paragraph(sorted(UNSUPPORTED)))
    return "\n".join(parts)


def _values(fields: list[str], tables: dict[str, Any]) -> str:
    """Return the values that these fields accept, in words.

    If several routes accept the same type, only the value on the first route is listed.
    """
    found: dict[str, str] = {}
    for name, table in product(fields, tables.values()):
        if name in table:
            value = _value(table[name].schema())
            if not any(value in other for other in found.values()):
                found.setdefault(value.split()[0], value)
    return ", or ".join(found.values()) if len(found) <= MOST_VALUES else ""


def _value(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join({_value(one): None for one in schema["anyOf"]})
    if "enum" in schema or "const" in schema:
        words = schema.get("enum") or [schema["const"]]
        return ", ".join(f"`{word}`" if isinstance(word, str) else _number(word) for word in words)
    low = schema.get("minimum", schema.get("exclusiveMinimum", -UNLIMITED))
    high = schema.get("maximum", UNLIMITED)
    name = NAMES_OF_TYPES.get(schema.get("type", ""), "any")
    if low > -UNLIMITED and high < UNLIMITED:
        return f"{name} {_number(low)} to {_number(high)}"
    return f"{name} from {_number(low)}" if low > -UNLIMITED else name


def _number(value: Any) -> str:
    return str(value).replace("-", "−")


def _where(field: str, tables: dict[str, Any]) -> str:
    """Return the groups whose routes all have the field, and single routes of other groups."""
    having = {path for path, table in tables.items() if field in table}
    assert having, f"no route has {field}"
    lacking = [name for name, paths in GROUPS.items() if not having & set(paths)]
    whole = [name for name, paths in GROUPS.items() if having >= set(paths)]
    if len(whole) + len(lacking) == len(GROUPS) and len(lacking) <= 2:
        return "all but " + ", ".join(lacking) if lacking else "all"
    rest = having - {path for name in whole for path in GROUPS[name]}
    return ", ".join([*whole, *(f"`{path}`" for path in tables if path in rest)])


def _route(operation: Operation) -> str:
    return f"`{operation.method.upper()} {operation.path.replace(':path', '')}`"


def _section(path: str) -> str:
    return next(name for name, starts in SECTIONS if path.startswith(starts))


def _default(setting: Setting) -> str:
    value = setting.default
    if value is None or value == () or value == "":
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int | float):
        return f"{value:,.0f}" if value == int(value) else f"{value}"
    return _code(str(value))


def _code(*names: str) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _paragraph(names: Iterable[str]) -> str:
    return fill(_code(*names) + ".", 120) + "\n"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(_lines(head, rows)) + "\n"


def _lines(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


PAGES = (
    Page(FOLDER / "configuration.md", configuration),
    Page(FOLDER / "metrics.md", metrics),
    Page(FOLDER / "routes.md", routes),
    Page(FOLDER / "fields.md", fields),
)

if __name__ == "__main__":
    for page in PAGES:
        page.path.write_text(page.render())
