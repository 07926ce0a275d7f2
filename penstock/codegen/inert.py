"""Inert: refuses code that would run something when it is imported, or that uses a name that nothing in it defines."""

import ast

from penstock.errors import CodeError

# fmt: off
BUILT_IN = frozenset(
    {
        "ValueError", "__file__", "any", "bool", "complex", "dict", "float", "frozenset", "getattr", "int",
        "isinstance", "len", "list", "next", "object", "property", "range", "repr", "set", "slice", "sorted",
        "str", "super", "tuple", "type", "vars", "zip",
    }
)
# fmt: on
"""what code may use without defining it"""
_AT_REST = (ast.Constant, ast.Name, ast.Attribute, ast.Tuple, ast.Dict, ast.UnaryOp, ast.USub, ast.Load)
_READERS = frozenset({"constants"})
"""functions of the file itself that may be called while it is imported"""


def check_inert(text: str) -> None:
    """A last look at what was written: whatever the model calls its parts, it is data."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise CodeError("what was written is no Python", reason=error) from None
    for statement in tree.body:
        _check_statement(statement)
    nodes = list(ast.walk(tree))
    defined = _defined(nodes) | BUILT_IN
    for node in nodes:
        if isinstance(node, ast.Name) and node.id not in defined:
            raise CodeError("the code uses a name that it does not define", name=repr(node.id), line=node.lineno)


def _check_statement(statement: ast.stmt) -> None:
    if isinstance(statement, ast.ClassDef):
        for inner in statement.body:
            _check_statement(inner)
    if not all(map(_is_at_rest, _evaluated(statement))):
        raise CodeError("the code would run something when it is imported", line=statement.lineno)


def _evaluated(statement: ast.stmt) -> list[ast.expr]:
    """The expressions that an import evaluates; annotations are looked up like any, and call nothing."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return []
    if isinstance(statement, ast.ClassDef):
        return [*statement.bases, *statement.decorator_list, *(keyword.value for keyword in statement.keywords)]
    if isinstance(statement, ast.FunctionDef):
        defaults = (*statement.args.defaults, *statement.args.kw_defaults)
        return [*statement.decorator_list, *(default for default in defaults if default is not None)]
    if isinstance(statement, ast.AnnAssign) and statement.value is None:
        return []
    if isinstance(statement, ast.Assign | ast.Expr):
        return [statement.value]
    raise CodeError("the code would run something when it is imported", line=statement.lineno)


def _is_at_rest(value: ast.expr) -> bool:
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in _READERS:
        return all(isinstance(argument, ast.Constant) for argument in value.args)
    return all(isinstance(node, _AT_REST) for node in ast.walk(value))


def _defined(nodes: list[ast.AST]) -> set[str]:
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return found
