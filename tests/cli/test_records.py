"""command: the fields of records become options, each with its own default."""

from dataclasses import dataclass
from inspect import signature
from typing import Annotated

from typer import Option

from penstock.cli.options import command


@dataclass(frozen=True)
class Point:
    x: Annotated[int, Option(help="How far right.")]
    y: int = 2


seen: list[object] = []


def mark(*, name: str = "spot", point: Point, loud: bool = False) -> None:
    """Mark a point."""
    seen.append((name, point, loud))


def test_a_command_takes_the_fields_in_the_place_of_their_record() -> None:
    assert list(signature(command(mark)).parameters) == ["name", "x", "y", "loud"]


def test_a_field_keeps_its_default_and_one_without_is_required() -> None:
    parameters = signature(command(mark)).parameters
    assert parameters["y"].default == 2
    assert parameters["x"].default is parameters["x"].empty


def test_the_verb_gets_its_record_back() -> None:
    command(mark)(name="here", x=1, y=5, loud=True)
    assert seen.pop() == ("here", Point(1, 5), True)


def test_name_and_docstring_are_those_of_the_verb() -> None:
    assert (command(mark).__name__, command(mark).__doc__) == ("mark", "Mark a point.")
