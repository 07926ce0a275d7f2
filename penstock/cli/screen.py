"""Screen: what commands print: views, in colour on a terminal and plain in a pipe, JSON, and notes on stderr."""

import json
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.views import RichView, Subject


def look(view: "RichView[Subject]", subject: "Subject") -> None:
    """Print a view as the reader can use it best."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        console.print(view.renderable(subject))
    else:
        typer.echo(view(subject))


def print_sheet(header: tuple[str, ...], rows: "Sequence[tuple[str, ...]]") -> None:
    """Print a table: names at the left, figures at the right."""
    from rich.console import Console

    from penstock.views import TextTable

    console, table = Console(), TextTable(header, tuple(rows))
    if console.is_terminal:
        console.print(table.rich())
    else:
        typer.echo(table.markdown())


def print_json(value: object) -> None:
    """Print a value for programs."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def note(text: str) -> None:
    """Tell something beside the result: on stderr, so that a pipe gets the result alone."""
    typer.echo(text, err=True)
