"""Runs orders with one thread per rank and symbolic values, and compares the result with the unsplit model's.

It is written from the docstrings of the instructions, and shares nothing with the passes and with verify. A value is
the hash of what it was made from, so a wrong, missing or repeated input anywhere shows in the result. A value for a
stage of the same rank is handed over when it is made: what is freed later is the maker's, not the reader's.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property

from penstock.ir import (
    Action,
    Backward,
    Cuts,
    Forward,
    Free,
    InputGrad,
    Overlap,
    Placement,
    Recv,
    Reduce,
    Reshard,
    Send,
    Unshard,
    WeightGrad,
)
from tests.passes.transports import InOrder, Key, Rendezvous, Transport, WrongRunError

OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT = range(3)
_THREADS = ThreadPoolExecutor(max_workers=16)

Orders = Sequence[Sequence[Action]]
Gradients = dict[int, tuple[int, ...]]


@dataclass(frozen=True)
class Draft:
    """A program that nobody has checked."""

    placement: Placement
    num_microbatches: int
    cuts: Cuts
    orders: Orders

    @cached_property
    def is_sharded(self) -> bool:
        """Whether parameters are sharded at all: some rank moves some."""
        return any(isinstance(action, Unshard | Reshard) for order in self.orders for action in order)

    def __str__(self) -> str:
        lines = [" ".join(map(str, order)) for order in self.orders]
        return "\n".join([f"{self.placement}, {self.num_microbatches} microbatches, {self.cuts}", *lines])


def failure(draft: Draft) -> str:
    """Empty if the orders end with the right result under both message semantics, else what goes wrong."""
    for transport in (Rendezvous, InOrder):
        try:
            execute(draft, transport)
        except WrongRunError as wrong:
            return f"{transport.__name__}: {wrong}"
    return ""


def execute(draft: Draft, transport: type[Transport]) -> Gradients:
    """The weight gradients per stage; raises WrongRunError if anything goes wrong."""
    channel = transport(len(draft.orders))
    workers = [Worker(draft, rank, channel) for rank in range(len(draft.orders))]
    for run in [_THREADS.submit(worker.run) for worker in workers]:
        run.result()
    if channel.hall.failure:
        raise channel.hall.failure
    channel.check_nothing_is_left()
    gradients = {stage: tuple(sorted(sums)) for worker in workers for stage, sums in worker.gradients.items()}
    if gradients != unsplit(draft.cuts, draft.num_microbatches):
        raise WrongRunError("wrong result")
    if len({("reduce", stage) in worker.done for worker in workers for stage in worker.gradients}) > 1:
        raise WrongRunError("some stages are reduced and others are not")
    return gradients


@cache
def unsplit(cuts: Cuts, num_microbatches: int) -> Gradients:
    """The weight gradients per stage when one thread runs all stages, in the order in which anyone would."""
    sums: dict[int, list[int]] = {stage: [] for stage in range(cuts.num_stages)}
    for microbatch in range(num_microbatches):
        made: dict[Key, int] = {}
        output: dict[int, int] = {}
        for stage in range(cuts.num_stages):
            inputs = [made[source, stage, microbatch] for source in readings(cuts, stage)]
            output[stage] = hash((OUTPUT, stage, microbatch, *inputs))
            made |= bundles(cuts, OUTPUT, stage, microbatch, output[stage])
        for stage in reversed(range(cuts.num_stages)):
            inputs = [output[stage], *(made[source, stage, microbatch] for source in returns(cuts, stage))]
            gradient = hash((INPUT_GRADIENT, stage, microbatch, *inputs))
            made |= bundles(cuts, INPUT_GRADIENT, stage, microbatch, gradient)
            sums[stage].append(hash((WEIGHT_GRADIENT, stage, microbatch, gradient)))
    return {stage: tuple(sorted(values)) for stage, values in sums.items()}


def readings(cuts: Cuts, stage: int) -> list[int]:
    """The stages whose values a stage reads."""
    return [producer for producer, consumer in cuts.edges if consumer == stage]


def returns(cuts: Cuts, stage: int) -> list[int]:
    """The stages that return gradients to a stage."""
    return [b for a, b in cuts.edges if a == stage and (a, b) not in cuts.without_gradient]


def bundles(cuts: Cuts, what: int, stage: int, microbatch: int, value: int) -> dict[Key, int]:
    """What a stage has for others once its output or its input gradient exists: for each of them something else."""
    if what == OUTPUT:
        others = [b for a, b in cuts.edges if a == stage]
    else:
        others = [a for a, b in cuts.edges if b == stage and (a, b) not in cuts.without_gradient]
    return {(stage, other, microbatch): hash((value, other)) for other in others}


class Worker:
    """One rank: does its actions in order and holds its stages' values."""

    def __init__(self, draft: Draft, rank: int, channel: Transport) -> None:
        self.draft, self.rank, self.channel = draft, rank, channel
        own = [stage for stage, home in enumerate(draft.placement.ranks) if home == rank]
        self.gradients: dict[int, list[int]] = {stage: [] for stage in own}
        # (fact, stage, microbatch) -> value, and key -> what one stage has for another
        self.values: dict[tuple[int, int, int], int] = {}
        self.bundles: dict[Key, int] = {}
        # What may be done once only, and which stages are gathered.
        self.done: set[object] = set()
        self.gathered: set[int] = set()

    def run(self) -> None:
        """All actions of the rank; a failure is reported to the other ranks."""
        try:
            for action in self.draft.orders[self.rank]:
                self.do(action)
        except Exception as error:
            self.channel.hall.leave(error)
        else:
            self.channel.hall.leave()

    def do(self, action: Action) -> None:
        """One action, as its docstring says."""
        match action:
            case Overlap():
                # Both halves take what they need before either has made anything.
                halves = [(half, self.gather(half)) for half in (action.forward, action.backward)]
                for half, inputs in halves:
                    self.make(half, inputs)
            case Forward() | Backward() | InputGrad() | WeightGrad():
                self.make(action, self.gather(action))
            case Send() | Recv():
                self.exchange(action)
            case Reduce(stage):
                self.must_live_here(stage)
                self.once("reduce", stage)
                if len(self.gradients[stage]) != self.draft.num_microbatches:
                    raise WrongRunError(f"{action} comes before the last weight gradient")
            case Unshard(stage) | Reshard(stage):
                self.must_live_here(stage)
                if isinstance(action, Unshard) == (stage in self.gathered):
                    raise WrongRunError(f"{action} finds it so already")
                self.gathered ^= {stage}
            case Free(stage, microbatch):
                self.must_be_held(stage, microbatch)
                if (WEIGHT_GRADIENT, stage, microbatch) not in self.values:
                    raise WrongRunError(f"{action} comes before the weight gradient")
                self.once("free", stage, microbatch)

    def gather(self, action: Action) -> list[int]:
        """Everything that a pass needs, waited for if it comes from another rank."""
        stage, microbatch = action.stage, action.microbatch
        self.must_be_held(stage, microbatch)
        if self.draft.is_sharded and stage not in self.gathered:
            raise WrongRunError(f"{action} computes with sharded parameters")
        cuts = self.draft.cuts
        match action:
            case Forward():
                return [self.read((source, stage, microbatch)) for source in readings(cuts, stage)]
            case Backward() | InputGrad():
                own = self.made(OUTPUT, stage, microbatch)
                return [own, *(self.read((source, stage, microbatch)) for source in returns(cuts, stage))]
            case _:
                return [self.made(INPUT_GRADIENT, stage, microbatch)]

    def make(self, action: Action, inputs: list[int]) -> None:
        """What a pass leaves behind."""
        stage, microbatch = action.stage, action.microbatch
        if isinstance(action, Forward):
            self.keep(OUTPUT, stage, microbatch, hash((OUTPUT, stage, microbatch, *inputs)))
        if isinstance(action, Backward | InputGrad):
            self.keep(INPUT_GRADIENT, stage, microbatch, hash((INPUT_GRADIENT, stage, microbatch, *inputs)))
        if isinstance(action, Backward | WeightGrad):
            gradient = self.made(INPUT_GRADIENT, stage, microbatch)
            self.keep(WEIGHT_GRADIENT, stage, microbatch, hash((WEIGHT_GRADIENT, stage, microbatch, gradient)))
            self.gradients[stage].append(self.values[WEIGHT_GRADIENT, stage, microbatch])

    def keep(self, what: int, stage: int, microbatch: int, value: int) -> None:
        self.once(what, stage, microbatch)
        self.values[what, stage, microbatch] = value
        if what != WEIGHT_GRADIENT:
            self.bundles |= bundles(self.draft.cuts, what, stage, microbatch, value)

    def made(self, what: int, stage: int, microbatch: int) -> int:
        if (what, stage, microbatch) not in self.values:
            raise WrongRunError(f"something of stage {stage}, microbatch {microbatch} is used before it exists")
        return self.values[what, stage, microbatch]

    def read(self, key: Key) -> int:
        """What one stage has for another, from this rank or from a mailbox."""
        if self.draft.placement[key[0]] != self.rank:
            return self.channel.take(key)
        if key not in self.bundles:
            raise WrongRunError(f"what stage {key[0]} has for stage {key[1]} is used before it exists")
        return self.bundles[key]

    def exchange(self, action: Send | Recv) -> None:
        """One end of a message that some stage of another rank needs."""
        self.must_be_held(action.stage, action.microbatch)
        sends = isinstance(action, Send)
        source, target = (action.stage, action.peer) if sends else (action.peer, action.stage)
        key = (source, target, action.microbatch)
        self.once("send" if sends else "receive", *key)
        cuts, ranks = self.draft.cuts, self.draft.placement.ranks
        if target not in (b for a, b in cuts.edges if a == source) and target not in (
            a for a, b in cuts.edges if b == source and (a, b) not in cuts.without_gradient
        ):
            raise WrongRunError(f"{action} carries nothing: no cut leads there")
        if ranks[source] == ranks[target]:
            raise WrongRunError(f"{action} does not leave the rank")
        if not sends:
            self.channel.post((self.rank, ranks[source]), key)
        elif key in self.bundles:
            self.channel.send((self.rank, ranks[target]), key, self.bundles[key])
        else:
            raise WrongRunError(f"{action} comes before its values exist")

    def must_live_here(self, stage: int) -> None:
        if stage not in self.gradients:
            raise WrongRunError(f"stage {stage} is not on rank {self.rank}")

    def must_be_held(self, stage: int, microbatch: int) -> None:
        self.must_live_here(stage)
        if microbatch >= self.draft.num_microbatches:
            raise WrongRunError(f"there is no microbatch {microbatch}")
        if ("free", stage, microbatch) in self.done:
            raise WrongRunError(f"stage {stage}, microbatch {microbatch} is freed already")

    def once(self, *what: object) -> None:
        if what in self.done:
            raise WrongRunError(f"done twice: {what}")
        self.done.add(what)
