"""Options: records that several verbs share; a field is an option, its default and its help, declared once."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

if TYPE_CHECKING:
    from penstock.ir import Cluster, Placement, StageCosts

AsJson = Annotated[bool, Option("--json", help="Print JSON for programs instead of text for people.")]
_Seconds = partial(Option, metavar="SECONDS")
_File = partial(Option, metavar="FILE")


@dataclass(frozen=True)
class Sizes:
    """How large the pipeline is."""

    ranks: Annotated[int, Option(metavar="P", help="Pipeline ranks.")] = 4
    microbatches: Annotated[int, Option(metavar="M", help="Pieces that a batch is cut into.")] = 8
    stages_per_rank: Annotated[
        int | None, Option(metavar="V", help="Stages that each rank holds; else what the schedule wants.")
    ] = None


@dataclass(frozen=True)
class Times:
    """How long passes and messages take, and how much is held."""

    forward: Annotated[float, _Seconds(help="Forward of one rank's layers for one microbatch.")] = 1.0
    input_grad: Annotated[float, _Seconds(help="Their input gradients.")] = 1.0
    weight_grad: Annotated[float, _Seconds(help="Their weight gradients.")] = 1.0
    latency: Annotated[float, _Seconds(help="Travel of a message between ranks.")] = 0.0
    overlap: Annotated[
        float, Option(metavar="SHARE", help="How much of the shorter of two overlapped passes is hidden, 0 to 1.")
    ] = 0.0
    activation_bytes: Annotated[str, Option(metavar="SIZE", help="What one rank's layers keep of one microbatch.")] = (
        "1GiB"
    )

    @property
    def are_equal(self) -> bool:
        """Whether forward, input gradient and weight gradient take equally long."""
        return self.forward == self.input_grad == self.weight_grad

    def costs(self, placement: "Placement") -> "StageCosts":
        """The costs of stages that share their rank's layers equally: schedules of any placement do the same work."""
        from penstock.ir import StageCosts, parse_bytes

        shares = [1 / len(placement.stages[rank]) for rank in placement.ranks]
        held = parse_bytes(self.activation_bytes)
        return StageCosts(
            forward=tuple(self.forward * share for share in shares),
            input_grad=tuple(self.input_grad * share for share in shares),
            weight_grad=tuple(self.weight_grad * share for share in shares),
            activation_bytes=tuple(int(held * share) for share in shares),
        )

    def cluster(self, ranks: int) -> "Cluster":
        """Ranks whose links all have the latency."""
        from penstock.ir import Cluster

        return Cluster(ranks, latency=self.latency, overlap=self.overlap)


@dataclass(frozen=True)
class Outputs:
    """Files that a simulation is written to."""

    svg: Annotated[Path | None, _File(help="Write the timelines as an SVG picture.")] = None
    png: Annotated[Path | None, _File(help="Write the timelines as a PNG picture (needs matplotlib).")] = None
    memory_svg: Annotated[Path | None, _File(help="Write the memory of every rank over time as an SVG picture.")] = None
    trace: Annotated[Path | None, _File(help="Write a Chrome trace; compressed if the name ends in .gz.")] = None
    csv: Annotated[Path | None, _File(help="Write the order of one schedule as CSV, as torch reads it.")] = None


@dataclass(frozen=True)
class Example:
    """What is made up for a model of Hugging Face, of which only the configuration is known."""

    batch: Annotated[int, Option(min=1, metavar="N", help="Samples of the batch made up for an hf: model.")] = 32
    sequence: Annotated[
        int | None, Option(min=1, metavar="N", help="Tokens of each; else 512, or what the model has positions for.")
    ] = None
    weights: Annotated[
        bool, Option("--weights", help="Give an hf: model random weights and measure it, in place of estimating.")
    ] = False
