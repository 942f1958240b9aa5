r"""Parses the tokens of one expression into terms: a closed grammar, parsed from left to right without backtracking.

    sum      = [sign] product {(+ | -) product}
    product  = factor {[\cdot | \times | * | / | \div] factor}     (a factor may follow another directly: 2x, xy)
    factor   = atom {^ exponent | ! | degree}
    atom     = number | letter [_ subscript] | constant | ( sum ) | | sum | | \frac | \sqrt | \binom | function argument

A number cannot directly follow a number or a symbol (`2 3` and `x2` are rejected), two signs cannot follow each other,
and `1/2x` is (1/2)x. `x^10` is x^{10}, `\frac12` is one half.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from jrl.tasks.verifiers.expressions.terms import NAMES, NoAnswer, Terms
from jrl.tasks.verifiers.expressions.tokens import MAX_DEPTH, PLAIN_NAMES, Token

MAX_NESTING = 3 * MAX_DEPTH  # of sums, factors and arguments
MAX_BARS = 16
MAX_SUBSCRIPT = 16  # tokens
MAX_SCALE = 1_000  # of a power of ten after an e
GREEK = frozenset(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell".split()
)
LOG_BASE = r"\log"  # the symbol for an unspecified base: expressions are equal only if they are for every base
_PRODUCT_SIGNS = {r"\cdot": "*", r"\times": "*", "*": "*", "/": "/", r"\div": "/"}
_CLOSERS = {"(": ")", "[": "]", "{": "}"}


def parse(tokens: Sequence[Token], terms: Terms, letters: frozenset[str]) -> int:
    """Returns the term of the whole of `tokens`.

    Args:
        letters: those of the gold answer; a run of several letters is a product only if it consists of them.

    Raises:
        NoAnswer: the tokens are not an expression.
    """
    parser = _Parser(_with_names(tokens, letters), terms)
    term = parser.sum()
    if parser.next() is not None:
        raise NoAnswer(f"{parser.tokens[parser.position].text!r} where the expression should end")
    return term


def read_decimal(text: str) -> Fraction:
    """Returns the value of a number token."""
    mantissa, _, scale = text.replace(",", "").lower().partition("e")
    integer, _, decimals = mantissa.partition(".")
    if abs(int(scale or 0)) > MAX_SCALE:
        raise NoAnswer(f"a power of ten beyond {MAX_SCALE}")
    return Fraction(int((integer + decimals) or "0")) * Fraction(10) ** (int(scale or 0) - len(decimals))


def _with_names(tokens: Sequence[Token], letters: frozenset[str]) -> list[Token]:
    """Returns the tokens with function names as commands. Raises NoAnswer for another run of letters that are not all
    in the gold answer."""
    result: list[Token] = []
    index = 0
    while index < len(tokens):
        end = index + 1
        if tokens[index].kind == "letter":
            while end < len(tokens) and tokens[end].kind == "letter" and not tokens[end].spaced:
                end += 1
        word = "".join(token.text for token in tokens[index:end])
        if end - index > 1 and word in PLAIN_NAMES:
            result.append(Token("command", f"\\{word}", tokens[index].spaced))
        elif end - index > 1 and not set(word) <= letters:
            raise NoAnswer(f"the word {word[:40]!r}")
        else:
            result.extend(tokens[index:end])
        index = end
    return result


class _Parser:
    """A recursive descent parser: the position in the tokens, and the nesting depth."""

    def __init__(self, tokens: list[Token], terms: Terms):
        self.tokens, self.terms = tokens, terms
        self.position = self.depth = self.bars = self.all_bars = 0

    def next(self) -> str | None:
        """Returns the text of the next token; None at the end."""
        return self.tokens[self.position].text if self.position < len(self.tokens) else None

    def following(self, count: int) -> str:
        """Returns the texts of the next `count` tokens, each followed by a space."""
        return "".join(token.text + " " for token in self.tokens[self.position : self.position + count])

    def take(self) -> Token:
        if self.position >= len(self.tokens):
            raise NoAnswer("an end where an expression should be")
        self.position += 1
        return self.tokens[self.position - 1]

    def expect(self, text: str) -> None:
        if self.take().text != text:
            raise NoAnswer(f"no {text} where one should be")

    def sum(self) -> int:
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise NoAnswer(f"an expression more than {MAX_NESTING} deep")
        total = self.signed(self.product)
        while self.next() in ("+", "-"):
            sign = self.take().text
            if self.next() in ("+", "-"):
                raise NoAnswer("two signs")
            term = self.product()
            total = self.terms.add(total, term) if sign == "+" else self.terms.subtract(total, term)
        self.depth -= 1
        return total

    def signed(self, read) -> int:
        """Returns the result of `read` after an optional sign."""
        if self.next() in ("+", "-"):
            sign = self.take().text
            if self.next() in ("+", "-"):
                raise NoAnswer("two signs")
            return self.terms.negate(read()) if sign == "-" else read()
        return read()

    def product(self) -> int:
        value = self.factor()
        while True:
            operator = _PRODUCT_SIGNS.get(self.next() or "")
            if operator:
                self.take()
                factor = self.signed(self.factor)
                value = self.terms.multiply(value, factor) if operator == "*" else self.terms.divide(value, factor)
            elif self.starts_factor():
                value = self.terms.multiply(value, self.factor())
            else:
                return value

    def starts_factor(self) -> bool:
        """Returns whether the next token starts a factor of an implicit product."""
        if self.position >= len(self.tokens):
            return False
        token = self.tokens[self.position]
        if token.kind == "number":
            if self.tokens[self.position - 1].text not in ("}", ")"):
                raise NoAnswer("a number directly after a number or symbol")
            return True
        if token.text == "|":
            return not self.bars
        if token.kind == "sign":
            return token.text in "([{"
        return token.kind == "letter" or (token.kind == "command" and token.text not in (r"\rfloor", r"\rceil"))

    def factor(self) -> int:
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise NoAnswer(f"an expression more than {MAX_NESTING} deep")
        start = self.position
        value = self.atom()
        raised = False
        while self.position < len(self.tokens):
            token = self.tokens[self.position]
            if token.text == "^" and token.kind == "sign":
                if raised:
                    raise NoAnswer("two exponents")
                self.take()
                value, raised = self.terms.raise_to(value, self.exponent()), True
            elif token.text == "!":
                if raised or any(before.text == "!" for before in self.tokens[start : self.position]):
                    raise NoAnswer("a factorial of a factorial or of a power")
                self.take()
                value = self.terms.factorial(value)
            elif token.kind == "degree":
                self.take()
                value = self.terms.multiply(value, self.terms.divide(self.terms.named("pi"), self.terms.number(180)))
            else:
                break
        self.depth -= 1
        return value

    def exponent(self) -> int:
        if self.next() in ("(", "["):
            return self.group()
        if self.next() in ("+", "-"):
            return self.signed(self.exponent)
        return self.argument(digits=False)

    def argument(self, *, digits: bool = True) -> int:
        r"""Returns the argument of a command: a group in braces, or one token (with `digits` one digit of a number)."""
        token = self.take()
        if token.text in _CLOSERS:
            self.position -= 1
            return self.group()
        if token.kind == "number":
            if not digits or len(token.text) == 1:
                return self.terms.number(read_decimal(token.text))
            if len(token.text) != 2 or not token.text.isdigit():
                raise NoAnswer("a number where one digit or braces should be")
            self.position -= 1
            self.tokens[self.position] = Token("number", token.text[1])
            return self.terms.number(int(token.text[0]))
        if token.kind not in ("letter", "command"):
            raise NoAnswer(f"{token.text!r} where an expression should be")
        self.position -= 1
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise NoAnswer(f"an expression more than {MAX_NESTING} deep")
        value = self.atom()
        self.depth -= 1
        return value

    def group(self) -> int:
        closer = _CLOSERS[self.take().text]
        outside, self.bars = self.bars, 0
        value = self.sum()
        self.expect(closer)
        self.bars = outside
        return value

    def atom(self) -> int:
        token = self.take()
        terms = self.terms
        if token.kind == "number":
            return self.number(token)
        if token.kind == "letter":
            name = token.text + self.subscript()
            return terms.named(name) if name in ("e", "i") else terms.symbol(name)
        if token.text in _CLOSERS and token.kind == "sign":
            self.position -= 1
            return self.group()
        if token.text == "|" and token.kind == "sign":
            return self.bar()
        if token.kind != "command":
            raise NoAnswer(f"{token.text[:40]!r} where an expression should be")
        name = token.text[1:]
        match name:
            case "pi":
                return terms.named("pi")
            case "frac":
                if re.match(r"\{ d ([A-Za-z\\][^ ]* )+\} \{ d [A-Za-z\\]", self.following(12)):
                    raise NoAnswer("a derivative is not read")
                top = self.argument()
                return terms.divide(top, self.argument())
            case "sqrt":
                index = terms.number(2)
                if self.next() == "[":
                    index = self.group()
                token = self.tokens[self.position] if self.position < len(self.tokens) else None
                if token is not None and token.kind == "number" and len(token.text) > 1:
                    raise NoAnswer("a root of a number without braces")
                value = terms.constant(index)
                if value is None:
                    return terms.raise_to(self.argument(), terms.divide(terms.number(1), index))
                if value.denominator != 1:
                    raise NoAnswer("a root whose index is not a whole number")
                return terms.root(int(value), self.argument())
            case "binom":
                n = self.argument()
                return terms.binomial(n, self.argument())
            case "lfloor" | "lceil":
                value = self.sum()
                self.expect(f"\\r{name[1:]}")
                return terms.call(name[1:], value)
        if name in GREEK:
            return terms.symbol(token.text + self.subscript())
        if name in NAMES or name in ("log", "lg"):
            return self.function(name)
        raise NoAnswer(f"{token.text} is not read")

    def bar(self) -> int:
        self.all_bars += 1
        if self.all_bars > MAX_BARS:
            raise NoAnswer(f"more than {MAX_BARS} absolute values")
        outside, self.bars = self.bars, 1
        value = self.sum()
        self.expect("|")
        self.bars = outside
        return self.terms.call("abs", value)

    def function(self, name: str) -> int:
        """Parses a function: an optional base of \\log, an optional power as in sin^2 x, and the argument."""
        terms = self.terms
        base = None
        if name == "log" and self.next() == "_":
            self.take()
            base = self.base()
        elif name == "lg":
            base = terms.number(10)
        power = None
        if self.next() == "^":
            self.take()
            power = self.exponent()
            if terms.constant(power) == -1:
                if name not in ("sin", "cos", "tan"):
                    raise NoAnswer(f"the inverse of {name}")
                name, power = f"arc{name}", None
        value = self.function_argument()
        if name in ("log", "lg"):
            below = terms.symbol(LOG_BASE) if base is None else terms.call("ln", base)
            value = terms.divide(terms.call("ln", value), below)
        else:
            value = terms.call(name, value)
        return value if power is None else terms.raise_to(value, power)

    def base(self) -> int:
        r"""Returns the base of a logarithm: `\log_28` is the logarithm of 8 to the base 2."""
        token = self.tokens[self.position] if self.position < len(self.tokens) else None
        if token is not None and token.kind == "number" and len(token.text) > 1 and token.text.isdigit():
            self.tokens[self.position] = Token("number", token.text[1:])
            return self.terms.number(int(token.text[0]))
        return self.argument()

    def function_argument(self) -> int:
        r"""Returns a group in brackets or bars, or the factors up to the next sign, bracket or function."""
        if self.next() in ("(", "[", "{"):
            return self.group()
        if self.next() == "|" and not self.bars:
            self.take()
            return self.bar()
        value = self.factor()
        while self.position < len(self.tokens):
            token = self.tokens[self.position]
            name = token.text[1:]
            if token.kind == "letter" or (
                token.kind == "command" and (name in GREEK or name in ("pi", "frac", "sqrt"))
            ):
                value = self.terms.multiply(value, self.factor())
            else:
                break
        return value

    def number(self, token: Token) -> int:
        """Parses a decimal, a repeating decimal, or a mixed number."""
        if self.next() == r"\overline" and "." in token.text:
            self.take()
            self.expect("{")
            period = self.take()
            self.expect("}")
            if period.kind != "number" or not period.text.isdigit():
                raise NoAnswer("a period that is not made of digits")
            decimals = len(token.text) - token.text.index(".") - 1
            nines = (10 ** len(period.text) - 1) * 10**decimals
            head = read_decimal(token.text) if token.text != "." else Fraction(0)
            return self.terms.number(head + Fraction(int(period.text), nines))
        value = read_decimal(token.text)
        if self.next() == r"\frac" and value.denominator == 1 and value > 0 and "e" not in token.text.lower():
            fraction = self.proper_fraction()
            if fraction is not None:
                value += fraction
        return self.terms.number(value)

    def proper_fraction(self) -> Fraction | None:
        r"""Parses a \frac of two whole numbers with a smaller numerator; else returns None without moving."""
        self.position += 1
        rest = self.following(6)
        self.position -= 1
        match = re.match(r"(?:\{ ([0-9]+) \} |([0-9]) )(?:\{ ([0-9]+) \} |([0-9]) )|([0-9])([0-9]) ", rest)
        if match is None:
            return None
        top, bottom = (int(group) for group in match.groups() if group is not None)
        if not 0 < top < bottom:
            return None
        self.position += 1 + match[0].count(" ")
        return Fraction(top, bottom)

    def subscript(self) -> str:
        """Returns `_name` for a subscript, else ""."""
        if self.next() != "_":
            return ""
        self.take()
        token = self.take()
        if token.text != "{":
            if token.kind not in ("number", "letter", "command"):
                raise NoAnswer("a subscript that is not read")
            return f"_{token.text}"
        name = []
        while self.next() != "}":
            token = self.take()
            if token.text in ("{", "^", "_") or len(name) == MAX_SUBSCRIPT:
                raise NoAnswer("a subscript that is not read")
            name.append(token.text)
        self.take()
        if not name:
            raise NoAnswer("an empty subscript")
        return "_" + " ".join(name)
