"""Supervised: ranks that break are ended, and the training is taken up again from its last good checkpoint."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from penstock.cli.lasting import AUTO
from penstock.cli.outcome import BAD_CHECKPOINT, RUN_FAILED, failed
from penstock.cli.screen import note
from penstock.cli.training_job import Job, work
from penstock.errors import CheckpointError, DamagedError, RunError

if TYPE_CHECKING:
    from penstock.ir import Plan, Run
    from penstock.launch import RankFailure, RestartDecision, StopRequest

_LOOK_SECONDS = 0.1
PlanFor = Callable[[int], "Plan"]
"""what makes a plan for fewer ranks"""


class Supervisor:
    """Sees a training through all its lives, each of which is one launch of all ranks."""

    def __init__(self, job: Job, board: Path, wish: "StopRequest") -> None:
        self._job, self._lasting, self._board, self._wish = job, job.lasting, board, wish

    def run(self, plan: "Plan", plan_for: PlanFor) -> "Run | None":
        """What the last life came to; None if it was asked to stop between two of them."""
        # Ranks are copies of this process: what it has loaded they need not. The first is what making any optimizer
        # loads, a second of work for each rank of each life.
        import torch._dynamo  # noqa: F401

        import penstock.api.loop  # noqa: F401
        from penstock.launch import RankFailure, RestartController, launch

        lives = RestartController(self._lasting.endurance, plan.num_ranks)
        while True:
            job = replace(self._job, life=lives.restarts)
            try:
                return _run_of(launch(work, plan.num_ranks, job, plan, status_dir=self._board))
            except RunError as error:
                death = RankFailure.of(error)
                following = lives.decide(death, self._newest)
                if following.end or self._wish or not self._lasting.endurance.restarts:
                    self._give_up(error, following)
                note(self._words(death, following, lives.restarts, plan.num_ranks))
            if self._stops_within(following.pause_seconds):
                note(f"stopped before it was taken up again from {self._source}")
                return None
            if following.ranks < plan.num_ranks:
                plan = plan_for(following.ranks)

    def _words(self, death: "RankFailure", following: "RestartDecision", restart: int, ranks: int) -> str:
        from penstock.ir import counted

        place = f" after {death.step} steps" if death.step else ""
        place += f", in {death.action}" if death.action else ""
        newest = self._source
        if following.ranks < ranks:
            newest += f" with {counted(following.ranks, 'rank')}, as rank {death.rank} is gone for good"
        return (
            f"rank {death.rank} broke{place}: {death.summary}\n"
            f"restart {restart} of {self._lasting.restarts} in {following.pause_seconds:g} s from {newest}"
        )

    @property
    def _newest(self) -> int | None:
        """The step of the newest checkpoint, as far as can be seen without reading it."""
        from penstock.checkpoint import is_good, step_of, steps

        directory = self._lasting.checkpoint
        found = steps(directory) if directory is not None and directory.is_dir() else []
        return next((step_of(path) for path in found if is_good(path)), None)

    @property
    def _source(self) -> str:
        """From where the next life goes on."""
        if self._newest is not None:
            return f"step {self._newest}"
        return "the beginning" if self._lasting.resume in (None, AUTO) else str(self._lasting.resume)

    def _stops_within(self, seconds: float) -> bool:
        """Wait; whether it was asked to stop meanwhile."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._wish:
            time.sleep(_LOOK_SECONDS)
        return bool(self._wish)

    def _give_up(self, error: RunError, following: "RestartDecision") -> NoReturn:
        # Raised on purpose, it says what is wrong without the way that led there.
        words = (error.rank_message or str(error)).replace("loss_fn=...", "--loss NAME")
        why = f"\nnot taken up again: {following.end}" if following.end else ""
        is_checkpoint = error.rank_error_type in (CheckpointError.__name__, DamagedError.__name__)
        raise failed(words + why, BAD_CHECKPOINT if is_checkpoint else RUN_FAILED)


def _run_of(results: Sequence[str]) -> "Run":
    from penstock.ir import Run, from_json

    return from_json(results[0], Run)
