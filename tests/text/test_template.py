import contextlib
import json
import os
import tracemalloc

import pytest

from headrace.text import sandbox
from headrace.text.template import ChatTemplate
from headrace.text.tool_formats.table import tool_format
from headrace_common.errors import ModelError, RequestError
from headrace_common.request import Chat

CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] | trim) + '<|im_end|>' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}"""
USER = {"role": "user", "content": "Hi"}


def render(source: str, *messages, **fields) -> str:
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}).render(Chat(messages, **fields))


def failure(source: str, *messages, **fields) -> str:
    with pytest.raises(RequestError) as failed:
        render(source, *(messages or (USER,)), **fields)
    assert failed.value.code == "template_failed"
    return failed.value.message


def test_blocks_are_trimmed_and_the_generation_prompt_is_an_option():
    assert render(CHATML, USER).startswith("<|im_start|>user\nHi<|im_end|>")
    assert render(CHATML, USER).count("<|im_start|>assistant\n") == 1
    assert "assistant" not in render(CHATML, USER, add_generation_prompt=False)


def test_the_messages_and_the_generation_prompt_cannot_be_replaced_by_variables():
    replaced = {"messages": [], "add_generation_prompt": False, "word": "x"}
    assert render("{{ messages|length }}{{ add_generation_prompt }}{{ word }}", USER) == "1True"
    source = "{{ messages|length }}{{ add_generation_prompt }}{{ word }}"
    assert render(source, USER, template_kwargs=replaced) == "1Truex"


def test_a_continued_message_is_the_end_of_the_text():
    begun = {"role": "assistant", "content": "The answer is "}
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(CHATML, USER, begun, **fields).endswith("<|im_start|>assistant\nThe answer is ")


def test_a_continued_message_is_found_behind_equal_ones():
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    same = [{"role": "assistant", "content": "end"}] * 2
    whole = render(CHATML, *same, add_generation_prompt=False)
    assert render(CHATML, *same, **fields) == whole[: whole.rindex("<|im_end|>")]


def test_a_continued_message_may_be_made_of_parts():
    source = "{% for p in messages[-1].content %}[{{ p.text }}]{% endfor %}!"
    message = {"role": "assistant", "content": [{"text": "a"}, {"text": "b"}]}
    assert render(source, message, continue_final_message=True) == "[a][b"


def test_a_template_that_hides_the_last_message_cannot_continue_it():
    begun = {"role": "assistant", "content": "x"}
    assert "cannot be continued" in failure("nothing", begun, continue_final_message=True)


def test_a_developer_is_rendered_as_system():
    assert render("{{ messages[0].role }}", {"role": "developer", "content": ""}) == "system"


def test_arguments_of_tool_calls_are_objects_to_the_template():
    source = "{{ messages[0].tool_calls[0].function.arguments.a }}"
    function = {"name": "add", "arguments": '{"a": 1}'}
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    assert render(source, message) == "1"
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


@pytest.mark.parametrize("arguments", ["{broken", "[" * 200_000, '["\\ud800"]', "-1e999"], ids=len)
def test_arguments_that_cannot_be_read_reach_the_template_as_they_are(arguments):
    source = "{{ messages[0].tool_calls[0].function.arguments }}"
    message = {"role": "assistant", "tool_calls": [{"function": {"arguments": arguments}}]}
    assert render(source, message) == arguments


@pytest.mark.parametrize("sent", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_each_name_that_a_template_may_read(sent, read):
    message = {"role": "assistant", "content": "", sent: "Hm.", "tool_calls": [{"id": "1"}]}
    assert render(f"{{{{ messages[0].{read} }}}}", message) == "Hm."
    assert render("{{ messages[0].thinking }}", message | {"content": "I look."}) == ""


SYSTEM_TOOLS = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if 'tools' in message and message['tools'] is not none %}"
    "<|tool|>{{ message['tools'] }}<|/tool|>{% endif %}{% endfor %}"
)


def test_a_template_that_reads_the_tools_from_the_system_message_finds_them_there():
    tools = ({"type": "function", "function": {"name": "add"}},)
    system = {"role": "system", "content": "Be brief."}
    written = '<|tool|>[{"name": "add"}]<|/tool|><user>Hi'
    assert render(SYSTEM_TOOLS, USER, tools=tools) == f"<system>{written}"
    assert render(SYSTEM_TOOLS, system, USER, tools=tools) == f"<system>Be brief.{written}"
    assert render(SYSTEM_TOOLS, USER) == "<user>Hi"
    assert render("{% if tools %}!{% endif %}" + SYSTEM_TOOLS, USER, tools=tools) == "!<user>Hi"
    assert tool_format(SYSTEM_TOOLS) == "phi4"


def test_a_text_that_is_not_unicode_is_a_template_failure():
    assert "surrogate" in failure("{{ '%c' % 55296 }}")


def test_json_is_not_escaped_for_a_web_page():
    assert render("{{ tools | tojson }}", USER, tools=({"a": "<é>"},)) == '[{"a": "<é>"}]'


def test_loop_controls_generation_marks_and_dates_work():
    source = (
        "{% for x in range(9) %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}"
        "{% generation %}said{% endgeneration %}{{ strftime_now('%%') }}"
    )
    assert render(source, USER) == "01said%"


def test_special_tokens_are_variables():
    assert render("{{ bos_token }}", USER) == "<s>"


def test_a_refusal_has_the_templates_own_message():
    assert failure("{{ raise_exception('No system role.') }}") == "No system role."


def test_a_refusal_is_a_short_text_whatever_the_template_says():
    assert failure("{{ raise_exception(messages[0]) }}") == str(USER)
    assert failure("{{ raise_exception('%c' % 55296) }}") == "?"
    assert len(failure("{{ raise_exception('a' * 10 ** 6) }}")) == 1000


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{% for x in range(10 ** 9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set n = namespace(s='ab') %}{% for x in range(60) %}{% set n.s = n.s ~ n.s %}"
        "{% endfor %}",
        "{% set n = namespace(s=[1]) %}{% for x in range(60) %}{% set n.s = n.s + n.s %}"
        "{% endfor %}",
        "{% for x in range(9999) %}{% for y in range(9999) %}{{ messages }}{% endfor %}"
        "{% endfor %}",
        "{{ '%1500000000d' % 1 }}",
        "{{ '%*d' % (1500000000, 1) }}",
        "{{ '%.1500000000f' % 1.5 }}",
        "{{ ('%s' * 9999) % ('a' * 10 ** 7) }}",
        "{{ 'a' | center(10 ** 10) }}",
        "{{ ['a'] | map('center', 10 ** 10) | list }}",
        "{{ 'a'.center(10 ** 10) }}",
        "{{ 'a'.zfill(10 ** 10) }}",
        "{{ ('\\t' * 10 ** 5).expandtabs(10 ** 6) }}",
        "{{ ('a' * 10 ** 6) | replace('a', 'b' * 10 ** 6) }}",
        "{{ ('a' * 10 ** 6).replace('a', 'b' * 10 ** 6) }}",
        "{{ ('a' * 10 ** 6).translate({97: 'b' * 10 ** 6}) }}",
        "{{ ('a' * 10 ** 6).join(['b'] * 10 ** 6) }}",
        "{{ (['b'] * 10 ** 6) | join('a' * 10 ** 6) }}",
        "{{ '%1500000000d' | format(1) }}",
        "{{ '{:1500000000d}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1500000000) }}",
        "{{ '{a:1500000000}'.format_map({'a': 1}) }}",
        "{{ ('a\n' * 10 ** 6) | indent(10 ** 6) }}",
        "{{ ('a ' * 10 ** 6) | wordwrap(1, wrapstring='b' * 10 ** 6) }}",
        "{{ [1] | batch(10 ** 10, 1) | list }}",
        "{{ [1] | slice(10 ** 10) | list }}",
        "{{ 1 | round(10 ** 9, 'ceil') }}",
        "{{ [1] | tojson(indent=10 ** 9) }}",
        "{{ (5).to_bytes(10 ** 10, 'big') }}",
        "{% set s = 'a' * 10 ** 6 %}{{ [s] * 1000 }}",
        "{% set s = 'a' * 10 ** 6 %}{{ 'a' ~ [s] * 1000 }}",
        "{% set s = 'a' * 10 ** 6 %}{{ ([s] * 1000) | string }}",
        "{% set s = 'a' * 10 ** 6 %}{{ ([s] * 1000) | pprint }}",
        "{% set s = 'a' * 10 ** 6 %}{{ ([s] * 1000) | upper }}",
        "{% set s = 'a' * 10 ** 6 %}{{ ([s] * 1000) | e }}",
        "{% set s = 'a' * 10 ** 6 %}{{ ([s] * 1000) | replace('b', 'c') }}",
        "{% set s = 'a' * 10 ** 6 %}{{ ([s] * 1000) | center(9) }}",
        "{% set s = 'a' * 10 ** 6 %}{{ [[s] * 1000] | join }}",
        "{% set s = 'a' * 10 ** 6 %}{{ '%s' % (([s] * 1000),) }}",
        "{% set s = 'a' * 10 ** 6 %}{{ '{}'.format([s] * 1000) }}",
        "{% set s = 'a' * 10 ** 6 %}{{ ([s] * 1000) | tojson }}",
        "{% set s = 'a' * 10 ** 6 %}{{ {'a': s, 'b': [s] * 1000} }}",
        "{% set s = 'a' * 10 ** 6 %}{{ {'b': [s] * 1000}.items() }}",
        "{% set s = 'a' * 10 ** 6 %}{% set n = namespace(a=[s] * 1000) %}{{ n }}",
        "{% set s = 'a' * 10 ** 6 %}{{ {'a': [s] * 1000} | xmlattr }}",
        "{% set s = 'a' * 10 ** 6 %}{{ ('a' | safe).escape([s] * 1000) }}",
        "{% set s = 'a' * 10 ** 6 %}{{ raise_exception([s] * 1000) }}",
        "{{ ([1] * 10 ** 5) | tojson(separators=('a' * 10 ** 4, ':')) }}",
        pytest.param(
            "{% set n = namespace(x=[1]) %}{% for i in range(900) %}{% set n.x = [n.x, 1] %}"
            "{% endfor %}{{ ([n.x] * 500) | tojson(indent=90) }}",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "{% set n = namespace(x=1) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}"
            "{% endfor %}{{ n.x }}",
            marks=pytest.mark.slow,
        ),
        "{% set n = namespace(x=1) %}{% set n.x = [n, n] %}{% for i in range(40) %}"
        "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n }}",
        "{{ '{:{}}'.format(1, '1500000000') }}",
        "{{ ('\n' * 10 ** 6) | indent(100) }}",
        "{{ ('a ' * 10 ** 7).split() | length }}",
        "{{ ('a,' * 10 ** 7).split(',') | length }}",
        "{{ ('a' * 10 ** 7) | list | length }}",
        "{{ ([1] * 10 ** 7) | length }}",
        "{{ [1] | batch(10 ** 7, 1) | list | length }}",
        "{{ [1] | slice(10 ** 7) | list | length }}",
        "{{ ([[1] * 10 ** 5] * 100) | sum(start=[]) | length }}",
        "{{ ('a' * 10 ** 7).encode('utf-32') | length }}",
        "{% macro f() %}{% for i in range(1000) %}{{ messages[0].content * 100 }}{% endfor %}"
        "{% endmacro %}{% set x = f() %}",
        "{% set x %}{% for i in range(1000) %}{{ messages[0].content * 100 }}{% endfor %}"
        "{% endset %}",
    ],
)
def test_a_template_that_grows_without_end_overruns_before_it_takes_memory(source):
    tracemalloc.start()
    try:
        assert "overran" in failure(source, {"role": "user", "content": "x" * 10_000})
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()


def test_values_of_usual_size_are_printed_in_every_way():
    long = "a 1\n" * 200_000
    source = (
        "{% set x = {'a': [1, 2.5, none, 'é']} %}{{ x }}{{ 'a' ~ [1] }}{{ [1, 2] | join('-') }}"
        "{{ '%s|%5.1f' % ([1], 2) }}{{ '{{\"a\": {}}}'.format(3) }}{{ x | tojson }}"
        "{{ [1, 2] | tojson(indent=1, separators=(',', ':')) }}{{ ['b', 'a'] | sort | list }}"
        "{{ [1, 2] | sum }}{{ 'abc' | reverse }}{{ range(3) | map('string') | join }}"
        "{% set y %}{{ 1 }}{% endset %}{{ y }}{{ 7 // 2 }}"
    )
    assert render(source, USER) == (
        "{'a': [1, 2.5, None, 'é']}a[1]1-2[1]|  2.0{\"a\": 3}"
        '{"a": [1, 2.5, null, "é"]}[\n 1,\n 2\n]'
        "['a', 'b']3cba01213"
    )
    for how in (
        "m | trim",
        "m.split(' ', 1) | join(' ')",
        "m | indent(0)",
        "'%s' % m",
        "'{}'.format(m)",
        "m ~ ''",
        "[m] | join",
    ):
        source = "{% set m = messages[0].content %}{{ " + how + " }}"
        assert render(source, {"role": "user", "content": long}).strip() == long.strip()


def test_methods_are_called_in_a_loop_by_all_their_arguments():
    source = (
        "{% for m in messages %}{% set a = 'a,b,c' %}{{ a.split(',') }}{{ a.split(sep=',') }}"
        "{{ a.rsplit(',', maxsplit=1) }}{{ a.split() }}{{ ('<' | safe).escape('<' * 3) }}"
        "{% endfor %}"
    )
    assert render(source, USER) == (
        "['a', 'b', 'c']['a', 'b', 'c']['a,b', 'c']['a,b,c']&lt;&lt;&lt;"
    )


def test_a_template_that_loops_without_writing_overruns_its_time(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.05)
    source = "{% for x in range(99999) %}{% for y in range(99999) %}{% endfor %}{% endfor %}"
    assert "more than 0.05 seconds" in failure(source)


def test_a_template_cannot_shadow_the_clock(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.05)
    source = (
        "{% set environment = none %}{% set tick = none %}"
        "{% for x in range(99999) %}{% for y in range(99999) %}{% endfor %}{% endfor %}"
    )
    assert "seconds" in failure(source)


@pytest.mark.parametrize(
    "source", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ messages[0] + 1 }}"]
)
def test_the_sandbox_and_wrong_types_are_template_failures(source):
    assert failure(source)


def test_an_invalid_template_is_a_model_error():
    with pytest.raises(ModelError, match="not valid"):
        ChatTemplate({"default": "{% for %}"}, {})


BOMBS = (
    "{{ 'a' | center(90000000) }}",
    "{{ ('a' | center(90000000)) | center(4) }}",
    "{% autoescape 'a' | center(90000000) %}{% endautoescape %}",
    "{% set x = 'a' | center(90000000) %}",
    "{% if 'a' | center(90000000) %}{% endif %}",
)


@pytest.mark.parametrize("source", BOMBS)
def test_nothing_is_evaluated_while_a_template_is_compiled(monkeypatch, source):
    evaluated = []

    def evaluate(*given: object) -> str:
        evaluated.append(given)
        return "a"

    monkeypatch.setattr(sandbox, "FILTERS", {"center": evaluate})
    with contextlib.suppress(ModelError):
        ChatTemplate({"default": source}, {})
    assert not evaluated


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "9" * 5_000 + " }}",
        "{% for x in y %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "(" * 20_000 + ")" * 20_000 + " }}",
        "{{ " + "-" * 90_000 + "1 }}",
        "{% if x %}" * 5_000 + "{% endif %}" * 5_000,
        "a" * 300_000,
        "{{ 1 | " + "b" * 10_000 + " }}",
    ],
)
def test_a_template_error_is_one_short_line(source):
    with pytest.raises(ModelError) as failed:
        ChatTemplate({"default": source}, {})
    assert len(str(failed.value)) < 500 and "\n" not in str(failed.value)
    assert failed.value.__cause__ is failed.value.__context__ is None


def test_formats_filters_and_methods_of_usual_sizes_work():
    source = (
        "{{ '%5.1f|%-4s|' % (2.25, 'a') }}{{ '{:>4}'.format('b') }}{{ 'c' | center(5) }}"
        "{{ '1,2' | replace(',', ';') }}{{ [1, 2] | join('+') }}{{ ' '.join(['x', 'y']) }}"
        "{{ 'l\nm' | indent(2) }}{{ '%s' | format('z') }}{{ 7 % 4 }}"
        "{% autoescape false %}<{% endautoescape %}"
    )
    assert render(source, USER) == "  2.2|a   |   b  c  1;21+2x yl\n  mz3<"


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja", "mine.jinja"])
def test_the_file_with_a_broken_template_is_named(tmp_path, name):
    broken = "line one\n{% for %}"
    is_config = name.endswith(".json")
    (tmp_path / name).write_text(json.dumps({"chat_template": broken}) if is_config else broken)
    with pytest.raises(ModelError, match=rf"{name}.* is not valid: .*\(line 2\); correct it"):
        ChatTemplate.load(tmp_path, {}, str(tmp_path / name) if name == "mine.jinja" else None)


def test_templates_are_found_where_models_keep_them(tmp_path):
    assert ChatTemplate.load(tmp_path, {}) is None
    config = {"chat_template": "from config"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.load(tmp_path, {}).source == "from config"
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert ChatTemplate.load(tmp_path, {}).source == "from file"
    (tmp_path / "mine.jinja").write_text("mine")
    assert ChatTemplate.load(tmp_path, {}, str(tmp_path / "mine.jinja")).source == "mine"


def test_the_named_template_for_tools_is_used_with_tools(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.load(tmp_path, {})
    assert template.render(Chat((USER,))) == "plain"
    assert template.render(Chat((USER,), tools=({"name": "add"},))) == "tools"


def test_a_config_that_is_not_json_is_a_model_error(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{broken")
    with pytest.raises(ModelError, match="is not valid JSON"):
        ChatTemplate.load(tmp_path, {})


@pytest.mark.parametrize("config", [[], {"chat_template": 5}, {"chat_template": [{"name": "x"}]}])
def test_a_config_of_another_shape_is_a_model_error(tmp_path, config):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="must be a text or a list"):
        ChatTemplate.load(tmp_path, {})


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_pipe_in_place_of_a_template_does_not_block(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match="cannot be read"):
        ChatTemplate.load(tmp_path, {})
