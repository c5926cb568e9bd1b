"""PTX text to a `Module` ("Syntax" and "Directives", PTX ISA 4 and 11)."""

from __future__ import annotations

import struct
from functools import lru_cache

from emulator.errors import PtxSyntaxError, UnsupportedInstruction

from .module import (
    Address,
    Function,
    Group,
    Immediate,
    Instruction,
    Module,
    Name,
    Not,
    Operand,
    Pair,
    Part,
    Register,
    Sink,
    SpecialRegister,
    Symbol,
    Variable,
    Vector,
)
from .ptx_types import TYPE_BITS
from .tokens import Token, Tokens, integer_value

_LINKING = (".extern", ".visible", ".weak", ".common")
_SPACES = (".global", ".const", ".shared", ".local", ".param")
_NUMBERED = (
    ".maxntid",
    ".reqntid",
    ".minnctapersm",
    ".maxnctapersm",
    ".maxnreg",
    ".reqnctapercluster",
    ".maxclusterrank",
)
_FLAGS = (".noreturn", ".explicitcluster", ".blocksareclusters")
_SELECTORS = (".x", ".y", ".z", ".w")
_PARTS = (".b0", ".b1", ".b2", ".b3", ".h0", ".h1")


@lru_cache(maxsize=64)
def parse_module(text: str) -> Module:
    """Parse a translation unit.

    Raises
    ------
    PtxSyntaxError
        The text is not PTX.
    UnsupportedInstruction
        A directive that the emulator does not know.
    """
    return _Parser(text).module()


class _Parser:
    def __init__(self, text: str) -> None:
        self.tokens = Tokens(text)
        self.result = Module()

    def module(self) -> Module:
        tokens = self.tokens
        while tokens.peek().kind != "end":
            directive = tokens.expect_kind("dotted")
            if directive.text == ".version":
                self.result.version = tokens.take().text
            elif directive.text == ".target":
                self.result.target = tokens.take().text
                while tokens.accept(","):
                    tokens.take()
            elif directive.text == ".address_size":
                if tokens.integer() != 64:
                    raise UnsupportedInstruction(".address_size 32")
            elif directive.text in (".file", ".section", ".pragma"):
                self._skip_debugging(directive)
            else:
                self._definition(directive)
        return self.result

    def _skip_debugging(self, directive: Token) -> None:
        """Pass over what says nothing about execution."""
        tokens = self.tokens
        line = tokens.line(directive.start)
        if directive.text == ".section":
            while not tokens.accept("}"):
                tokens.take()
        elif directive.text == ".pragma":
            while not tokens.accept(";"):
                tokens.take()
        else:
            while tokens.line(tokens.peek().start) == line and tokens.peek().kind != "end":
                tokens.take()

    def _definition(self, directive: Token) -> None:
        tokens, external = self.tokens, False
        while directive.text in _LINKING:
            external |= directive.text == ".extern"
            directive = tokens.expect_kind("dotted")
        if directive.text in (".entry", ".func"):
            function = _FunctionParser(self.tokens, self.result, directive.text == ".entry").parse()
            known = self.result.functions.get(function.name)
            if known is None or function.instructions:
                self.result.functions[function.name] = function
        elif directive.text in (".global", ".const", ".shared"):
            for variable in parse_variables(tokens, directive.text[1:], external):
                self.result.variables[variable.name] = variable
            tokens.expect(";")
        else:
            raise UnsupportedInstruction(f"{directive.text}, line {tokens.line(directive.start)}")


