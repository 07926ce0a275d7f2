"""Options that several verbs share, and `command`, which turns records of options into command-line options.

A field of a record is an option: its name, type, default and help are declared there and nowhere else.
"""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

from typer import Context, Option

from penstock.api.train_options import Flag
from penstock.cli.output import exit_on_error

if TYPE_CHECKING:
    from penstock.ir import Cluster, Placement, StageCosts

AsJson = Annotated[bool, Option("--json", help="Print JSON instead of text.")]
Depth = Annotated[int | None, Option(min=1, metavar="N", help="Open modules N levels deep; default: down to blocks.")]
Blocks = Annotated[list[str] | None, Option(metavar="NAME", help="A module or class to keep whole; may be repeated.")]
_Seconds = partial(Option, metavar="SECONDS")
_File = partial(Option, metavar="FILE")


@dataclass(frozen=True)
class Sizes:
    """The size of the pipeline."""

    ranks: Annotated[int, Option(metavar="P", help="Pipeline ranks.")] = 4
    microbatches: Annotated[int, Option(metavar="M", help="Microbatches per batch.")] = 8
    stages_per_rank: Annotated[
        int | None, Option(metavar="V", help="Stages per rank; default: as the schedule needs.")
    ] = None


@dataclass(frozen=True)
class Times:
    """Seconds of passes and messages, and bytes of activations."""

    forward: Annotated[float, _Seconds(help="Forward of one rank's layers for one microbatch.")] = 1.0
    input_grad: Annotated[float, _Seconds(help="Input gradients of the same layers.")] = 1.0
    weight_grad: Annotated[float, _Seconds(help="Weight gradients of the same layers.")] = 1.0
    latency: Annotated[float, _Seconds(help="Latency of a message between ranks.")] = 0.0
    overlap: Annotated[
        float, Option(metavar="SHARE", help="Share of the shorter of two overlapped passes that is hidden, 0 to 1.")
    ] = 0.0
    activation_bytes: Annotated[
        str, Option(metavar="SIZE", help="Activations of one rank's layers for one microbatch.")
    ] = "1GiB"

    def costs(self, placement: "Placement") -> "StageCosts":
        """Costs of stages that share their rank's layers equally, so that every schedule does the same work."""
        from penstock.ir import StageCosts, parse_bytes

        shares = [1 / len(placement.stages[rank]) for rank in placement.ranks]
        activation_bytes = parse_bytes(self.activation_bytes)
        return StageCosts(
            forward=tuple(self.forward * share for share in shares),
            input_grad=tuple(self.input_grad * share for share in shares),
            weight_grad=tuple(self.weight_grad * share for share in shares),
            activation_bytes=tuple(int(activation_bytes * share) for share in shares),
        )

    def cluster(self, ranks: int) -> "Cluster":
        """Ranks whose links all have the latency."""
        from penstock.ir import Cluster

        return Cluster(ranks, latency=self.latency, overlap=self.overlap)


@dataclass(frozen=True)
class Outputs:
    """Files written by a simulation."""

    svg: Annotated[Path | None, _File(help="Write the timelines as an SVG picture.")] = None
    png: Annotated[Path | None, _File(help="Write the timelines as a PNG picture (needs matplotlib).")] = None
    memory_svg: Annotated[Path | None, _File(help="Write the memory of every rank over time as an SVG picture.")] = None
    trace: Annotated[Path | None, _File(help="Write a Chrome trace; compressed if the name ends in .gz.")] = None
    csv: Annotated[Path | None, _File(help="Write the order of one schedule as CSV in torch's format.")] = None


@dataclass(frozen=True)
class Example:
    """The example batch of a Hugging Face model, of which only the configuration is known."""

    batch: Annotated[int, Option(min=1, metavar="N", help="Samples in the example batch of an hf: model.")] = 32
    sequence: Annotated[
        int | None, Option(min=1, metavar="N", help="Tokens per sample; default: 512, or fewer if the model has fewer.")
    ] = None
    weights: Annotated[
        bool, Option("--weights", help="Give an hf: model random weights and measure it instead of estimating.")
    ] = False


class Given(frozenset[str]):
    """The names of the options that were typed; a verb with a parameter of this type is given them.

    It contains an option that was typed with its default value, and not one that was left out.
    """

    def of(self, *records: type) -> list[str]:
        """The typed options that are fields of the records, as they are typed."""
        names = (field.name for record in records for field in fields(record))
        return [f"--{name.replace('_', '-')}" for name in names if name in self]


Verb = Callable[..., None]


def command(verb: Verb) -> Verb:
    """Turn a verb that takes records of options into a function that takes each of their fields, as typer needs it."""
    hints = get_type_hints(verb)
    records: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    takes_given = [name for name, hint in hints.items() if hint is Given]
    names = {name: [field.name for field in fields(record)] for name, record in records.items()}

    def run(**values: Any) -> None:
        with exit_on_error():
            # Before torch, whose extension module imports numpy while it loads and drops a ctrl-c that comes meanwhile.
            import numpy  # noqa: F401

            for name in takes_given:
                context = values.pop(name)
                sources = {key: context.get_parameter_source(key) for key in context.params}
                values[name] = Given(key for key, source in sources.items() if source and source.name == "COMMANDLINE")
            built = {name: record(**{key: values.pop(key) for key in names[name]}) for name, record in records.items()}
            verb(**built, **values)

    parameters = []
    for parameter in signature(verb).parameters.values():
        if parameter.name not in records:
            is_given = parameter.name in takes_given
            parameters.append(parameter.replace(annotation=Context) if is_given else parameter)
            continue
        record = records[parameter.name]
        types = get_type_hints(record, include_extras=True)
        for field in fields(record):
            default = Parameter.empty if field.default is MISSING else field.default
            annotation = types[field.name]
            kind, *details = get_args(annotation) if hasattr(annotation, "__metadata__") else (annotation,)
            # In records that do not know typer, a Flag is in the place of an Option.
            if flag := next((detail for detail in details if isinstance(detail, Flag)), None):
                annotation = Annotated[kind, Option(metavar=flag.metavar, help=flag.help, min=flag.min)]
            parameters.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    # typer reads the name, the docstring and the signature of a function.
    run.__name__, run.__doc__ = verb.__name__, verb.__doc__
    run.__signature__ = Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
