"""JSON schemas for tests: some have short answers, others have unbounded ones."""

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

NAMES = st.sampled_from(["a", "b", "name", "age", "city", "x y", "é"])
_TEXTS = st.sampled_from(["", "red", "green", 'a "b"', "ü\n"])
_SMALL = st.integers(-1000, 1000)


def _between(low: int, size: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": low + size}


_LEAVES: list[st.SearchStrategy[Schema]] = [
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}]),
    st.builds(_between, _SMALL, st.integers(0, 500)),
    st.lists(_TEXTS | _SMALL | st.none() | st.booleans(), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
    (_TEXTS | _SMALL).map(lambda value: {"const": value}),
    st.integers(0, 8).map(lambda most: {"type": "string", "maxLength": most}),
    st.integers(1, 4).map(lambda n: {"type": "string", "minLength": n, "maxLength": n + 3}),
    st.sampled_from(
        [
            {"type": "string", "pattern": "^[a-c]{1,4}$"},
            {"type": "string", "pattern": "^(yes|no)-[0-9]{2}$"},
            {"type": "string", "format": "date"},
            {"type": "string", "format": "uuid"},
            {"type": "integer", "minimum": 0, "maximum": 99, "multipleOf": 5},
        ]
    ),
]
_ENDLESS: list[st.SearchStrategy[Schema]] = [
    st.sampled_from(
        [
            {"type": "string"},
            {"type": "integer"},
            {"type": "number"},
            {"type": "string", "pattern": "^a+b*$"},
            {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
            {"type": "object", "patternProperties": {"^x": {"type": "boolean"}}},
            {"type": "array", "items": {"type": "boolean"}},
            {},
        ]
    )
]


def _objects(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    def make(properties: dict[str, Schema], num_required: int) -> Schema:
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:num_required],
            "additionalProperties": False,
        }

    return st.builds(make, st.dictionaries(NAMES, inner, max_size=4), st.integers(0, 4))


def _arrays(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    lists = st.builds(
        lambda items, least, more: {
            "type": "array",
            "items": items,
            "minItems": least,
            "maxItems": least + more,
        },
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    tuples = st.lists(inner, min_size=1, max_size=3).map(
        lambda them: {"type": "array", "prefixItems": them, "items": False, "minItems": len(them)}
    )
    return lists | tuples


def _mixed(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    either = st.lists(inner, min_size=1, max_size=3).map(lambda them: {"anyOf": them})
    return _objects(inner) | _arrays(inner) | either


def _with_reference(schema: Schema, shared: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {"one": {"$ref": "#/$defs/shared"}, "two": schema},
        "required": ["one"],
        "additionalProperties": False,
        "$defs": {"shared": shared},
    }


def _trees(leaves: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    trees = st.recursive(leaves, _mixed, max_leaves=5)
    return trees | st.builds(_with_reference, trees, trees)


bounded = _trees(st.one_of(_LEAVES))
"""Schemas whose answers have at most a few hundred characters with white space."""

endless = _trees(st.one_of([*_LEAVES, *_ENDLESS]))

ZOD_EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]"
    r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)
"""The pattern that Zod 4's `z.email()` adds to `"format": "email"`."""
