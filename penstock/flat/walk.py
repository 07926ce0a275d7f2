"""Walk: the actions of this rank in one call, run one after another in 1f1b order."""

from collections.abc import Iterable
from functools import lru_cache

from torch import Tensor

from penstock.flat.hands import Hands
from penstock.flat.line import Line
from penstock.flat.mail import Mail
from penstock.ir import Action, Backward, Forward, Recv, Send
from penstock.passes import lower
from penstock.runtime import located_error
from penstock.schedules import build

Order = tuple[tuple[Action, int], ...]


class Walk:
    """Brings what comes by mail to the hands, and what they make to the mail."""

    def __init__(self, line: Line, mail: Mail, hands: Hands, is_training: bool) -> None:
        self._line, self._mail, self._hands, self._is_training = line, mail, hands, is_training
        self._made: dict[tuple[bool, int], list[Tensor]] = {}

    def run(self, order: Iterable[tuple[Action, int]]) -> None:
        """Run all actions, and wait until everything that was sent has arrived."""
        for action, code in order:
            try:
                self._do(action, code)
            except Exception as error:
                raise located_error(error, self._line.groups.rank, code) from error
        self._mail.finish()

    def _do(self, action: Action, code: int) -> None:
        match action:
            case Recv():
                self._mail.expect(action, code)
            case Send():
                self._mail.send(action, code, self._made.pop((action.is_gradient, action.microbatch)))
            case Forward(stage, microbatch):
                came = [] if self._line.is_first else self._mail.take((stage - 1, stage, microbatch))
                self._line.works(code)
                values = self._hands.forward(microbatch, came, self._is_training)
                if not self._line.is_last:
                    self._made[False, microbatch] = values
            case Backward(stage, microbatch):
                gradients = [] if self._line.is_last else self._mail.take((stage + 1, stage, microbatch))
                self._line.works(code)
                values = self._hands.backward(microbatch, gradients)
                if not self._line.is_first:
                    self._made[True, microbatch] = values


@lru_cache(maxsize=64)
def orders(ranks: int, microbatches: int, is_training: bool) -> tuple[Order, ...]:
    """Per rank the actions with their codes, messages among them."""
    schedule = build("1f1b", ranks, microbatches)
    program = lower(schedule if is_training else schedule.forwards(), passes=("add_transfers",))
    table = program.table
    return tuple(
        tuple(zip(actions, table.rank(rank).tolist(), strict=True)) for rank, actions in enumerate(program.orders)
    )
