"""Long statements are broken into lines that mean the same."""

import ast

import pytest

from penstock.codegen.formatting import WIDTH, broken_lines, statement_lines

NAMES = [f"a_long_name_of_a_value_{n}" for n in range(8)]
ITEMS = ", ".join(NAMES)

# fmt: off
LONG = {
    "call": f"found = function({ITEMS})",
    "keywords": f"found = self.layers[0]({', '.join(f'{name}={name}' for name in NAMES)}, **{{'a b': 1}})",
    "nested": f"first, (second, third) = function(first, ({ITEMS}), [{ITEMS}], key={{'k': ({ITEMS},), 2: x}})",
    "call of a result": f"found = function({ITEMS})(other)",
    "list": f"TABLE = [{ITEMS}]",
    "dict": f"TABLE = {{{', '.join(f'{name!r}: {name}' for name in NAMES)}}}",
    "tuple of one": f"TABLE = (function({ITEMS}),)",
    "strings with brackets and quotes": f"f({'(,[' * 20!r}, {'),' * 20!r}, {chr(34) + chr(39) + '{' * 50!r}, b'(\\'')",
    "index": f"found = values[{ITEMS}]",
    "index of one": f"found = values[{' + '.join(NAMES)}]",
    "parentheses": f"found = other * ({' + '.join(NAMES)})",
    "empty brackets": f"found = {'.'.join(NAMES)}()",
    "return of a tuple": f"return {ITEMS}",
    "in place": f"found += function({ITEMS})",
    "operand": f"found = other * function({ITEMS})",
    "the same display twice": f"found = function([{ITEMS}])[0] + other([{ITEMS}])",
    "unpacked": f"found = function(*({ITEMS}), **{{'a b': 1, **more}})",
    "exponent": f"found = function({ITEMS}, 1e+30, -3.4e+38, name1e + 2, '1e+30')",
}
# fmt: on


@pytest.mark.parametrize("code", LONG.values(), ids=LONG)
def test_a_broken_statement_means_the_same(code):
    lines = statement_lines(code, "    ")
    assert all(line.startswith("    ") for line in lines)
    text = "\n".join(line.removeprefix("    ") for line in lines)
    assert ast.dump(ast.parse(text)) == ast.dump(ast.parse(code))


@pytest.mark.parametrize(
    "name", ["call", "keywords", "nested", "list", "dict", "return of a tuple", "in place", "operand"]
)
def test_brackets_at_the_end_of_a_statement_are_broken(name):
    lines = statement_lines(LONG[name])
    assert len(lines) > 2
    assert all(len(line) <= WIDTH for line in lines)


def test_a_long_signature_is_broken():
    signature = f"forward(self, {ITEMS})"
    lines = broken_lines(f"def {signature}:", ast.parse(signature), "    ")
    assert lines[0] == "    def forward("
    assert lines[-1] == "    ):"
    assert all(len(line) <= WIDTH for line in lines)
