"""Hostile chat templates and tokenizers: small files that need too much time or memory."""

import base64
import math
import random
from pathlib import Path
from typing import Any

from stress.attack.hostile_json import REGEXES, Raw, hostile_value, nested, replace, rewrite, spoil

TEMPLATES = (
    '{{ "%1500000000d" % 1 }}',
    '{{ "%*d" % (1500000000, 1) }}',
    "{{ ('a'.center(9999999) | replace('a', 'a' * 99)).center(99999999) }}",
    "{{ 'a' | center(99999999) | replace(' ', 'aaaaaaaaaa') | replace('a', 'bbbbbbbbbb') }}",
    "{{ 'a' * 4000000000 }}",
    "{{ [0] * 900000000 }}",
    "{{ '{:>2000000000}'.format(1) }}",
    "{{ 'a'.ljust(2000000000) ~ 'a'.zfill(2000000000) }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ (2 ** 999999) | string }}",
    "{{ 7 << 90000000 }}",
    "{{ range(10 ** 12) | list }}",
    "{{ ('ab' * 5000000) | list | sort | join('x' * 100) }}",
    "{{ 'x' | indent(1000000000, true) }}",
    "{{ ('a\n' * 1000000) | indent(99999) }}",
    "{{ ('a ' * 9999999) | wordwrap(1) }}",
    "{{ '\\n' | xmlattr }}",
    "{{ lipsum(n=100000) }}",
    "{% for a in range(99999) %}" * 9 + "{{ a }}" + "{% endfor %}" * 9,
    "{% for a in [1, 2] %}" * 30 + "x" + "{% endfor %}" * 30,
    "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}"
    "{% endfor %}{{ ns.s }}",
    "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "{{ " + "-" * 50_000 + "1 }}",
    "{{ " + "not " * 50_000 + "1 }}",
    "{{ 1" + " + 1" * 50_000 + " }}",
    "{{ " + "9" * 5000 + " }}",
    "{{ 1e999999999 | int }}",
    "{% if a %}" * 20_000 + "{% endif %}" * 20_000,
    "{% set x = 1 %}" * 100_000,
    "{{ a" + ".b" * 50_000 + " }}",
    "{{ a" + " | upper" * 20_000 + " }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self._TemplateReference__context }}",
    "{{ (messages | map(attribute='__class__') | list)[0].__base__ }}",
    "{{ nothing.at.all }}",
    "{{ raise_exception('no' * 100000) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% extends 'x' %}",
    "{% block a %}{{ super() }}{% endblock %}",
    "{% raw %}" * 1000,
    "{{ '\\ud800' }}{{ '\\x00' }}",
    "{% generation %}",
    "{{",
    "{% for",
    "\0" * 100_000,
    "{#" * 100_000,
    "{{ strftime_now('%' * 1000000) }}",
    "{{ messages | tojson(indent=100000000) }}",
    "{{ messages | pprint }}{{ dict(a=1) | dictsort | batch(10 ** 12) | list }}",
    "{{ [1] | slice(1000000000) | list }}",
    "{{ 'a' | truncate(1) }}{{ ('((((' * 9999) | urlize }}",
)
"""Templates that are invalid, access forbidden attributes, or need too much time or memory.

Some of these templates nest too deeply.
"""

_CHAT = "tokenizer_config.json"
_TYPES: dict[str, tuple[dict[str, Any], ...]] = {
    "normalizer": (
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        {"type": "Precompiled", "precompiled_charsmap": ""},
        {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100_000},
        {"type": "Replace", "pattern": {"String": ""}, "content": "aa"},
        {"type": "Prepend", "prepend": "x" * 1_000_000},
        {
            "type": "Sequence",
            "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aaaa"}]
            * 30,
        },
        {"type": "Sequence", "normalizers": [{"type": "NFKD"}] * 10_000},
        {"type": "BertNormalizer"},
    ),
    "pre_tokenizer": (
        {"type": "Metaspace", "replacement": "", "prepend_scheme": "always"},
        {"type": "CharDelimiterSplit", "delimiter": "\0"},
        {"type": "Punctuation", "behavior": "X"},
        {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}] * 99},
    ),
    "post_processor": (
        {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * 1000,
            "pair": [],
            "special_tokens": {},
        },
        {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * 1000,
            "pair": [],
            "special_tokens": {"x": {"id": "x", "ids": [2**32 - 1] * 10_000, "tokens": ["x"]}},
        },
        {"type": "RobertaProcessing", "sep": ["x", 2**32 - 1], "cls": ["y", 2**31]},
    ),
    "decoder": (
        {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1_000_000},
        {"type": "WordPiece", "prefix": "", "cleanup": True},
        {"type": "Strip", "content": "a", "start": 2**63, "stop": 2**63},
        {"type": "CTC"},
    ),
    "model": (
        {"type": "BPE", "vocab": {}, "merges": []},
        {"type": "BPE", "vocab": {"a": 2**32 - 1, "b": 0}, "merges": []},
        {"type": "BPE", "vocab": {"a": 0, "b": 0, "\0": 1}, "merges": ["a b"]},
        {"type": "BPE", "vocab": {"a": 0}, "merges": [], "dropout": 2.0},
        {"type": "BPE", "vocab": {"a" * 1_000_000: 0}, "merges": [], "unk_token": "no"},
        {"type": "Unigram", "unk_id": 5, "vocab": [["a", math.nan], ["b", -math.inf]]},
        {"type": "Unigram", "unk_id": 0, "vocab": [["", 0.0]] * 1000},
        {"type": "Unigram", "unk_id": None, "vocab": []},
        {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "no", "max_input_chars_per_word": 0},
        {"type": "WordLevel", "vocab": {"a": -1}, "unk_token": "no"},
        {"type": "WordLevel", "vocab": {"\ud800": 0}, "unk_token": "\ud800"},
    ),
}
_IDS = (2**32 - 1, 2**31, 2**31 - 1, -1, 2**63, 10_000_000, 0, 1.5, None)


