"""Results come back; if anything fails, the first cause is reported and nothing is left behind."""

import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.ir import Forward, Recv, encode
from penstock.launch import STATUS_DIR_VARIABLE, StatusFile, launch, launcher
from penstock.launch.process_state import GONE, process_state
from tests.leftovers import wait_until

pytestmark = pytest.mark.usefixtures("tidy")
STEP, RECEIVE, COMPUTE = 4, int(encode([Recv(1, 3, 0)])[0]), int(encode([Forward(2, 3)])[0])


def sum_of_ranks() -> float:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total.item()


class Guarded:
    """An object that only the process that made it may finalise."""

    def __init__(self) -> None:
        self.itself, self.owner = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.owner:
            os.abort()


def test_ranks_do_not_collect_what_they_inherit() -> None:
    gc.disable()
    try:
        Guarded()  # garbage that the parent has not collected yet
        assert launch(gc.isenabled, 2) == [True, True]
        assert all(found >= 0 for found in launch(gc.collect, 2))
    finally:
        gc.enable()


def broken(fn: Callable[..., Any], ranks: int, **options: Any) -> str:
    """The error of a launch that must fail.

    Ranks that are left alone sleep longer than a test may take, so that passing proves that they were ended.
    """
    with pytest.raises(RunError) as caught:
        launch(fn, ranks, **options)
    return str(caught.value)


def statuses() -> Any:
    """On a launched rank: the status of all ranks."""
    return StatusFile.read(os.environ[STATUS_DIR_VARIABLE])


# ---------------------------------------------------------------------------------------------------------- results


def test_results_come_back_by_rank() -> None:
    assert launch(lambda x: (dist.get_rank(), sum_of_ranks(), x), 3, "a") == [
        (0, 3.0, "a"),
        (1, 3.0, "a"),
        (2, 3.0, "a"),
    ]


def test_one_rank_is_enough() -> None:
    assert launch(sum_of_ranks, 1) == [0.0]


def test_spawned_processes_work_too() -> None:
    assert launch(os.getenv, 2, "RANK", start="spawn") == ["0", "1"]


def test_tensors_arrive_as_ordinary_tensors() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    one, two = launch(lambda: {"w": weight * (dist.get_rank() + 1), "b": weight.bfloat16(), "t": weight.t()}, 2)
    assert torch.equal(two["w"], weight * 2)
    assert not one["w"].is_shared()
    assert one["b"].dtype is torch.bfloat16
    assert torch.equal(one["t"], weight.t())


def test_more_tensors_than_files_may_be_open_come_back() -> None:
    results = launch(lambda: [torch.full((1,), float(i)) for i in range(3000)], 2)
    assert [float(tensor) for tensor in results[1]] == list(range(3000))


def test_a_result_loses_its_graph_and_keeps_its_ties() -> None:
    weight = nn.Parameter(torch.ones(2))
    ((loss, first, second),) = launch(lambda: ((weight * 3).sum(), weight, weight), 1)
    assert loss.item() == 6.0
    assert not loss.requires_grad
    assert first is second
    assert isinstance(first, nn.Parameter)


def test_a_model_of_the_caller_is_not_changed_by_the_ranks() -> None:
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    results = launch(lambda: model.weight.data.add_(dist.get_rank() + 1.0).clone(), 2)
    assert torch.equal(model.weight, before)
    assert torch.equal(results[1], before + 2)


def test_the_environment_names_the_rank() -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    results = launch(lambda: [os.environ[name] for name in names] + [torch.get_num_threads()], 2, threads=2)
    assert results == [["0", "2", "0", "2", 2], ["1", "2", "1", "2", 2]]
    assert not set(names) & set(os.environ)


def test_the_output_of_ranks_is_passed_through(capfd: pytest.CaptureFixture[str]) -> None:
    launch(lambda: print(f"rank {dist.get_rank()} prints"), 2)
    # Under pytest a line and its end are written apart, so that lines of two ranks may mix.
    assert sorted(capfd.readouterr().out.replace("\n", "").split("rank ")) == ["", "0 prints", "1 prints"]


def test_sys_exit_without_a_code_is_a_plain_return() -> None:
    assert launch(lambda: sys.exit(0), 2) == [None, None]


def train_a_step(size: int) -> Tensor:
    model = nn.Linear(size, size)
    model(torch.randn(size, size)).relu().sum().backward()
    return model.weight.grad.sum()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_caller_that_used_many_threads_does_not_hang_its_ranks(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        train_a_step(600)
        torch.randn(1 << 20).exp().sum()
        results = launch(train_a_step, 4, 600, threads=threads, timeout=120)
    finally:
        torch.set_num_threads(before)
    assert len(results) == 4


def test_launch_can_be_called_again_and_from_a_thread() -> None:
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda ranks: launch(sum_of_ranks, ranks), [2, 3]))
    assert results == [[1.0, 1.0], [3.0, 3.0, 3.0]]


