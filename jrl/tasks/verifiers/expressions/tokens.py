r"""Tokens of LaTeX and of the plain notation that models write: numbers, letters, commands, signs, text.

Spacing, sizes (\left, \big) and math-mode dollars are dropped. Thousands are distinguished from lists here: `1,000`,
`1{,}000`, `1,\!000`, `1,\! 000` and `1\,000` are one number, and `1, 000` is two.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from jrl.tasks.verifiers.expressions.terms import NoAnswer

MAX_CHARACTERS = 4_096
MAX_TOKENS = 1_024
MAX_DIGITS = 1_000
MAX_DEPTH = 32  # of brackets

OPENING = {"(": "round", "[": "round", "{": "brace", r"\{": "set", r"\langle": "angle", r"\lfloor": "floor",
           r"\lceil": "ceil"}  # fmt: skip
CLOSING = {")": "round", "]": "round", "}": "brace", r"\}": "set", r"\rangle": "angle", r"\rfloor": "floor",
           r"\rceil": "ceil"}  # fmt: skip
# Names that may be written without a backslash.
PLAIN_NAMES = frozenset("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp sqrt pi".split())
_ALIASES = {
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\dbinom": r"\binom", r"\tbinom": r"\binom",
    r"\leq": r"\le", r"\leqslant": r"\le", r"\geq": r"\ge", r"\geqslant": r"\ge", r"\neq": r"\ne", r"\lt": "<",
    r"\gt": ">", r"\lbrace": r"\{", r"\rbrace": r"\}", r"\vert": "|", r"\lvert": "|", r"\rvert": "|",
    r"\ast": "*", r"\colon": ":", r"\varnothing": r"\emptyset", r"\varphi": r"\phi", r"\varepsilon": r"\epsilon",
    r"\%": "%", r"\lbrack": "[", r"\rbrack": "]", r"\land": r"\wedge", r"\lor": r"\vee", r"\bar": r"\overline",
    r"\exponentialE": "e", r"\imaginaryI": "i",
}  # fmt: skip
_UNICODE = str.maketrans({
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "≤": r"\le ", "≥": r"\ge ",
    "≠": r"\ne ", "∞": r"\infty ", "√": r"\sqrt ", "°": r"\degree ", "∪": r"\cup ", "∅": r"\emptyset ", "±": r"\pm ",
    "θ": r"\theta ", "²": "^2", "³": "^3", "\u00a0": " ", "\t": " ", "\n": " ", "\r": " ",
})  # fmt: skip
_TEXT = "text|textbf|textit|textrm|textsf|textnormal|mbox|mathrm|mathbf|mathit|mathsf|mathtt|operatorname|boldsymbol|bm"
_TOKEN = re.compile(
    r"(?P<blank>(?: |~|\\[,;:! ]|\\(?:left|right|[bB]igg?[lrm]?|q?quad|thinspace|displaystyle|textstyle|limits)"
    r"(?![A-Za-z]))+)"
    r"|(?P<number>[1-9][0-9]{0,2}(?:(?:\{,\}|,\\!|\\,) ?[0-9]{3})+(?![0-9])(?:\.[0-9]+)?"
    r"|[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9]|,[0-9])(?:\.[0-9]+)?"
    r"|[0-9]*\.[0-9]*(?=\\(?:overline|bar)(?![A-Za-z]))"
    r"|(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4}(?![0-9.]))?)"
    r"|(?P<degree>\^ ?(?:\{ ?\\circ ?\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z]))"
    r"|(?P<environment>\\(?:begin|end) ?\{[A-Za-z]{1,16}\})"
    rf"|(?P<text>\\(?:{_TEXT}) ?\{{[^{{}}\\$]*\}})"
    r"|(?P<command>\\(?:[A-Za-z]{1,32}|.))"
    r"|(?P<letter>[A-Za-z])"
    r"|(?P<sign>[-+*/^_(){}\[\].,;:!|=<>%&$'])"
)


class Token(NamedTuple):
    kind: str  # number, letter, command, sign, text, environment or degree
    text: str
    spaced: bool = False  # a space precedes it


def tokenize(text: str) -> list[Token]:
    """Returns the tokens of an answer.

    Raises:
        NoAnswer: an unsupported character, mismatched brackets, an unpaired dollar, or more than the caps allow.
    """
    if len(text) > MAX_CHARACTERS:
        raise NoAnswer(f"{len(text)} characters; at most {MAX_CHARACTERS} are read")
    text = text.translate(_UNICODE)
    tokens: list[Token] = []
    position, spaced = 0, False
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise NoAnswer(f"the character {text[position]!r} is not read")
        position = match.end()
        kind, word = match.lastgroup or "", match[0]
        if kind == "blank":
            spaced = True
            continue
        tokens.extend(_token(kind, word, spaced))
        spaced = False
        if len(tokens) > MAX_TOKENS:
            raise NoAnswer(f"more than {MAX_TOKENS} tokens")
    _check_brackets(tokens)
    return _without_dollars(tokens)


def _token(kind: str, word: str, spaced: bool) -> list[Token]:
    match kind:
        case "number":
            if len(word) > MAX_DIGITS:
                raise NoAnswer(f"a number of more than {MAX_DIGITS} digits")
            # A comma without a space after it stays: whether it is a thousands separator depends on the context.
            return [Token(kind, re.sub(r"(?:\{,\}|,\\!|\\,) ?", "", word), spaced)]
        case "degree":
            return [Token(kind, "degree", spaced)]
        case "environment":
            return [Token(kind, word.replace(" ", ""), spaced)]
        case "text":
            command, _, content = word[1:-1].partition("{")
            content = " ".join(content.split())
            if content in PLAIN_NAMES:
                return [Token("command", f"\\{content}", spaced)]
            if command.startswith(("mathrm", "operatorname")):
                letter = re.fullmatch("[ei]", content)
            else:
                letter = re.fullmatch("[A-Za-z]", content) if command.startswith(("math", "bold", "bm")) else None
            if letter:
                return [Token("letter", content, spaced)]
            if re.fullmatch(r"[0-9]{1,100}(?:\.[0-9]{1,100})?", content):
                return [Token("number", content, spaced)]
            return [Token("text", content, spaced)]
        case "command":
            name = _ALIASES.get(word, word)
            if name.startswith("\\"):
                return [Token("command", name, spaced)]
            return [Token("letter" if name.isalpha() else "sign", name, spaced)]
    return [Token(kind, word, spaced)]


def _check_brackets(tokens: list[Token]) -> None:
    """Raises NoAnswer if brackets do not match. Round and square brackets may close each other (intervals)."""
    stack: list[str] = []
    for token in tokens:
        if token.text in OPENING and token.kind in ("sign", "command"):
            stack.append(OPENING[token.text])
            if len(stack) > MAX_DEPTH:
                raise NoAnswer(f"brackets more than {MAX_DEPTH} deep")
        elif token.text in CLOSING and token.kind in ("sign", "command"):
            if not stack or stack.pop() != CLOSING[token.text]:
                raise NoAnswer("brackets that do not match")
    if stack:
        raise NoAnswer("brackets that do not match")


def _without_dollars(tokens: list[Token]) -> list[Token]:
    r"""Returns the tokens without pairs of dollars and \( \) \[ \]. A single dollar at the beginning is a currency."""
    plain = [token for token in tokens if token.text not in (r"\(", r"\)", r"\[", r"\]")]
    dollars = sum(token.text == "$" for token in plain)
    if dollars == 1 and plain[0].text == "$":
        return [Token("command", r"\$", plain[0].spaced), *plain[1:]]
    if dollars % 2:
        raise NoAnswer("a single dollar")
    return [token for token in plain if token.text != "$"]
