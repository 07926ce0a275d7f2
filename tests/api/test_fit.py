"""penstock.fit trains as a plain PyTorch loop with the same options, also after it resumes from a checkpoint."""

import math
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import mse_loss

import penstock
from penstock import CheckpointOptions, GradScaler, PenstockError, RunError, TrainEvent, TrainOptions
from penstock.api.step_logs import Csv
from penstock.ir import Plan, StepMetrics
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.small_models import WIDTH, chain, noise

STEPS = 7
RATE = 0.1
MICROBATCHES = 2
OPTIONS = {
    "nothing": {},
    "clip": {"clip": 0.05},
    "accumulate": {"accumulate": 2},
    "cosine": {"lr_schedule": "cosine", "warmup": 2},
    "linear": {"lr_schedule": "linear"},
    "constant": {"lr_schedule": "constant", "warmup": 3},
    "warmup alone": {"warmup": 3},
    "eval": {"eval_every": 3},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "all": {
        "clip": 0.05,
        "accumulate": 2,
        "lr_schedule": "cosine",
        "warmup": 2,
        "eval_every": 2,
        "precision": "fp16",
    },
}
HELD_OUT = [(noise(size, WIDTH, seed=90 + size), noise(size, WIDTH, seed=80 + size)) for size in (4, 4, 3)]


def batches(count: int = 2 * STEPS) -> list[tuple[Tensor, Tensor]]:
    return [(noise(6, WIDTH, seed=2 * index), noise(6, WIDTH, seed=2 * index + 1)) for index in range(count)]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return mse_loss(output.to(target.dtype), target)


def dtype_of(options: dict[str, Any]) -> torch.dtype:
    """Half precision is compared bit for bit, so the model has the usual dtype."""
    return torch.float32 if "precision" in options else torch.float64


def cast(data: list[tuple[Tensor, Tensor]], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    return [(x.to(dtype), y.to(dtype)) for x, y in data]


class Trained(NamedTuple):
    """The numbers of a training."""

    losses: list[float]
    norms: list[float | None]
    rates: list[float]
    eval_losses: list[float | None]
    weights: dict[str, Tensor]


def plain_loop(options: dict[str, Any], data: list[tuple[Tensor, Tensor]], steps: int = STEPS) -> Trained:
    """The options as one writes them in plain PyTorch."""
    dtype = dtype_of(options)
    model, data, held_out = chain(4).to(dtype), cast(data, dtype), cast(HELD_OUT, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    name = options.get("lr_schedule", "constant")
    schedule = transformers.get_scheduler(
        "constant_with_warmup" if name == "constant" else name, optimizer, options.get("warmup", 0), steps
    )
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.get("precision", ""))
    scaler = torch.amp.GradScaler("cpu", enabled=half is torch.float16)
    size, every = options.get("accumulate", 1), options.get("eval_every")
    found = Trained([], [], [], [], {})
    groups = [data[start : start + size] for start in range(0, len(data), size)][:steps]
    for number, group in enumerate(groups, 1):
        optimizer.zero_grad()
        loss_of_step = 0.0
        for x, y in group:
            # Rounding in half precision depends on the microbatches; in float64 the whole batch is the reference.
            parts = zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True) if half else [(x, y)]
            for part, target in parts:
                with torch.autocast("cpu", dtype=half, enabled=half is not None):
                    loss = loss_fn(model(part), target) * (len(part) / len(x) / len(group))
                scaler.scale(loss).backward()
                loss_of_step += loss.item()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), options.get("clip", math.inf))
        found.rates.append(optimizer.param_groups[0]["lr"])
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        found.losses.append(loss_of_step)
        found.norms.append(norm.item() if norm.isfinite() else None)  # in float16, at a scale that is too large
        is_time = every is not None and number % every == 0
        found.eval_losses.append(evaluated(model, held_out, half) if every and (is_time or number == steps) else None)
    found.weights.update({name: parameter.detach() for name, parameter in model.named_parameters()})
    return found


def evaluated(model: nn.Module, held_out: list[tuple[Tensor, Tensor]], half: torch.dtype | None) -> float:
    """The mean loss over samples."""
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=half, enabled=half is not None):
        total = sum(loss_fn(model(x), y).item() * len(x) for x, y in held_out)
    model.train()
    return total / sum(len(x) for x, _ in held_out)


