"""The files of a directory after a save."""

import os
import shutil
import stat
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from torch import nn

import penstock
from penstock.checkpoint import CheckpointDir, CheckpointReader, CheckpointWriter, writer
from penstock.checkpoint.locks import lock_exclusively
from penstock.errors import CheckpointError
from penstock.ir import Plan
from tests.checkpoint.trainings import Training, saved, the_plan
from tests.plans import quick_plan
from tests.small_models import tied, token_loss


def test_every_parameter_is_in_one_file_by_its_own_name(tmp_path: Path) -> None:
    training = saved(tmp_path, 1)
    found: dict[str, torch.Tensor] = {}
    for path in sorted(tmp_path.glob("step-000001/stage-*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            assert not set(opened.keys()) & set(found)
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    state = training.pipe.full_state_dict()
    assert set(state) - set(found) == {"head.weight"}  # it is embed.weight
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.items())


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        saved(tmp_path / "new" / "in" / "it", 1)
    finally:
        os.umask(old)
    for path in (tmp_path / "new", *(tmp_path / "new").rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_an_asynchronous_save_writes_to_the_given_directory_although_the_program_changes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    training = Training(the_plan(1, "gpipe"), local=True)
    with mock.patch.object(writer, "write_file", side_effect=slowly(writer.write_file)):
        assert training.save("saved", asynchronous=True) == Path("saved/step-000000")
        monkeypatch.chdir(tmp_path / "elsewhere")
        training.pipe.wait_for_save()
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step-000000"]


def slowly(function: Any) -> Any:
    """The function with a delay."""

    def called(*args: Any) -> Any:
        time.sleep(0.05)
        return function(*args)

    return called


def test_load_waits_for_a_running_save(tmp_path: Path) -> None:
    training = saved(tmp_path, 1)
    training.losses(1)
    with mock.patch.object(writer, "write_file", side_effect=slowly(writer.write_file)):
        training.save(tmp_path, asynchronous=True)
        assert training.pipe.load(tmp_path).step == 2


def test_the_plan_is_saved(tmp_path: Path) -> None:
    training = saved(tmp_path, 1)
    assert Plan.load(tmp_path / "step-000001" / "plan.json") == training.pipe.plan


def test_older_checkpoints_are_pruned_and_damaged_ones_do_not_count(tmp_path: Path) -> None:
    training = saved(tmp_path, 1, 2, 3)
    (tmp_path / "step-000002" / "manifest.json").unlink()
    training.losses(1)
    training.save(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003", "step-000004"]


def test_newer_checkpoints_of_another_training_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    saved(tmp_path, 1, 2)
    training = Training(the_plan(1, "gpipe"), local=True)
    training.losses(3)
    training.save(tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000003", "step-000005"]


@pytest.mark.parametrize("link", [False, True])
def test_anything_with_the_name_of_the_checkpoint_is_replaced(link: bool, tmp_path: Path) -> None:
    place = tmp_path / "step-000001"
    if link:
        place.symlink_to("nowhere")
    else:
        place.write_text("mine")
    saved(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert place.is_dir()


def test_the_same_step_may_be_saved_again(tmp_path: Path) -> None:
    training = saved(tmp_path, 1)
    training.save(tmp_path, extra="again")
    assert training.pipe.load(tmp_path).extra == "again"
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_remains_of_interrupted_saves_are_removed(tmp_path: Path) -> None:
    training = saved(tmp_path, 1)
    (tmp_path / ".tmp-step-000002-00000000").mkdir()
    (tmp_path / "step-000001").rename(tmp_path / ".replaced-step-000001")
    (tmp_path / ".tmp-mine").mkdir()
    before = sorted(tmp_path.iterdir())
    assert training.pipe.load(tmp_path).step == 1
    assert sorted(tmp_path.iterdir()) == before  # a reader changes nothing
    training.losses(1)
    training.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp-mine", "step-000001", "step-000002"]


def test_a_save_that_is_interrupted_leaves_nothing_although_the_program_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = saved(tmp_path, 1)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("penstock.checkpoint.writer.write_file", interrupt)
        with pytest.raises(KeyboardInterrupt):
            training.pipe.save(tmp_path, training.optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_a_step_is_saved_again_while_an_interrupted_save_left_its_older_checkpoint_to_a_reader(tmp_path: Path) -> None:
    training = saved(tmp_path, 1)
    older = tmp_path / ".replaced-step-000001"
    shutil.copytree(tmp_path / "step-000001", older)
    with CheckpointReader(older):
        training.save(tmp_path, extra="again")
        assert training.pipe.load(tmp_path).extra == "again"
    training.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_training_resumes_from_the_only_checkpoint_although_it_is_replaced(tmp_path: Path) -> None:
    assert not CheckpointDir(tmp_path).has_any
    training = saved(tmp_path, 1)
    training.losses(1)
    (tmp_path / "step-000001").rename(tmp_path / ".replaced-step-000001")
    options = penstock.CheckpointOptions(tmp_path, resume="auto")
    penstock.fit(training.pipe, [], training.optimizer, penstock.TrainOptions(steps=1), checkpoints=options)
    assert training.pipe.num_steps == 1


def test_a_replaced_checkpoint_is_loaded_before_older_ones(tmp_path: Path) -> None:
    training = saved(tmp_path, 1, 2)
    (tmp_path / "step-000002").rename(tmp_path / ".replaced-step-000002")
    assert training.pipe.load(tmp_path).step == 2


def test_a_checkpoint_that_a_process_still_writes_is_left_alone(tmp_path: Path) -> None:
    temporary = tmp_path / ".tmp-step-000002-00000000"
    temporary.mkdir()
    lock = lock_exclusively(temporary)
    assert CheckpointDir(tmp_path).clean_up() == []
    assert lock is not None
    lock.release()
    assert CheckpointDir(tmp_path).clean_up() == [temporary.name]


def test_a_rank_that_is_late_for_an_abandoned_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    made = CheckpointWriter.create(tmp_path, 1, 2)
    made.join(1)
    made.abandon()
    made.write(1, {"a.json": b"{}"})
    assert list(tmp_path.iterdir()) == []


def test_extra_position_and_scheduler_come_back(tmp_path: Path) -> None:
    training = Training(the_plan(1, "gpipe"), local=True)
    extra = {"a": [1, 2.5, None, True, "x"], "b": (float("inf"), {3: "c"}), "c": torch.arange(3), "d": torch.float16}
    scheduler = torch.optim.lr_scheduler.MultiStepLR(training.optimizer, [2, 2, 5])
    training.losses(1)
    scheduler.step()
    training.save(tmp_path, extra=extra, position={"epoch": 1, "batch": 7}, scheduler=scheduler)
    again = Training(the_plan(1, "gpipe"), local=True)
    other = torch.optim.lr_scheduler.MultiStepLR(again.optimizer, [9])
    loaded = again.pipe.load(tmp_path, again.optimizer, scheduler=other)
    assert {**loaded.extra, "c": 0} == {**extra, "c": 0}
    assert torch.equal(loaded.extra["c"], extra["c"])
    assert loaded.position == {"epoch": 1, "batch": 7}
    assert other.state_dict() == scheduler.state_dict()


def test_the_scale_of_a_scaler_is_kept(tmp_path: Path) -> None:
    scalers = [penstock.GradScaler(8.0), penstock.GradScaler(2.0)]
    saving, loading = (
        penstock.Pipeline(tied(), the_plan(1, "gpipe"), loss_fn=token_loss, local=True, scaler=scaler)
        for scaler in scalers
    )
    saving.save(tmp_path)
    loading.load(tmp_path)
    assert scalers[1].scale == 8.0


def test_random_numbers_continue_unless_asked_not_to(tmp_path: Path) -> None:
    training = saved(tmp_path, 1)
    expected = torch.rand(3)
    training.pipe.load(tmp_path, random_state=False)
    assert not torch.equal(torch.rand(3), expected)
    training.pipe.load(tmp_path)
    assert torch.equal(torch.rand(3), expected)


def other_model(blocks: int) -> penstock.Pipeline:
    x = torch.ones(4, 4, dtype=torch.float64)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(blocks))).double()
    plan = quick_plan(model, (x,), ranks=1, microbatches=1, schedule="gpipe", loss_fn=nn.functional.mse_loss)
    return penstock.Pipeline(model, plan, loss_fn=nn.functional.mse_loss, local=True)


def test_a_checkpoint_of_another_model_is_refused_with_the_difference(tmp_path: Path) -> None:
    other_model(3).save(tmp_path)
    with pytest.raises(CheckpointError, match=r"unexpected: 2\.weight, 2\.bias"):
        other_model(2).load(tmp_path)
    with pytest.raises(CheckpointError, match="missing"):
        other_model(4).load(tmp_path)


def sgd(training: Training) -> torch.optim.Optimizer:
    return torch.optim.SGD(training.pipe.parameters())


def split_groups(training: Training) -> torch.optim.Optimizer:
    first, *others = training.pipe.parameters()
    return torch.optim.Adam([{"params": [first], "lr": 1.0}, {"params": others}])


@pytest.mark.parametrize(
    ("saves", "loads", "message"),
    [
        (sgd, lambda t: t.optimizer, "state of another optimizer"),
        (split_groups, lambda t: t.optimizer, "groups with different options"),
        (lambda t: None, lambda t: t.optimizer, "no optimizer state"),
        (
            lambda t: torch.optim.Adam(list(t.pipe.parameters())[:2]),
            lambda t: t.optimizer,
            "lacks parameters",
        ),
    ],
)
def test_an_optimizer_that_does_not_match_is_refused(saves, loads, message: str, tmp_path: Path) -> None:
    training = Training(the_plan(1, "gpipe"), local=True)
    training.pipe.save(tmp_path, saves(training))
    with pytest.raises(CheckpointError, match=message):
        training.pipe.load(tmp_path, loads(training))


def test_groups_keep_their_options_by_parameter(tmp_path: Path) -> None:
    training = Training(the_plan(1, "gpipe"), local=True)
    training.pipe.save(tmp_path, split_groups(training))
    first, *others = training.pipe.parameters()
    turned = torch.optim.Adam([{"params": others}, {"params": [first]}, {"params": []}], lr=0.5)
    training.pipe.load(tmp_path, turned)
    assert [group["lr"] for group in turned.param_groups] == [1e-3, 1.0, 0.5]


class Counting(torch.optim.SGD):
    """It keeps state that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        """Take the step and count it."""
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1
        return super().step(closure)


def test_optimizer_state_that_belongs_to_no_parameter_comes_back(tmp_path: Path) -> None:
    training = Training(the_plan(2), local=True)
    training.optimizer = Counting(training.pipe.parameters(), lr=0.1)
    training.losses(2)
    training.save(tmp_path)
    again = Counting(training.pipe.parameters(), lr=0.1)
    training.pipe.load(tmp_path, again)
    assert dict(again.state["all"]) == {"steps": 2}


class OwnStateDict(torch.optim.SGD):
    """It overrides state_dict."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "mine": 3}


WRONG = {
    "keep must be a positive integer": {"keep": 0},
    "asynchronous must be True or False": {"asynchronous": 1},
    "must be a torch.optim.Optimizer": {"optimizer": 3},
    "its own state_dict method": {"optimizer": OwnStateDict([torch.nn.Parameter(torch.ones(1))])},
    "parameters of this pipeline only": {"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])},
    "cannot hold": {"extra": {"f": print}},
    "must be a path": {"path": 3},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_save_that_is_refused_leaves_nothing(message: str, tmp_path: Path) -> None:
    training = Training(the_plan(1, "gpipe"), local=True)
    with pytest.raises(CheckpointError, match=message):
        training.pipe.save(**{"path": tmp_path / "new", **WRONG[message]})
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_complex128_parameters_resumes_with_its_optimizer(tmp_path: Path) -> None:
    def square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).abs().square().mean()

    def trained() -> tuple[penstock.Pipeline, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.complex128) for _ in range(2)))
        plan = quick_plan(model, (x,), ranks=2, microbatches=2, schedule="1f1b", loss_fn=square)
        pipe = penstock.Pipeline(model, plan, loss_fn=square, local=True)
        return pipe, torch.optim.Adam(pipe.parameters(), lr=0.1)

    def step(pipe: penstock.Pipeline, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        pipe.step(x, target=x)
        optimizer.step()

    x = torch.randn(6, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))
    first, second = trained(), trained()
    step(*first)
    first[0].save(tmp_path, first[1], extra={"phase": x})
    loaded = second[0].load(tmp_path, second[1])
    assert torch.equal(loaded.extra["phase"], x)
    for each in (first, second):
        step(*each)
    pairs = zip(first[0].parameters(), second[0].parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_broken_link_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="must be a directory, got a broken link"):
        Training(the_plan(1, "gpipe"), local=True).pipe.save(tmp_path / "link")