def test_a_rank_that_has_finished_stays_until_all_have() -> None:
    def late() -> float:
        if dist.get_rank() == 2:
            time.sleep(0.5)  # the others have long returned
        box = torch.zeros(1)
        if dist.get_rank() == 0:
            dist.isend(torch.ones(1), 2).wait()
        if dist.get_rank() == 2:
            dist.recv(box, 0)
        return box.item()

    assert launch(late, 3) == [0.0, 0.0, 1.0]


# ----------------------------------------------------------------------------------------------------------- refusals


def test_ranks_must_be_a_positive_integer() -> None:
    for ranks in (0, -1, 2.0, True, "2"):
        with pytest.raises(RunError, match="ranks must be a positive integer"):
            launch(sum_of_ranks, ranks)  # type: ignore[arg-type]


def test_fn_must_be_a_function() -> None:
    with pytest.raises(RunError, match="fn must be a function"):
        launch(3, 2)  # type: ignore[arg-type]


def test_an_unknown_start_method_is_refused() -> None:
    with pytest.raises(RunError, match="'thread'"):
        launch(sum_of_ranks, 2, start="thread")


def test_a_rank_cannot_launch_and_gets_a_hint() -> None:
    message = broken(lambda: launch(sum_of_ranks, 2), 1)
    assert "torch.distributed is already initialised in this process (rank: 0, ranks: 1)" in message
    assert "try: call the function itself" in message


def test_a_closure_cannot_be_spawned_and_gets_a_hint() -> None:
    with pytest.raises(RunError, match='start="fork"'):
        launch(lambda: 0, 2, start="spawn")


def test_a_result_that_cannot_be_sent_is_named() -> None:
    message = broken(lambda: lambda: 0, 1)
    assert "the result of a rank cannot be sent to the launcher (type: function" in message


# ----------------------------------------------------------------------------------------------------------- failures


def wait_forever() -> None:
    dist.recv(torch.zeros(1), (dist.get_rank() + 1) % dist.get_world_size())


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("boom")
    wait_forever()


def test_an_exception_is_shown_with_its_traceback_and_stops_all() -> None:
    message = broken(lambda: fail_on(1), 4)
    assert message.startswith("a rank failed (rank: 1)\nTraceback (most recent call last):")
    assert "in fail_on" in message
    assert "KeyError: 'boom'" in message
    assert "launch/worker.py" not in message
    assert message.splitlines()[-3:] == ["rank 0: stopped", "rank 2: stopped", "rank 3: stopped"]


def test_of_two_exceptions_the_first_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine the second rank may need longer for its report.
    monkeypatch.setattr(launcher, "_SETTLE_SECONDS", 30.0)

    def two() -> None:
        if dist.get_rank() == 0:
            wait_until(lambda: statuses()[1].failure)
        raise ValueError(f"of rank {dist.get_rank()}")

    message = broken(two, 2)
    assert message.startswith("a rank failed (rank: 1)")
    assert message.endswith("ValueError: of rank 1\nrank 0: also failed: ValueError: of rank 0")


def test_the_place_of_a_failure_and_the_activity_of_other_ranks_are_reported() -> None:
    def step() -> None:
        status_file = StatusFile.create(os.environ[STATUS_DIR_VARIABLE], dist.get_rank(), 3)
        if dist.get_rank() == 1:
            status_file.waiting(STEP, RECEIVE, 0)
        elif dist.get_rank() == 2:
            status_file.working(STEP, COMPUTE)
        dist.barrier()
        if dist.get_rank() == 0:
            raise RunError("no", step=STEP, stage=0, microbatch=3, action="0F3")
        time.sleep(600)

    message = broken(step, 3)
    assert message.startswith("a rank failed (rank: 0, step: 4, stage: 0, microbatch: 3, action: 0F3)\n")
    second, third = message.splitlines()[-2:]
    assert second.startswith("rank 1: stopped: waiting for 1RECV_F3 of step ")
    assert third.startswith("rank 2: stopped: working on 2F3 of step ")


def test_a_killed_rank_is_named_with_its_signal() -> None:
    def killed() -> None:
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_forever()

    message = broken(killed, 4)
    assert message.startswith("a rank was killed (rank: 2, signal: SIGKILL)\n")
    assert "rank 1: also failed: RuntimeError" in message
    assert "memory" in message.splitlines()[-1]


def test_a_rank_that_exits_silently_is_named_with_its_exit_code() -> None:
    message = broken(lambda: os._exit(0) if dist.get_rank() else wait_forever(), 2)
    assert message.startswith("a rank exited without a result (rank: 1, exit code: 0)")


def test_an_abort_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    message = broken(lambda: os.abort() if dist.get_rank() else wait_forever(), 2)
    assert message.startswith("a rank was killed (rank: 1, signal: SIGABRT)")
    assert "Fatal Python error: Aborted" in capfd.readouterr().err


