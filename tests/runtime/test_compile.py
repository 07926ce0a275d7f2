"""The order of a rank becomes calls that know where everything comes from and goes to."""

from typing import Any

import torch
from torch import Tensor

import penstock
from penstock.ir import Crossing, TensorSpec, Value, decode_one
from penstock.passes import lower
from penstock.runtime import Route
from penstock.runtime.compile import Prepared, compile_rank
from penstock.runtime.execute import execute, execute_together
from penstock.runtime.inside import Inside

VALUE = Value("x", TensorSpec((1,), "float64", requires_grad=True))


class Counted:
    """A passage that adds one on its way forward, and doubles on its way back."""

    def __init__(self, value: Tensor) -> None:
        self._left = {"x": value + 1}

    def take_outputs(self) -> dict[str, Tensor]:
        return self._left

    def backward(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"x": 2 * gradients["x"]}

    input_grad = backward

    def weight_grad(self) -> None: ...


class Counting:
    """Plays stages that count; the first begins with the microbatch, the last with a gradient of one."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.ends: dict[int, float] = {}

    def forward(self, stage: int, microbatch: int, incoming: dict[str, Any], is_split: bool) -> Counted:
        value = incoming["x"].detach() if stage else torch.tensor([10.0 * microbatch], dtype=torch.float64)
        if stage == self.last:
            self.ends[microbatch] = float(value)
        return Counted(value)

    def own_gradients(self, stage: int, microbatch: int) -> dict[str, Tensor | None]:
        return {"x": torch.ones(1, dtype=torch.float64)} if stage == self.last else {}

    def can_split(self, stage: int) -> bool:
        return True

    def reduce(self, stage: int) -> None: ...

    unshard = reshard = reduce


class Noted(Inside):
    """Notes what is opened and made."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.events: list[str] = []
        self.routes: list[Route] = []

    def open(self) -> None:
        self.events.append("open")

    def departure(self, route: Route) -> Any:
        self.routes.append(route)
        return super().departure(route)


def prepared(name: str, ranks: int, transport: Inside) -> tuple[list[Prepared], Counting]:
    schedule = penstock.schedule(name, ranks, 3)
    stages = range(schedule.num_stages)
    edges = [{(s, s + 1): Crossing(s, s + 1, (VALUE,)) for s in stages[:-1]}] * 3
    player = Counting(stages[-1])
    return [compile_rank(lower(schedule), rank, edges, player, transport) for rank in range(ranks)], player


def test_values_go_from_stage_to_stage_whichever_rank_has_them() -> None:
    for name, ranks in (("1f1b", 3), ("interleaved", 2), ("zbv", 2), ("gpipe", 1)):
        made, player = prepared(name, ranks, Inside(torch.device("cpu")))
        for _ in range(2):
            execute_together(made, lambda code: None)
            assert player.ends == {m: 10.0 * m + player.last for m in range(3)}


def test_stages_of_one_rank_hand_values_on_without_a_message() -> None:
    transport = Noted()
    prepared("zbv", 2, transport)
    # Stages 1 and 2 share a rank.
    assert {route.way[:2] for route in transport.routes} == {(0, 1), (1, 0), (2, 3), (3, 2)}


def test_the_first_message_of_every_step_opens_the_transport() -> None:
    transport = Noted()
    made, _ = prepared("1f1b", 2, transport)
    for _ in range(2):
        execute_together(made, lambda code: None)
    assert transport.events == ["open"] * 4


def test_passes_and_what_is_sent_are_told_and_room_for_messages_is_not() -> None:
    transport = Noted()
    (first, _), _ = prepared("1f1b", 2, transport)
    told: list[int] = []
    transport.mail.update({(1, 0, m): [torch.ones(1, dtype=torch.float64)] for m in range(3)})
    execute(first, told.append)
    kinds = [str(decode_one(code)) for code in told]
    assert not any("RECV" in kind for kind in kinds)
    assert {"0F0", "0SEND_F0", "0B0"} <= set(kinds)


def test_what_a_step_left_behind_is_cleared() -> None:
    (one,), _ = prepared("gpipe", 1, Inside(torch.device("cpu")))
    one.cells[0].passage = object()
    one.clear()
    assert all(cell.passage is None for cell in one.cells)
