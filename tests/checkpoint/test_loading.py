"""Ranks save and load together: with any plan, with the losses of a training that never stopped."""

import json
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LinearLR, SequentialLR

import penstock
from penstock.checkpoint import writer
from penstock.errors import PenstockError, PenstockWarning
from penstock.ir import Plan
from tests.checkpoint.trainings import OPTIMIZERS, Training, the_plan
from tests.plans import BATCHES, chain_plan, quick_plan
from tests.selection import alternated
from tests.small_models import chain, tied

pytestmark = pytest.mark.gloo

# Other numbers of ranks, other schedules, other cuts.
WAY = (
    the_plan(4, "1f1b"),
    the_plan(2, "gpipe"),
    the_plan(3, "zb_h1", partitioner="parameters"),
    the_plan(1, "gpipe"),
    the_plan(4, "1f1b", partitioner="parameters"),
)


SAME_SUMS = tuple(
    quick_plan(chain(6), BATCHES[0][:1], ranks=ranks, microbatches=2, schedule=schedule, loss_fn=mse_loss)
    for ranks, schedule in ((4, "1f1b"), (2, "1f1b"), (3, "gpipe"), (1, "gpipe"), (4, "gpipe"))
)


def leg(plan: Plan, optimizer: str, root: str) -> tuple[list[float], Any]:
    """Load, take two steps and save."""
    training = Training(plan, optimizer)
    loaded = training.pipe.load(root, training.optimizer) if any(Path(root).iterdir()) else None
    losses = training.losses(2)
    training.save(root, position=training.pipe.num_steps)
    return losses, loaded


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("momentum", marks=pytest.mark.whole)])
def test_any_plan_resumes_from_a_checkpoint_of_any_plan(optimizer: str, pools: Any, tmp_path: Path) -> None:
    losses: list[float] = []
    for index, plan in enumerate(WAY):
        found = pools[plan.num_ranks].run(leg, plan, optimizer, str(tmp_path))
        assert all(each == found[0][0] for each, _ in found)
        assert {loaded and loaded.position for _, loaded in found} == {2 * index if index else None}
        losses += found[0][0]
    assert losses == pytest.approx(Training(WAY[3], optimizer, local=True).losses(10), rel=1e-6)


def plain_leg(plan: Plan, optimizer: str, root: str) -> list[float]:
    """Load, take two steps without clipping, and save."""
    return plain_losses(penstock.Pipeline(chain(6), plan, loss_fn=mse_loss), optimizer, root, 2)


def plain_losses(pipe: penstock.Pipeline, optimizer: str, root: str, steps: int) -> list[float]:
    made = OPTIMIZERS[optimizer](pipe.parameters())
    if any(Path(root).iterdir()):
        pipe.load(root, made)
    losses = []
    for step in range(pipe.num_steps, pipe.num_steps + steps):
        made.zero_grad()
        x, y = BATCHES[step % len(BATCHES)]
        losses.append(float(pipe.step(x, target=y).loss))
        made.step()
    pipe.save(root, made)
    return losses


@pytest.mark.parametrize("optimizer", [pytest.param("adam", marks=pytest.mark.whole), "momentum"])
def test_plans_that_add_in_the_same_order_resume_bit_identically(optimizer: str, pools: Any, tmp_path: Path) -> None:
    (way := tmp_path / "way").mkdir()
    (whole := tmp_path / "whole").mkdir()
    losses = [loss for plan in SAME_SUMS for loss in pools[plan.num_ranks].run(plain_leg, plan, optimizer, str(way))[0]]
    alone = penstock.Pipeline(chain(6), SAME_SUMS[3], loss_fn=mse_loss, local=True)
    assert losses == plain_losses(alone, optimizer, str(whole), 10)


def interrupted(plan: Plan, root: str) -> tuple[list[float], list[float], Any, dict[str, int]]:
    """Losses and a random number after a save, and the same after loading it into a meta-device model."""
    training = Training(plan)
    torch.manual_seed(plan.num_ranks)
    training.losses(3)
    training.save(root)
    expected = [*training.losses(20), float(torch.rand(()))]
    with torch.device("meta"):
        bare = tied()
    again = Training(plan, model=bare)
    loaded = again.pipe.load(root, again.optimizer)
    sizes = {name: p.nbytes for name, p in again.pipe.state_dict().items()}
    return expected, [*again.losses(20), float(torch.rand(()))], loaded, sizes


