"""Tests grammars of schemas: exact numbers, softened tools and error messages."""

import json
import time
import tracemalloc
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from headrace.fleet.served_model import ServedModel
from headrace.protocols.worker import Jobs
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import RequestError
from headrace_common.grammar import Grammar, GrammarCompiler
from headrace_common.request import Route
from headrace_common.worker_jobs import CheckedBody
from tests.schemas import ZOD_EMAIL, Schema

MINI = ServedModel(ModelConfig())
ID = 1234567890123456789
UINT64_IN_JAVASCRIPT = 18446744073709552000
CHAT: Route = "/v1/chat/completions"
SCHEMA = "response_format.json_schema.schema"


@pytest.fixture(scope="module")
def jobs() -> Jobs:
    return Jobs(MINI)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    spec = MINI.spec
    return GrammarCompiler.load(MINI.folder, spec.vocab_size, spec.end_token_ids)


def read(jobs: Jobs, body: dict[str, Any] | str, route: Route = CHAT) -> CheckedBody:
    text = body if isinstance(body, str) else json.dumps({"messages": HELLO, **body})
    return jobs.read(text.encode(), route)


ENDLESS = {"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}, "required": ["n"]}
HELLO = [{"role": "user", "content": "Hi"}]


def by_schema(schema: Schema | str) -> str:
    """Return a chat body with this schema; a string is inserted unchanged."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    described = f'{{"type": "json_schema", "json_schema": {{"name": "a", "schema": {text}}}}}'
    return f'{{"messages": {json.dumps(HELLO)}, "response_format": {described}}}'


def tool(parameters: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **fields}}


def takes(compiler: GrammarCompiler, checked: CheckedBody, text: str) -> bool:
    """Return whether the compiled grammar accepts the text as a complete answer."""
    grammar = compiler.compile(checked.fields["constraint"][0])
    return is_whole(grammar, MINI, text)


def is_whole(grammar: Grammar, model: ServedModel, text: str) -> bool:
    matcher = grammar._matcher.deep_copy()
    tokens = list(model.tokenizer.encode(text, add_special_tokens=False))
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"const": ID}, [str(ID)], [str(ID - 1), str(ID - 21)]),
        ({"enum": [ID, "x", None]}, [str(ID), '"x"', "null"], [str(ID + 1)]),
        ({"minimum": ID, "type": "integer"}, [str(ID), str(ID * 9)], [str(ID - 1)]),
        ({"maximum": -ID, "type": "integer"}, [str(-ID), str(-ID * 9)], [str(1 - ID)]),
        ({"maximum": ID, "type": ["integer", "null"]}, [str(ID), "null"], [str(ID + 1)]),
        ({"exclusiveMaximum": ID, "type": "number"}, [f"{ID - 1}.99"], [str(ID), f"{ID}.0"]),
        ({"maximum": 1 << 64, "type": "integer"}, [str(1 << 64)], [str((1 << 64) + 1)]),
        ("""{"const": 0.12345678901234567}""", ["0.12345678901234567"], ["0.12345678901234566"]),
        ({"const": 123456789.12345679}, ["123456789.12345679"], ["123456789.1234568"]),
        (
            {"enum": [8.789642961e-18]},
            ["0.000000000000000008789642961"],
            ["8.789642961E-18", "0.0000000000000000087896429611"],
        ),
        ({"minimum": 123456789.12345679}, ["123456789.12345679"], ["123456789.12345678"]),
        ({"type": ["string", "null"], "minimum": ID}, ['"a"', "null"], [str(ID)]),
        ("""{"const": 1e30}""", ["1" + "0" * 30], ["1" + "0" * 29 + "1"]),
        ({"properties": {"a": {"const": ID}}, "required": ["a"]}, [f'{{"a": {ID}}}'], ["{}"]),
        ({"items": {"enum": [ID, 1]}, "maxItems": 2}, [f"[{ID}, 1]", "[]"], [f"[{ID},1,1]"]),
        ({"const": {"a": [ID], "b": "x"}}, [f'{{"a":[{ID}],"b":"x"}}'], [f'{{"a":[{ID}]}}']),
        ({"anyOf": [{"const": ID}, {"type": "null"}]}, [str(ID), "null"], [str(ID - 1)]),
        ({"allOf": [{"type": "integer"}, {"minimum": ID}]}, [str(ID)], [str(ID - 1)]),
        ({"type": "integer", "format": "uint64"}, [str((1 << 64) - 1)], ["-1", str(1 << 64)]),
        ({"multipleOf": 0.07, "minimum": 0, "maximum": 1}, ["0.35", "0"], ["0.36"]),
        ({"multipleOf": 0.1, "minimum": 0.3, "maximum": 0.3}, ["0.3"], ["0.2"]),
        (
            {"anyOf": [{"items": {"$ref": "#"}, "type": "array"}, {"const": ID}]},
            [f"[{ID}]"],
            [f"[{ID - 1}]"],
        ),
    ],
)
def test_numbers_of_any_size_are_exact(
    jobs: Jobs, compiler: GrammarCompiler, schema: Any, right: list[str], wrong: list[str]
) -> None:
    checked = read(jobs, by_schema(schema))
    exact = json.loads(schema if isinstance(schema, str) else json.dumps(schema), **EXACT)
    for text in right:
        assert takes(compiler, checked, text), text
        Draft202012Validator(exact).validate(json.loads(text, **EXACT))
    for text in wrong:
        assert not takes(compiler, checked, text), text


EXACT: dict[str, Any] = {"parse_float": Decimal}


@pytest.mark.parametrize("field", ["guided_json", "json_schema"])
@pytest.mark.parametrize("is_text", [False, True])
def test_every_field_for_a_schema_keeps_its_digits(
    jobs: Jobs, compiler: GrammarCompiler, field: str, is_text: bool
) -> None:
    schema = {"const": ID}
    checked = read(jobs, {field: json.dumps(schema) if is_text else schema})
    assert takes(compiler, checked, str(ID)) and not takes(compiler, checked, str(ID - 21))


@pytest.mark.parametrize("first", [0, 1 << 53, 10**18])
def test_an_enum_may_have_thousands_of_numbers(
    jobs: Jobs, compiler: GrammarCompiler, first: int
) -> None:
    schema = {
        "type": "object",
        "properties": {"id": {"enum": [first + 7 * i for i in range(5000)]}},
    }
    checked = read(jobs, by_schema({**schema, "required": ["id"]}))
    assert checked.ignored == ()
    for number, is_right in (
        (first + 7 * 4999, True),
        (first + 7 * 5000, False),
        (first + 1, False),
    ):
        assert takes(compiler, checked, f'{{"id": {number}}}') == is_right


def test_texts_in_an_enum_with_large_numbers_are_matched_exactly(
    jobs: Jobs, compiler: GrammarCompiler
) -> None:
    texts = ["a/b", "a.b", "(", "\\d", '"', "|", "é ", "\n", "#~&<-", "[x]", "/", ""]
    checked = read(jobs, by_schema({"enum": [ID, None, True, *texts]}))
    for value in [ID, None, True, *texts]:
        assert takes(compiler, checked, json.dumps(value, ensure_ascii=False)), value
    for wrong in ["axb", "x", "d"]:
        assert not takes(compiler, checked, json.dumps(wrong)), wrong


def bodies(schema: Any, choice: str) -> Iterator[tuple[Route, dict[str, Any]]]:
    """Yield a request with this non-strict tool for each API that accepts tools."""
    messages = {"messages": HELLO}
    anthropic = {"name": "f", "input_schema": schema}
    named = {"auto": "auto", "required": "any"}[choice]
    flat = {"type": "function", "name": "f", "parameters": schema, "strict": False}
    yield CHAT, {**messages, "tools": [tool(schema)], "tool_choice": choice}
    yield "/v1/responses", {"input": "Hi", "tools": [flat], "tool_choice": choice}
    asked = {"model": "headrace-mini", "max_tokens": 9, "tool_choice": {"type": named}}
    yield "/v1/messages", {**messages, **asked, "tools": [anthropic]}
    if choice == "auto":
        yield "/api/chat", {**messages, "model": "headrace-mini", "tools": [tool(schema)]}


ODD = [
    {"type": "integer", "maximum": UINT64_IN_JAVASCRIPT},
    {"type": "string", "format": "email", "pattern": ZOD_EMAIL},
    {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1},
    {"type": "any"},
    {"properties": None},
    {"type": "string", "pattern": "("},
    {"$ref": "https://example.com/schema.json"},
    {"$ref": "#/$defs/missing"},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"patternProperties": {"^a": True, "b$": True}},
    {"enum": []},
    {"minimum": 3, "maximum": 1, "type": "integer"},
    {"maxLength": 10**12, "type": "string"},
    {"multipleOf": 0},
    False,
    7,
]


@pytest.mark.parametrize("odd", ODD, ids=json.dumps)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_tool_that_is_not_strict_is_never_refused(jobs: Jobs, odd: Any, choice: str) -> None:
    schema = {"type": "object", "properties": {"x": odd, "y": {"type": "null"}}, "required": ["y"]}
    for route, body in bodies(schema, choice):
        assert jobs.read(json.dumps(body).encode(), route)


def test_a_keyword_dropped_from_a_tool_is_named_by_its_path(jobs: Jobs) -> None:
    lost = {"x": {"type": "string", "pattern": "(?=a)b"}, "y": {"uniqueItems": True}}
    tools = [tool({"type": "object", "properties": lost})]
    names = read(jobs, {"tools": tools, "tool_choice": "required"}).ignored
    path = "tools[0].function.parameters.properties"
    assert names == (f"{path}.x.pattern", f"{path}.y.uniqueItems")


@pytest.mark.parametrize(
    ("route", "fields", "path"),
    [
        (
            "/v1/messages",
            {"tools": [{"name": "f", "input_schema": {"not": {}}}], "tool_choice": {"type": "any"}},
            "tools[0].input_schema.not",
        ),
        ("/api/chat", {"format": {"type": "string", "format": "jwt"}}, "format.format"),
    ],
)
def test_a_dropped_keyword_has_the_path_of_its_own_api(
    jobs: Jobs, route: Route, fields: dict[str, Any], path: str
) -> None:
    asked = {"model": "headrace-mini", "max_tokens": 9} if route == "/v1/messages" else {}
    body = {"model": "headrace-mini", "messages": HELLO, **asked, **fields}
    assert jobs.read(json.dumps(body).encode(), route).ignored == (path,)


def test_the_rest_of_a_softened_tool_is_enforced(jobs: Jobs, compiler: GrammarCompiler) -> None:
    schema = {"properties": {"a": {"pattern": "(?=a)b"}, "b": {"const": ID}}, "required": ["b"]}
    checked = read(jobs, {"tools": [tool(schema)], "tool_choice": "required"})
    call = '<tool_call>\n{"name": "f", "arguments": {"b": %d}}\n</tool_call>'
    assert takes(compiler, checked, call % ID) and not takes(compiler, checked, call % (ID + 1))


def test_a_strict_tool_is_refused_by_the_keyword(jobs: Jobs) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)b"}}}
    with pytest.raises(RequestError) as refused:
        read(jobs, {"tools": [tool(schema, strict=True)]})
    assert refused.value.param == "tools[0].function.parameters.properties.x.pattern"
    assert "look-around" in refused.value.message


def test_a_schema_beside_json_object_takes_effect(jobs: Jobs, compiler: GrammarCompiler) -> None:
    schema = {"properties": {"a": {"const": 7}}, "required": ["a"], "additionalProperties": False}
    checked = read(jobs, {"response_format": {"type": "json_object", "schema": schema}})
    assert takes(compiler, checked, '{"a": 7}') and not takes(compiler, checked, "{}")


def test_a_schema_with_strict_false_is_softened(jobs: Jobs) -> None:
    described = {"name": "a", "strict": False, "schema": {"uniqueItems": True}}
    asked = {"type": "json_schema", "json_schema": described}
    assert read(jobs, {"response_format": asked}).ignored == (f"{SCHEMA}.uniqueItems",)
    body = {"input": "Hi", "text": {"format": {"type": "json_schema", **described}}}
    checked = jobs.read(json.dumps(body).encode(), "/v1/responses")
    assert checked.ignored == ("text.format.schema.uniqueItems",)


@pytest.mark.parametrize("known", ["base64", "jwt", "nanoid", "path", "password"])
def test_an_unknown_format_is_an_annotation(
    jobs: Jobs, compiler: GrammarCompiler, known: str
) -> None:
    checked = read(jobs, by_schema({"type": "string", "format": known, "pattern": "^a{3}$"}))
    assert checked.ignored == (f"{SCHEMA}.format",)
    assert takes(compiler, checked, '"aaa"') and not takes(compiler, checked, '"aa"')


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"$ref": "#/$defs/N", "$defs": {"N": ENDLESS}}, ".$defs.N"),
        ({"enum": []}, ".enum"),
        ({"properties": {"a": False}, "required": ["a"], "type": "object"}, ""),
        ({"properties": {"a": {"type": "integer", "minimum": 3, "maximum": 2}}, "required": ["a"],
          "type": "object"}, ".properties.a"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, ""),
        ({"type": "string", "const": 3}, ""),
        ({"type": "string", "allOf": [{"pattern": "^a$"}, {"pattern": "^b$"}]}, ""),
    ],
)  # fmt: skip
def test_a_schema_that_nothing_satisfies_is_refused(jobs: Jobs, schema: Schema, path: str) -> None:
    with pytest.raises(RequestError) as refused:
        read(jobs, by_schema(schema))
    assert refused.value.param == SCHEMA + path
    assert "satisfy" in refused.value.message or "satisfied" in refused.value.message


def test_a_property_that_can_never_end_is_left_out(jobs: Jobs, compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}}
    checked = read(jobs, by_schema({**schema, "$defs": {"N": ENDLESS}}))
    assert takes(compiler, checked, "{}") and not takes(compiler, checked, '{"n": {')


@pytest.mark.parametrize(
    ("names", "right", "wrong"),
    [
        ({"type": "string"}, '{"b": 1}', '{"b": ""}'),
        ({"pattern": "^a"}, '{"ab": 1}', '{"b": 1}'),
        ({"enum": ["a", "c"]}, '{"c": 1}', '{"b": 1}'),
        ({"maxLength": 2}, '{"ab": 1}', '{"abc": 1}'),
    ],
)
def test_names_of_properties_are_enforced(
    jobs: Jobs, compiler: GrammarCompiler, names: Schema, right: str, wrong: str
) -> None:
    schema = {"type": "object", "propertyNames": names, "additionalProperties": {"const": 1}}
    checked = read(jobs, by_schema(schema))
    assert takes(compiler, checked, right) and not takes(compiler, checked, wrong)


@pytest.mark.parametrize("value", [{"const": 1}, {"const": 1234567890123456789}])
@pytest.mark.parametrize("is_first", [True, False])
def test_names_that_share_a_schema_do_not_multiply_it(
    jobs: Jobs, compiler: GrammarCompiler, value: Schema, is_first: bool
) -> None:
    schema = value
    for _ in range(22):
        names = {"propertyNames": {"enum": ["a", "b"]}}
        below = {"additionalProperties": schema}
        schema = {"type": "object", **(names | below if is_first else below | names)}
    checked = read(jobs, by_schema(schema))
    right = '{"b": ' * 22 + str(value["const"]) + "}" * 22
    assert takes(compiler, checked, right)
    assert not takes(compiler, checked, right.replace('"b"', '"c"', 1))


def test_required_names_that_are_not_listed_do_not_multiply_a_schema(
    jobs: Jobs, compiler: GrammarCompiler
) -> None:
    schema: Schema = {"const": 1234567890123456789}
    for _ in range(22):
        schema = {"type": "object", "required": ["a"], "additionalProperties": schema}
    checked = read(jobs, by_schema(schema))
    assert takes(compiler, checked, '{"a": ' * 22 + "1234567890123456789" + "}" * 22)


def chain(length: int, end: Schema) -> Schema:
    """Return definitions of which each refers to the next."""
    found: Schema = {f"a{length}": end}
    for i in range(length):
        properties = {"x": {"$ref": f"#/$defs/a{i + 1}"}}
        found[f"a{i}"] = {"type": "object", "properties": properties, "required": ["x"]}
    return {"$ref": "#/$defs/a0", "$defs": found}


@pytest.mark.parametrize("end", [{"type": "string"}, {"const": 1234567890123456789}])
def test_a_chain_of_thousands_of_definitions_is_refused_for_its_length(
    jobs: Jobs, end: Schema
) -> None:
    before = time.process_time()
    with pytest.raises(RequestError, match="characters; the limit is 262144"):
        read(jobs, by_schema(chain(3000, end)))
    assert time.process_time() - before < 10  # took minutes before the limit


def test_parts_that_share_a_large_definition_are_refused_before_they_take_memory(
    jobs: Jobs,
) -> None:
    large = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}
    users = {f"r{i}": {"type": "array", "items": {"$ref": "#/$defs/a"}} for i in range(1000)}
    properties = {**users, "z": {"const": 1234567890123456789}}
    schema = {"type": "object", "properties": properties, "$defs": {"a": large}}
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="characters; the limit is 262144"):
            read(jobs, by_schema(schema))
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["const", "default", "enum", "examples", "properties", "$defs"])
def test_a_property_with_the_name_of_a_keyword_may_have_an_anchor(
    jobs: Jobs, compiler: GrammarCompiler, name: str
) -> None:
    named = {name: {"$anchor": "here", "const": "x"}, "b": {"$ref": "#here"}}
    schema = {"type": "object", "properties": named, "required": ["b"]}
    checked = read(jobs, by_schema(schema))
    assert takes(compiler, checked, '{"b": "x"}') and not takes(compiler, checked, '{"b": "y"}')


def test_properties_beside_patterns_hold_both(jobs: Jobs, compiler: GrammarCompiler) -> None:
    patterns = {"^a": {"type": "string", "maxLength": 2}}
    schema = {"properties": {"ab": {"minLength": 2}}, "patternProperties": patterns}
    checked = read(jobs, by_schema({"type": "object", **schema}))
    assert takes(compiler, checked, '{"ab": "xy"}')
    assert not takes(compiler, checked, '{"ab": "x"}') and not takes(compiler, checked, '{"ab": 1}')


def test_a_checked_body_can_be_stored(jobs: Jobs) -> None:
    schema = {"properties": {"x": {"maximum": 10**400, "minimum": -(10**20)}}}
    assert msgspec.msgpack.encode(read(jobs, {"tools": [tool(schema)]}))


@pytest.mark.parametrize(
    ("keyword", "number"),
    [
        ("minimum", "1e150"),
        ("exclusiveMinimum", "1e100"),
        ("maximum", "-1e150"),
        ("multipleOf", "1e400"),
        ("multipleOf", "7" * 400),
    ],
)
def test_a_number_that_no_pattern_can_enforce_is_refused(
    jobs: Jobs, keyword: str, number: str
) -> None:
    with pytest.raises(RequestError) as refused:
        read(jobs, by_schema(f'{{"{keyword}": {number}}}'))
    assert refused.value.param == f"{SCHEMA}.{keyword}"
    assert "cannot be enforced beyond 1e100" in refused.value.message


@pytest.mark.parametrize(("keyword", "number"), [("maximum", "1e150"), ("minimum", "-1e309")])
def test_a_bound_that_leaves_small_numbers_may_be_of_any_size(
    jobs: Jobs, compiler: GrammarCompiler, keyword: str, number: str
) -> None:
    assert takes(compiler, read(jobs, by_schema(f'{{"{keyword}": {number}}}')), "7")


def test_a_step_below_other_keywords_leaves_these_in_force(
    jobs: Jobs, compiler: GrammarCompiler
) -> None:
    step = {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25}
    schema = {"type": "array", "items": step, "anyOf": [{"minItems": 1}, {"minItems": 2}]}
    checked = read(jobs, by_schema(schema))
    assert takes(compiler, checked, "[0.25]")
    assert not takes(compiler, checked, "[]") and not takes(compiler, checked, "1")


def test_a_bound_that_is_excluded_as_in_draft_4_is_enforced(
    jobs: Jobs, compiler: GrammarCompiler
) -> None:
    schema = {"type": "integer", "maximum": ID, "exclusiveMaximum": True}
    checked = read(jobs, by_schema(schema))
    assert takes(compiler, checked, str(ID - 1)) and not takes(compiler, checked, str(ID))


@pytest.mark.parametrize("is_text", [False, True])
@pytest.mark.parametrize("exponent", ["+9999999", "9999999999999999999", "-9999999999999999999"])
@pytest.mark.parametrize("keyword", ["const", "maximum"])
def test_an_exponent_of_any_size_is_read(
    jobs: Jobs, keyword: str, exponent: str, is_text: bool
) -> None:
    schema = f'{{"type": "number", "{keyword}": 1e{exponent}}}'
    body = {"messages": HELLO, "guided_json": schema}
    assert read(jobs, json.dumps(body) if is_text else by_schema(schema))


def test_steps_without_a_common_multiple_of_32_bits_are_refused(jobs: Jobs) -> None:
    steps = [{"type": "integer", "multipleOf": step} for step in (4_000_000_000, 3_999_999_999)]
    with pytest.raises(RequestError) as refused:
        read(jobs, by_schema({"allOf": steps}))
    assert refused.value.param == f"{SCHEMA}.allOf[0].multipleOf"


KEYWORDS = [
    "type",
    "enum",
    "const",
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "if",
    "then",
    "properties",
    "patternProperties",
    "propertyNames",
    "additionalProperties",
    "required",
    "minProperties",
    "maxProperties",
    "dependentRequired",
    "items",
    "prefixItems",
    "contains",
    "minItems",
    "maxItems",
    "uniqueItems",
    "unevaluatedItems",
    "unevaluatedProperties",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "multipleOf",
    "$ref",
    "$defs",
    "$id",
    "$anchor",
]
NONSENSE: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 10**30, "", "(", "#/a", "http://[", [], {}, [None], [1]),
    *(["x"], [[]], [False], {"a": None}, {"(": {}}, {"$ref": 5}, {"type": "nope"}, "(a{999}){999}"),
]
INNER_WORDS = ("Some(", "fuel", "NoExtension", "Unimplemented", "lexer", "regex parse", "e+")


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_no_keyword_value_makes_a_tool_fail(jobs: Jobs, keyword: str) -> None:
    for value in NONSENSE:
        parameters = {"properties": {"x": {keyword: value}}, "required": ["x"]}
        assert read(jobs, {"tools": [tool(parameters)], "tool_choice": "required"})
        assert read(jobs, {"tools": [tool({keyword: value})], "tool_choice": "auto"})


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_refusal_has_a_path_and_no_library_message(jobs: Jobs, keyword: str) -> None:
    for value in NONSENSE:
        try:
            read(jobs, by_schema({keyword: value}))
        except RequestError as error:
            assert (error.param or "").startswith(SCHEMA)
            assert error.message.startswith(error.param) and error.message.endswith(".")
            assert not any(word in error.message for word in INNER_WORDS), error.message
