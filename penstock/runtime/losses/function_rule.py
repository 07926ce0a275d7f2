"""Function rule: how the loss of a loss function is reduced, found at its first output and looked after since."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from penstock.errors import RunError
from penstock.runtime.losses.case import Case
from penstock.runtime.losses.divisors import LiveTerm
from penstock.runtime.losses.judge import Judge
from penstock.runtime.losses.proof import is_close
from penstock.runtime.losses.reading import Reading
from penstock.runtime.losses.verdict import Verdict
from penstock.runtime.losses.way import Way, parameters_of, way_of

LossFn = Callable[[Any, Any], Any]
_NUM_WAYS = 8
"""after as many different ways through a function it is recorded anew no more, only tried"""
_ROUNDING = 1e-9
_NAMED = 3


class FunctionRule:
    """Knows the rule of a loss function.

    At the first microbatch the function is recorded and tried, which calls it five times more. It is tried again, by
    three calls, in the 2nd, 4th, 8th ... step. If it goes another way than before, which the graph of a loss shows
    without any call, it is recorded and tried again. If its counts turn out wrong, as those of class weights that grow
    from step to step do, it is recorded anew in every step from then on, by two calls. One that cannot be looked into,
    and may be a mean over samples or over labels, is tried whenever samples have different numbers of labels.
    """

    def __init__(self, judge: Judge, elsewhere: Mapping[int, str]) -> None:
        """`elsewhere` names the parameters, by their identity, of which this process has no live numbers."""
        self._judge, self._elsewhere = judge, elsewhere
        self._read: Reading | None = None
        self._verdict: Verdict | None = None
        self._doubts: dict[str, None] = {}
        self._ways: set[Way] = set()
        self._ratios: list[float] = []
        self._is_changing = False

    @property
    def verdict(self) -> Verdict | None:
        """What is known, once an output was seen."""
        return self._verdict

    @property
    def doubts(self) -> tuple[str, ...]:
        """What speaks, or has ever spoken, against the rule."""
        return tuple(self._doubts) + (self._verdict.doubts if self._verdict else ())

    def distrust(self) -> None:
        """Record the function anew in every step: what was counted is not what it divided by."""
        self._is_changing = True

    def before(self, case: Case, step: int) -> None:
        """Look at the function before it is called; `step` counts from 1, and is 0 within a step."""
        if self._verdict is None:
            self._study(case)
        elif step and self._is_changing:
            self._read_again(case)
        elif self._is_due(step) or not self._verdict.is_final:
            self._try_again(case)

    def after(self, loss: Tensor, case: Case) -> None:
        """Whether the function went a way that it never went before."""
        way = way_of(loss, case.output)
        if way in self._ways or len(self._ways) > _NUM_WAYS:
            return
        self._refuse_elsewhere(parameters_of(loss, case.output))
        is_new, self._ways = bool(self._ways), self._ways | {way}
        if is_new and len(self._ways) <= _NUM_WAYS:
            self._study(case)

    def compare(self, terms: Sequence[LiveTerm] | None, case: Case) -> None:
        """Find the rule anew if a step's first loss was divided by more or less, for what is counted, than the last's.

        Class weights or a threshold may be others by now.
        """
        assert self._verdict is not None
        rule = self._verdict.rule
        if not terms or not self._verdict.is_read or not any(term.counts for term in rule.terms):
            return
        counts = self._verdict.counter(case.piece)
        if counts is None or not all(counts):
            return
        ratios = [term.below_all / counts[rule.leading] for term in terms if term.below_all is not None]
        rounding = max(_ROUNDING, *(term.rounding for term in terms))
        is_new = len(ratios) != len(self._ratios)
        if is_new or all(is_close(one, other, rounding) for one, other in zip(ratios, self._ratios, strict=True)):
            self._ratios = ratios
        else:
            self.distrust()
            self._study(case)

    def _is_due(self, step: int) -> bool:
        """Whether the function is tried in this step."""
        is_open = self._verdict is not None and self._verdict.is_ambiguous
        return step > 1 and (is_open or not step & (step - 1))

    def _study(self, case: Case) -> None:
        self._read, self._ratios = self._judge.read(case), []
        self._refuse_elsewhere(self._read.parameters)
        self._verdict = self._judge.judge(self._read, case)
        if self._verdict.is_final:
            # A doubt that another microbatch has raised is not gone because this one raises none.
            self._doubts.update(dict.fromkeys(self._verdict.doubts))

    def _read_again(self, case: Case) -> None:
        """The rule stays if it is read again, with what it counts by now; else all is found anew."""
        assert self._verdict is not None
        reading = self._judge.read(case)
        if self._verdict.is_read and self._read is not None and reading.rule == self._read.rule:
            self._ratios, self._read = [], reading
            self._verdict = replace(self._verdict, counter=reading.counter)
        else:
            self._study(case)

    def _try_again(self, case: Case) -> None:
        """The rule stays if it is borne out, or if nothing can be told; else all is found anew."""
        assert self._verdict is not None
        is_same = self._judge.confirms(self._verdict, case)
        if is_same:
            self._verdict = replace(self._verdict, is_final=True)
        elif is_same is not None:
            self._study(case)

    def _refuse_elsewhere(self, parameters: Iterable[nn.Parameter]) -> None:
        """A parameter that is trained on another rank has old numbers here, and its gradient would be lost."""
        names = sorted({self._elsewhere[id(one)] for one in parameters if id(one) in self._elsewhere})
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            raise RunError(
                "the loss function uses parameters of the model that are on another rank: their numbers are old "
                "here, and their gradients would be lost",
                parameters=", ".join(names[:_NAMED]) + more,
                hint="penstock.add_loss(...) in the forward of the module that has them, or weight_decay=... of the "
                "optimizer",
            )
