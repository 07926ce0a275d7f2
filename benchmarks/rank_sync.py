"""rank_sync: CPU time and duration of a rank sync, compared with an all_gather of the same size."""

import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

import penstock
from benchmarks.table import Line, Table
from penstock.runtime import ProcessGroups, RankSync, SyncRequest
from penstock.runtime.sync import VOTE_BYTES

_DEADLINE_SECONDS = 60.0


def tables() -> tuple[Table, ...]:
    """All tables of this benchmark."""
    return (costs(),)


def costs(ranks: tuple[int, ...] = (2, 4, 8), rounds: int = 8, times: int = 50) -> Table:
    """Mean CPU time per rank and mean duration in microseconds; each the minimum of several rounds."""

    def lines() -> Iterator[Line]:
        for count in ranks:
            found = penstock.launch(_measure, count, rounds, times)
            cpu, other, seconds, others = (sum(column) / count for column in zip(*found, strict=True))
            cells = (f"{count} ranks", *(f"{1e6 * value:.0f}" for value in (cpu, other, seconds, others)))
            yield Line((*cells, f"{cpu / other:.2f}"), cpu / other, 1.0, at_least=False)

    columns = ("", "CPU", "all_gather", "time", "all_gather", "CPU ratio")
    return Table("rank sync compared with an all_gather, microseconds", columns, lines())


def _measure(rounds: int, times: int) -> tuple[float, float, float, float]:
    """Returns CPU seconds of a sync and of an all_gather, then the seconds of both, on this rank."""
    groups = ProcessGroups.of_world(dist.get_world_size(), _DEADLINE_SECONDS)
    sync, own = RankSync(groups), torch.zeros(VOTE_BYTES, dtype=torch.uint8)
    pairs = [
        (_timed(lambda: sync.exchange(SyncRequest("step", 0)), times), _timed(lambda: groups.gather(own), times))
        for _ in range(rounds)
    ]
    (cpu, seconds), (other, others) = (map(min, zip(*side, strict=True)) for side in zip(*pairs, strict=True))
    return cpu, other, seconds, others


def _timed(call: Callable[[], object], times: int) -> tuple[float, float]:
    call()
    cpu, begin = time.process_time(), time.perf_counter()
    for _ in range(times):
        call()
    return (time.process_time() - cpu) / times, (time.perf_counter() - begin) / times
