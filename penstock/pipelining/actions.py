"""Actions of a schedule under torch's names, and custom functions that replace them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

from penstock.errors import RunError
from penstock.ir import Action, ComputeAction, Kind, Message, Overlap, decode_one, parse_action
from penstock.runtime import RankProgram


class _ComputationType(StrEnum):
    """The kinds of actions; the values are those of schedule files."""

    FORWARD = "F"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    FULL_BACKWARD = "B"
    OVERLAP_F_B = "OVERLAP_F_B"
    REDUCE_GRAD = "REDUCE_GRAD"


_TYPES = {
    Kind.FORWARD: _ComputationType.FORWARD,
    Kind.BACKWARD: _ComputationType.FULL_BACKWARD,
    Kind.INPUT_GRAD: _ComputationType.BACKWARD_INPUT,
    Kind.WEIGHT_GRAD: _ComputationType.BACKWARD_WEIGHT,
    Kind.OVERLAP: _ComputationType.OVERLAP_F_B,
    Kind.REDUCE: _ComputationType.REDUCE_GRAD,
    Kind.UNSHARD: _ComputationType.UNSHARD,
    Kind.RESHARD: _ComputationType.RESHARD,
}
CUSTOMISABLE = tuple(_TYPES.values())


class _Action(NamedTuple):
    """One action; `str(action)` is its text in a schedule file."""

    stage_index: int
    computation_type: _ComputationType
    microbatch_index: int | None = None
    sub_actions: "tuple[_Action, ...] | None" = None

    def __str__(self) -> str:
        if self.sub_actions is not None:
            return f"({';'.join(map(str, self.sub_actions))}){self.computation_type}"
        microbatch = "" if self.microbatch_index is None else self.microbatch_index
        return f"{self.stage_index}{self.computation_type}{microbatch}"

    __repr__ = __str__

    @staticmethod
    def from_str(action_string: str) -> "_Action | None":
        """The action of a cell; None for an empty cell."""
        text = action_string.strip()
        return as_torch_action(parse_action(text)) if text else None


def as_torch_action(action: Action) -> _Action:
    """Convert an action of penstock to torch's names."""
    if isinstance(action, Overlap):
        parts = tuple(map(as_torch_action, action.parts))
        return _Action(-1, _ComputationType.OVERLAP_F_B, None, parts)
    if isinstance(action, Message):
        verb = "SEND" if action.kind is Kind.SEND else "RECV"
        computation = _ComputationType(f"{verb}_{'B' if action.is_gradient else 'F'}")
        return _Action(action.stage, computation, action.microbatch)
    microbatch = action.microbatch if isinstance(action, ComputeAction) else None
    return _Action(action.stage, _TYPES[action.kind], microbatch)


@dataclass
class _PipelineContext:
    """The second argument of a custom function. `run()` runs the action that the function replaces."""

    schedule_ref: Any
    arg_mbs: list[Any] | None = None
    kwarg_mbs: list[Any] | None = None
    target_mbs: list[Any] | None = None
    losses: list[Any] | None = None
    run: Callable[[], None] = lambda: None


CustomFunction = Callable[[_Action, _PipelineContext], None]


def with_custom_functions(
    functions: Mapping[_ComputationType, CustomFunction], context: Callable[[], _PipelineContext], program: RankProgram
) -> RankProgram:
    """The program with custom functions in place of the actions of some types.

    `context()` returns the context of the current step; compiled programs are kept for later steps.
    """
    actions = []
    for compiled in program.actions:
        action = decode_one(compiled.code)
        function = functions.get(_TYPES[action.kind]) if action.kind in _TYPES else None
        if function is not None:
            compiled = compiled._replace(run=partial(_call, function, as_torch_action(action), compiled.run, context))
        actions.append(compiled)
    return replace(program, actions=tuple(actions))


def _call(
    function: CustomFunction, action: _Action, run: Callable[[], None] | None, context: Callable[[], _PipelineContext]
) -> None:
    """Run a custom function; `run` is the compiled action, None for one that has nothing to do on this rank."""
    function(action, replace(context(), run=run or (lambda: None)))


def customisable_type(computation_type: Any) -> _ComputationType:
    """Convert the type of a custom function, given by its text or as a member of torch's own enumeration."""
    text = getattr(computation_type, "value", computation_type)
    if text not in [each.value for each in CUSTOMISABLE]:
        raise RunError(
            "computation_type must be a type that custom functions can replace",
            got=str(computation_type),
            hint=f"one of {', '.join(each.name for each in CUSTOMISABLE)}",
        )
    return _ComputationType(text)


def orders_text(actions: Mapping[int, Sequence[Any]]) -> str:
    """Format orders by rank as CSV; an action may be any object whose `str` is its text in a schedule file."""
    rows = [actions[rank] for rank in sorted(actions)]
    return "\n".join(",".join("" if action is None else str(action) for action in row) for row in rows) + "\n"