def parse_variables(tokens: Tokens, space: str, external: bool = False) -> list[Variable]:
    """The variables that a declaration declares, its space already taken."""
    align, components = 0, 1
    type_name = ""
    while tokens.peek().kind == "dotted":
        word = tokens.take().text[1:]
        if word == "align":
            align = tokens.integer()
        elif word in ("v2", "v4", "v8"):
            components = int(word[1:])
        elif word == "ptr":
            _skip_pointer_attributes(tokens)
        elif word in TYPE_BITS:
            type_name = word
        elif word == "attribute":
            while not tokens.accept(")"):
                tokens.take()
        else:
            raise UnsupportedInstruction(f".{word} of a variable")
    element = TYPE_BITS[type_name] // 8 * components
    variables = []
    while True:
        name = tokens.expect_kind("word").text
        count = 1
        while tokens.accept("["):
            count *= 0 if tokens.at("]") else tokens.integer()
            tokens.expect("]")
        initial = None
        if tokens.accept("="):
            initial = _initial_bytes(tokens, type_name)
            count = max(count, len(initial) // element)
            initial = initial.ljust(count * element, b"\0")
        elif space in ("global", "const") and not external:
            initial = bytes(count * element)  # "Initializers": zero where none is given
        variables.append(
            Variable(name, space, count * element, align or element, -1, initial, external)
        )
        if space == "param" or not tokens.accept(","):
            return variables


def _skip_pointer_attributes(tokens: Tokens) -> None:
    if tokens.peek().text in _SPACES:
        tokens.take()
    if tokens.accept(".align"):
        tokens.integer()


def _initial_bytes(tokens: Tokens, type_name: str) -> bytes:
    if tokens.accept("{"):
        parts = []
        while not tokens.accept("}"):
            parts.append(_initial_bytes(tokens, type_name))
            tokens.accept(",")
        return b"".join(parts)
    bits = TYPE_BITS[type_name]
    value = parse_number(tokens)
    if type_name[0] == "f":
        return _float_bits(value, bits).to_bytes(bits // 8, "little")
    return (value.value & ((1 << bits) - 1)).to_bytes(bits // 8, "little")


def _float_bits(value: Immediate, bits: int) -> int:
    if value.float_bits == bits:
        return value.value
    raise UnsupportedInstruction(f"a float constant of {value.float_bits} bits for {bits} bits")


def parse_number(tokens: Tokens) -> Immediate:
    """A numeric constant ("Constants", PTX ISA 4.5), with its sign."""
    negative = complemented = False
    while sign := tokens.accept("-", "~", "+"):
        negative ^= sign.text == "-"
        complemented ^= sign.text == "~"
    token = tokens.take()
    if token.kind == "int":
        value = integer_value(token.text)
        value = ~value if complemented else value
        return Immediate(-value if negative else value)
    if token.kind != "float":
        raise PtxSyntaxError(f"line {tokens.line(token.start)}: {token.text!r} is no number")
    head = token.text[:2].lower()
    if head == "0f":
        return Immediate(int(token.text[2:], 16) ^ (negative << 31), 32)
    if head == "0d":
        return Immediate(int(token.text[2:], 16) ^ (negative << 63), 64)
    decimal = -float(token.text) if negative else float(token.text)
    return Immediate(struct.unpack("<Q", struct.pack("<d", decimal))[0], 64)


class _FunctionParser:
    """The parser of one `.entry` or `.func`, its directive already taken."""

    def __init__(self, tokens: Tokens, module: Module, is_entry: bool) -> None:
        self.tokens = tokens
        self.module = module
        self.function = Function("", is_entry)
        self.scopes: list[int] = [0]
        self.registers: list[dict[str, Register]] = [{}]
        self.variables: list[dict[str, Variable]] = [dict(module.variables)]
        self.scope_count = 1
        self.used: set[str] = set()
        self.frame_bytes = {"local": 0, "param": 0}

    def parse(self) -> Function:
        tokens, function = self.tokens, self.function
        if not function.is_entry and tokens.at("("):
            function.returns = self._parameters()
        function.name = tokens.expect_kind("word").text
        if tokens.at("("):
            function.parameters = self._parameters()
        while tokens.peek().kind == "dotted":
            self._directive(tokens.take())
        if tokens.accept(";"):
            return function
        tokens.expect("{")
        self._body()
        return function

    def _directive(self, token: Token) -> None:
        name = token.text
        if name in _NUMBERED:
            values = [self.tokens.integer()]
            while self.tokens.accept(","):
                values.append(self.tokens.integer())
            self.function.directives[name[1:]] = tuple(values)
        elif name in _FLAGS:
            self.function.directives[name[1:]] = ()
        elif name == ".pragma":
            self._skip_statement()
        else:
            raise UnsupportedInstruction(f"{name}, line {self.tokens.line(token.start)}")

    def _parameters(self) -> list[Variable]:
        tokens, result = self.tokens, []
        tokens.expect("(")
        while not tokens.accept(")"):
            if tokens.accept(".reg"):
                raise UnsupportedInstruction("a .reg parameter of a function")
            tokens.expect(".param")
            (declared,) = parse_variables(tokens, "param")
            result.append(self._place(declared))
            if not tokens.at(")"):
                tokens.expect(",")
        return result

    def _place(self, declared: Variable) -> Variable:
        """Give a parameter or a local variable its place in its list or frame."""
        offset = declared.offset
        space = declared.space
        if space in self.frame_bytes:
            offset = -(-self.frame_bytes[space] // declared.align) * declared.align
            self.frame_bytes[space] = offset + declared.size
        placed = Variable(
            declared.name, space, declared.size, declared.align, offset, declared.initial
        )
        self.variables[-1][placed.name] = placed
        return placed

    def _body(self) -> None:
        """Statements up to the closing brace."""
        tokens = self.tokens
        while not tokens.accept("}"):
            token = tokens.peek()
            if tokens.accept("{"):
                self._nested()
            elif tokens.accept(";"):
                continue
            elif token.kind == "dotted":
                self._declaration(tokens.take())
            elif token.kind == "word" and tokens.peek(1).text == ":":
                self._label(tokens.take().text)
            else:
                self._instruction()

    def _nested(self) -> None:
        self.scopes.append(self.scope_count)
        self.scope_count += 1
        self.registers.append({})
        self.variables.append({})
        self._body()
        self.scopes.pop()
        self.registers.pop()
        self.variables.pop()

    def _label(self, name: str) -> None:
        self.tokens.expect(":")
        key = (self.scopes[-1], name)
        if self.tokens.accept(".branchtargets"):
            names = [self._name(self.tokens.expect_kind("word").text)]
            while self.tokens.accept(","):
                names.append(self._name(self.tokens.expect_kind("word").text))
            self.tokens.expect(";")
            self.function.targets[key] = tuple(names)
        elif self.tokens.at(".callprototype", ".calltargets"):
            # Of an indirect call, which is refused where a kernel that is launched has one.
            self._skip_statement()
        elif key in self.function.labels:
            raise self.tokens.error(f"label {name} is there twice")
        else:
            self.function.labels[key] = len(self.function.instructions)

    def _name(self, text: str) -> Name:
        return Name(text, tuple(self.scopes))

    def _declaration(self, token: Token) -> None:
        tokens = self.tokens
        if token.text == ".reg":
            self._registers()
        elif token.text in (".local", ".shared", ".param", ".global", ".const"):
            for declared in parse_variables(tokens, token.text[1:]):
                self.function.variables.append(self._place(declared))
            tokens.expect(";")
        elif token.text == ".pragma":
            self._skip_statement()
        elif token.text == ".loc":
            line = tokens.line(token.start)
            while tokens.line(tokens.peek().start) == line and tokens.peek().kind != "end":
                tokens.take()
        else:
            raise UnsupportedInstruction(f"{token.text}, line {tokens.line(token.start)}")

    def _skip_statement(self) -> None:
        while not self.tokens.accept(";"):
            if self.tokens.take().kind == "end":
                raise self.tokens.error("';' is needed")

    def _registers(self) -> None:
        tokens = self.tokens
        type_name = tokens.expect_kind("dotted").text[1:]
        if type_name not in TYPE_BITS:
            raise UnsupportedInstruction(f".reg .{type_name}")
        while True:
            name = tokens.expect_kind("word").text
            if tokens.accept("<"):
                for index in range(tokens.integer()):
                    self._register(f"{name}{index}", type_name)
                tokens.expect(">")
            else:
                self._register(name, type_name)
            if not tokens.accept(","):
                break
        tokens.expect(";")

    def _register(self, name: str, type_name: str) -> None:
        unique = f"{name}@{self.scopes[-1]}" if name in self.used else name
        if not self.function.is_entry:
            unique = f"{self.function.name}/{unique}"
        self.used.add(name)
        self.registers[-1][name] = Register(unique, type_name)

    def _instruction(self) -> None:
        tokens = self.tokens
        start = tokens.peek().start
        guard = None
        if tokens.accept("@"):
            negated = tokens.accept("!")
            guard = self._word(tokens.expect_kind("word").text)
            guard = Not(guard) if negated else guard
        opcode = tokens.expect_kind("word").text
        while tokens.peek().kind == "dotted":
            opcode += tokens.take().text
        operands = []
        while not tokens.at(";"):
            operands.append(self._operand())
            if not tokens.at(";"):
                tokens.expect(",")
        end = tokens.take().end
        text = " ".join(tokens.source[start:end].split())
        self.function.instructions.append(
            Instruction(opcode, tuple(operands), guard, tokens.line(start), text)
        )

    def _operand(self) -> Operand:
        operand = self._single()
        if self.tokens.accept("|"):
            return Pair(operand, self._single())
        return operand

    def _single(self) -> Operand:
        tokens = self.tokens
        token = tokens.peek()
        if tokens.accept("!"):
            return Not(self._single())
        if tokens.accept("{"):
            return Vector(self._list("}"))
        if tokens.accept("("):
            return Group(self._list(")"))
        if tokens.accept("["):
            return self._address()
        if token.kind == "word":
            return self._with_suffix(self._word(tokens.take().text))
        return parse_number(tokens)

    def _list(self, closing: str) -> tuple[Operand, ...]:
        elements = []
        while not self.tokens.accept(closing):
            elements.append(self._operand())
            if not self.tokens.at(closing):
                self.tokens.expect(",")
        return tuple(elements)

    def _with_suffix(self, operand: Operand) -> Operand:
        """A word with what may follow it: a component, or an offset."""
        tokens = self.tokens
        if isinstance(operand, SpecialRegister) and tokens.at(*_SELECTORS):
            return SpecialRegister(operand.name + tokens.take().text)
        if isinstance(operand, Register) and tokens.at(*_PARTS):
            return Part(operand, tokens.take().text[1:])
        if isinstance(operand, Symbol) and tokens.at("+", "-"):
            tokens.accept("+")
            return Symbol(operand.variable, tokens.integer())
        return operand

    def _address(self) -> Address:
        tokens = self.tokens
        base = self._single()
        offset = 0
        if isinstance(base, Immediate):
            base, offset = Immediate(0), base.value
        if tokens.at("+", "-"):
            tokens.accept("+")
            offset += tokens.integer()
        extra: list[Operand] = []
        while tokens.accept(","):
            extra.append(self._operand())
        tokens.expect("]")
        return Address(base, offset, tuple(extra))

    def _word(self, text: str) -> Operand:
        if text == "_":
            return Sink()
        for registers, variables in zip(
            reversed(self.registers), reversed(self.variables), strict=True
        ):
            if text in registers:
                return registers[text]
            if text in variables:
                return Symbol(variables[text])
        if text.startswith("%"):
            return SpecialRegister(text)
        if text == "WARP_SZ":
            return Immediate(32)
        return self._name(text)
