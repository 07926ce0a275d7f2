"""Checks the import order of the packages, that planning loads no torch, and that no code is loaded from data.

Every test walks over the files that exist. An offence is reported as `path:line`, all of them at once.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "penstock"
TESTS = REPOSITORY / "tests"
FILES = sorted(PACKAGE.rglob("*.py"))

# Packages of one level do not import each other; a package may import any package of an earlier level.
LEVELS = (
    ("errors",),
    ("ir",),
    ("schedules", "passes", "simulate", "partitioners", "views"),
    ("planner",),
    ("launch",),
    ("capture",),
    ("batches",),
    ("stages",),
    ("codegen", "measure", "loss"),
    ("runtime",),
    ("checkpoint",),
    ("api",),
    ("auto", "flat", "hf", "pipelining", "demo"),
    ("penstock",),  # penstock/__init__.py: the public names
    ("cli",),
    ("__main__",),
)
PLANNING = tuple(package for level in LEVELS[:4] for package in level)
LOADS_TORCH = ("launch", "capture", "batches", "stages", "codegen", "measure", "loss", "runtime", "checkpoint")
OPTIONAL = ("torch", "transformers", "ortools", "pymetis", "matplotlib", "pydantic")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes of a file; to walk over all files takes a second."""
    return list(ast.walk(tree_of(path)))


def package_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return "penstock" if first == "__init__.py" else first.removesuffix(".py")


def packages() -> list[str]:
    return sorted({package_of(path) for path in FILES})


def module_of(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def level_of(package: str) -> int:
    return next(number for number, level in enumerate(LEVELS) if package in level)


def name_of(function: ast.expr) -> str:
    """The last word of what is called; to unparse all expressions would take seconds."""
    return getattr(function, "id", getattr(function, "attr", ""))


def imported_modules(path: Path, node: ast.AST) -> list[str]:
    """Dotted names imported by one statement or by one `import_module("...")` call."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = path.relative_to(REPOSITORY).parent.parts
            above = package[: len(package) - node.level + 1]
            base = ".".join((*above, *([node.module] if node.module else [])))
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and name_of(node.func) in ("import_module", "__import__"):
        return [str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
    return []


def imports(path: Path, nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.AST, str, str | None]]:
    """Every import among the nodes: the node, the module, and the package of penstock that the module belongs to."""
    known = {package for level in LEVELS for package in level}
    for node in nodes:
        for module in imported_modules(path, node):
            parts = module.split(".")
            if parts[0] != "penstock":
                yield node, module, None
            else:
                yield node, module, parts[1] if len(parts) > 1 and parts[1] in known else "penstock"


def eager_nodes(path: Path) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported: no function bodies, nothing under `if TYPE_CHECKING`."""
    waiting: list[ast.AST] = list(tree_of(path).body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))


def at(path: Path, node: ast.AST, text: str) -> str:
    return f"{path.relative_to(REPOSITORY)}:{getattr(node, 'lineno', 1)} {text}"


def assert_none(offences: list[str]) -> None:
    assert not offences, "\n" + "\n".join(offences)


def test_every_package_has_a_level() -> None:
    assert_none([package for package in packages() if not any(package in level for level in LEVELS)])


def test_packages_import_only_packages_of_earlier_levels_even_inside_functions() -> None:
    upward = [
        at(path, node, f"{package_of(path)} imports {package}")
        for path in FILES
        for node, _, package in imports(path, nodes_of(path))
        if package not in (None, package_of(path)) and level_of(package) >= level_of(package_of(path))
    ]
    assert_none(upward)


def test_planning_packages_import_no_torch_even_inside_functions() -> None:
    impure = [
        at(path, node, f"imports {module}")
        for path in FILES
        if package_of(path) in PLANNING
        for node, module, package in imports(path, nodes_of(path))
        if module.split(".")[0] == "torch" or package in LOADS_TORCH
    ]
    assert_none(impure)


def test_the_command_line_and_the_package_import_torch_lazily() -> None:
    eager = [
        at(path, node, f"imports {module} when it is itself imported")
        for path in FILES
        if package_of(path) in ("cli", "penstock", "__main__")
        for node, module, package in imports(path, eager_nodes(path))
        if module.split(".")[0] == "torch" or package in LOADS_TORCH
    ]
    assert_none(eager)


@pytest.mark.parametrize("package", [package for package in packages() if package in (*PLANNING, "penstock", "cli")])
def test_importing_loads_neither_torch_nor_an_optional_library(package: str) -> None:
    modules = [module_of(path) for path in FILES if package_of(path) == package]
    program = f"import sys, {', '.join(modules)}; print(*sorted(set({OPTIONAL!r}) & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert_none(result.stdout.split() + result.stderr.splitlines())


def test_importing_the_python_interface_does_not_load_slow_modules_of_torch() -> None:
    modules = [module_of(path) for path in FILES if package_of(path) in ("api", "auto", "flat", "pipelining")]
    slow = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo")
    program = f"import sys, {', '.join(modules)}; print(*sorted(set({slow!r}) & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert_none(result.stdout.split() + result.stderr.splitlines())


def test_ruff_bans_every_file_of_ir_from_being_imported_past_the_package() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    banned = set(project["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"])
    files = {module_of(path) for path in FILES if package_of(path) == "ir" and path.name != "__init__.py"}
    assert banned == files


def test_nothing_registers_itself() -> None:
    registering = [
        at(path, node, "registers by decorator or by being subclassed")
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and (node.name == "__init_subclass__" or any("register" in ast.unparse(item) for item in node.decorator_list))
    ]
    assert_none(registering)


def test_no_code_is_loaded_from_data() -> None:
    calls = [
        at(path, node, ast.unparse(node.func))
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        and name_of(node.func) in ("eval", "exec", "compile", "load")
        and ast.unparse(node.func) in ("eval", "exec", "compile", "torch.load")
    ]
    modules = [
        at(path, node, module)
        for path in FILES
        for node, module, _ in imports(path, nodes_of(path))
        if module.split(".")[0] in ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve")
    ]
    assert_none(calls + modules)


def test_tests_mirror_the_packages() -> None:
    tested = {path.parent.name for path in TESTS.glob("*/test_*.py")}
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert tested == folders


def test_the_list_of_planning_packages_is_the_same_in_the_makefile_and_the_coverage_settings() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    covered = project["tool"]["coverage"]["run"]["include"]
    linted = re.search(r"^PLANNING := (.*)$", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert linted
    assert sorted(re.sub(r"^penstock/|/\*$|\.py$", "", item) for item in covered) == sorted(PLANNING)
    assert sorted(re.sub(r"^penstock/|\.py$", "", item) for item in linted[1].split()) == sorted(PLANNING)