def test_the_same_plan_resumes_bit_identically_and_each_rank_reads_its_own_part(pools: Any, tmp_path: Path) -> None:
    found = pools[2].run(interrupted, the_plan(2), str(tmp_path))
    for rank, (expected, losses, loaded, sizes) in enumerate(found):
        assert losses == expected
        # Of the tied table, which both have, the first keeps it.
        assert loaded.files == tuple(f"stage-{stage:03d}.safetensors" for stage in range(rank + 1))
        assert loaded.num_tensors == len(sizes)
    checked = sum(loaded.bytes_checked for *_, loaded, _ in found)
    assert checked == sum(path.stat().st_size for path in tmp_path.glob("step-*/*") if path.stem != "manifest")


def broken(plan: Plan, root: str, others: str, asynchronous: bool) -> tuple[list[str], list[float], Any]:
    """The errors of each rank if rank 1 has a full disk, or another directory; then training continues and loads."""
    training, errors = Training(plan), []
    training.losses(1)
    training.save(root)
    is_second = torch.distributed.get_rank() == 1

    def heard(call: Any) -> None:
        try:
            call()
            errors.append("")
        except PenstockError as error:
            errors.append(str(error))

    training.losses(1)
    full = OSError(28, "No space left on device")
    with mock.patch.object(writer, "write_file", side_effect=full if is_second else writer.write_file):
        heard(lambda: training.save(root, asynchronous=asynchronous))
        heard(training.pipe.wait_for_save)
    heard(lambda: training.save(others if is_second else root))
    heard(lambda: training.pipe.save(root, extra=print if not is_second else None))
    losses = training.losses(1)
    return errors, losses, training.pipe.load(root, training.optimizer).step


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_error_of_one_rank_is_raised_on_all_and_the_old_checkpoint_stays(
    asynchronous: bool, pools: Any, tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    results = pools[2].run(broken, the_plan(2), str(tmp_path / "one"), str(tmp_path / "other"), asynchronous)
    for errors, _, step in results:
        saving, waiting, apart, strange = errors
        assert "No space left" in (waiting if asynchronous else saving)
        assert "cannot reach the directory" in apart
        assert "cannot hold" in strange
        assert step == 1
    assert results[0][1] == results[1][1]
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["step-000001"]


def beside(plan: Plan, root: str) -> tuple[list[float], list[float], str]:
    """Steps during an asynchronous save; then a save that fails, which the next step raises."""
    training = Training(plan)
    training.losses(1)
    training.save(root, asynchronous=True)
    training.losses(2)
    training.save(root, asynchronous=True, keep=1)
    expected = training.losses(2)
    training.pipe.wait_for_save()
    training.pipe.load(root, training.optimizer)
    losses = training.losses(2)
    full = OSError(28, "No space left on device")
    with mock.patch.object(writer, "write_file", side_effect=full):
        training.save(root, asynchronous=True)
        training.pipe._saver.background.wait()
    try:
        training.losses(1)
        error_text = ""
    except PenstockError as error:
        error_text = str(error)
    training.losses(1)
    return expected, losses, error_text


def test_an_asynchronous_save_writes_the_state_at_the_call_and_its_failure_is_raised_at_the_next_step(
    pools: Any, tmp_path: Path
) -> None:
    for expected, losses, error_text in pools[2].run(beside, the_plan(2), str(tmp_path)):
        assert losses == expected
        assert "No space left" in error_text
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]