@cache
def plan(dtype: torch.dtype) -> Plan:
    model = chain(4).to(dtype)
    return quick_plan(model, (noise(6, WIDTH).to(dtype),), ranks=2, microbatches=MICROBATCHES, schedule="1f1b")


def pipeline(chosen: dict[str, Any], **settings: Any) -> penstock.Pipeline:
    dtype = dtype_of(chosen)
    scaler = GradScaler() if chosen.get("precision") == "fp16" else None
    settings = {"local": True, **settings}
    return penstock.Pipeline(chain(4).to(dtype), plan(dtype), loss_fn=loss_fn, scaler=scaler, **settings)


def trained(
    options: dict[str, Any], data: list[tuple[Tensor, Tensor]], pipe: penstock.Pipeline, **settings: Any
) -> Trained:
    dtype = dtype_of(options)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=RATE, momentum=0.9)
    held_out = cast(HELD_OUT, dtype) if "eval_every" in options else None
    chosen = TrainOptions(**{"steps": STEPS, **options})
    run = penstock.fit(pipe, cast(data, dtype), optimizer, chosen, eval_batches=held_out, **settings)
    columns = zip(*((m.loss, m.grad_norm, m.lr, m.eval_loss) for m in run.steps), strict=True)
    weights = {name: parameter.detach() for name, parameter in pipe.named_parameters()}
    return Trained(*map(list, columns), weights)  # type: ignore[arg-type]


def assert_equal(found: Trained, expected: Trained, rel: float = 1e-12) -> None:
    for ours, theirs in zip(found[:3], expected[:3], strict=True):
        assert ours == pytest.approx(theirs, rel=rel)
    assert [loss is None for loss in found.eval_losses] == [loss is None for loss in expected.eval_losses]
    assert [loss or 0.0 for loss in found.eval_losses] == pytest.approx(
        [e or 0.0 for e in expected.eval_losses], rel=rel
    )
    for name, weight in found.weights.items():
        torch.testing.assert_close(weight, expected.weights[name], rtol=rel, atol=rel)


def tolerance(options: dict[str, Any]) -> float:
    return 1e-12 if "precision" not in options else 1e-6 if "eval_every" not in options else 1e-3


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # if the scaler skips the first step
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_has_the_numbers_of_a_plain_loop(options: dict[str, Any]) -> None:
    data = batches()
    assert_equal(trained(options, data, pipeline(options)), plain_loop(options, data), tolerance(options))


def test_the_batches_that_are_left_at_the_end_are_a_step() -> None:
    options = {"accumulate": 3, "steps": None}
    data = batches(7)
    found = trained(options, data, pipeline(options))
    assert len(found.losses) == 3
    assert_equal(found, plain_loop({"accumulate": 3}, data))


def test_the_options_change_the_numbers() -> None:
    """Else the comparisons with a plain loop would show little."""
    data = batches()
    usual = plain_loop({}, data)
    for name in ("clip", "accumulate", "cosine", "linear", "constant", "bf16"):
        other = plain_loop(OPTIONS[name], data)
        assert max(abs(a - b) for a, b in zip(usual.losses, other.losses, strict=True)) > 1e-6, name


# ------------------------------------------------------------------------------------------------------------ resuming


def resumed(options: dict[str, Any], directory: Path, steps: int, **settings: Any) -> Trained:
    """A part of the training, with its schedule for all steps, from the newest checkpoint if there is one."""

    def stop(event: TrainEvent) -> None:
        if event.name == "after_step" and event.step + 1 == steps:
            event.stop()

    chosen = {**options, "log": [f"csv:{directory / 'log.csv'}"]}
    checkpoints = CheckpointOptions(directory / "saved", every=2, resume="auto")
    pipe = pipeline(options)
    return trained(chosen, batches(), pipe, checkpoints=checkpoints, callbacks=[stop], **settings)


def rows(directory: Path) -> list[tuple[Any, ...]]:
    """All but the seconds."""
    return [(m.step, m.loss, m.grad_norm, m.lr, m.eval_loss) for m in Csv(directory / "log.csv").read()]