def test_a_killed_rank_is_seen_although_its_own_child_lives() -> None:
    def killed() -> None:
        if dist.get_rank() == 0 and os.fork() == 0:
            time.sleep(600)
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    message = broken(killed, 2)
    assert message.startswith("a rank was killed (rank: 0")


def test_stopped_ranks_end_too() -> None:
    def stopped() -> None:
        if dist.get_rank():
            os.kill(os.getpid(), signal.SIGSTOP)
        wait_until(lambda: all(status.process == "stopped" for status in statuses()[1:]))
        raise ValueError("no")

    assert "ValueError: no" in broken(stopped, 3)


def test_a_timeout_reports_what_every_rank_did() -> None:
    def slow() -> None:
        status_file = StatusFile.create(os.environ[STATUS_DIR_VARIABLE], dist.get_rank(), 2)
        if dist.get_rank():
            status_file.working(STEP, COMPUTE)
            while True:
                pass
        status_file.waiting(STEP, RECEIVE, 1)
        time.sleep(600)

    for timeout in (1, 4, 16, 64):  # on a busy machine the ranks may need longer to start
        message = broken(slow, 2, timeout=timeout)
        assert message.startswith(f"the ranks did not finish in time (timeout seconds: {timeout})")
        if "2F3" in message and "1RECV_F3" in message:
            break
    _, second, third, _ = message.splitlines()
    assert second.startswith("rank 1: no progress, working on 2F3 of step 4 for ")
    assert third.startswith("rank 0: waiting for 1RECV_F3 of step 4 from rank 1 for ")


# ------------------------------------------------------------------------------------------------- nothing left behind


def test_nothing_listens_beyond_loopback() -> None:
    addresses = [address for rank in launch(listening, 3) for address in rank]
    assert addresses
    assert {address.split(":")[0] for address in addresses} == {"0100007F"}


def listening() -> list[str]:
    """The local addresses on which this process listens, as the kernel writes them (127.0.0.1 is 0100007F)."""
    dist.barrier()
    links = (os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    sockets = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")}
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and row[9] in sockets]


def test_no_shared_memory_is_left() -> None:
    pids = [str(pid) for pid, _ in launch(lambda: (os.getpid(), torch.ones(1 << 20)), 2)]
    assert not [path for path in Path("/dev/shm").iterdir() if any(pid in path.name for pid in pids)]


def test_the_caller_keeps_no_file_open() -> None:
    launch(sum_of_ranks, 2)
    before = len(list(Path("/proc/self/fd").iterdir()))
    launch(sum_of_ranks, 4)
    broken(lambda: fail_on(0), 2)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_status_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="Not a directory"):
        launch(int, 2, status_dir=tmp_path / "file" / "status")


def test_a_status_directory_of_the_caller_is_kept(tmp_path: Path) -> None:
    broken(lambda: fail_on(0), 2, status_dir=tmp_path / "status")
    first, second = StatusFile.read(tmp_path / "status")
    assert "KeyError: 'boom'" in first.failure
    assert (second.rank, second.process) == (1, "gone")


INTERRUPTED = 42


def launch_sleeping_ranks(place: Path, stopped: int | None) -> None:
    """A process that launches three ranks that only sleep; it exits with a code of its own after ctrl-c."""
    errors = os.open(place.parent / "errors", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    # Whoever runs the tests in the background has told its children to ignore ctrl-c.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def idle() -> None:
        (place.parent / f"rank{os.environ['RANK']}").write_text(str(os.getpid()))
        dist.barrier()
        (place.parent / f"ready{os.environ['RANK']}").touch()
        if dist.get_rank() == stopped:
            signal.raise_signal(signal.SIGSTOP)
        time.sleep(600)

    try:
        launch(idle, 3)
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)


def interrupted(place: Path, number: int, stopped: int | None = None) -> tuple[int | None, list[int]]:
    """The exit code of a launcher that gets a signal while its ranks run, and their pids."""
    process = get_context("fork").Process(target=launch_sleeping_ranks, args=(place, stopped))
    process.start()
    wait_until(lambda: len(list(place.parent.glob("ready*"))) == 3)
    pids = [int((place.parent / f"rank{rank}").read_text()) for rank in range(3)]
    os.kill(process.pid or 0, number)
    process.join()
    return process.exitcode, pids


def are_gone(pids: list[int], place: Path) -> bool:
    """Whether the processes have ended and all temporary files are removed."""
    return all(process_state(pid) == GONE for pid in pids) and not list(place.iterdir())


def test_ctrl_c_ends_the_ranks_and_is_raised(tidy: Path) -> None:
    code, pids = interrupted(tidy, signal.SIGINT)
    assert code == INTERRUPTED
    assert are_gone(pids, tidy)  # before launch has returned
    assert (tidy.parent / "errors").read_text() == ""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("stopped", [None, 1])
def test_ranks_die_with_the_launcher_and_their_files_go(tidy: Path, number: int, stopped: int | None) -> None:
    code, pids = interrupted(tidy, number, stopped)
    assert code == -number
    wait_until(lambda: are_gone(pids, tidy))
