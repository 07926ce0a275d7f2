"""Meeting: all ranks come together, and none goes on unless all were called for the same and are about to do the same.

Every call that needs all ranks begins with one, so that a call that one rank makes alone, or in another order, is an
error on all of them that says who called what. The ranks of a pipeline meet first, then those of its replicas that hold
the same stages.
"""

import contextlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

from penstock.errors import PenstockError, RunError
from penstock.runtime.agreement import Form, called_differently, difference, different_batches
from penstock.runtime.circle import Circle
from penstock.runtime.crew import Crew
from penstock.runtime.row import KEY_BYTES, NO_FIGURES, ROW_BYTES, Figures, Key, Row, figures_in, merged

_REFUSED = -1


@dataclass(frozen=True)
class Occasion:
    """What a rank was called for: the name of the call, the number of the next step, and options in words."""

    name: str
    step: int
    options: str = ""

    @cached_property
    def words(self) -> str:
        """The call as the user would write it."""
        return f"{self.name}({self.options})" if self.options else self.name


class Said(NamedTuple):
    """What a rank brings to a meeting."""

    form: Form | None = None
    batch: int = 0
    figures: Figures = NO_FIGURES
    content: tuple[float, ...] = ()
    is_for_replicas: bool = False
    """whether replicas must have the same form too"""


class Heard:
    """What all ranks said together: `here` over the ranks of this pipeline, `figures` over all of all replicas."""

    def __init__(self, here: Figures, figures: Figures, rows: bytes) -> None:
        self.here, self.figures, self._rows = here, figures, rows

    def content(self, rank: int) -> tuple[float, ...]:
        """The numbers that only one rank of this pipeline knew."""
        return Row.unpack(self._rows[rank * ROW_BYTES :]).content


_NOTHING = Said()


class Meeting:
    """The meetings of the ranks of one Pipeline, one after another; all ranks inside one process always agree."""

    _next_pipeline: ClassVar[int] = 0

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._circle = None if crew.is_alone else Circle(crew, crew.control)
        self._replicas = None if crew.replica_control is None else Circle(crew, crew.replica_control)
        self._number, self._pipeline = 0, -1
        self.step = 0
        """that of the last meeting"""
        self._open: tuple[Occasion, Said, Row] | None = None

    def found(self, options: Form, plan: int = 0) -> bool:
        """The first meeting: the ranks compare what their Pipeline was given, and agree on a number for it.

        Returns whether the digest of the plan is the same on all.
        """
        if self._circle is None:
            return True
        figures = Figures(maxes=(float(Meeting._next_pipeline), float(plan), -float(plan)))
        heard = self.hold(Occasion("Pipeline", 0), Said(options, figures=figures, is_for_replicas=True))
        number, largest, smallest = heard.figures.maxes[:3]
        self._pipeline = int(number)
        Meeting._next_pipeline = self._pipeline + 1
        return largest == -smallest

    def hold(self, occasion: Occasion, said: Said = _NOTHING) -> Heard:
        """Meet now."""
        self.begin(occasion, said)
        return self.end()

    def begin(self, occasion: Occasion, said: Said = _NOTHING) -> None:
        """Say what this rank was called for, without waiting for the others."""
        digest = zlib.crc32(f"{self._pipeline} {occasion.words}".encode())
        self._say(occasion, said, digest)

    def refuse(self, occasion: Occasion, error: Exception) -> None:
        """Tell the others, who are or will be at this meeting, that this rank will not do it, and why."""
        # The caller is about to say it in the words of the error itself.
        with contextlib.suppress(RunError):
            self._say(occasion, Said(Form([_written(error)])), _REFUSED)
            self.end()

    def _say(self, occasion: Occasion, said: Said, digest: int) -> None:
        if self._open is not None:
            # Left open by a step that broke before its first message: what was sent must be taken.
            with contextlib.suppress(RunError):
                self.end()
        form = said.form.digest if said.form is not None else 0
        text_bytes = len(said.form.text.encode()) if said.form is not None else 0
        key = Key(self._number, occasion.step, digest, form, said.batch)
        row = Row(key, occasion.words, text_bytes, said.figures, said.content)
        self._number += 1
        self.step = occasion.step
        self._open = (occasion, said, row)
        if self._circle is not None:
            self._circle.begin(row.pack())

    def end(self) -> Heard:
        """What all ranks said, once all have come; the same error on every rank if it does not fit together."""
        assert self._open is not None
        (occasion, said, row), self._open = self._open, None
        if self._circle is None:
            return Heard(row.figures, row.figures, row.pack())
        if self._crew.lookout is not None:
            self._crew.lookout.meets(occasion.name, occasion.step)
        rows = self._circle.end()
        problem = None if _is_one_key(rows) else _problem(self._circle, _unpacked(rows), said)
        here = merged([figures_in(rows, start) for start in range(0, len(rows), ROW_BYTES)])
        everywhere = here if self._replicas is None else self._met_replicas(self._replicas, row, here, said, problem)
        if problem is not None:
            raise problem
        return Heard(here, everywhere, rows)

    def _met_replicas(self, circle: Circle, own: Row, here: Figures, said: Said, problem: RunError | None) -> Figures:
        """The figures of all replicas; a problem of one is one of all."""
        if problem is not None:
            said = Said(Form([_written(problem)]))
        elif not said.is_for_replicas and own.key.occasion != _REFUSED:
            said = _NOTHING
        form = said.form or Form(())
        occasion = own.key.occasion if problem is None else _REFUSED
        key = Key(own.key.number, own.key.step, occasion, form.digest)
        circle.begin(Row(key, own.words, len(form.text.encode()), here).pack())
        rows = _unpacked(circle.end())
        wrong = _problem(circle, rows, Said(form), "replica")
        if wrong is not None and problem is None:
            raise wrong
        return merged([found.figures for found in rows])

    def close(self) -> None:
        """The call is over for which this meeting was held."""
        if self._crew.lookout is not None:
            self._crew.lookout.leaves()