@pytest.mark.parametrize("name", ["accumulate", "cosine", "eval", "all"])
def test_a_training_that_resumes_is_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    options = OPTIONS[name]
    (tmp_path / "whole").mkdir()
    whole = resumed(options, tmp_path / "whole", STEPS)
    resumed(options, tmp_path, 3)
    later = resumed(options, tmp_path, STEPS)
    assert (later.losses, later.norms, later.rates) == (whole.losses[3:], whole.norms[3:], whole.rates[3:])
    assert all(torch.equal(weight, whole.weights[name]) for name, weight in later.weights.items())
    # Where it stopped, it was evaluated once more.
    stopped = [(*row[:4], None) if row[0] == 2 and name == "eval" else row for row in rows(tmp_path)]
    expected = [(*row[:4], None) if row[0] == 2 and name == "eval" else row for row in rows(tmp_path / "whole")]
    if name == "all":
        stopped[2], expected[2] = stopped[2][:4], expected[2][:4]
    assert stopped == expected
    names = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert names == [f"step-{number:06}" for number in (2, 3, 4, 6, 7)]


def test_steps_that_an_attempt_took_beyond_its_checkpoint_are_logged_once(tmp_path: Path) -> None:
    def fail(event: TrainEvent) -> None:
        if event.name == "after_step" and event.step == 4:
            raise KeyError("cut")

    options = {"log": [f"csv:{tmp_path / 'log.csv'}"]}
    settings = {"checkpoints": CheckpointOptions(tmp_path / "saved", every=3, resume="auto")}
    with pytest.raises(KeyError, match="cut"):
        trained(options, batches(), pipeline({}), callbacks=[fail], **settings)
    assert [row[0] for row in rows(tmp_path)] == [0, 1, 2, 3, 4]
    trained(options, batches(), pipeline({}), **settings)
    assert [row[0] for row in rows(tmp_path)] == list(range(STEPS))


def test_a_run_that_resumes_has_the_id_of_the_saved_one_in_logs(tmp_path: Path) -> None:
    ids = []

    class Stub(Csv):
        def __init__(self, target: Any, run_id: str) -> None:
            super().__init__(Path(target.where))
            ids.append(run_id)

    options = {"log": [f"csv:{tmp_path / 'log.csv'}"]}
    checkpoints = CheckpointOptions(tmp_path / "saved", resume="auto")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.api.step_logs.make_log", Stub)
        for steps in (2, 3, 4):
            trained({**options, "steps": steps}, batches(), pipeline({}), checkpoints=checkpoints)
    assert len(ids) == 3
    assert len(set(ids)) == 1


# ----------------------------------------------------------------------------------------------- callbacks, evaluation


