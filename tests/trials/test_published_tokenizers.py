"""Tokenizers in each published form against `transformers`, on 10,000 strings, and templates on 40 conversations.

pytest -m slow tests/trials/test_published_tokenizers.py -s

Needs the [reference] extra. Text that spells a control token is compared in the two ways that have a counterpart: as
the text of a template (transformers' default), and as data (its split_special_tokens).
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import random
import unicodedata
from pathlib import Path

import published_forms as forms
import pytest

from jrl.tasks.tokenizers.published import HuggingFace, build

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")

STRINGS = 10_000
ROOT = Path(__file__).parents[2]
CORPUS = [*forms.TEXTS, *(path.read_text() for path in sorted((ROOT / "jrl" / "tasks" / "tokenizers").glob("*.py")))]
CORPUS = [line for text in CORPUS for line in text.splitlines(keepends=True)]
MARKS = [chr(c) for c in range(0x300, 0x370) if unicodedata.combining(chr(c))]
EMOJI = [
    "\U0001f389",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467",
    "\U0001f1eb\U0001f1f7",
    "\u2764\ufe0f",
    "\U0001f44d\U0001f3fd",
]
CODE = [
    "for (int i=0;i<n;++i)",
    "x = {'a': [1, 2]}",
    '\t\treturn f"{x!r}"',
    "// \\n",
    "a->b::c<d>()",
    "0x1F+1e-5",
    "__init__",
]


def strings(specials: list[str], *, draw: random.Random, count: int = STRINGS) -> list[str]:
    """Returns `count` strings of words, emoji, combining marks, code, runs of blanks, every plane, and specials."""
    words = sorted({word for line in CORPUS for word in line.split()})

    def point() -> str:
        while True:
            char = chr(draw.randrange(17) << 16 | draw.randrange(1 << 16))
            if not 0xD800 <= ord(char) < 0xE000:
                return char

    kinds = [
        lambda: draw.choice(words), lambda: draw.choice(words) + " ", lambda: draw.choice(EMOJI),
        lambda: draw.choice("aeiouncs\u05d0\u0915") + draw.choice(MARKS),
        lambda: draw.choice(CODE),
        lambda: draw.choice(" \n\t\r\u00a0\u3000\u2003") * draw.randrange(1, 9), point,
        lambda: str(draw.randrange(10**8)),
        lambda: draw.choice("\u65e5\u672c\u8a9e\u0440\u0443\u0441\u0639\u0631\u0628"),
        lambda: "'" + draw.choice(["s", "T", "re", "LL", "x"]),
    ]  # fmt: skip
    if specials:
        kinds.append(lambda: draw.choice(specials))
    texts = ["", *specials, *(chr(plane << 16 | 0x41) for plane in range(17))]
    while len(texts) < count:
        texts.append("".join(draw.choice(kinds)() for _ in range(draw.randrange(1, 12))))
    return texts


def unigram_json(folder: Path, model: bytes) -> Path:
    """Writes the `tokenizer.json` of a unigram `.model`, in the form that published conversions have."""
    import sentencepiece
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    proto = sentencepiece.SentencePieceProcessor(model_proto=model)
    vocab = [(proto.id_to_piece(i), proto.get_score(i)) for i in range(proto.vocab_size())]
    tokenizer = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                      decoders.Strip(" ", 1, 0)])  # fmt: skip
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    return forms.write_json(folder, {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": config})


def unigram_model(folder: Path) -> Path:
    """Writes a folder with a unigram `.model`, and beside it one with its `tokenizer.json`: transformers reads a
    unigram `.model` by itself only for the families that publish one."""
    model = forms.sentencepiece_model("unigram", texts=CORPUS, vocab_size=2000)
    unigram_json(folder.with_name("theirs"), model)
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": False, "legacy": False}
    forms.write_json(folder, {"tokenizer_config.json": config})
    (folder / "tokenizer.model").write_bytes(model)
    return folder


def unigram_scores(folder: Path) -> list[float]:
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_proto=(folder / "tokenizer.model").read_bytes())
    return [model.get_score(i) for i in range(model.vocab_size())]


def llama_model(folder: Path, *, legacy: bool) -> Path:
    """Writes a sentencepiece BPE folder as Llama 2 and Mistral publish it, without a tokenizer.json."""
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
              "add_bos_token": True, "legacy": legacy}  # fmt: skip
    forms.write_json(folder, {"tokenizer_config.json": config, "config.json": {"model_type": "llama"}})
    (folder / "tokenizer.model").write_bytes(forms.sentencepiece_model("bpe", texts=CORPUS, vocab_size=2000))
    return folder


def converted(folder: Path, source: Path) -> Path:
    """Writes what transformers makes of a folder: a tokenizer.json converted from the sentencepiece file."""
    transformers.AutoTokenizer.from_pretrained(str(source)).save_pretrained(str(folder))
    return folder


def gemma_model(folder: Path) -> Path:
    """Writes a sentencepiece BPE folder as Gemma publishes it: turn markers are symbols, no blank goes in front."""
    config = {"tokenizer_class": "GemmaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
              "pad_token": "<pad>", "add_bos_token": True}  # fmt: skip
    symbols = ("<pad>", "<start_of_turn>", "<end_of_turn>", "\n\n", "\n\n\n")
    forms.write_json(folder, {"tokenizer_config.json": config, "config.json": {"model_type": "gemma"}})
    model = forms.sentencepiece_model("bpe", texts=CORPUS, vocab_size=2000, dummy_prefix=False, symbols=symbols)
    (folder / "tokenizer.model").write_bytes(model)
    return folder


FORMS = {
    "sentencepiece bpe, gemma": gemma_model,
    "gpt2": lambda at: forms.byte_level("gpt2", at, texts=CORPUS, vocab_size=2000),
    "llama3": lambda at: forms.byte_level("llama3", at, texts=CORPUS, vocab_size=2000),
    "qwen": lambda at: forms.byte_level("qwen", at, texts=CORPUS, vocab_size=2000),
    "phi": lambda at: forms.byte_level("phi", at, texts=CORPUS, vocab_size=2000),
    "sentencepiece bpe": lambda at: llama_model(at, legacy=False),
    "sentencepiece bpe, legacy": lambda at: llama_model(at, legacy=True),
    "sentencepiece bpe, converted": lambda at: converted(at, llama_model(at.with_name("source"), legacy=False)),
    "sentencepiece unigram": unigram_model,
    "sentencepiece unigram, converted": lambda at: unigram_json(
        at, forms.sentencepiece_model("unigram", texts=CORPUS, vocab_size=2000)
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_ids_and_round_trips_equal_those_of_transformers(form, tmp_path):
    folder = FORMS[form](tmp_path / "model")
    reference = folder.with_name("theirs") if folder.with_name("theirs").exists() else folder
    theirs = transformers.AutoTokenizer.from_pretrained(str(reference))
    ours = build(HuggingFace(path=str(folder)), [])
    specials = [text for i, text in ours.names.items() if i in ours.controls]
    draw = random.Random(0)
    every, _ = ours._patterns
    ties = []

    def tie(a: list[int], b: list[int]) -> bool:
        """Two cuts of one text that a unigram model likes equally; its libraries break such ties differently."""
        if form != "sentencepiece unigram":
            return False
        score = lambda ids: sum(scores[i] for i in ids)
        same = ours.decode(a) == ours.decode(b) and abs(score(a) - score(b)) < 1e-4
        ties.extend([a] if same else [])
        return same

    scores = unigram_scores(folder) if form == "sentencepiece unigram" else []
    forged, differ = 0, {"as a template's text": [], "as data": [], "decoded": []}
    for text in strings(specials, draw=draw):
        literal = ours._ids(ours.speller.spell(text, every))
        reference = theirs(text, add_special_tokens=False).input_ids
        if literal != reference and not tie(literal, reference):
            differ["as a template's text"].append(text)
        ids = ours.encode(text)
        assert not ours.controls.intersection(ids)
        reference = theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
        if not ours.controls.isdisjoint(reference):
            forged += 1  # a vocabulary that holds "</s>" as a word says it: what ours must never do
        elif ids != reference and not ("unigram" in form and "<unk>" in text) and not tie(ids, reference):
            differ["as data"].append(text)
        for some in (ids, literal):
            if ours.decode(some) != theirs.decode(some, skip_special_tokens=True, clean_up_tokenization_spaces=False):
                differ["decoded"].append(text)
    counts = {name: len(actual) for name, actual in differ.items()}
    print(f"\n{form}: {ours.filled} ids, {STRINGS} strings, different {json.dumps(counts)}; "
          f"{forged} where transformers makes a control of data; {len(ties)} ties")  # fmt: skip
    for name, actual in differ.items():
        assert not actual, (name, len(actual), sorted(actual, key=len)[:5])
    assert ours.start_ids == tuple(theirs("").input_ids)


def conversations(draw: random.Random, count: int = 40) -> list[tuple[list[dict], list[dict] | None]]:
    """Returns conversations of one to nine turns: with and without a system message, tools, calls, and thinking."""
    text = lambda: " ".join(draw.choice(WORDS) for _ in range(draw.randrange(1, 9)))
    out = []
    for n in range(count):
        messages = [{"role": "system", "content": text()}] if n % 3 == 0 else []
        tools = [tool(name) for name in ("add", "weather")[: 1 + n % 2]] if n % 4 == 1 else None
        for turn in range(1 + n % 4):
            messages.append({"role": "user", "content": text()})
            if turn == n % 4 and n % 5 != 0:
                break
            if tools and turn == 0:
                call = {
                    "type": "function",
                    "function": {"name": "add", "arguments": {"a": n, "b": [text(), None, 1.5]}},
                }
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
                messages.append({"role": "tool", "content": json.dumps({"sum": text()})})
            answer = {"role": "assistant", "content": text()}
            if n % 7 == 2:
                answer["reasoning_content"] = text()
            if n % 7 == 3:
                answer["content"] = f"<think>\n{text()}\n</think>\n\n{text()}"
            messages.append(answer)
        out.append((messages, tools))
    return out


def tool(name: str) -> dict:
    fields = {"type": "object", "properties": {"a": {"type": "integer", "description": "\u00e9"}}, "required": ["a"]}
    description = f"It does {name} <well> & 'so'."
    return {"type": "function", "function": {"name": name, "description": description, "parameters": fields}}


WORDS = ["hello", "12+34", "\u65e5\u672c\u8a9e", "\U0001f389", "def f(x):\n    return x",
         "  two blanks ", "\n", "'quoted'", '"a"',
         "> quote", "a < b", "</p>", "{{ x }}", "{% if %}", "end", "user", "e\u0301", "\t"]  # fmt: skip


def compare(folder: Path, options: dict | None = None) -> tuple[int, int]:
    """Asserts that conversations render equal, to text and to ids. Returns how many did, and how many both refuse."""
    options = options or {}
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    bindings = tuple(f"{name}={json.dumps(value)}" for name, value in options.items())
    config = HuggingFace(path=str(folder), template_options=bindings, date=datetime.date.today().isoformat())
    ours = build(config, [])
    rendered = refused = 0
    for messages, tools in conversations(random.Random(1)):
        for ask in (True, False):
            how = {"tools": tools, "add_generation_prompt": ask, **options}
            try:
                text = theirs.apply_chat_template(messages, tokenize=False, **how)
            except Exception:
                with pytest.raises(ValueError, match="chat template"):
                    ours.render(messages, tools or [], add_generation_prompt=ask)
                refused += 1
                continue
            assert ours.render(messages, tools or [], add_generation_prompt=ask) == text
            ids = ours.encode_conversation(messages, tools or [], add_generation_prompt=ask)
            if not any(tag in str(messages) for tag in ours.tags):
                assert ids == theirs(text, add_special_tokens=False).input_ids, text
            rendered += 1
    return rendered, refused


@pytest.mark.parametrize("form", ["qwen", "llama3", "gemma", "mistral", "phi"])
def test_conversations_render_equal_to_transformers(form, tmp_path):
    rendered, refused = compare(forms.byte_level(form, tmp_path / form))
    print(f"\n{form}: {rendered} renderings equal in text and ids, {refused} refused by both")
    assert rendered >= 20


def test_options_render_equal_to_transformers(tmp_path):
    rendered, _ = compare(forms.byte_level("qwen", tmp_path / "qwen"), {"enable_thinking": False})
    assert rendered == 80


def trl_templates() -> list[Path]:
    """The chat templates inside the installed TRL, without importing it."""
    actual = importlib.util.find_spec("trl")
    return [] if actual is None else sorted(Path(actual.submodule_search_locations[0]).glob("chat_templates/*.jinja"))


@pytest.mark.parametrize("path", trl_templates(), ids=lambda path: path.stem)
def test_templates_of_trl_render_equal_to_transformers(path, tmp_path):
    folder = forms.byte_level("qwen", tmp_path / "model", template=path.read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    forms.write_json(folder, {"tokenizer_config.json": config | {"bos_token": "<|endoftext|>"}})
    rendered, refused = compare(folder)
    print(f"\n{path.stem}: {rendered} equal, {refused} refused by both")
    assert rendered
