"""Agreement: what all ranks must see alike before data flows, and the words for what two of them see differently.

gloo takes a smaller message or another type of equal size for granted, and a larger one ends the process: so nothing
is sent until both ends of every edge have shown that they mean the same.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

from penstock.errors import RunError
from penstock.ir import Crossing, Program
from penstock.runtime.row import Row

_STAGES = "stages "
_OPTION = "option "


class Form:
    """All that the ranks must agree on for one kind of call: one line per fact, and a digest of them."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = tuple(lines)
        self.text = "\n".join(self.lines)
        self.digest = int.from_bytes(hashlib.sha256(self.text.encode()).digest()[:8], "big", signed=True)

    @classmethod
    def of_step(cls, program: Program, edges: Sequence[Mapping[tuple[int, int], Crossing]], words: str) -> "Form":
        """The order of actions of a step, and what passes between the stages."""
        order = hashlib.sha256(program.table.codes.tobytes() + program.table.starts.tobytes()).hexdigest()
        return cls([words, f"program of {len(program.table.codes)} actions {order[:16]}", *_edge_lines(edges)])

    @classmethod
    def of_options(cls, options: Mapping[str, object]) -> "Form":
        """Choices by name."""
        return cls(f"{_OPTION}{name}: {value}" for name, value in options.items())


def called_differently(rows: Sequence[Row], who: str = "rank") -> RunError | None:
    """The error for rows of ranks that were called for different things, None if all were called for the same."""
    words = [row.words for row in rows]
    if len({row.key.occasion for row in rows}) > 1:
        usual, _ = Counter(words).most_common(1)[0]
        one = words.index(usual)
        other = next(place for place, row in enumerate(rows) if row.key.occasion != rows[one].key.occasion)
        did = f"{_did(words[other])} while {who} {one} {_did(usual)}"
        did = f"{_did(usual)} of another Pipeline than {who} {one}" if words[other] == usual else did
        return RunError(
            f"{who} {other} {did}",
            step=rows[one].key.step,
            **{f"{who}_{place}": said for place, said in enumerate(words)} if len(rows) > 2 else {},
            hint=f"the same calls in the same order, with the same options, on every {who}",
        )
    steps, numbers = [row.key.step for row in rows], [row.key.number for row in rows]
    if len(set(steps)) > 1:
        hint = f"call step and eval alike on every {who}"
        return RunError(f"the {who}s are at different steps", called=words[0], steps=steps, hint=hint)
    if len(set(numbers)) > 1:
        hint = f"the same calls in the same order on every {who}"
        return RunError(f"some {who}s have made more calls than others", called=words[0], calls=numbers, hint=hint)
    return None


def _did(words: str) -> str:
    """A call has a name, anything else is a place in one."""
    return f"was at {words}" if words.startswith("the ") else f"called {words}"


def different_batches(checksums: Sequence[int]) -> RunError | None:
    """The error for batches that have not the same content on all ranks."""
    if len(set(checksums)) == 1:
        return None
    other = next(rank for rank, number in enumerate(checksums) if number != checksums[0])
    return RunError(
        "the ranks were given different batches",
        ranks=(0, other),
        hint='the same batch on every rank (seed the data loader alike), or inputs="first"',
    )


def difference(forms: Sequence[Sequence[str]], who: str = "rank") -> RunError | None:
    """The first thing that two ranks see differently, with what each of them sees."""
    for rank, lines in enumerate(forms):
        for mine, other in zip_longest(forms[0], lines, fillvalue="nothing"):
            if mine != other:
                return _told(rank, mine, other, who)
    return None


def _told(rank: int, mine: str, other: str, who: str) -> RunError:
    if mine.startswith(_OPTION) and other.startswith(_OPTION):
        return _told_option(rank, mine.removeprefix(_OPTION), other.removeprefix(_OPTION), who)
    edge = next((line for line in (mine, other) if line.startswith(_STAGES)), "")
    values: dict[str, object] = {f"{who}_0": mine, f"{who}_{rank}": other}
    if edge:
        producer, consumer = edge.removeprefix(_STAGES).split(":")[0].split(" to ")
        values = {"producer": f"stage {producer}", "consumer": f"stage {consumer.split(',')[0]}", **values}
    return RunError(
        "the ranks do not agree on what passes between the stages",
        hint="give every rank the same model, plan, options and form of batch",
        **values,
    )


def _told_option(rank: int, mine: str, other: str, who: str) -> RunError:
    (name, _, value), (_, _, another) = mine.partition(": "), other.partition(": ")
    values = {f"{who}_0": value, f"{who}_{rank}": another}
    return RunError(f"the {who}s were given different {name}", hint=f"the same {name} on every {who}", **values)


def _edge_lines(edges: Sequence[Mapping[tuple[int, int], Crossing]]) -> Iterable[str]:
    for microbatch, crossings in enumerate(edges):
        for (producer, consumer), crossing in sorted(crossings.items()):
            for value in crossing.values:
                spec = value.spec
                extra = f" order {list(spec.order)}" if spec.order else ""
                needs = " with gradient" if spec.requires_grad else ""
                place = f"{_STAGES}{producer} to {consumer}, microbatch {microbatch}"
                yield f"{place}: {value.name!r} {spec}{extra}{needs}"