def test_callbacks_get_every_event_in_order(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    paths = []

    def note(event: TrainEvent) -> None:
        seen.append((event.name, event.step))
        paths.append(event.path)
        metrics = event.metrics
        assert metrics is None or isinstance(metrics, StepMetrics)
        assert (event.name == "eval") <= (metrics is not None and metrics.eval_loss is not None)

    options = {"steps": 3, "eval_every": 2}
    checkpoints = CheckpointOptions(tmp_path, every=2)
    trained(options, batches(), pipeline({}), callbacks=[note], checkpoints=checkpoints)
    assert seen == [
        ("before_step", 0),
        ("after_step", 0),
        ("before_step", 1),
        ("after_step", 1),
        ("eval", 1),
        ("save", 1),
        ("before_step", 2),
        ("after_step", 2),
        ("eval", 2),
        ("save", 2),
        ("end", 3),
    ]
    assert [path for path in paths if path] == [tmp_path / "step-000002", tmp_path / "step-000003"]


def test_a_callback_can_stop_the_training() -> None:
    found = trained({}, batches(), pipeline({}), callbacks=[lambda event: event.step == 3 and event.stop()])
    assert len(found.losses) == 4


def test_evaluating_does_not_change_the_training() -> None:
    def drawn() -> Iterator[Any]:
        for _ in range(4):
            yield torch.randn(6, WIDTH, dtype=torch.float64), torch.randn(6, WIDTH, dtype=torch.float64)

    def losses(**settings: Any) -> Any:
        torch.manual_seed(3)
        pipe = pipeline({})
        optimizer = torch.optim.SGD(pipe.parameters(), lr=RATE)
        return penstock.fit(pipe, drawn(), optimizer, TrainOptions(**settings), eval_batches=drawn).losses

    assert losses() == losses(eval_every=1)


def test_an_evaluation_whose_loss_is_not_finite_is_not_repeated() -> None:
    pipe, events = pipeline({}), []
    optimizer = torch.optim.SGD(pipe.parameters(), lr=RATE)
    bad = [(torch.full((4, WIDTH), math.inf, dtype=torch.float64), noise(4, WIDTH))]
    data = cast(batches(2), torch.float64)
    note_event = lambda event: events.append(event.name)  # noqa: E731
    run = penstock.fit(pipe, data, optimizer, TrainOptions(steps=2), eval_batches=bad, callbacks=[note_event])
    assert run.steps[-1].eval_loss is None
    assert events.count("eval") == 1


def test_an_evaluation_that_fails_leaves_the_random_generators_as_they_were() -> None:
    def broken() -> Iterator[Any]:
        torch.randn(3)
        np.random.random()
        random.random()
        raise KeyError("broken")
        yield

    pipe, states = pipeline({}), []

    def note_state(event: TrainEvent) -> None:
        if event.name == "after_step":
            states.append((torch.get_rng_state().tolist(), np.random.get_state()[2], random.getstate()))

    optimizer = torch.optim.SGD(pipe.parameters(), lr=RATE)
    data = cast(batches(1), torch.float64)
    with pytest.raises(KeyError, match="broken"):
        penstock.fit(pipe, data, optimizer, TrainOptions(steps=1), eval_batches=broken, callbacks=[note_state])
    assert states == [(torch.get_rng_state().tolist(), np.random.get_state()[2], random.getstate())]


def test_another_fit_counts_a_step_of_which_batches_were_skipped_or_missing() -> None:
    pipe = pipeline({}, options=penstock.RunOptions(nonfinite="skip"))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=RATE)
    (x, y), *others = cast(batches(8), torch.float64)
    data = [(x * math.nan, y), *others]
    first = penstock.fit(pipe, data[:7], optimizer, TrainOptions(accumulate=2))  # the last step has one batch
    second = penstock.fit(pipe, data[4:], optimizer, TrainOptions(steps=6, accumulate=2))
    assert [metrics.step for metrics in (*first.steps, *second.steps)] == list(range(6))


@pytest.mark.parametrize("is_by_fit", [False, True])
def test_fit_counts_the_steps_of_a_loaded_checkpoint_although_batches_were_skipped(
    is_by_fit: bool, tmp_path: Path
) -> None:
    (x, y), *others = cast(batches(8), torch.float64)
    options = TrainOptions(accumulate=2)
    checkpoints = CheckpointOptions(tmp_path) if is_by_fit else None
    pipes = [pipeline({}, options=penstock.RunOptions(nonfinite="skip")) for _ in range(2)]
    first, second = [torch.optim.SGD(pipe.parameters(), lr=RATE) for pipe in pipes]
    penstock.fit(pipes[0], [(x * math.nan, y), *others[:5]], first, options, checkpoints=checkpoints)
    if not is_by_fit:
        pipes[0].save(tmp_path, first)
    pipes[1].load(tmp_path, second)
    run = penstock.fit(pipes[1], others[5:], second, options)
    assert [metrics.step for metrics in run.steps] == [3]


def test_fit_counts_the_calls_of_step_of_a_checkpoint_without_a_fit(tmp_path: Path) -> None:
    data = cast(batches(6), torch.float64)
    pipes = [pipeline({}), pipeline({})]
    for x, y in data[:4]:
        pipes[0].step(x, target=y)
    pipes[0].save(tmp_path)
    optimizer = torch.optim.SGD(pipes[1].parameters(), lr=RATE)
    penstock.fit(pipes[1], data[:2], optimizer)
    pipes[1].load(tmp_path)
    run = penstock.fit(pipes[1], data[4:], optimizer, TrainOptions(accumulate=2))
    assert [metrics.step for metrics in run.steps] == [2]