def passed_over(plan: Plan, root: str) -> tuple[int | None, list[str]]:
    """The step that is loaded, and the warnings."""
    training = Training(plan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = training.pipe.load(root, training.optimizer).step
    return step, [str(warning.message) for warning in caught if warning.category is PenstockWarning]


def test_all_ranks_fall_back_to_the_same_checkpoint_with_a_warning(pools: Any, tmp_path: Path) -> None:
    training = Training(the_plan(2), local=True)
    for _ in range(3):
        training.losses(1)
        training.save(tmp_path)
    flip(tmp_path / "step-000003" / "stage-001.safetensors", -1)
    (tmp_path / "step-000002" / "optimizer-000.json").unlink()
    (first, warned), (second, nothing) = pools[2].run(passed_over, the_plan(2), str(tmp_path))
    assert first == second == 1
    assert not nothing
    assert "resumes from step-000001" in warned[0]
    assert "stage-001" in warned[0]
    assert "optimizer-000.json" in warned[0]


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


FLIPS = {"Adam": b"Adal", "groups": b"gsoups", '"group"': b'"gsoup"', "exp_avg_sq": b"exp_avg_sr"}


@pytest.mark.parametrize(("word", "ranks"), alternated([(word, ranks) for word in FLIPS for ranks in (2, 3)]))
def test_a_flipped_bit_is_found_before_any_rank_reads(word: str, ranks: int, pools: Any, tmp_path: Path) -> None:
    training = Training(the_plan(2), local=True)
    for _ in range(2):
        training.losses(1)
        training.save(tmp_path)
    damaged = tmp_path / "step-000002" / "optimizer-001.json"
    damaged.write_bytes(damaged.read_bytes().replace(word.encode(), FLIPS[word], 1))
    found = pools[ranks].run(passed_over, the_plan(ranks), str(tmp_path))
    assert [step for step, _ in found] == [1] * ranks
    assert "optimizer-001.json" in found[0][1][0]


def stepped(plan: Plan, root: str, steps: int, schedules: str) -> tuple[list[float], list[list[float]]]:
    """Losses and learning rates of steps in which every parameter has its own decaying rate."""
    pipe = penstock.Pipeline(chain(6), plan, loss_fn=mse_loss)
    places = {name: place for place, (name, _) in enumerate(chain(6).named_parameters())}
    groups = [{"params": [own], "lr": 0.1 / (1 + places[name])} for name, own in pipe.named_parameters()]
    optimizer = torch.optim.SGD(groups)
    scheduler = SCHEDULERS[schedules](optimizer)
    if any(Path(root).iterdir()):
        pipe.load(root, optimizer, scheduler=scheduler)
    losses, rates = [], []
    for step in range(pipe.num_steps, pipe.num_steps + steps):
        optimizer.zero_grad()
        x, y = BATCHES[step % len(BATCHES)]
        losses.append(float(pipe.step(x, target=y).loss))
        optimizer.step()
        scheduler.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
    pipe.save(root, optimizer, scheduler=scheduler)
    return losses, rates


SCHEDULERS = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 0.5**step),
    "sequence": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=3), ExponentialLR(optimizer, 0.5)], [3]
    ),
}


@pytest.mark.parametrize(
    ("other", "schedules"), alternated([(other, name) for other in SAME_SUMS[1:3] for name in SCHEDULERS])
)
def test_every_rank_resumes_with_the_learning_rates_of_its_own_groups(
    other: Plan, schedules: str, pools: Any, tmp_path: Path
) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = pools[other.num_ranks].run(stepped, other, str(tmp_path / "whole"), 6, schedules)
    pools[2].run(stepped, SAME_SUMS[1], str(tmp_path / "parts"), 3, schedules)
    found = pools[other.num_ranks].run(stepped, other, str(tmp_path / "parts"), 3, schedules)
    assert [rates for _, rates in found] == [rates[3:] for _, rates in whole]
    assert found[0][0] == whole[0][0][3:]


