r"""Forms: the structure of an answer (scalar, tuple, list, set, relation, matrix, ...), before values are compared.

A form is parsed from tokens, outermost first; its scalars become terms. docs/math-answers.md has the policy, row by
row.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from jrl.tasks.verifiers.expressions.parser import GREEK, parse
from jrl.tasks.verifiers.expressions.terms import NAMES, NoAnswer, Terms
from jrl.tasks.verifiers.expressions.tokens import CLOSING, OPENING, PLAIN_NAMES, Token, tokenize

MAX_ELEMENTS = 256  # of lists, sets and matrices
MAX_LABELS = 2  # of a quantity, such as dollars and millions
RELATIONS = ("=", "<", ">", r"\le", r"\ge", r"\ne", r"\in")
_DOWNWARD = {">": "<", r"\ge": r"\le"}
# Runs of letters that mean a product. Other runs of letters in a gold answer are words.
_PRODUCTS = re.compile("[abc]{2,3}|[xyz]{2,3}|[mn]{2}|[kn]{2}|[pqr]{2,3}|[rst]{2,3}|[uvw]{2,3}")
_ATOM = r"(?:[A-Za-z]|\\[A-Za-z]+)(?:_(?:\{[^{}]*\}|[A-Za-z0-9]))?'*"
_NAME = re.compile(rf"{_ATOM}(?:\({_ATOM}(?:,{_ATOM})*\))?|\({_ATOM}(?:,{_ATOM})+\)|[A-Z]{{2,4}}")
_UNIT_NAMES = {"percent": "%", "degree": "degree", "dollar": "$", "usd": "$"}


class Form(NamedTuple):
    """kind: scalar, infinity, numeral, name, list, set, union, difference, tuple, ratio, matrix, labeled, named
    (`x = 5`), member (`x \\in S`), relation or chain (a < x < b)."""

    kind: str
    label: str = ""  # compared as text: brackets, unit, relation, base, shape
    parts: tuple[Form, ...] = ()
    term: int = -1  # of a scalar; for a relation left - right, if both are scalars
    is_decimal: bool = False  # a number with a decimal point


@dataclasses.dataclass
class Reader:
    """The context for parsing forms."""

    terms: Terms
    letters: frozenset[str]  # of the gold answer
    unit: str | None = None  # of the gold answer; None: the gold answer itself is being parsed
    commas_separate: bool = False  # `100,200` is two numbers


def letters_of(tokens: Sequence[Token]) -> frozenset[str]:
    return frozenset(token.text for token in tokens if token.kind == "letter")


def word(text: str) -> str | None:
    r"""Returns a case-folded word, or a choice (a capital letter, with or without parentheses); None if it is neither.

    `xy`, `abc` and the like are products, so neither they nor function names are words.
    """
    text = re.sub(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox) ?\{([^{}]*)\}", r"\1", text.strip().strip("$"))
    text = " ".join(re.sub(r"\\[,;:! ]|~|\\(?:left|right)(?![A-Za-z])", " ", text).split()).removesuffix(".")
    choice = re.fullmatch(r"\( ?([A-Z]) ?\)|([A-Z])", text)
    if choice:
        return choice[1] or choice[2]
    if not re.fullmatch(r"[A-Za-z][A-Za-z' -]*", text) or not re.search("[A-Za-z]{2}", text):
        return None
    if text in PLAIN_NAMES or _PRODUCTS.fullmatch(text) or re.search("[A-Za-z] ?- ?[A-Za-z](?![A-Za-z])", text):
        return None
    return text.casefold()


def phrase(text: str) -> str:
    """Returns the case-folded text without text commands and repeated spaces, to compare gold answers that are not
    mathematics."""
    text = re.sub(r"\\(?:text|textbf|textit|textrm|mathrm|mbox) ?\{([^{}]*)\}", r"\1", text)
    return " ".join(re.sub(r"\\[,;:! ]|~|\$", " ", text).split()).casefold().removesuffix(".")


def read_answer(text: str, reader: Reader) -> Form:
    """Returns the form of a text. Raises NoAnswer if it cannot be parsed as one answer."""
    return _list(_unwrapped(tokenize(text)), reader)


def _unwrapped(tokens: list[Token]) -> list[Token]:
    r"""Removes what surrounds the whole answer: braces, \boxed{} and \text{}."""
    for _ in range(4):
        if len(tokens) > 1 and tokens[0].text in (r"\boxed", r"\fbox") and tokens[1].text == "{":
            tokens = tokens[1:]
        if len(tokens) > 2 and tokens[0].text == "{" and _closing(tokens, 0) == len(tokens) - 1:
            tokens = tokens[1:-1]
        elif len(tokens) == 1 and tokens[0].kind == "text":
            tokens = tokenize(tokens[0].text)
        else:
            break
    if not tokens:
        raise NoAnswer("nothing where an answer should be")
    return tokens


def _closing(tokens: Sequence[Token], start: int) -> int:
    """Returns the index of the bracket that closes the one at `start`; tokenize() has checked that there is one."""
    depth = 0
    for index in range(start, len(tokens)):
        depth += _depth(tokens[index])
        if depth == 0:
            return index
    raise NoAnswer("brackets that do not match")


def _depth(token: Token) -> int:
    if token.kind == "environment":
        return 1 if token.text.startswith(r"\begin") else -1
    if token.kind not in ("sign", "command"):
        return 0
    return (token.text in OPENING) - (token.text in CLOSING)


def _outside(tokens: Sequence[Token]) -> list[int]:
    """Returns the indices of the tokens outside all brackets."""
    depth, indices = 0, []
    for index, token in enumerate(tokens):
        change = _depth(token)
        depth += min(change, 0)
        if depth == 0 and change == 0:
            indices.append(index)
        depth += max(change, 0)
        if depth < 0:
            raise NoAnswer("brackets that do not match")
    return indices


def _split(tokens: Sequence[Token], indices: Sequence[int]) -> list[list[Token]]:
    """Returns the tokens split at the ones with these indices. Raises NoAnswer for an empty element."""
    ends = [*indices, len(tokens)]
    starts = [0, *(index + 1 for index in indices)]
    if len(ends) > MAX_ELEMENTS:
        raise NoAnswer(f"more than {MAX_ELEMENTS} elements")
    pieces = [list(tokens[start:end]) for start, end in zip(starts, ends)]
    if not all(pieces):
        raise NoAnswer("nothing where an element should be")
    return pieces


def _with_commas(tokens: list[Token], separate: bool) -> list[Token]:
    """Returns the tokens with commas in numbers outside brackets resolved: removed, or with `separate` as separators
    between numbers."""
    result: list[Token] = []
    outside = set(_outside(tokens))
    for index, token in enumerate(tokens):
        if token.kind == "number" and "," in token.text and index in outside:
            numbers = token.text.split(",")
            if separate:
                result.append(Token("number", numbers[0], token.spaced))
                for number in numbers[1:]:
                    result += [Token("sign", ","), Token("number", number)]
                continue
            token = Token("number", "".join(numbers), token.spaced)
        result.append(token)
    return result


def _elements(tokens: list[Token], *, in_brackets: bool, reader: Reader) -> list[list[Token]]:
    """Returns the tokens split at commas, semicolons, "and" and "or" outside brackets. In brackets, a comma in a number
    is a thousands separator only if there are other separators."""
    tokens = _with_words(tokens)
    indices = [index for index in _outside(tokens) if _is_separator(tokens[index])]
    tokens = _with_commas(tokens, reader.commas_separate or (in_brackets and not indices))
    tokens = [
        token
        for index, token in enumerate(tokens)
        if not (token.text in (",", ";") and index + 1 < len(tokens) and tokens[index + 1].kind == "separator")
    ]
    return _split(tokens, [index for index in _outside(tokens) if _is_separator(tokens[index])])


def _is_separator(token: Token) -> bool:
    return token.kind == "separator" or (token.kind == "sign" and token.text in (",", ";"))


def _with_words(tokens: list[Token]) -> list[Token]:
    """Returns the tokens with "and" and "or", in \\text or plain, as separators."""
    result: list[Token] = []
    index = 0
    while index < len(tokens):
        token = tokens[index]
        for name in ("and", "or"):
            end = index + len(name)
            letters = tokens[index:end]
            if token.kind == "text" and token.text == name:
                token = Token("separator", name)
            elif (
                all(letter.kind == "letter" for letter in letters)
                and "".join(letter.text for letter in letters) == name
                and token.spaced
                and not any(letter.spaced for letter in letters[1:])
                and (end == len(tokens) or tokens[end].kind != "letter" or tokens[end].spaced)
            ):
                token = Token("separator", name)
                index = end - 1
        result.append(token)
        index += 1
    return result


def _list(tokens: list[Token], reader: Reader) -> Form:
    """Returns the form of an unordered list of answers, or of one answer."""
    pieces = _elements(tokens, in_brackets=False, reader=reader)
    if len(pieces) > 1 and _relations(pieces[0]) and not any(_relations(piece) for piece in pieces[1:]):
        # `x = 1, 2` is x = (1, 2)
        first = _piece(pieces[0], reader)
        if len(first) == 1 and first[0].kind == "named":
            rest = [form for piece in pieces[1:] for form in _piece(piece, reader)]
            return Form("named", first[0].label, (Form("list", "", (first[0].parts[0], *rest)),))
    forms = [form for piece in pieces for form in _piece(piece, reader)]
    if len(forms) == 1:
        return forms[0]
    if all(form.kind == "named" and form.label == forms[0].label for form in forms):
        return Form("named", forms[0].label, (Form("list", "", tuple(form.parts[0] for form in forms)),))
    return Form("list", "", tuple(forms))


def _piece(tokens: list[Token], reader: Reader) -> list[Form]:
    r"""Returns the form of one element of a list; two forms if it has a \pm."""
    if _relations(tokens):
        return [_relation(tokens, reader)]
    signs = [token.text for token in tokens if token.text in (r"\pm", r"\mp")]
    if not signs or (tokens[0].text == r"\{" and _closing(tokens, 0) == len(tokens) - 1):
        return [_one(tokens, reader)]
    if signs.count(r"\pm") != 1 or len(signs) > 2:
        raise NoAnswer(r"\pm more than once")
    variants = []
    for plus, minus in (("+", "-"), ("-", "+")):
        signed = {r"\pm": plus, r"\mp": minus}
        variants.append([Token("sign", signed[token.text]) if token.text in signed else token for token in tokens])
    return [_one(_without_plus(variant), reader) for variant in variants]


def _without_plus(tokens: list[Token]) -> list[Token]:
    return tokens[1:] if tokens[0].text == "+" else tokens


def _relations(tokens: list[Token]) -> list[int]:
    return [index for index in _outside(tokens) if tokens[index].text in RELATIONS]


def _relation(tokens: list[Token], reader: Reader) -> Form:
    indices = _relations(tokens)
    signs = [tokens[index].text for index in indices]
    sides = _split(tokens, indices)
    if len(signs) == 2 and (set(signs) <= {"<", r"\le"} or set(signs) <= {">", r"\ge"}):
        if signs[0] in _DOWNWARD:
            signs, sides = [_DOWNWARD[sign] for sign in signs[::-1]], sides[::-1]
        return Form("chain", " ".join(signs), tuple(_one(side, reader) for side in sides))
    if len(signs) != 1:
        raise NoAnswer("a chain of relations is not an answer")
    (sign,), (left, right) = signs, sides
    if sign in _DOWNWARD:
        sign, left, right = _DOWNWARD[sign], right, left
    if sign == r"\in":
        name = _name(left)
        if name is None:
            raise NoAnswer(r"\in without a name")
        return Form("member", name, (_one(right, reader),))
    if sign == "=":
        for name, value in ((_name(left), right), (_name(right), left)):
            if name is None:
                continue
            form = _list(value, reader)
            if name not in _symbols(form, reader.terms):
                symbol = form.kind == "scalar" and re.fullmatch(_ATOM, name)
                term = reader.terms.subtract(reader.terms.symbol(name), form.term) if symbol else -1
                return Form("named", name, (form,), term)
    parts = (_one(left, reader), _one(right, reader))
    scalars = all(part.kind == "scalar" for part in parts)
    return Form("relation", sign, parts, reader.terms.subtract(parts[0].term, parts[1].term) if scalars else -1)


def _name(tokens: list[Token]) -> str | None:
    """Returns a name that can be assigned a value: x, x_1, f(x), (x, y), AB; None for another expression."""
    text = "".join(token.text for token in tokens)
    if len(tokens) > 16 or not _NAME.fullmatch(text) or text in ("e", "i"):
        return None
    if any(token.kind == "command" and token.text[1:] not in GREEK for token in tokens):
        return None
    return re.sub(r"_\{([A-Za-z0-9])\}", r"_\1", text)


def _symbols(form: Form, terms: Terms) -> frozenset[str]:
    here = terms.bounds[form.term].symbols if form.term >= 0 else frozenset()
    return here.union(*(_symbols(part, terms) for part in form.parts))


def _one(tokens: list[Token], reader: Reader, labels: int = 0) -> Form:
    """Returns the form of one answer that is neither a list nor a relation. labels: number of units parsed before."""
    tokens = _unwrapped(tokens)
    labeled = _label(tokens, reader)
    if labeled is not None:
        if labels == MAX_LABELS:
            raise NoAnswer(f"more than {MAX_LABELS} units")
        label, rest = labeled
        return Form("labeled", label, (_one(rest, reader, labels + 1),))
    outside = _outside(tokens)
    for sign, kind in ((r"\cup", "union"), (r"\setminus", "difference"), (r"\backslash", "difference"), (":", "ratio")):
        indices = [index for index in outside if tokens[index].text == sign]
        if indices:
            pieces = _split(_with_commas(tokens, False), indices)
            return Form(kind, "", tuple(_one(piece, reader) for piece in pieces))
    first = tokens[0]
    if first.kind == "environment":
        return _matrix(tokens, reader)
    text = "".join(token.text for token in tokens)
    if text in (r"\infty", r"+\infty", r"-\infty"):
        return Form("infinity", text.replace("+", ""))
    if text == r"\emptyset":
        return Form("set")
    if re.fullmatch(r"\\mathbb(?:\{[RQZNC]\}|[RQZNC])|\\(?:R|reals)", text):
        if "R" in text or "reals" in text:
            return Form("tuple", "( )", (Form("infinity", r"-\infty"), Form("infinity", r"\infty")))
        return Form("name", re.sub("[{}]", "", text))
    if first.text in OPENING and first.text != "{" and _closing(tokens, 0) == len(tokens) - 1:
        inside = tokens[1:-1]
        if first.text == r"\{":
            pieces = _elements(inside, in_brackets=True, reader=reader) if inside else []
            return Form("set", "", tuple(form for piece in pieces for form in _element(piece, reader)))
        if first.text in ("(", "[", r"\langle") and inside:
            pieces = _elements(inside, in_brackets=True, reader=reader)
            if len(pieces) > 1 or first.text == r"\langle":
                brackets = f"{first.text} {tokens[-1].text}"
                return Form("tuple", brackets, tuple(_one(piece, reader) for piece in pieces))
            tokens = [first, *pieces[0], tokens[-1]]
    return _numeral(text) or _scalar(_with_commas(tokens, False), reader)


def _element(tokens: list[Token], reader: Reader) -> list[Form]:
    """Returns the forms of an element of a set, which cannot be a relation."""
    if _relations(tokens):
        raise NoAnswer("a relation in a set")
    return _piece(tokens, reader)


def _label(tokens: list[Token], reader: Reader) -> tuple[str, list[Token]] | None:
    """Returns the unit, percent sign, degree sign or currency of a quantity and the other tokens; None without one."""
    if tokens[0].text == r"\$" and len(tokens) > 1:
        return "$", tokens[1:]
    if len(tokens) > 2 and tokens[0].text == "-" and tokens[1].text == r"\$":
        return "$", [tokens[0], *tokens[2:]]
    last = tokens[-1]
    if len(tokens) > 1 and last.text in ("%", r"\$"):
        return last.text[-1], tokens[:-1]
    if len(tokens) > 1 and last.kind == "degree":
        if any(token.kind == "command" and token.text[1:] in NAMES for token in tokens):
            return None
        return "degree", tokens[:-1]
    indices = [index for index, token in enumerate(tokens) if token.kind == "text"]
    if indices and indices[0] > 0:
        return _unit(tokens[indices[0] :]), tokens[: indices[0]]
    end = len(tokens) - 2 * (len(tokens) > 3 and tokens[-2].text == "^" and last.kind == "number")
    start = end
    while start > 1 and tokens[start - 1].kind == "letter":
        start -= 1
    written = "".join(" " * token.spaced + token.text for token in tokens[start:end]).strip()
    if end - start > 1 and tokens[start - 1].kind == "number" and not PLAIN_NAMES & set(written.split()):
        unit = _unit([Token("text", written), *tokens[end:]])
        if unit == reader.unit or (reader.unit is None and tokens[start].spaced and word(written) is not None):
            return unit, tokens[:start]
    return None


def _unit(tokens: list[Token]) -> str:
    """Returns the text of a unit, without braces, surrounding spaces and a plural s."""
    text = ""
    for token in tokens:
        if token.kind not in ("text", "number") and token.text not in ("^", "{", "}", "/", r"\cdot", "-"):
            raise NoAnswer("a unit that is not read")
        text += token.text
    text = re.sub(r"[{}]", "", text.replace(r"\cdot", "*"))
    text = re.sub(r"([A-Za-z]{3,})s(?![A-Za-z])", r"\1", " ".join(text.split()).strip(" .,"))
    return _UNIT_NAMES.get(text.casefold(), text)


def _matrix(tokens: list[Token], reader: Reader) -> Form:
    kind = re.fullmatch(r"\\begin\{([pbvV]?matrix)\}", tokens[0].text)
    if not kind or tokens[-1].text != f"\\end{{{kind[1]}}}" or _closing(tokens, 0) != len(tokens) - 1:
        raise NoAnswer("an environment that is not read")
    inside = tokens[1:-1]
    if inside and inside[-1].text == "\\\\":
        inside = inside[:-1]
    rows = _split(inside, [index for index in _outside(inside) if inside[index].text == "\\\\"])
    cells = [_split(row, [index for index in _outside(row) if row[index].text == "&"]) for row in rows]
    if len({len(row) for row in cells}) != 1:
        raise NoAnswer("a matrix with rows of different lengths")
    shape = f"{len(cells)} by {len(cells[0])}"
    forms = tuple(_scalar(_with_commas(cell, False), reader) for row in cells for cell in row)
    return Form("matrix", f"{'bars ' * (kind[1] in ('vmatrix', 'Vmatrix'))}{shape}", forms)


def _numeral(text: str) -> Form | None:
    """Returns the form of a numeral with its base as a subscript; None if it is not one."""
    match = re.fullmatch(r"\(?([0-9A-Z]{1,1000})\)?_(?:\{([0-9]{1,2})\}|([0-9]))", text)
    if match is None or (match[1].isalpha() and len(match[1]) == 1):
        return None
    digits, base = match[1], int(match[2] or match[3])
    if not 2 <= base <= 36 or any(int(digit, 36) >= base for digit in digits):
        raise NoAnswer(f"a digit that base {base} does not have")
    return Form("numeral", f"{digits.lstrip('0') or '0'} base {base}")


def _scalar(tokens: list[Token], reader: Reader) -> Form:
    terms = reader.terms
    mixed = [token.text if token.kind == "number" else token.text[:1] for token in tokens]
    sign = mixed[0] if mixed[0] in ("-", "+") else ""
    if re.fullmatch("[0-9]+ [0-9]+ / [0-9]+", " ".join(mixed[len(sign) :])) and tokens[len(sign) + 1].spaced:
        number, top, _, bottom = mixed[len(sign) :]  # 3 1/2
        if not 0 < int(top) < int(bottom):
            raise NoAnswer("two numbers")
        value = int(number) + Fraction(int(top), int(bottom))
        return Form("scalar", "", (), terms.number(-value if sign == "-" else value))
    term = parse(tokens, terms, reader.letters | letters_of(tokens) if reader.unit is None else reader.letters)
    has_point = any(token.kind == "number" and "." in token.text for token in tokens)
    return Form("scalar", "", (), term, has_point and terms.constant(term) is not None)
