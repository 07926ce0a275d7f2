"""Agreement: before data flows, all ranks compare what they are about to do.

gloo takes a smaller message or another type of equal size for granted, and a larger one ends the process: so nothing
is sent until both ends of every edge have shown that they mean the same.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

import torch

from penstock.errors import RunError
from penstock.ir.partition import Crossing
from penstock.ir.program import Program
from penstock.runtime.crew import Crew

_STAGES = "stages "


class Form:
    """All that the ranks must agree on for one kind of step: one line per fact, and a digest of them."""

    def __init__(self, program: Program, edges: Sequence[Mapping[tuple[int, int], Crossing]], words: str) -> None:
        order = hashlib.sha256(program.table.codes.tobytes() + program.table.starts.tobytes()).hexdigest()
        self.lines = [words, f"program of {len(program.table.codes)} actions {order[:16]}", *_edge_lines(edges)]
        self.digest = int.from_bytes(hashlib.sha256("\n".join(self.lines).encode()).digest()[:8], "big", signed=True)


def agree(crew: Crew, step: int, form: Form, checksum: int = 0) -> None:
    """Raise the same error on every rank unless all are about to take the same step on the same batch."""
    mine = torch.tensor([step, form.digest, checksum], dtype=torch.int64)
    rows = crew.gather(mine)
    if (bool((rows == mine).all()) and len(rows) == crew.ranks) or crew.is_alone:
        return
    _refuse_steps(rows[:, 0].tolist())
    texts = crew.gather_texts("\n".join(form.lines))
    if problem := difference([text.split("\n") for text in texts]):
        raise problem
    _refuse_batches(rows[:, 2].tolist())


def _refuse_steps(steps: list[int]) -> None:
    if len(set(steps)) > 1:
        raise RunError("the ranks are at different steps", steps=steps, hint="call step and eval alike on every rank")


def _refuse_batches(checksums: list[int]) -> None:
    if len(set(checksums)) > 1:
        other = next(rank for rank, number in enumerate(checksums) if number != checksums[0])
        raise RunError(
            "the ranks were given different batches",
            ranks=(0, other),
            hint='the same batch on every rank (seed the data loader alike), or inputs="first"',
        )


def difference(forms: Sequence[Sequence[str]]) -> RunError | None:
    """The first thing that two ranks see differently, with what each of them sees."""
    for rank, lines in enumerate(forms):
        for mine, other in zip_longest(forms[0], lines, fillvalue="nothing"):
            if mine != other:
                return _told(rank, mine, other)
    return None


def _told(rank: int, mine: str, other: str) -> RunError:
    edge = next((line for line in (mine, other) if line.startswith(_STAGES)), "")
    values: dict[str, object] = {"rank_0": mine, f"rank_{rank}": other}
    if edge:
        producer, consumer = edge.removeprefix(_STAGES).split(":")[0].split(" to ")
        values = {"producer": f"stage {producer}", "consumer": f"stage {consumer.split(',')[0]}", **values}
    return RunError(
        "the ranks do not agree on what passes between the stages",
        hint="give every rank the same model, plan, options and form of batch",
        **values,
    )


def _edge_lines(edges: Sequence[Mapping[tuple[int, int], Crossing]]) -> Iterable[str]:
    for microbatch, crossings in enumerate(edges):
        for (producer, consumer), crossing in sorted(crossings.items()):
            for value in crossing.values:
                spec = value.spec
                extra = f" order {list(spec.order)}" if spec.order else ""
                needs = " with gradient" if spec.requires_grad else ""
                place = f"{_STAGES}{producer} to {consumer}, microbatch {microbatch}"
                yield f"{place}: {value.name!r} {spec}{extra}{needs}"
