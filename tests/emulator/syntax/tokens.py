"""PTX text as tokens ("Source Format" to "Constants", PTX ISA 4.1 to 4.5)."""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import NamedTuple

from emulator.errors import PtxSyntaxError

_PATTERN = re.compile(
    r"""
      (?P<skip>\s+ | //[^\n]* | /\*.*?\*/)
    | (?P<string>"[^"]*")
    | (?P<float>0[fF][0-9a-fA-F]{8}\b | 0[dD][0-9a-fA-F]{16}\b | \d+\.\d*(?:[eE][+-]?\d+)?
                | \d+[eE][+-]?\d+)
    | (?P<int>0[xX][0-9a-fA-F]+U? | 0[bB][01]+U? | \d+U?)
    | (?P<word>[%$_A-Za-z][\w$]*)
    | (?P<dotted>\.\w+(?:::\w+)*)
    | (?P<sign>[{}()\[\],;:<>=|@!+\-*~])
    """,
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    kind: str
    text: str
    start: int
    end: int


class Tokens:
    """A stream of tokens with one-token lookahead."""

    def __init__(self, text: str) -> None:
        self.source = text
        self._lines = [m.start() for m in re.finditer("\n", text)]
        self._tokens = list(self._scan(text))
        self._next = 0

    def _scan(self, text: str) -> list[Token]:
        tokens, position = [], 0
        while position < len(text):
            match = _PATTERN.match(text, position)
            if match is None:
                raise PtxSyntaxError(
                    f"line {self.line(position)}: cannot read {text[position : position + 20]!r}"
                )
            if match.lastgroup != "skip":
                tokens.append(Token(str(match.lastgroup), match.group(), position, match.end()))
            position = match.end()
        tokens.append(Token("end", "", len(text), len(text)))
        return tokens

    def line(self, position: int) -> int:
        """The line of a position, from 1."""
        return bisect_right(self._lines, position - 1) + 1

    def peek(self, ahead: int = 0) -> Token:
        return self._tokens[min(self._next + ahead, len(self._tokens) - 1)]

    def take(self) -> Token:
        token = self.peek()
        self._next += 1
        return token

    def at(self, *texts: str) -> bool:
        """Whether the next token is one of these texts (and no string)."""
        token = self.peek()
        return token.kind != "string" and token.text in texts

    def accept(self, *texts: str) -> Token | None:
        return self.take() if self.at(*texts) else None

    def expect(self, *texts: str) -> Token:
        if not self.at(*texts):
            raise self.error(f"{' or '.join(map(repr, texts))} is needed")
        return self.take()

    def expect_kind(self, kind: str) -> Token:
        if self.peek().kind != kind:
            what = {"dotted": "a directive or a type, such as .version,", "word": "a name"}
            raise self.error(f"{what.get(kind, kind)} is needed")
        return self.take()

    def error(self, what: str) -> PtxSyntaxError:
        token = self.peek()
        return PtxSyntaxError(f"line {self.line(token.start)}: {what}, found {token.text!r}")

    def integer(self) -> int:
        """An integer constant, with its sign."""
        sign = -1 if self.accept("-") else 1
        return sign * integer_value(self.expect_kind("int").text)


def integer_value(text: str) -> int:
    """The value of an integer constant; a leading 0 means octal."""
    text = text.rstrip("U")
    if len(text) > 1 and text[0] == "0" and text[1].isdigit():
        return int(text, 8)
    return int(text, 0)
