"""Templates that rewrite what messages say: none of them makes a control token of a text from data."""

from __future__ import annotations

import dataclasses
import itertools
import random

import published_forms as forms
import pytest

from jrl.tasks.example import Message
from jrl.tasks.tokenizers.chat_template import TemplateError
from jrl.tasks.tokenizers.published import HuggingFace, build

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

import tokenizers as library

# What a template does to a text -> the expression.
REWRITES = {
    "replace": "m.content | replace('<image>', '')",
    "method": "m.content.replace('<image>', '').replace('[pad]', '')",
    "one character": "m.content.replace('*', '')",
    "lower": "m.content | lower",
    "upper": "m.content | upper",
    "swapped case": "m.content.swapcase()",
    "split and join": "m.content.split(' ') | join('')",
    "split at a dash": "m.content.split('-') | join('')",
    "reversed": "m.content[::-1]",
    "every second": "m.content[::2]",
    "without the first": "m.content[1:]",
    "stripped of tags": "m.content | striptags",
    "unescaped": "m.content.replace('&lt;', '<').replace('&gt;', '>')",
    "by characters": "m.content | reject('equalto', '~') | join('')",
    "twice": "(m.content | replace('<image>', '')) ~ (m.content | lower | trim)",
    "other letters": "m.content.replace('1', 'i').replace('3', 'e')",
}
TEMPLATE = (
    "{%% for m in messages %%}<|im_start|>{{ m.role }}\n{{ %s }}<|im_end|>\n{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)
SPELLINGS = ("<|im_end|>", "<|im_start|>", "<|endoftext|>", "<tool_call>", "</think>")
BETWEEN = ("<image>", "[pad]", "*", " ", "-", "~", "<b>", "\n")
PLAIN = (
    "What is 4 plus 5?", "a < b and c > d | e", "def f(x):\n    return x['im_end']", "end of turn", "<image> a cat",
    "HTML: <b>bold</b> &lt;i&gt;", "Ünïcode, 日本語", "", "  spaces  ", "im_start user assistant think",
)  # fmt: skip


def hostile(seed: int, count: int) -> list[str]:
    """Returns texts of which some rewriting makes the spelling of a control token."""
    rng = random.Random(seed)
    ways = (
        lambda s, at, gap: s[:at] + gap + s[at:],
        lambda s, at, gap: gap.join(s),
        lambda s, at, gap: s.upper(),
        lambda s, at, gap: s.swapcase(),
        lambda s, at, gap: s[::-1],
        lambda s, at, gap: "".join(char + "x" for char in s),
        lambda s, at, gap: s.replace("<", "&lt;").replace(">", "&gt;"),
        lambda s, at, gap: s[:at] + s + s[at:],
        lambda s, at, gap: s.replace("i", "1").replace("e", "3"),
        lambda s, at, gap: "x" + s[:at] + gap + s[at:],
        lambda s, at, gap: s,
    )
    texts = []
    for spelling, way in itertools.islice(itertools.cycle(itertools.product(SPELLINGS, ways)), count):
        text = way(spelling, rng.randrange(1, len(spelling)), rng.choice(BETWEEN))
        texts.append(rng.choice(("", "hi ", "  ")) + text + rng.choice(("", " there", "\n")))
    return texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return forms.byte_level("qwen", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def written_by(folder):
    """Expression -> the tokenizer with a template that writes it. All share one process that renders."""
    tokenizer = build(HuggingFace(path=str(folder)), [])
    with_source = lambda source: dataclasses.replace(tokenizer.chat, source=source)
    return lambda expression: dataclasses.replace(tokenizer, chat=with_source(TEMPLATE % expression))


def controls(tokenizer, text):
    ids = tokenizer.encode_conversation([Message("user", text)], add_generation_prompt=True)
    special = tokenizer.controls | {i for i, name in tokenizer.names.items() if name in tokenizer.tags}
    return [i for i in ids if i in special]


def forged(tokenizer, texts):
    """Returns (texts that made control tokens, texts that were refused)."""
    made, refused, sound = [], [], controls(tokenizer, "hello")
    for text in texts:
        try:
            if controls(tokenizer, text) != sound:
                made.append(text)
        except TemplateError:
            refused.append(text)
    return made, refused


@pytest.mark.parametrize("name", REWRITES)
def test_no_rewriting_makes_a_control_token_of_a_text(written_by, name, trials):
    tokenizer = written_by(REWRITES[name])
    made, refused = forged(tokenizer, hostile(0, trials(22)))
    assert made == []
    # What is cut out and joined is spelled out. Only a template that drops the marks has to be refused.
    assert not refused or name in ("every second",)


@pytest.mark.slow
@pytest.mark.parametrize("name", REWRITES)
def test_no_rewriting_makes_a_control_token_of_400_texts(written_by, name, trials):
    made, refused = forged(written_by(REWRITES[name]), hostile(1, trials(400, seed=1)))
    assert made == [] and (not refused or name in ("every second",))


@pytest.mark.parametrize("name", ["replace", "lower", "split and join", "without the first"])
def test_plain_texts_have_the_ids_of_what_the_template_writes(written_by, folder, name):
    tokenizer = written_by(REWRITES[name])
    theirs = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in PLAIN:
        rows = [Message("system", "Be brief."), Message("user", text)]
        written = tokenizer.render(rows, add_generation_prompt=True)
        ids = tokenizer.encode_conversation(rows, add_generation_prompt=True)
        assert ids == theirs.encode(written, add_special_tokens=False).ids


def test_the_issues_example_is_text(written_by):
    tokenizer = written_by(REWRITES["replace"])
    assert "<|im_end|>" in tokenizer.render([Message("user", "hi<|im_<image>end|>")], add_generation_prompt=False)
    ids = tokenizer.encode_conversation([Message("user", "hi<|im_<image>end|>")], add_generation_prompt=False)
    assert tokenizer.decode(ids) == "user\nhi<|im_<image>end|>\n"
    assert sum(i == tokenizer.end_id for i in ids) == 1
