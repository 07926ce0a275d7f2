"""capture: a model of the user's as a graph, and what crosses when it is cut."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from penstock.cli.builds import built, told
from penstock.cli.files import check_targets, write
from penstock.cli.options import AsJson
from penstock.cli.screen import look, note, print_json
from penstock.errors import CaptureError

if TYPE_CHECKING:
    from penstock.ir.graph import Graph
    from penstock.ir.partition import Partition

Target = Annotated[
    str, Argument(metavar="FILE.py:FUNCTION", help="A function that returns a model, and args and kwargs of one batch.")
]
Depth = Annotated[int | None, Option(min=1, metavar="N", help="Open modules so many levels down; else find blocks.")]
Block = Annotated[list[str] | None, Option(metavar="NAME", help="A module or class to keep whole; may be repeated.")]
Stages = Annotated[int, Option(min=1, metavar="N", help="Cut into so many stages and show what crosses.")]
Picture = Annotated[Path | None, Option(metavar="FILE", help="Draw the graph, and its stages, as an SVG picture.")]


def capture(
    *,
    target: Target,
    depth: Depth = None,
    block: Block = None,
    stages: Stages = 1,
    svg: Picture = None,
    as_json: AsJson = False,
) -> None:
    """Show a model as a graph of blocks.

    The model is run on the batch and recorded. With --stages it is also cut into stages of about equally many modules,
    and every tensor that crosses from one to another is listed.
    """
    from penstock.partitioners import uniform

    check_targets((svg,), source=Path(target.rpartition(":")[0]))
    graph, title = _graph(target, depth, tuple(block or ()))
    partition = uniform(graph, stages)
    if as_json:
        print_json(_plain(graph, partition))
    else:
        _print(graph, partition)
    if svg:
        from penstock.views.model import Model

        write(svg, Model(title=title)((graph, partition)))
        note(f"wrote {svg}")


def _graph(target: str, depth: int | None, blocks: tuple[str, ...]) -> "tuple[Graph, str]":
    """The graph, and what the model is called."""
    import penstock

    with built(target) as (model, args, kwargs):
        path = Path(target.rpartition(":")[0])
        with told("the model failed on the batch while it was recorded", path, CaptureError):
            captured = penstock.capture(model, args, kwargs, depth=depth, basic_blocks=blocks)
        return captured.graph, type(model).__name__


def _print(graph: "Graph", partition: "Partition") -> None:
    from penstock.views.cuts import Cuts
    from penstock.views.outline import Outline

    look(Outline(), (graph, partition))
    if partition.num_stages > 1:
        typer.echo()
        look(Cuts(), (graph, partition))


def _plain(graph: "Graph", partition: "Partition") -> dict[str, Any]:
    """What programs read: the graph and the partition as documents that penstock reads, and what crosses."""
    from penstock.ir import codec

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
    graph_document, partition_document = (json.loads(codec.to_json(noun)) for noun in (graph, partition))
    return {"graph": graph_document, "partition": partition_document, "crossings": crossings}