WRONG = {
    "precision": ({"precision": "int8"}, 'precision must be "fp32", "bf16" or "fp16" .got: \'int8\''),
    "schedule": ({"lr_schedule": "step"}, 'lr_schedule must be "constant", "linear"'),
    "no end": ({"lr_schedule": "cosine"}, "needs the number of steps"),
    "long warmup": ({"lr_schedule": "linear", "steps": 3, "warmup": 3}, "shorter than steps"),
    "accumulate": ({"accumulate": 0}, "accumulate must be a whole number, 1 or more"),
    "steps": ({"steps": 1.5}, "steps must be a whole number"),
    "clip": ({"clip": math.nan}, "clip must be finite and above 0"),
    "log": ({"log": ["csv"]}, "log must be KIND:WHERE"),
    "a log that is not in a list": ({"log": "csv:log.csv"}, "log must be a list"),
    "a directory that is missing": ({"log": ["csv:missing/log.csv"]}, "in a directory that exists"),
    "one log twice": ({"log": ["csv:log.csv", "csv:log.csv"]}, "every target once"),
}


@pytest.mark.parametrize(("options", "text"), WRONG.values(), ids=WRONG)
def test_wrong_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(PenstockError, match=text):
        TrainOptions(**options)


def refusals() -> dict[str, tuple[Callable[[Path], Any], str]]:
    x = [(noise(6, WIDTH), noise(6, WIDTH))]

    def fit(options: TrainOptions, **settings: Any) -> Any:
        pipe = pipeline({})
        return penstock.fit(pipe, x, torch.optim.SGD(pipe.parameters(), lr=RATE), options, **settings)

    def other_file(path: Path) -> Any:
        (path / "notes.csv").write_text("a,b\n1,2\n")
        return fit(TrainOptions(log=[f"csv:{path / 'notes.csv'}"]))

    def again(options: TrainOptions, data: Any) -> Any:
        pipe = pipeline({})
        optimizer = torch.optim.SGD(pipe.parameters(), lr=RATE)
        penstock.fit(pipe, x, optimizer, options)
        return penstock.fit(pipe, data, optimizer, options)

    return {
        "fp16 without a scaler": (lambda path: fit(TrainOptions(precision="fp16")), "needs a scaler"),
        "evaluation without data": (lambda path: fit(TrainOptions(eval_every=1)), "needs batches to evaluate"),
        "an iterator to evaluate": (lambda path: fit(TrainOptions(), eval_batches=iter(x)), "got an iterator"),
        "nothing to evaluate": (lambda path: fit(TrainOptions(), eval_batches=[]), "no batches to evaluate"),
        "another file": (other_file, "the log file has other columns"),
        "no batches after earlier steps": (lambda path: again(TrainOptions(), []), "the data has no batches"),
        "steps that are taken": (lambda path: again(TrainOptions(steps=1), x), r"steps must be above .*try: steps=2"),
    }


@pytest.mark.parametrize("name", refusals())
def test_a_call_that_cannot_be_meant_is_refused(name: str, tmp_path: Path) -> None:
    call, text = refusals()[name]
    with pytest.raises(RunError, match=f"(?s){text}"):
        call(tmp_path)


def test_a_loss_that_overflows_float16_at_every_scale_ends_the_training() -> None:
    options = {"precision": "fp16", "steps": None}
    data = [(x * math.inf, y) for x, y in batches(60)]
    with pytest.raises(RunError, match="3 steps in a row: gradients overflow at a loss scale of"):
        trained(options, data, pipeline(options))


# ----------------------------------------------------------------------------------------------------------- processes


@cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))


def trained_on_processes(options: dict[str, Any], with_replicas: bool) -> Trained:
    pipe = pipeline(options, local=False, mesh=mesh() if with_replicas else None)
    return trained(options, batches(), pipe)


@pytest.mark.gloo
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_and_replicas_have_the_numbers_of_a_plain_loop(ranks: int, pools: Pools) -> None:
    options = {key: value for key, value in OPTIONS["all"].items() if key != "precision"}
    for found in pools[ranks].run(trained_on_processes, options, ranks == 4):
        assert_equal(found, plain_loop(options, batches()))


def refused_batches() -> str:
    pipe = pipeline({}, local=False, mesh=mesh())
    own = [(x + mesh().get_local_rank("dp"), y) for x, y in batches(2)]
    try:
        penstock.fit(pipe, own, torch.optim.SGD(pipe.parameters(), lr=RATE))
    except RunError as error:
        return str(error)
    return ""


@pytest.mark.gloo
def test_replicas_that_are_given_different_batches_are_refused(pools: Pools) -> None:
    for text in pools[4].run(refused_batches):
        assert "all replicas must be given the same batch" in text