def spoil_template(folder: Path, rng: random.Random) -> str:
    """Writes a hostile template into one of the files in which a template may be stored."""
    template = rng.choice(TEMPLATES)
    own = (folder / "chat_template.jinja").read_text()
    text = rng.choice((template, template + own, own + template))
    if rng.random() < 0.6:
        replace(folder / "chat_template.jinja", text.encode())
    else:
        (folder / "chat_template.jinja").unlink()
        value = rng.choice((text, [{"name": "default", "template": text}], {"default": text}))

        def change(config: Any) -> str:
            config["chat_template"] = value
            return ""

        rewrite(folder / _CHAT, change)
    return f"template {template[:50]!r}"


def spoil_tokenizer(folder: Path, rng: random.Random) -> str:
    """Changes a tokenizer.json so that it is valid or nearly valid."""

    def change(document: Any) -> str:
        kind = rng.choice(("section", "section", "section", "added", "regex", "vocab", "any"))
        if kind == "section":
            name = rng.choice(tuple(_TYPES))
            source = name if rng.random() < 0.8 else rng.choice(tuple(_TYPES))
            value = _charsmap(rng) if rng.random() < 0.1 else rng.choice(_TYPES[source])
            document[name] = value
            return f"{name} is {str(value)[:60]}"
        if kind == "added":
            return _spoil_added(document["added_tokens"], rng)
        if kind == "regex":
            pattern = {"Regex": rng.choice(REGEXES)}
            split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
            swap = {"type": "Replace", "pattern": pattern, "content": ""}
            document.update(rng.choice(({"pre_tokenizer": split}, {"normalizer": swap})))
            return f"regex {pattern['Regex'][:40]}"
        if kind == "vocab":
            return _spoil_vocab(document["model"]["vocab"], rng)
        return spoil(document, rng)

    return f"tokenizer: {rewrite(folder / 'tokenizer.json', change)}"


def _charsmap(rng: random.Random) -> dict[str, Any]:
    garbage = base64.b64encode(rng.randbytes(rng.choice((4, 40, 40_000)))).decode()
    return {"type": "Precompiled", "precompiled_charsmap": garbage}


def _spoil_added(tokens: list[dict[str, Any]], rng: random.Random) -> str:
    one = dict(rng.choice(tokens))
    what = rng.choice(("id", "id", "content", "many", "twice"))
    if what == "id":
        one |= {"id": rng.choice(_IDS), "content": "<new>"}
    elif what == "content":
        one |= {"id": 1536, "content": rng.choice(("", "\0", "\ud800", "a" * 1_000_000, "a"))}
    elif what == "many":
        tokens += [one | {"id": 1536 + n, "content": f"<{n}>"} for n in range(50_000)]
        return "50,000 added tokens"
    tokens.append(one)
    return f"added token {one['id']} {str(one['content'])[:20]!r}"


def _spoil_vocab(vocab: dict[str, Any], rng: random.Random) -> str:
    token = rng.choice(tuple(vocab))
    what = rng.choice(("id", "missing", "odd", "huge", "many", "value"))
    if what == "id":
        vocab[token] = rng.choice(_IDS)
    elif what == "missing":
        for name in rng.sample(tuple(vocab), rng.choice((1, 100, len(vocab)))):
            del vocab[name]
    elif what == "odd":
        vocab[rng.choice(("\0", "\ud800", "", "\U0010ffff"))] = vocab.pop(token)
    elif what == "huge":
        vocab["x" * 1_000_000] = len(vocab)
    elif what == "many":
        vocab |= {f"x{n}": len(vocab) + n for n in range(200_000)}
    else:
        vocab[token] = hostile_value(rng)
    return f"vocabulary: {what}"


def raw_documents() -> tuple[bytes, ...]:
    """Return JSON documents that are invalid, very deep or very long."""
    deep: tuple[Raw, ...] = (nested(100_000), nested(100_000, '{"model":', "}"))
    return (b"", b"{", b"null", b"[]", b"5", b"\xff\xfe{}", b"\0" * 1000, *map(str.encode, deep))
