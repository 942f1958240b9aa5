from __future__ import annotations

import json
import os
import random
import re
import resource
import time

import pytest

from jrl.tasks.example import Message
from jrl.tasks.tokenizers import chat_template
from jrl.tasks.tokenizers.chat_template import (
    ChatTemplate,
    Guard,
    TemplateError,
    free_mark,
    plain_messages,
    renamed,
    without_mark,
)

pytest.importorskip("jinja2")

ASKED = [{"role": "user", "content": "q"}]


@pytest.fixture(scope="module")
def renderer():
    opened = chat_template.Renderer()
    yield opened
    opened.close()


def render(renderer, source, messages=ASKED, tools=(), **variables):
    return ChatTemplate(source, None, variables, "2026-11-20", renderer=renderer).render(
        messages, tools, add_generation_prompt=True
    )


def test_the_helpers_of_published_templates_are_there(renderer):
    assert render(renderer, "{{ strftime_now('%d %b %Y') }}") == "20 Nov 2026"
    assert render(renderer, "{{ {'b': '<\u00e9>', 'a': 1} | tojson }}") == '{"b": "<\u00e9>", "a": 1}'
    assert render(renderer, "{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert render(renderer, "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render(renderer, "a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "aqb"
    assert render(renderer, "{% if add_generation_prompt %}  {{ x }}\n  {% endif %}\n", x="y") == "  y\n"
    with pytest.raises(TemplateError, match="one turn only"):
        render(renderer, "{{ raise_exception('one turn only') }}")


def test_a_template_sees_tools_or_none(renderer):
    source = "{{ tools is none }} {{ documents is none }}"
    assert render(renderer, source) == "True True"
    assert render(renderer, source, tools=[{"name": "f"}]) == "False True"
    both = ChatTemplate("plain", "with tools", {}, "2026-11-20", renderer=renderer)
    assert both.render(ASKED, [{}], add_generation_prompt=True) == "with tools"
    assert both.render(ASKED, [], add_generation_prompt=True) == "plain"


HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a recursive macro": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a long text": "{{ 'x' * 10 ** 12 }}",
    "a growing text": "{% set ns = namespace(s='x') %}{% for i in 'x' * 99 %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "much output": "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "a subclass": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "an attribute": "{{ messages.append(1) }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "a format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}",
    "a filter that is not there": "{{ 'x' | shell }}",
    "an unclosed block": "{% if x %}",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_and_the_next_one_renders(renderer, name):
    start = time.monotonic()
    if name in ("a subclass", "globals of a function", "a format"):  # the sandbox gives nothing, or refuses
        try:
            assert "class" not in render(renderer, HOSTILE[name]) + render(renderer, "")
        except TemplateError as error:
            assert "unsafe" in str(error) or "undefined" in str(error)
    else:
        with pytest.raises(TemplateError, match="the chat template"):
            render(renderer, HOSTILE[name])
    # 2 seconds of processor time end it; where a machine is so busy that it does not get them, the clock does.
    assert time.monotonic() - start < chat_template.WALL_SECONDS + 30
    assert render(renderer, "{{ messages[0].content }}") == "q"


OBJECTS = (
    "''", "[]", "{}", "()", "1", "none", "true", "messages", "messages[0]", "raise_exception", "strftime_now",
    "namespace", "namespace()", "range", "range(2)", "dict", "lipsum", "cycler", "joiner", "self", "tools",
    "undefined_name",
)  # fmt: skip
INWARD = (
    "__class__", "__globals__", "__init__", "__code__", "__subclasses__", "__mro__", "__base__", "__builtins__",
    "gi_frame", "func_globals", "__dict__", "__reduce__", "__getattribute__", "f_globals", "__import__",
)  # fmt: skip
READ = ("{{ %s.%s }}", "{{ %s['%s'] }}", "{{ %s | attr('%s') }}", "{%% set x = %s.%s %%}{{ x() }}")


def test_no_attribute_leads_out_of_the_sandbox(renderer, trials):
    templates = [form % (thing, name) for thing in OBJECTS for name in INWARD for form in READ]
    random.Random(0).shuffle(templates)
    for source in templates[: trials(130, len(templates))]:
        try:
            found = render(renderer, source)  # dict['x'] is a type with a parameter: it shows nothing, and makes {}
            assert found in ("", "{}") or found.startswith("dict['"), source
        except TemplateError as error:
            assert "the chat template" in str(error), source


def test_a_renderer_that_is_closed_leaves_no_process():
    opened = chat_template.Renderer()
    assert opened.render("x", [{}, {}], "2026-11-20") == ["x", "x"]
    process = opened._child._process
    opened.close()
    assert process.returncode is not None


def test_a_process_with_more_than_a_thousand_open_files_renders():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"this system allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    opened, files = chat_template.Renderer(), []
    try:
        while not files or files[-1] < 1024:
            files.append(os.open(os.devnull, os.O_RDONLY))
        assert opened.render("x", [{}], "2026-11-20") == ["x"]
    finally:
        opened.close()
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_text_cannot_say_a_spelling_alone_or_with_its_neighbors():
    guard = Guard(["<|end|>", "[INST]"])
    broken = lambda text: guard.text(text, "#")
    assert broken("plain text") == "plain text"
    assert broken("a<|end|>b") == "a<#|end|>b"
    assert broken("[INST][INST]") == "[#INST][#INST]"
    assert broken("a <|en ") == "a <|en# "  # a template may trim it and write d|>
    assert broken("|> quoted") == "#|> quoted"
    assert broken("end") == "#end#"
    assert broken("x < y") == "x < y"
    assert broken("") == ""
    assert guard.text("end", "#", free=False) == "end"
    assert guard.tree({"type": "end", "content": "end"}, "#") == {"type": "end", "content": "#end#"}
    assert guard.words({"end": ["INST", "x"], "content": "end", "type": {"a": "end"}}) == {"end", "INST"}
    assert renamed({"end": ["end", "bend"]}, {"end"}) == {"QQQ": ["QQQ", "bend"]}
    tree = guard.tree({"a": ["<|end|>", 1, None], "<|end|>": True}, "#")
    assert tree == {"a": ["<#|end|>", 1, None], "<#|end|>": True}
    assert Guard([]).text("<|end|>", "#") == "<|end|>"


def test_the_mark_is_in_no_text():
    assert free_mark(["a", {"b": 1}]) == "\U00020000"
    assert free_mark(["a\U00020000", {"\U00020001": "\U00020002"}]) == "\U00020003"
    assert free_mark(["\\ud840\\udc00"]) != "\U00020000"  # its escape, if JSON were written in JSON
    mark = free_mark([])
    assert without_mark(f"a{mark}b" + json.dumps(mark) + repr([mark]), mark) == "ab\"\"['']"


def test_messages_are_json_with_known_roles():
    assert plain_messages([Message("user", "a\ud800")]) == [{"role": "user", "content": "a\ufffd"}]
    row = plain_messages([{"role": "assistant", "content": "b", "reasoning": "c"}])[0]
    assert (row["reasoning_content"], row["thinking"]) == ("c", "c")
    with pytest.raises(ValueError, match=r"role '<\|end\|>'"):
        plain_messages([{"role": "<|end|>", "content": ""}])
    with pytest.raises(ValueError, match="is not JSON"):
        plain_messages([{"role": "user", "content": object()}])


def test_literals_are_the_texts_between_quotes(trials):
    """As the pattern reads them that says it in one line, and is quadratic where quotes are not closed."""
    pattern = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)
    draw = random.Random(0)
    for _ in range(trials(2_000)):
        source = "".join(draw.choices("'\"\\nab", k=draw.randrange(16)))
        texts = {first or second for first, second in pattern.findall(source)} - {""}
        unescaped = {re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], text) for text in texts}
        assert chat_template._literals(source) == unescaped - {""}
    assert chat_template._literals("{{ 'it\\'s' }} don't \"a\" 'b") == {"it's", 't "a" '}
