"""The house rules that a machine can check: floors, torch-free rooms, sizes, names and forbidden calls.

Every test walks over the files that exist, so that a new room or file is held to the rules without being listed here;
only a new room must be given its floor. An offence is reported as `path:line what is wrong`, all of them at once.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "penstock"
TESTS = REPOSITORY / "tests"
FILES = sorted(PACKAGE.rglob("*.py"))

FAMILIES = ("partitioners", "schedules", "passes", "views")
PURE = ("errors", "ir", *FAMILIES, "simulate", "synthesis", "planner")
HANDS = ("capture", "measure", "split", "runtime", "checkpoint")
TORCH = ("processes", *HANDS, "training")
# From the ground up: a room imports from the floors below its own, never from its own floor or above.
FLOORS = (
    ("errors",),
    ("ir",),
    ("processes",),
    (*FAMILIES, "simulate", *HANDS),
    ("synthesis",),
    ("planner", "training"),
    ("api",),
    ("auto", "flat", "hf", "demo"),  # doors with the names of other libraries, and what the demo trains
    ("penstock",),  # the package itself: its public names
    ("cli",),
    ("__main__",),
)
OPTIONAL = ("torch", "transformers", "ortools", "pymetis", "matplotlib")

FILE_LINES = 400
MEMBER_LINES = 150
FUNCTION_LINES = 60
ARGUMENTS = 6
DOOR_ARGUMENTS = 15
ATTRIBUTES = 8
VAGUE_NAMES = re.compile(r"(^|_)(utils?|helpers?|commons?|managers?|misc)($|_)")
LEFT_OPEN = re.compile(r"\b(TODO|FIXME|XXX)\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Node = TypeVar("Node", bound=ast.AST)


# ------------------------------------------------------------------------------------------------ reading the source


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return "penstock" if first == "__init__.py" else first.removesuffix(".py")


def module_of(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def rooms() -> list[str]:
    return sorted({room_of(path) for path in FILES})


def files_in(*names: str) -> list[Path]:
    return [path for path in FILES if room_of(path) in names]


def at(path: Path, node: ast.AST, what: str) -> str:
    return f"{path.relative_to(REPOSITORY)}:{getattr(node, 'lineno', 1)} {what}"


def nodes(kind: type[Node]) -> Iterator[tuple[Path, Node]]:
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, kind):
                yield path, node


def functions() -> Iterator[tuple[Path, Function]]:
    yield from nodes(ast.FunctionDef)
    yield from nodes(ast.AsyncFunctionDef)


def assert_none(offences: list[str]) -> None:
    assert not offences, "\n" + "\n".join(offences)


def called_name(node: ast.AST) -> str:
    """`a.b` for the call or decorator `a.b(...)`; empty for anything that is not a plain dotted name."""
    target = node.func if isinstance(node, ast.Call) else node
    return ast.unparse(target) if isinstance(target, ast.Name | ast.Attribute) else ""


# ----------------------------------------------------------------------------------------------------------- imports


def imported_modules(path: Path, node: ast.AST) -> list[str]:
    """The dotted names that one statement or `import_module("...")` call brings in."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = absolute_base(path, node)
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and called_name(node).split(".")[-1] in ("import_module", "__import__"):
        return [str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
    return []


def absolute_base(path: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = path.relative_to(REPOSITORY).parent.parts
    above = package[: len(package) - node.level + 1]
    return ".".join((*above, *([node.module] if node.module else [])))


def imported_rooms(path: Path, node: ast.AST) -> list[str]:
    names = [name.split(".") for name in imported_modules(path, node)]
    return [room_named(parts) for parts in names if parts[0] == "penstock"]


@cache
def known_rooms() -> frozenset[str]:
    return frozenset({room for floor in FLOORS for room in floor} | set(rooms()))


def room_named(parts: list[str]) -> str:
    return parts[1] if len(parts) > 1 and parts[1] in known_rooms() else "penstock"


def needs_torch(module: str) -> bool:
    parts = module.split(".")
    return parts[0] == "torch" or (parts[0] == "penstock" and room_named(parts) in TORCH)


def eager_nodes(path: Path) -> Iterator[ast.AST]:
    """What runs when the module is imported: no function bodies, nothing under `if TYPE_CHECKING`."""
    waiting: list[ast.AST] = list(tree_of(path).body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
        elif not isinstance(node, Function | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))


def floor_of(room: str) -> int:
    return next(number for number, floor in enumerate(FLOORS) if room in floor)


# ------------------------------------------------------------------------------------------------------------ floors


def test_there_is_a_house_to_check() -> None:
    assert {"errors", "ir", "schedules"} <= set(rooms())


def test_every_room_has_a_floor() -> None:
    assert_none([room for room in rooms() if not any(room in floor for floor in FLOORS)])


def test_imports_go_strictly_downward() -> None:
    upward = [
        at(path, node, f"{room_of(path)} imports {room}")
        for path, node in nodes(ast.AST)
        for room in imported_rooms(path, node)
        if room != room_of(path) and floor_of(room) >= floor_of(room_of(path))
    ]
    assert_none(upward)


def test_pure_rooms_import_neither_torch_nor_a_torch_room_even_inside_functions() -> None:
    impure = [
        at(path, node, f"imports {module}")
        for path in files_in(*PURE)
        for node in ast.walk(tree_of(path))
        for module in imported_modules(path, node)
        if needs_torch(module)
    ]
    assert_none(impure)


def test_the_command_line_and_the_package_import_torch_and_its_rooms_lazily() -> None:
    eager = [
        at(path, node, f"imports {module} when it is itself imported")
        for path in files_in("cli", "penstock", "__main__")
        for node in eager_nodes(path)
        for module in imported_modules(path, node)
        if needs_torch(module)
    ]
    assert_none(eager)


@pytest.mark.parametrize("room", [room for room in rooms() if room in (*PURE, "penstock", "cli")])
def test_importing_a_room_loads_neither_torch_nor_an_optional_library(room: str) -> None:
    modules = [module_of(path) for path in files_in(room)]
    program = f"import sys, {', '.join(modules)}; print(*sorted(set({OPTIONAL!r}) & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert_none(result.stdout.split() + result.stderr.splitlines())


# ------------------------------------------------------------------------------------------------------------- sizes


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def length_of(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def arguments_of(function: Function) -> tuple[list[str], list[str]]:
    """The names that can be given by position, and those by keyword only; self and cls are not counted."""
    by_position = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
    return [name for name in by_position if name not in ("self", "cls")], [a.arg for a in function.args.kwonlyargs]


def num_arguments(function: Function) -> int:
    by_position, by_keyword = arguments_of(function)
    return len(by_position) + len(by_keyword)


def has_too_many_arguments(path: Path, function: Function) -> bool:
    by_position, _ = arguments_of(function)
    is_public = not function.name.startswith("_") or function.name == "__init__"
    is_door = room_of(path) in ("api", "auto", "flat", "hf") and is_public
    limit = DOOR_ARGUMENTS if is_door else ARGUMENTS
    return len(by_position) > ARGUMENTS or num_arguments(function) > limit


def attributes_of(cls: ast.ClassDef) -> set[str]:
    """Fields of a dataclass, and what its methods set on self."""
    is_dataclass = any(called_name(item).split(".")[-1] == "dataclass" for item in cls.decorator_list)
    declared = [item for item in cls.body if isinstance(item, ast.AnnAssign) and is_dataclass]
    fields = {ast.unparse(item.target) for item in declared if "ClassVar" not in ast.unparse(item.annotation)}
    stored = {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    return fields | stored


def test_files_are_small() -> None:
    assert_none([f"{module_of(p)}: {num_lines(p)} lines" for p in FILES if num_lines(p) > FILE_LINES])


def test_functions_are_short() -> None:
    long = [
        at(path, node, f"{node.name} has {length_of(node)} lines")
        for path, node in functions()
        if length_of(node) > FUNCTION_LINES
    ]
    assert_none(long)


def test_functions_take_few_arguments() -> None:
    wide = [
        at(path, node, f"{node.name} takes {num_arguments(node)} arguments")
        for path, node in functions()
        if has_too_many_arguments(path, node)
    ]
    assert_none(wide)


def test_classes_have_few_attributes() -> None:
    wide = [
        at(path, node, f"{node.name} has {len(attributes_of(node))} attributes")
        for path, node in nodes(ast.ClassDef)
        if len(attributes_of(node)) > ATTRIBUTES
    ]
    assert_none(wide)


# ---------------------------------------------------------------------------------------------------------- families


def family_imports(family: str) -> dict[str, str]:
    """Name in the family's `__init__.py` -> the file of the family that it comes from."""
    path = PACKAGE / family / "__init__.py"
    origin = {}
    for node in tree_of(path).body:
        for module, alias in zip(imported_modules(path, node), getattr(node, "names", ()), strict=False):
            parts = module.split(".")
            if parts[:2] == ["penstock", family] and len(parts) > 2:
                origin[alias.asname or alias.name] = parts[2]
    return origin


def family_tables(family: str) -> list[set[str]]:
    """For every module-level table of a family, the files whose contents it names."""
    origin = family_imports(family)
    tables = []
    for node in tree_of(PACKAGE / family / "__init__.py").body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            members = {origin[n.id] for n in ast.walk(node.value) if isinstance(n, ast.Name) and n.id in origin}
            tables.append(members - {"base"})
    return [members for members in tables if members]


BUILT_FAMILIES = [family for family in FAMILIES if (PACKAGE / family / "__init__.py").exists()]


@pytest.mark.parametrize("family", BUILT_FAMILIES)
def test_a_family_has_one_explicit_table_in_its_init(family: str) -> None:
    assert len(family_tables(family)) == 1


@pytest.mark.parametrize("family", BUILT_FAMILIES)
def test_a_member_of_a_family_is_a_small_file(family: str) -> None:
    members = [PACKAGE / family / f"{name}.py" for table in family_tables(family) for name in sorted(table)]
    assert_none([f"{module_of(p)}: {num_lines(p)} lines" for p in members if num_lines(p) > MEMBER_LINES])


def test_nothing_registers_itself() -> None:
    registering = [
        at(path, node, "registers by decorator or by being subclassed")
        for path, node in (*functions(), *nodes(ast.ClassDef))
        if node.name == "__init_subclass__" or any("register" in called_name(item) for item in node.decorator_list)
    ]
    assert_none(registering)


# ------------------------------------------------------------------------------------------------ words and the rest


def opens_with_a_sentence(path: Path) -> bool:
    first = (ast.get_docstring(tree_of(path)) or "").split("\n")[0]
    return first.endswith(".") and len(re.findall(r"[.!?](?=\s+[A-Z]|$)", first)) == 1


def test_every_file_opens_with_one_sentence() -> None:
    assert_none([module_of(path) for path in FILES if not opens_with_a_sentence(path)])


def test_file_names_say_what_is_inside() -> None:
    assert_none([module_of(path) for path in PACKAGE.rglob("*") if VAGUE_NAMES.search(path.stem)])


def test_nothing_is_left_open() -> None:
    open_ends = [module_of(path) for path in FILES if LEFT_OPEN.search(path.read_text(encoding="utf-8"))]
    unwritten = [at(path, n, n.id) for path, n in nodes(ast.Name) if n.id == "NotImplementedError"]
    assert_none(open_ends + unwritten)


def test_no_code_is_loaded_from_data() -> None:
    calls = [
        at(path, node, called_name(node))
        for path, node in nodes(ast.Call)
        if called_name(node) in ("eval", "exec", "compile", "torch.load")
    ]
    imports = [
        at(path, node, module)
        for path, node in nodes(ast.AST)
        for module in imported_modules(path, node)
        if module.split(".")[0] in ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve")
    ]
    assert_none(calls + imports)


def test_every_room_has_its_folder_of_tests_and_every_folder_of_tests_its_room() -> None:
    tested = {path.parent.name for path in TESTS.glob("*/test_*.py")}
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    untested = [f"penstock/{name} has no tests/{name}" for name in sorted(folders - tested)]
    astray = [f"tests/{name} has no penstock/{name}" for name in sorted(tested - folders)]
    assert_none(untested + astray)


def test_the_list_of_pure_rooms_is_the_same_wherever_it_is_written() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    covered = project["tool"]["coverage"]["report"]["include"]
    linted = re.search(r"^PURE_ROOMS := (.*)$", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert linted
    assert sorted(re.sub(r"^penstock/|/\*$|\.py$", "", item) for item in covered) == sorted(PURE)
    assert sorted(item.removesuffix(".py") for item in linted[1].split()) == sorted(PURE)
