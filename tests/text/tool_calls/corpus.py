"""Valid and damaged tool calls in each format, and the output that a client should get.

The expected pieces are in order: a string is content, `Thought` reasoning, `Call` a call. Arguments
that are a string belong to a call that was cut: they are the part that was generated.
"""

from typing import Any, NamedTuple


class Thought(NamedTuple):
    text: str


class Call(NamedTuple):
    name: str
    arguments: dict[str, Any] | str


Expected = list["str | Thought | Call"]
Case = tuple[str, str, Expected]
"""A case's description, the model's text and the expected pieces."""

F = Call("f", {"x": 1})
G = Call("g", {})
DEEP = Call("f", {"x": {"y": [{"z": "}]{["}], "w": 'a "quoted" \\ word'}})
DEEP_JSON = r'{"x": {"y": [{"z": "}]{["}], "w": "a \"quoted\" \\ word"}}'


def object_of(arguments: str, name: str = "f", key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


F_JSON, G_JSON = object_of('{"x": 1}'), object_of("{}", "g")


def of_objects(begin: str, end: str, key: str = "arguments") -> list[Case]:
    """Return the cases for formats whose calls are JSON objects between two markers."""

    def one(what: str, body: str, *expected: Any) -> Case:
        return what, begin + body + end, list(expected)

    def given(arguments: str) -> str:
        return object_of(arguments, key=key)

    return [
        one("a call", given('{"x": 1}'), F),
        one("no arguments", given("{}"), Call("f", {})),
        one("nested objects, with brackets and quotes in strings", given(DEEP_JSON), DEEP),
        one("an unknown name", object_of("{}", "never-declared.tool", key), Call("never-declared.tool", {})),
        one("no white space", '{"name":"f","%s":{"x":1}}' % key, F),
        one("white space everywhere", '\n {\n "name" : "f" ,\n "%s" : {\n  "x" : 1\n } \n}\n' % key, F),
        one("keys in another order", '{"%s": {"x": 1}, "name": "f"}' % key, F),
        one("more keys", '{"id": "c1", "name": "f", "%s": {"x": 1}}' % key, F),
        one("a type before the name", '{"type": "function", "name": "f", "%s": {"x": 1}}' % key, F),
        one("a function within", '{"type": "function", "function": %s}' % given('{"x": 1}'), F),
        one("the other name for arguments", object_of('{"x": 1}', key="parameters"), F),
        one("arguments as a string", given(r'"{\"x\": 1}"'), F),
        one("arguments as an empty string", given('""'), Call("f", {})),
        one("arguments that are null", given("null"), Call("f", {})),
        one("no arguments at all", '{"name": "f"}', Call("f", {})),
        one("a comma too many in the arguments", given('{"x": 1,}'), F),
        one("commas too many in lists", given('{"x": [1, 2, ], }'), Call("f", {"x": [1, 2]})),
        one("a comma too many in the call", '{"name": "f", "%s": {"x": 1},}' % key, F),
        one("single quotes", "{'name': 'f', '%s': {'x': 1}}" % key, F),
        one("single quotes in the arguments", given("{'x': 'it is \"so\"', 'y': 'don\\'t'}"),
            Call("f", {"x": 'it is "so"', "y": "don't"})),
        one("Python's literals", given('{"x": [True, False, None]}'), Call("f", {"x": [True, False, None]})),
        one("JSON's literals and numbers", given('{"x": [true, false, null, -1.5e+3]}'),
            Call("f", {"x": [True, False, None, -1500.0]})),
        one("line breaks in a string", given('{"x": "a\n\tb"}'), Call("f", {"x": "a\n\tb"})),
        one("a backslash before any letter", given(r'{"x": "\d+\.\w"}'), Call("f", {"x": r"\d+\.\w"})),
        one("escapes of every kind", given(r'{"x": "\u00e9\n\/\"\\"}'), Call("f", {"x": 'é\n/"\\'})),
        one("words of other scripts", given('{"x": "日本 🙂 é"}'), Call("f", {"x": "日本 🙂 é"})),
        one("a brace too many", given('{"x": 1}') + "}", F),
        one("a name in another script", object_of("{}", "wetter_für", key), Call("wetter_für", {})),
    ]  # fmt: skip


def broken(begin: str, end: str) -> list[Case]:
    """Return texts that are not calls, and must be returned unchanged."""
    bodies = {
        "words": "not a call at all",
        "a name that is no string": '{"name": 5, "arguments": {}}',
        "no name": '{"arguments": {"x": 1}}',
        "a name with a line break": '{"name": "a\nb", "arguments": {}}',
        "a name with a bad escape": r'{"name": "a\xb", "arguments": 5}',
        "a name that is half a surrogate pair": r'{"name": "\ud800", "arguments": {}}',
        "half a surrogate pair in a string": r'{"name": "f", "arguments": "{\"x\": \"\ud800\"}"}',
        "a value that JSON does not have": '{"arguments": {"x": NaN}, "name": "f"}',
        "an empty name": '{"name": "", "arguments": {"x": 1}}',
        "arguments that are a list": '{"name": "f", "arguments": [1]}',
        "arguments that are a text": '{"name": "f", "arguments": "x is 1"}',
        "a key without quotes": '{name: "f", "arguments": {}}',
        "no colon": '{"name" "f"}',
        "another object": '{"answer": 42}',
        "a list of numbers": "[1, 2, 3]",
        "cut within the name": '{"name": "f',
        "cut before the arguments": '{"name": "f", "arguments": ',
    }
    return [
        (what, begin + body + ("" if what.startswith("cut") else end),
         [begin + body + ("" if what.startswith("cut") else end)])
        for what, body in bodies.items()
    ]  # fmt: skip


HERMES: list[Case] = [
    *of_objects("<tool_call>\n", "\n</tool_call>"),
    *broken("<tool_call>\n", "\n</tool_call>"),
    ("reasoning, words, a call", f"<think>\nhm\n</think>\n\nOk.\n<tool_call>\n{F_JSON}\n</tool_call>",
     [Thought("hm"), "Ok.", F]),
    ("a call within reasoning stays reasoning",
     f"<think>I may <tool_call>{F_JSON}</tool_call> it</think>Done",
     [Thought(f"I may <tool_call>{F_JSON}</tool_call> it"), "Done"]),
    ("two calls", f"<tool_call>\n{F_JSON}\n</tool_call>\n<tool_call>\n{G_JSON}\n</tool_call>", [F, G]),
    ("two in one tag", f"<tool_call>\n{F_JSON}\n{G_JSON}\n</tool_call>", [F, G]),
    ("two in one tag with a comma", f"<tool_call>{F_JSON}, {G_JSON}</tool_call> and", [F, G, "and"]),
    ("an array in one tag", f"<tool_call>\n[{F_JSON}, {G_JSON}]\n</tool_call>", [F, G]),
    ("a fence in the tag", f"<tool_call>\n```json\n{F_JSON}\n```\n</tool_call>", [F]),
    ("the end tag forgotten", f"<tool_call>\n{F_JSON}", [F]),
    ("the end tag forgotten between two", f"<tool_call>{F_JSON}\n<tool_call>{G_JSON}", [F, G]),
    ("a brace forgotten", '<tool_call>{"name": "f", "arguments": {"x": 1}\n</tool_call>', [F]),
    ("text after the call", f"<tool_call>{F_JSON}</tool_call>\n\nThat is it.", [F, "That is it."]),
    ("an object after the call", f'<tool_call>{F_JSON}</tool_call>{{"a": 1}}', [F, '{"a": 1}']),
    ("markers in a string", '<tool_call>{"name": "f", "arguments": {"x": "<tool_call></tool_call>"}}</tool_call>',
     [Call("f", {"x": "<tool_call></tool_call>"})]),
    ("cut within the arguments", '<tool_call>\n{"name": "f", "arguments": {"x": [1, "a',
     [Call("f", '{"x": [1, "a')]),
    ("cut at a comma", '<tool_call>{"name": "f", "arguments": {"x": 1, ', [Call("f", '{"x": 1, ')]),
    ("a broken call and a good one", f"<tool_call>no</tool_call> <tool_call>{F_JSON}</tool_call>",
     ["<tool_call>no</tool_call>", F]),
    ("a good call and a broken one", f'<tool_call>{F_JSON}</tool_call><tool_call>{{"x"</tool_call>',
     [F, '<tool_call>{"x"</tool_call>']),
    ("the tag cut", "So: <tool_c", ["So: <tool_c"]),
    ("a comparison", "a < b and <tool> is none", ["a < b and <tool> is none"]),
]  # fmt: skip

MISTRAL: list[Case] = [
    *of_objects("[TOOL_CALLS][", "]"),
    *(case for case in broken("[TOOL_CALLS] ", "") if case[0] != "words"),
    ("words after the marker", "[TOOL_CALLS] is a marker.", ["[TOOL_CALLS] is a marker."]),
    ("two in an array", f"[TOOL_CALLS] [{F_JSON}, {G_JSON}]", [F, G]),
    ("one without an array", f"[TOOL_CALLS]{F_JSON}", [F]),
    ("names and arguments", 'hi[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}', ["hi", F, G]),
    ("a name with an id", '[TOOL_CALLS]f[CALL_ID]abc123[ARGS]{"x": 1}', [F]),
    ("a name without its marker", '[TOOL_CALLS]f{"x": 1}', [F]),
    ("the array left open", f"[TOOL_CALLS][{F_JSON}", [F]),
    ("markers in a string", '[TOOL_CALLS]f[ARGS]{"x": "[TOOL_CALLS][ARGS]"}',
     [Call("f", {"x": "[TOOL_CALLS][ARGS]"})]),
    ("slips in the arguments", "[TOOL_CALLS]f[ARGS]{'x': 1,}", [F]),
    ("cut within the arguments", '[TOOL_CALLS]f[ARGS]{"x": "a', [Call("f", '{"x": "a')]),
    ("text after the array", f"[TOOL_CALLS][{F_JSON}] Done", [F, "Done"]),
]  # fmt: skip

PHI4: list[Case] = [
    *of_objects("<|tool_call|>", "<|/tool_call|>"),
    *of_objects("<|tool_call|>[", "]"),
    *broken("<|tool_call|>", "<|/tool_call|>"),
    ("two calls", f"<|tool_call|>{F_JSON}<|/tool_call|><|tool_call|>{G_JSON}<|/tool_call|>", [F, G]),
    ("two in an array", f"<|tool_call|>[{F_JSON}, {G_JSON}]<|/tool_call|>", [F, G]),
    ("an array without an end, as of Granite 3", f"<|tool_call|>[{F_JSON}, {G_JSON}]", [F, G]),
    ("words before and after", f"Ok.<|tool_call|>[{F_JSON}]<|/tool_call|> Done", ["Ok.", F, "Done"]),
    ("cut within the arguments", '<|tool_call|>[{"name": "f", "arguments": {"x": "a',
     [Call("f", '{"x": "a')]),
]  # fmt: skip

LLAMA3: list[Case] = [
    *of_objects("", "", "parameters"),
    *(case for case in of_objects("<|python_tag|>", "", "parameters")),
    *broken("", ""),
    ("two with a semicolon", f"<|python_tag|>{F_JSON}; {G_JSON}", [F, G]),
    ("in the tags of Llama 4", f"<|python_start|>{F_JSON}<|python_end|>", [F]),
    ("two in lines", f"{F_JSON}\n{G_JSON}", [F, G]),
    ("an array", f"[{F_JSON}, {G_JSON}]", [F, G]),
    ("a function as a name", '{"function": "f", "parameters": {"x": 1}}', [F]),
    ("an answer in JSON", '{"answer": 42} is it', ['{"answer": 42} is it']),
    ("a call in the middle of words is no call", f"Use {F_JSON}.", [f"Use {F_JSON}."]),
    ("a tag within words", '{"answer": 42} <|python_tag|>', ['{"answer": 42} <|python_tag|>']),
    ("a call and words", f"{F_JSON}\nDone.", [F, "Done."]),
    ("cut within the arguments", '{"name": "f", "parameters": {"x": {"y": "a', [Call("f", '{"x": {"y": "a')]),
]  # fmt: skip

GENERIC: list[Case] = [
    *of_objects("", ""),
    *of_objects("```json\n", "\n```"),
    *broken("", ""),
    *broken("```json\n", "\n```"),
    ("two in lines, and words", f"{F_JSON}\n{G_JSON}\nDone.", [F, G, "Done."]),
    ("two in a fence", f"```json\n{F_JSON}\n{G_JSON}\n```", [F, G]),
    ("an array in a fence", f"```json\n[{F_JSON}, {G_JSON}]\n```", [F, G]),
    ("a fence of another language", "```python\nx = {}\n```", ["```python\nx = {}\n```"]),
    ("a fence in a string", '```json\n{"name": "f", "arguments": {"x": "```"}}\n```',
     [Call("f", {"x": "```"})]),
    ("after reasoning", f"<think>\nhm\n</think>\n\n{F_JSON}", [Thought("hm"), F]),
    ("words first", f"Ok: {F_JSON}", [f"Ok: {F_JSON}"]),
    ("one backtick", "`x` is it", ["`x` is it"]),
    ("cut within the arguments", '{"name": "f", "arguments": {"x": "a', [Call("f", '{"x": "a')]),
]  # fmt: skip

_DS, _DE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CS, _CE, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
DEEPSEEK: list[Case] = [
    ("fenced arguments", f'x{_DS}{_CS}function{_SEP}f\n```json\n{{"x": 1}}\n```{_CE}{_DE}', ["x", F]),
    ("bare arguments", f'{_DS}{_CS}f{_SEP}{{"x": 1}}{_CE}{_DE}', [F]),
    ("two", f'{_DS}{_CS}f{_SEP}{{"x": 1}}{_CE}\n{_CS}g{_SEP}{{}}{_CE}{_DE}', [F, G]),
    ("the outer tag forgotten", f'{_CS}function{_SEP}f\n```json\n{{"x": 1}}\n```{_CE}', [F]),
    ("the end tags forgotten", f'{_DS}{_CS}f{_SEP}{{"x": 1}}', [F]),
    ("slips in the arguments", f"{_DS}{_CS}f{_SEP}{{'x': 1,}}{_CE}{_DE}", [F]),
    ("nested", f"{_DS}{_CS}f{_SEP}{DEEP_JSON}{_CE}{_DE}", [DEEP]),
    ("markers in a string", f'{_DS}{_CS}f{_SEP}{{"x": "{_CE}```"}}{_CE}{_DE}', [Call("f", {"x": f"{_CE}```"})]),
    ("text after", f"{_DS}{_CS}g{_SEP}{{}}{_CE}{_DE}\nDone", [G, "Done"]),
    ("words instead", f"{_DS}nothing{_DE}", [f"{_DS}nothing{_DE}"]),
    ("arguments that are no object", f"{_CS}f{_SEP}x=1{_CE}", [f"{_CS}f{_SEP}x=1{_CE}"]),
    ("cut within the arguments", f'{_DS}{_CS}f{_SEP}{{"x": "a', [Call("f", '{"x": "a')]),
    ("cut within the name", f"{_DS}{_CS}function{_SEP}ge", [f"{_DS}{_CS}function{_SEP}ge"]),
    ("a call within reasoning stays reasoning", f"<think>{_DS}{_CS}g{_SEP}{{}}{_CE}{_DE}</think>Yes",
     [Thought(f"{_DS}{_CS}g{_SEP}{{}}{_CE}{_DE}"), "Yes"]),
]  # fmt: skip


def function(*parameters: str, name: str = "f") -> str:
    return f"<function={name}>\n" + "".join(f"{it}\n" for it in parameters) + "</function>"


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>"


_OPEN, _CLOSE = "<tool_call>\n", "\n</tool_call>"
_X = parameter("x", "1")
QWEN3_CODER: list[Case] = [
    ("a call", _OPEN + function(_X) + _CLOSE, [F]),
    ("no parameters", _OPEN + function(name="g") + _CLOSE, [G]),
    ("text and lines", "Hm\n" + _OPEN + function(parameter("cmd", "1\n2"), _X) + _CLOSE,
     ["Hm", Call("f", {"cmd": "1\n2", "x": 1})]),
    ("a text that looks like a number", _OPEN + function(parameter("cmd", "3")) + _CLOSE, [Call("f", {"cmd": "3"})]),
    ("a text or null", _OPEN + function(parameter("note", "3")) + function(parameter("note", "null")) + _CLOSE,
     [Call("f", {"note": "3"}), Call("f", {"note": None})]),
    ("a number or a text", _OPEN + function(parameter("size", "3")) + function(parameter("size", "null")) + _CLOSE,
     [Call("f", {"size": 3}), Call("f", {"size": "null"})]),
    ("JSON as a value", _OPEN + function(parameter("x", '{"a": [1, "}"]}')) + _CLOSE, [Call("f", {"x": {"a": [1, "}"]}})]),
    ("Python's literals", _OPEN + function(parameter("x", "True")) + _CLOSE, [Call("f", {"x": True})]),
    ("on one line", "<tool_call><function=f><parameter=x>1</parameter></function></tool_call>", [F]),
    ("two", _OPEN + function(_X) + _CLOSE + "\n" + _OPEN + function(name="g") + _CLOSE, [F, G]),
    ("two in one tag", _OPEN + function(_X) + "\n" + function(name="g") + _CLOSE, [F, G]),
    ("the tag before it forgotten", "Now\n" + function(_X) + _CLOSE, ["Now", F]),
    ("both tags forgotten", function(_X), [F]),
    ("the end tag forgotten", _OPEN + function(_X), [F]),
    ("the end of a parameter forgotten", "<tool_call><function=f>\n<parameter=x>\n1\n<parameter=cmd>\na\n</parameter>\n</function></tool_call>",
     [Call("f", {"x": 1, "cmd": "a"})]),
    ("the end of the last parameter forgotten", "<tool_call><function=f>\n<parameter=x>\n1\n</function></tool_call>", [F]),
    ("markers in a value", _OPEN + function(parameter("cmd", "echo '</tool_call></function>'")) + _CLOSE + " ok",
     [Call("f", {"cmd": "echo '</tool_call></function>'"}), "ok"]),
    ("angle brackets in a value", _OPEN + function(parameter("cmd", "if a<b && c>d: <p>")) + _CLOSE,
     [Call("f", {"cmd": "if a<b && c>d: <p>"})]),
    ("an unknown name", _OPEN + function(name="never.declared") + _CLOSE, [Call("never.declared", {})]),
    ("words in the tag", "<tool_call>no call</tool_call> ok", ["<tool_call>no call</tool_call> ok"]),
    ("words between parameters", _OPEN + "<function=f>\nso\n</function>" + _CLOSE, [_OPEN + "<function=f>\nso\n</function>" + _CLOSE]),
    ("cut within a value", _OPEN + "<function=f>\n<parameter=x>\n12", [_OPEN + "<function=f>\n<parameter=x>\n12"]),
    ("cut within the name", "<tool_call>\n<function=f", ["<tool_call>\n<function=f"]),
    ("a function alone, cut", "<function=f>\n<parameter=x>", ["<function=f>\n<parameter=x>"]),
    ("a call within reasoning stays reasoning", f"<think>{function(_X)}</think>Yes", [Thought(function(_X)), "Yes"]),
]  # fmt: skip


def glm(*pairs: tuple[str, str], name: str = "f", between: str = "\n") -> str:
    written = [
        f"<arg_key>{key}</arg_key>{between}<arg_value>{value}</arg_value>" for key, value in pairs
    ]
    return between.join([name, *written, ""])


GLM: list[Case] = [
    ("a call", "<tool_call>" + glm(("x", "1")) + "</tool_call>", [F]),
    ("no line breaks", "<tool_call>" + glm(("x", "1"), between="") + "</tool_call>", [F]),
    ("no arguments", "<tool_call>g\n</tool_call>", [G]),
    ("a text", "<tool_call>" + glm(("cmd", "1\n2")) + "</tool_call>", [Call("f", {"cmd": "1\n2"})]),
    ("a text or null", "<tool_call>" + glm(("note", "3")) + "</tool_call>\n<tool_call>" + glm(("note", "null")) + "</tool_call>",
     [Call("f", {"note": "3"}), Call("f", {"note": None})]),
    ("a number or a text", "<tool_call>" + glm(("size", "3")) + "</tool_call>\n<tool_call>" + glm(("size", "null")) + "</tool_call>",
     [Call("f", {"size": 3}), Call("f", {"size": "null"})]),
    ("JSON as a value", "<tool_call>" + glm(("x", '["a", {"b": null}]')) + "</tool_call>", [Call("f", {"x": ["a", {"b": None}]})]),
    ("two", f"<tool_call>{glm(('x', '1'))}</tool_call>\n<tool_call>g</tool_call>", [F, G]),
    ("the end tag forgotten", "<tool_call>" + glm(("x", "1")), [F]),
    ("markers in a value", "<tool_call>" + glm(("cmd", "a</tool_call>b<tool_call>")) + "</tool_call> ok",
     [Call("f", {"cmd": "a</tool_call>b<tool_call>"}), "ok"]),
    ("text around it", "So.\n<tool_call>g</tool_call>\nDone.", ["So.", G, "Done."]),
    ("words in the tag", "<tool_call>no call here</tool_call>", ["<tool_call>no call here</tool_call>"]),
    ("a key without a value", "<tool_call>f<arg_key>x</arg_key></tool_call>", ["<tool_call>f<arg_key>x</arg_key></tool_call>"]),
    ("cut within a value", "<tool_call>f<arg_key>x</arg_key><arg_value>1", ["<tool_call>f<arg_key>x</arg_key><arg_value>1"]),
    ("values that JSON does not have", "<tool_call>" + glm(("x", "NaN"), ("y", "-1e999")) + "</tool_call>",
     [Call("f", {"x": "NaN", "y": "-1e999"})]),
    ("a call within reasoning stays reasoning", "<think><tool_call>g</tool_call></think>Yes",
     [Thought("<tool_call>g</tool_call>"), "Yes"]),
]  # fmt: skip

GEMMA4: list[Case] = [
    ("a call", "<|tool_call>call:f{x:1}<tool_call|>", [F]),
    ("no arguments", "<|tool_call>call:g{}<tool_call|>", [G]),
    ("two", "<|tool_call>call:f{x:1}<tool_call|><|tool_call>call:g{}<tool_call|>", [F, G]),
    ("a text", '<|tool_call>call:f{cmd:<|"|>1\n"2", {a:b}<|"|>}<tool_call|>', [Call("f", {"cmd": '1\n"2", {a:b}'})]),
    ("nested values", '<|tool_call>call:f{x:[<|"|>a<|"|>,{b:null,c:[true,-1.5]}]}<tool_call|>',
     [Call("f", {"x": ["a", {"b": None, "c": [True, -1.5]}]})]),
    ("texts without quotes", "<|tool_call>call:f{cmd:3,note:4,size:5}<tool_call|>",
     [Call("f", {"cmd": "3", "note": "4", "size": 5})]),
    ("a text or null", '<|tool_call>call:f{note:<|"|>null<|"|>}<tool_call|><|tool_call>call:f{note:null}<tool_call|>',
     [Call("f", {"note": "null"}), Call("f", {"note": None})]),
    ("spaces", '<|tool_call>call: f { x : 1 }<tool_call|>', [F]),
    ("JSON's quotes", '<|tool_call>call:f{"cmd":"a, \\"b\\""}<tool_call|>', [Call("f", {"cmd": 'a, "b"'})]),
    ("no quotes", "<|tool_call>call:f{city:New York}<tool_call|>", [Call("f", {"city": "New York"})]),
    ("Python's words", "<|tool_call>call:f{x:[True,None]}<tool_call|>", [Call("f", {"x": [True, None]})]),
    ("the end tag forgotten", "<|tool_call>call:f{x:1}", [F]),
    ("text around it", "So.\n<|tool_call>call:g{}<tool_call|>\nDone.", ["So.", G, "Done."]),
    ("words in the tag", "<|tool_call>no call here<tool_call|>", ["<|tool_call>no call here<tool_call|>"]),
    ("a key without a value", "<|tool_call>call:f{x:}<tool_call|>", ["<|tool_call>call:f{x:}<tool_call|>"]),
    ("keys that look like literals", "<|tool_call>call:f{None:True,1:2}<tool_call|>", [Call("f", {"None": True, "1": 2})]),
    ("half a surrogate pair", r'<|tool_call>call:f{"cmd":"\ud800"}<tool_call|>', [Call("f", {"cmd": "\ud800"})]),
    ("a number beyond all doubles", "<|tool_call>call:f{x:1e999}<tool_call|>", ["<|tool_call>call:f{x:1e999}<tool_call|>"]),
    ("cut within a value", '<|tool_call>call:f{x:<|"|>a', ['<|tool_call>call:f{x:<|"|>a']),
]  # fmt: skip

_FS, _FE = "<function_calls>", "</function_calls>"


def lines(what: str, calls: str, *expected: Any) -> Case:
    return what, f"{_FS}{calls}{_FE}", list(expected)


def no_calls(what: str, text: str) -> Case:
    return lines(what, text, f"{_FS}{text}{_FE}")


OLMO3: list[Case] = [
    lines("a call", "f(x=1)", F),
    lines("no arguments", "g()", G),
    lines("two in lines", "f(x=1)\ng()", F, G),
    lines("lines around them", "\nf(x=1)\n\ng()\n", F, G),
    lines("commas between", "f(x=1), g(),", F, G),
    lines("white space", "f ( x = 1 )", F),
    lines("JSON's values", r'f(cmd="a \"b\"", x=[true, null, -1.5e+3, {}])',
          Call("f", {"cmd": 'a "b"', "x": [True, None, -1500.0, {}]})),
    lines("Python's values", r"f(cmd='a \'b\' \x41', x=[True, None, ''])",
          Call("f", {"cmd": "a 'b' A", "x": [True, None, ""]})),
    lines("nested values", f'f(x={DEEP_JSON[6:-1]})', DEEP),
    lines("brackets and markers in a text", f'f(cmd=")]}}{_FE}{_FS}", x=1)', Call("f", {"cmd": f")]}}{_FE}{_FS}", "x": 1})),
    lines("three quotes", 'f(cmd="""a "b"\n""c""", x=1)', Call("f", {"cmd": 'a "b"\n""c', "x": 1})),
    lines("a line break in a text", "f(cmd='a\nb')", Call("f", {"cmd": "a\nb"})),
    lines("an unknown escape", r'f(cmd="\d+")', Call("f", {"cmd": r"\d+"})),
    lines("surrogates", r'f(cmd="\ud83d\ude42 \ud800")', Call("f", {"cmd": "🙂 \ud800"})),
    lines("words of Python as names", 'f(from="a", class=1)', Call("f", {"from": "a", "class": 1})),
    lines("a name with dots and a hyphen", "server.f-2(x-y=1)", Call("server.f-2", {"x-y": 1})),
    lines("one object", 'f(**{"x": 1})', F),
    lines("commas too many", "f(x=[1, 2,],)", Call("f", {"x": [1, 2]})),
    lines("texts without quotes", "f(cmd=3, note=4, size=5)", Call("f", {"cmd": "3", "note": "4", "size": 5})),
    lines("a text or null", 'f(note="null")\nf(note=null)', Call("f", {"note": "null"}), Call("f", {"note": None})),
    ("the end tag forgotten", f"{_FS}f(x=1)", [F]),
    ("text around it", f"So.\n{_FS}g(){_FE}\nDone.", ["So.", G, "Done."]),
    lines("words after a call", "g(), and then", G, f", and then{_FE}"),
    lines("a call and a broken one", "g()\nf(1)", G, f"f(1){_FE}"),
    ("a tag in a call", f"{_FS}f(x={_FS}g(){_FE}", [f"{_FS}f(x=", G]),
    no_calls("nothing in the tag", ""),
    no_calls("words in the tag", "no call here"),
    no_calls("no names of arguments", "f(1)"),
    no_calls("an expression", "f(x=1+open('a'))"),
    no_calls("a set", "f(x={1, 2})"),
    no_calls("a name in a list", "f(x=[y=1])"),
    no_calls("a name of a variable", "f(x=y)"),
    no_calls("a bracket of another kind", 'f(x=1}, {"y": 2)'),
    no_calls("a number beyond all doubles", "f(x=1e999)"),
    no_calls("two texts", "f(x='a' 'b')"),
    ("cut within a text", f"{_FS}f(cmd='a", [f"{_FS}f(cmd='a"]),
    ("cut within the name", f"{_FS}f", [f"{_FS}f"]),
    ("cut after a call", f"{_FS}g()\nf(x=", [G, "f(x="]),
    ("a call within reasoning stays reasoning", f"<think>{_FS}g(){_FE}</think>Yes", [Thought(f"{_FS}g(){_FE}"), "Yes"]),
]  # fmt: skip

PYTHONIC: list[Case] = [
    ("two calls", '[f(x=1), g()]', [F, G]),
    ("in tags", "<|python_start|>[f(x=1)]<|python_end|>", [F]),
    ("without brackets in tags", "<|python_start|>f(x=1)<|python_end|>", [F]),
    ("in the tags of LFM2", "Ok.<|tool_call_start|>[f(x=1), g()]<|tool_call_end|>Done", ["Ok.", F, G, "Done"]),
    ("the bracket left open", "[f(x=1)", [F]),
    ("words after the list", "[f(x=1)] Done", [F, "Done"]),
    ("words of Python as names", 'f(from="a", class=1)'.join("[]"), [Call("f", {"from": "a", "class": 1})]),
    ("a name with a hyphen", "[server__f-2(x=1)]", [Call("server__f-2", {"x": 1})]),
    ("one object", '[f(**{"x": 1})]', [F]),
    ("JSON's escapes", r'[f(x="\/\ud83d\ude42")]', [Call("f", {"x": "/🙂"})]),
    ("nested values", """[f(x={"y": [{"z": "}]{["}], "w": 'a "quoted" \\\\ word'})]""", [DEEP]),
    ("JSON's words", "[f(x=[true, false, null])]", [Call("f", {"x": [True, False, None]})]),
    ("Python's words", "[f(x=[True, False, None])]", [Call("f", {"x": [True, False, None]})]),
    ("a comma too many", "[f(x=1,),]", [F]),
    ("texts without quotes", "[f(cmd=3, note=4, size=5)]", [Call("f", {"cmd": "3", "note": "4", "size": 5})]),
    ("a text or null", "[f(note='null'), f(note=null)]", [Call("f", {"note": "null"}), Call("f", {"note": None})]),
    ("over lines", "[\n            f(\n    x=1\n  )\n]", [F]),
    ("a name with dots", "[server.f(x=1)]", [Call("server.f", {"x": 1})]),
    ("brackets in strings", '[f(x="[g()]")]', [Call("f", {"x": "[g()]"})]),
    ("a list that is no call", "[1, 2] are two", ["[1, 2] are two"]),
    ("a link", "[here](http://x.org)", ["[here](http://x.org)"]),
    ("no names of arguments", "[f(1)]", ["[f(1)]"]),
    ("an expression", "[f(x=1+open('a'))]", ["[f(x=1+open('a'))]"]),
    ("half a surrogate pair", r'[f(x="\ud800")]', [Call("f", {"x": "\ud800"})]),
    ("a set", "[f(x={1, 2})]", ["[f(x={1, 2})]"]),
    ("an empty list", "[]", ["[]"]),
    ("cut", '[f(x="a', ['[f(x="a']),
    ("words first", "Ok: [f(x=1)]", ["Ok: [f(x=1)]"]),
    ("after reasoning", "<think>hm</think>\n[f(x=1)]", [Thought("hm"), F]),
]  # fmt: skip

CORPUS: dict[str, list[Case]] = {
    "hermes": HERMES,
    "mistral": MISTRAL,
    "phi4": PHI4,
    "llama3": LLAMA3,
    "generic": GENERIC,
    "deepseek": DEEPSEEK,
    "qwen3-coder": QWEN3_CODER,
    "glm": GLM,
    "gemma4": GEMMA4,
    "olmo3": OLMO3,
    "pythonic": PYTHONIC,
}