def _is_one_key(rows: bytes) -> bool:
    """Whether all ranks said the same, which is so nearly always, without a closer look at the rows."""
    key = rows[:KEY_BYTES]
    return all(rows.startswith(key, start) for start in range(ROW_BYTES, len(rows), ROW_BYTES))


def _unpacked(rows: bytes) -> list[Row]:
    return [Row.unpack(rows[start : start + ROW_BYTES]) for start in range(0, len(rows), ROW_BYTES)]


def _problem(circle: Circle, rows: Sequence[Row], said: Said, who: str = "rank") -> RunError | None:
    """Why the ranks cannot go on, None if they can; all ranks come to the same."""
    if all(row.key == rows[0].key for row in rows):
        return None
    problem = _told(circle, rows, said, who) or RunError(f"the {who}s do not agree on what they are about to do")
    problem.is_shared = True
    return problem


def _told(circle: Circle, rows: Sequence[Row], said: Said, who: str) -> RunError | None:
    refusing = [place for place, row in enumerate(rows) if row.key.occasion == _REFUSED]
    told = None if refusing else called_differently(rows, who)
    if told is not None:
        return told
    if not refusing and len({row.key.form for row in rows}) == 1:
        return different_batches([row.key.batch for row in rows])
    texts = circle.texts("" if said.form is None else said.form.text, [row.text_bytes for row in rows])
    return _read(texts[refusing[0]], who, refusing[0]) if refusing else difference([t.split("\n") for t in texts], who)


def _written(error: Exception) -> str:
    if not isinstance(error, PenstockError):
        error = RunError(f"{type(error).__name__}: {error}")
    return json.dumps(error.to_dict())


def _read(text: str, who: str, place: int) -> RunError:
    told = json.loads(text)
    values = {who: place, **told["values"]}
    return RunError(told["problem"], hint=told["hint"], report=told["report"], **values)
