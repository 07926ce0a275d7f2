"""`penstock capture`: show a model as a graph, and the tensors that cross its cuts."""

import json
from pathlib import Path
from typing import Annotated

from typer import Option

from penstock.cli.files import check_picture, check_targets, write
from penstock.cli.models import Model, build_model, source_of
from penstock.cli.options import AsJson, Blocks, Depth, Example
from penstock.cli.output import echo, note, print_json, print_view
from penstock.cli.user_code import user_errors
from penstock.errors import CaptureError

Stages = Annotated[int, Option(min=1, metavar="N", help="Cut into N stages and list the tensors that cross.")]
Picture = Annotated[Path | None, Option(metavar="FILE", help="Draw the graph and its stages as an SVG picture.")]


def capture(
    *,
    target: Model,
    depth: Depth = None,
    block: Blocks = None,
    stages: Stages = 1,
    svg: Picture = None,
    example: Example,
    as_json: AsJson = False,
) -> None:
    """Show a model as a graph of blocks.

    Runs the model on its batch and records it. With --stages, also cuts it into stages with about the same number of
    modules and lists every tensor that crosses from one stage to another.
    """
    import penstock
    from penstock.ir import to_json
    from penstock.partitioners import uniform
    from penstock.views import Cuts, Outline
    from penstock.views import Model as ModelView

    check_targets((svg,), source=source_of(target))
    check_picture(svg, ".svg")
    with build_model(target, example) as (model, args, kwargs):
        with user_errors("the model failed on the batch while it was recorded", source_of(target), CaptureError):
            captured = penstock.capture(model, args, kwargs, depth=depth, basic_blocks=block or ())
        graph, title = captured.graph, type(model).__name__
    partition = uniform(graph, stages)
    if as_json:
        # The graph and the partition as documents that penstock reads, and the crossings.
        crossings = [
            {
                "producer": crossing.producer,
                "consumer": crossing.consumer,
                "forward_bytes": crossing.forward_bytes,
                "backward_bytes": crossing.backward_bytes,
                "values": [
                    {
                        "name": value.name,
                        "tensor": str(value.spec),
                        "bytes": value.spec.bytes,
                        "needs_gradient": value.spec.requires_grad,
                    }
                    for value in crossing.values
                ],
            }
            for crossing in partition.crossings(graph)
        ]
        records = {"graph": graph, "partition": partition}
        found = {name: json.loads(to_json(record)) for name, record in records.items()}
        print_json({**found, "crossings": crossings})
    else:
        print_view(Outline(), (graph, partition))
        if partition.num_stages > 1:
            echo()
            print_view(Cuts(), (graph, partition))
    if svg:
        write(svg, ModelView(title=title)((graph, partition)))
        note(f"wrote {svg}")
