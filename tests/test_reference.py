"""Every public name is in the reference, with its parameters, result and errors described."""

import builtins
import copy
import sys
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import penstock

DOCS = Path(__file__).resolve().parents[1] / "docs"


def load_describe() -> ModuleType:
    spec = spec_from_file_location("penstock_docs_describe", DOCS / "describe.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


describe = load_describe()


@cache
def listed() -> dict[str, Any]:
    """The descriptions of the names in the reference; not at import, because it loads all optional packages."""
    return {each.name: each for _, each in describe.listed()}


@cache
def every() -> dict[str, Any]:
    """Those of the members too."""
    return {each.name: each for one in listed().values() for each in (one, *one.members)}


def test_every_public_name_is_in_the_reference() -> None:
    assert {f"penstock.{name}" for name in penstock.__all__} - set(listed()) == set()
    for package in ("penstock.hf", "penstock.pipelining"):
        public = {name for name in import_module(package).__all__ if not name.startswith("_")}
        assert {f"{package}.{name}" for name in public} - set(listed()) == set()


def test_every_name_is_described() -> None:
    assert [name for name, each in every().items() if not each.text] == []


def test_every_parameter_is_described() -> None:
    lacking = [f"{name}: {one}" for name, each in every().items() for one, text in each.parameters.items() if not text]
    assert lacking == []


def test_no_parameter_is_described_that_does_not_exist() -> None:
    wrong = [f"{name}: {one}" for name, each in every().items() for one in each.unknown]
    assert wrong == []


def test_functions_describe_their_results_and_errors() -> None:
    functions = {name: listed()[f"penstock.{name}"] for name in penstock.__all__ if name.islower()}
    assert len(functions) > 20
    assert [name for name, each in functions.items() if not (each.returns or each.signature.endswith("None"))] == []
    assert [name for name, each in functions.items() if not each.raises] == []


def test_every_error_that_is_described_exists() -> None:
    known = {*penstock.__all__, *vars(builtins)}
    assert {error for each in every().values() for error in each.raises} - known == set()


def test_every_method_of_a_pipeline_is_in_the_reference() -> None:
    public = {name for name in vars(penstock.Pipeline) if not name.startswith("_")}
    assert public - {each.name.rpartition(".")[2] for each in listed()["penstock.Pipeline"].members} == set()


def test_a_missing_description_is_found() -> None:
    def scale(x: float, factor: float = 2.0) -> float:
        """Multiply.

        Args:
            x: any number, also
                a negative one
        """
        return x * factor

    described = describe.describe("scale", scale)
    assert described.parameters == {"x": "any number, also a negative one", "factor": ""}
    assert described.signature == "(x: float, factor: float=2.0) -> float"


def test_the_fields_of_a_record_are_described_below_them() -> None:
    link = describe.describe("penstock.Link", penstock.Link)
    assert link.parameters["bandwidth"] == "bytes per second; None: infinite"
    assert link.signature == "(source: int, target: int, latency: float = 0.0, bandwidth: float | None = None)"


def test_the_page_of_plain_text_is_current() -> None:
    assert (DOCS / "llms.txt").read_text(encoding="utf-8") == describe.page_text(), "python docs/describe.py"


def test_the_package_is_serialised_by_its_name() -> None:
    assert copy.copy(penstock) is penstock


def test_dir_shows_public_names_only_whatever_packages_are_loaded() -> None:
    import_module("penstock.runtime")
    import_module("penstock.cli")
    assert set(dir(penstock)) ^ set(penstock.__all__) == {"__version__"}