def copies(plan: Plan, root: str, shards: bool) -> tuple[list[float], list[float]]:
    """Two replicas of two ranks, saved and loaded."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))

    def sharded(stage: Any, mesh: Any) -> None:
        if shards:
            fully_shard(stage, mesh=mesh["dp"])

    def made() -> tuple[penstock.Pipeline, torch.optim.Optimizer]:
        pipe = penstock.Pipeline(chain(4), plan, loss_fn=mse_loss, mesh=mesh, parallelize_fn=sharded)
        return pipe, OPTIMIZERS["adam"](pipe.parameters())

    def losses(pipe: penstock.Pipeline, optimizer: torch.optim.Optimizer) -> list[float]:
        found = []
        for x, y in BATCHES[:2]:
            optimizer.zero_grad()
            found.append(float(pipe.step(x, target=y).loss))
            optimizer.step()
        return found

    pipe, optimizer = made()
    losses(pipe, optimizer)
    pipe.save(root, optimizer)
    expected = losses(pipe, optimizer)
    again, other = made()
    again.load(root, other)
    return expected, losses(again, other)


@pytest.mark.parametrize("shards", [False, True])
def test_one_replica_writes_and_all_resume(shards: bool, pools: Any, tmp_path: Path) -> None:
    plans = [chain_plan("interleaved", 2, 2, 2), chain_plan("interleaved", 1, 4, 2)]
    results = pools[4].run(copies, plans[0], str(tmp_path), shards)
    alone = penstock.Pipeline(chain(4), plans[1], loss_fn=mse_loss, local=True)
    assert alone.load(tmp_path, OPTIMIZERS["adam"](alone.parameters())).step == 2
    for expected, losses in results:
        assert losses == expected
        assert float(alone.eval(*BATCHES[0][:1], target=BATCHES[0][1]).loss) == pytest.approx(losses[0])
    assert not list(tmp_path.glob("step-000002/random-002*"))


def late(plan: Plan, root: str) -> list[bool]:
    """Whether a slow asynchronous save has the weights at its call, with stages that are sharded over one rank."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))

    def sharded(stage: Any, mesh: Any) -> None:
        fully_shard(stage, mesh=mesh["dp"])

    pipe = penstock.Pipeline(chain(4), plan, loss_fn=mse_loss, mesh=mesh, parallelize_fn=sharded)
    optimizer = OPTIMIZERS["adam"](pipe.parameters())

    def step() -> None:
        pipe.step(BATCHES[0][0], target=BATCHES[0][1])
        optimizer.step()

    def written(*args: Any) -> Any:
        time.sleep(0.2)
        return write(*args)

    write = writer.write_file

    def numbers() -> dict[str, torch.Tensor]:
        return {name: one.detach().full_tensor().clone() for name, one in pipe.named_parameters()}

    step()
    before = numbers()
    with mock.patch.object(writer, "write_file", written):
        pipe.save(root, optimizer, asynchronous=True)
        step()
        pipe.wait_for_save()
    pipe.load(root, optimizer)
    return [torch.equal(one, before[name]) for name, one in numbers().items()]


def test_an_asynchronous_save_copies_tensors_that_are_not_sharded_too(pools: Any, tmp_path: Path) -> None:
    found = pools[2].run(late, chain_plan("interleaved", 2, 2, 2), str(tmp_path))
    assert all(all(each) and each for each in found)


ONES = torch.ones(4, 3)


def linear_chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))


def file_per_tensor(directory: Path) -> Path:
    """A Hugging Face directory with a file for every tensor."""
    state = linear_chain().state_dict()
    for name, tensor in state.items():
        save_file({name: tensor}, directory / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in state}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return directory


def load_both(plan: Plan, *directories: str) -> tuple[Any, str, float]:
    """What this rank loads from a directory, its error if only one rank finds the next one, and the loss afterwards."""
    with torch.device("meta"):
        empty = linear_chain()
    pipe = penstock.Pipeline(empty, plan, loss_fn=mse_loss)
    loaded = pipe.load(directories[0])
    try:
        pipe.load(directories[int(torch.distributed.get_rank() == 1)])
        problem = ""
    except PenstockError as error:
        problem = str(error)
    return loaded, problem, pipe.step(ONES, target=ONES).loss.item()


def test_each_rank_opens_its_own_files_and_an_error_of_one_is_raised_on_all(pools: Any, tmp_path: Path) -> None:
    plan = quick_plan(linear_chain(), (ONES,), ranks=2, microbatches=2, schedule="gpipe", loss_fn=mse_loss)
    results = pools[2].run(load_both, plan, str(file_per_tensor(tmp_path)), str(tmp_path / "nowhere"))
    expected = mse_loss(linear_chain()(ONES), ONES).item()
    for rank, (loaded, problem, loss) in enumerate(results):
        assert loaded.files == tuple(
            f"{2 * rank + n}.{kind}.safetensors" for n in (0, 1) for kind in ("bias", "weight")
        )
        assert (loaded.num_tensors, loaded.bytes_read) == (4, 96)
        assert "no such directory" in problem
        assert loss == pytest.approx(expected)
