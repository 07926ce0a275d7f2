"""capture: a model of the user's as a graph, and what crosses when it is cut."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from penstock.cli.builds import Model, built, source_of, told
from penstock.cli.files import check_targets, write
from penstock.cli.options import AsJson, Example
from penstock.cli.screen import look, note, print_json
from penstock.errors import CaptureError

if TYPE_CHECKING:
    from penstock.ir import Graph, Partition

Stages = Annotated[int, Option(min=1, metavar="N", help="Cut into so many stages and show what crosses.")]
Picture = Annotated[Path | None, Option(metavar="FILE", help="Draw the graph, and its stages, as an SVG picture.")]


@dataclass(frozen=True)
class Granularity:
    """How far a model is opened."""

    depth: Annotated[
        int | None, Option(min=1, metavar="N", help="Open modules so many levels down; else find blocks.")
    ] = None
    block: Annotated[
        list[str] | None, Option(metavar="NAME", help="A module or class to keep whole; may be repeated.")
    ] = None


def capture(
    *,
    target: Model,
    granularity: Granularity,
    stages: Stages = 1,
    svg: Picture = None,
    example: Example,
    as_json: AsJson = False,
) -> None:
    """Show a model as a graph of blocks.

    The model is run on the batch and recorded. With --stages it is also cut into stages of about equally many modules,
    and every tensor that crosses from one to another is listed.
    """
    from penstock.partitioners import uniform

    check_targets((svg,), source=source_of(target))
    graph, title = _graph(target, granularity, example)
    partition = uniform(graph, stages)
    if as_json:
        print_json(_plain(graph, partition))
    else:
        _print(graph, partition)
    if svg:
        from penstock.views import Model as ModelView

        write(svg, ModelView(title=title)((graph, partition)))
        note(f"wrote {svg}")


def _graph(target: str, granularity: Granularity, example: Example) -> "tuple[Graph, str]":
    """The graph, and what the model is called."""
    import penstock

    opened = {"depth": granularity.depth, "basic_blocks": tuple(granularity.block or ())}
    with built(target, example) as (model, args, kwargs):
        with told("the model failed on the batch while it was recorded", source_of(target), CaptureError):
            captured = penstock.capture(model, args, kwargs, **opened)
        return captured.graph, type(model).__name__


def _print(graph: "Graph", partition: "Partition") -> None:
    from penstock.views import Cuts, Outline

    look(Outline(), (graph, partition))
    if partition.num_stages > 1:
        typer.echo()
        look(Cuts(), (graph, partition))


def _plain(graph: "Graph", partition: "Partition") -> dict[str, Any]:
    """What programs read: the graph and the partition as documents that penstock reads, and what crosses."""
    from penstock.ir import to_json

    crossings = [
        {
            "producer": crossing.producer,
            "consumer": crossing.consumer,
            "forward_bytes": crossing.forward_bytes,
            "backward_bytes": crossing.backward_bytes,
            "values": [
                {"name": value.name, "tensor": str(value.spec), "bytes": value.spec.bytes, "needs_gradient": grad}
                for value in crossing.values
                for grad in [value.spec.requires_grad]
            ],
        }
        for crossing in partition.crossings(graph)
    ]
    graph_document, partition_document = (json.loads(to_json(noun)) for noun in (graph, partition))
    return {"graph": graph_document, "partition": partition_document, "crossings": crossings}
