"""The self-test of a machine: parity, prediction, memory and failures of a small GPT on real processes.

Its result is plain data: `penstock selftest` writes it as JSON and as one page that a user can post.
"""

import copy
import json
import os
import platform
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.api.pipeline import Pipeline
from penstock.api.plan import plan
from penstock.api.plan_together import plan_together
from penstock.capture import dtype_name
from penstock.demo.gpt import Sizes, batch, gpt, loss
from penstock.errors import PenstockError
from penstock.ir import GRADIENT, Cluster, DeviceSpeed, Plan, bytes_text, compare_tensors, percent_text, seconds_text
from penstock.launch import check_devices, launch, num_cores, use_local_device
from penstock.measure import AllocationTracker, device_name
from penstock.runtime import RunOptions
from penstock.stages import distances

TESTED_SCHEDULES = ("gpipe", "1f1b", "zb_h1", "interleaved", "zbv", "dualpipe_v")
QUICK_SCHEDULES = ("1f1b", "zbv")
_SIZES = {
    "quick": Sizes(layers=4, width=32, heads=2, vocabulary=64, length=16, samples=8, microbatches=4),
    "cpu": Sizes(layers=8, width=128, heads=4, vocabulary=128, length=64, samples=32, microbatches=8),
    "gpu": Sizes(layers=16, width=1024, heads=16, vocabulary=8192, length=512, samples=32, microbatches=8),
}
_ANY_SPEED = DeviceSpeed(1e12, 1e11)
_STEPS = {True: 4, False: 12}
_BUDGET_SECONDS = {True: 0.5, False: 5.0}
FAULTS = {"a rank that hangs": "rank {rank}: no progress", "a rank that is killed": "a rank was killed (rank: {rank},"}
"""with the beginning of the line in the error that names the rank"""
_DEADLINE_SECONDS = 2.0
_MAX_NOTICE_SECONDS = 10.0
"""how long after its cause a failure may be noticed, the deadline included"""
_MAX_DRILL_SECONDS = 300.0
"""after which a fault that nobody noticed ends the drill"""


@dataclass(frozen=True)
class SelfTest:
    """The results on one machine; all values are strings, numbers, lists and dicts."""

    machine: dict[str, str]
    seconds: float
    parity: list[dict[str, Any]] = field(default_factory=list)
    """per schedule, dtype and backend: the largest difference to the unsplit model"""
    prediction: dict[str, Any] = field(default_factory=dict)
    """predicted and measured seconds of a step"""
    memory: list[dict[str, Any]] = field(default_factory=list)
    """per rank: predicted and measured peak bytes of a step"""
    failures: list[dict[str, Any]] = field(default_factory=list)
    """per fault: how long it took until it was noticed, and the error"""

    @property
    def problems(self) -> list[str]:
        """The parts that failed; time and memory are only measured."""
        return [
            *(f"parity of {c['schedule']} ({c['dtype']}, {c['backend']})" for c in self.parity if not c["ok"]),
            *(each["fault"] for each in self.failures if not each["ok"]),
        ]

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "problems": self.problems}, indent=2) + "\n"

    def page(self) -> str:
        """The results as one page of Markdown."""
        state = f"failed: {', '.join(self.problems)}" if self.problems else "passed"
        lines = [f"# penstock selftest: {state}", "", *_table(("", ""), list(self.machine.items()))]
        lines += ["", "## Parity with the unsplit model", ""]
        rows = [
            (*(each[name] for name in ("schedule", "dtype", "backend")), f"{each['largest']:.1e}", _word(each["ok"]))
            for each in self.parity
        ]
        lines += _table(("schedule", "dtype", "backend", "largest relative difference", ""), rows)
        step, lines = self.prediction, [*lines, "", "## Predicted and measured step", ""]
        row = (
            step["schedule"],
            seconds_text(step["predicted_seconds"]),
            seconds_text(step["measured_seconds"]),
            percent_text(step["error"]),
            f"{step['samples_per_second']:.4g}",
        )
        lines += _table(("schedule", "predicted", "measured", "error", "samples per second"), [row])
        lines += ["", "## Predicted and measured peak memory", ""]
        sizes = [
            (
                each["rank"],
                bytes_text(each["predicted_bytes"]),
                bytes_text(each["measured_bytes"]),
                percent_text(each["error"]),
            )
            for each in self.memory
        ]
        lines += _table(("rank", "predicted", "measured", "error"), sizes)
        lines += ["", "## Failures", ""]
        faults = [
            (
                each["fault"],
                each["backend"],
                "never" if each["seconds"] is None else f"{each['seconds']:.1f} s",
                _word(each["ok"]),
                each["error"],
            )
            for each in self.failures
        ]
        lines += _table(("fault", "backend", "noticed after", "", "error"), faults)
        return "\n".join((*lines, "", f"Took {self.seconds:.0f} s. The same as data: selftest.json.", ""))


def _word(is_ok: bool) -> str:
    return "ok" if is_ok else "FAILED"


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in (header, ["---"] * len(header), *rows)]
    return [f"| {' | '.join(row)} |" for row in cells]


def run_selftest(device: str, ranks: int, is_quick: bool, echo: Callable[[str], None]) -> SelfTest:
    """Run all parts on `ranks` processes, each with a device of that type.

    Raises:
        PlanError: if there are not enough devices
        RunError: if a part cannot run at all
    """
    # Other work on the cores explains a step that takes longer than predicted.
    began, load = time.monotonic(), os.getloadavg()[0]
    check_devices(device, ranks)
    # A process that was forked cannot use a device of its parent.
    start = "fork" if device == "cpu" else "spawn"
    echo(f"parity, prediction and memory on {ranks} processes")
    results = [json.loads(text) for text in launch(measure_rank, ranks, device, is_quick, start=start)]
    # Per case that of the rank with the largest difference.
    parity = [
        max(cases, key=lambda case: (not case["ok"], case["largest"]))
        for cases in zip(*(result["parity"] for result in results), strict=True)
    ]
    first = results[0]
    failures = []
    for backend, fault in product(_backends(device), FAULTS):
        echo(f"fault: {fault}, over {backend}")
        failures.append(cause_fault(fault, device, backend, ranks, start))
    machine = {
        "penstock": version("penstock"),
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
        "system": platform.platform(),
        "device": first["device"],
        "backends": ", ".join(dict.fromkeys(each["backend"] for each in parity)),
        "ranks": str(ranks),
        "cores": str(num_cores()),
        "load before": f"{load:.1f}",
        "size": "quick" if is_quick else "full",
    }
    memory = [result["memory"] for result in results]
    return SelfTest(machine, time.monotonic() - began, parity, first["prediction"], memory, failures)


def _backends(kind: str) -> tuple[str, ...]:
    """The backends to test, that of the device first; gloo copies the tensors of a device through host memory."""
    return ("nccl", "gloo") if kind == "cuda" and dist.is_nccl_available() else ("gloo",)


def _mesh(backend: str, timeout_seconds: float | None = None) -> DeviceMesh | None:
    """The mesh of a pipeline over a backend; `timeout_seconds` is that of NCCL itself."""
    if backend == "gloo":
        return None  # the default group
    timeout = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
    group = dist.new_group(backend="nccl", timeout=timeout)
    return DeviceMesh.from_group(group, "cuda", mesh_dim_names=("pp",))


def _model_and_batch(
    sizes: Sizes, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Tensor, Tensor]:
    """The model, the tokens and the targets: the same on every rank."""
    torch.manual_seed(0)
    x, y = batch(sizes)
    return gpt(sizes).to(device, dtype), x.to(device), y.to(device)


def measure_rank(kind: str, is_quick: bool) -> str:
    """Parity, prediction and memory on this rank, as JSON."""
    device = use_local_device(kind)
    sizes = _SIZES["quick" if is_quick else "cpu" if kind == "cpu" else "gpu"]
    meshes = {backend: _mesh(backend) for backend in _backends(kind)}
    names = QUICK_SCHEDULES if is_quick else TESTED_SCHEDULES
    cases = [(name, torch.float32, backend) for backend in meshes for name in names]
    if kind != "cpu":
        cases.append(("1f1b", torch.bfloat16, next(iter(meshes))))
    small = _SIZES["quick"]
    parity = [_parity(name, dtype, backend, meshes[backend], small, device) for name, dtype, backend in cases]
    prediction, memory = _steps(next(iter(meshes.values())), sizes, device, is_quick)
    shown = device_name(device)
    return json.dumps({"parity": parity, "prediction": prediction, "memory": memory, "device": shown})


def _estimated_plan(model: nn.Module, x: Tensor, sizes: Sizes, schedule: str) -> Plan:
    """A plan without measurements, so that every rank makes the same one by itself."""
    return plan(
        model,
        (x,),
        ranks=dist.get_world_size(),
        microbatches=sizes.microbatches,
        schedule=schedule,
        partitioner="uniform",
        speed=_ANY_SPEED,
        budget_seconds=0.1,
    )


def _parity(
    schedule: str, dtype: torch.dtype, backend: str, mesh: DeviceMesh | None, sizes: Sizes, device: torch.device
) -> dict[str, Any]:
    """One step of the pipeline compared with the unsplit model, which every rank has."""
    model, x, y = _model_and_batch(sizes, device, dtype)
    plain = copy.deepcopy(model)
    expected_loss = loss(plain(x), y)
    expected_loss.backward()
    pipe = Pipeline(model, _estimated_plan(model, x, sizes, schedule), loss_fn=loss, mesh=mesh)
    result = pipe.step(x, target=y)
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    actual = {f"{GRADIENT}{name}": parameter.grad for name, parameter in pipe.named_parameters()}
    expected = {name: gradients[name.removeprefix(GRADIENT)] for name in actual}
    losses = {"loss": expected_loss.detach().cpu()}, {"loss": result.loss}
    compared = compare_tensors(
        "the unsplit model", [*distances(*losses), *distances(expected, actual)], {}, dtype_name(dtype)
    )
    return {
        "schedule": schedule,
        "dtype": dtype_name(dtype),
        "backend": backend,
        "largest": compared.largest.relative,
        "tensor": compared.largest.name,
        "ok": compared.ok,
    }


def _steps(
    mesh: DeviceMesh | None, sizes: Sizes, device: torch.device, is_quick: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plan together, train some steps, and compare time and memory with the prediction."""
    model, x, y = _model_and_batch(sizes, device)

    def make(cluster: Cluster) -> Plan:
        budget = _BUDGET_SECONDS[is_quick]
        return plan(model, (x,), ranks=cluster, microbatches=sizes.microbatches, loss_fn=loss, budget_seconds=budget)

    group = None if mesh is None else mesh.get_group("pp")
    chosen = plan_together(make, group=group)
    pipe = Pipeline(model, chosen, loss_fn=loss, mesh=mesh)
    seconds = []
    for _ in range(_STEPS[is_quick]):
        pipe.step(x, target=y)
        pipe.zero_grad()
        _synchronize(device)
        dist.barrier()
        start = time.perf_counter()
        pipe.step(x, target=y)
        _synchronize(device)
        seconds.append(pipe.largest(time.perf_counter() - start)[0])
    measured, predicted = median(seconds), chosen.predicted.makespan
    prediction = {
        "schedule": chosen.choices.schedule,
        "predicted_seconds": predicted,
        "measured_seconds": measured,
        "error": measured / predicted - 1,
        "samples_per_second": len(x) / measured,
    }
    rank = dist.get_rank()
    expected, found = chosen.predicted.peak_bytes(rank), _peak_bytes(pipe, x, y, device)
    memory = {"rank": rank, "predicted_bytes": expected, "measured_bytes": found, "error": found / expected - 1}
    return prediction, memory


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _peak_bytes(pipe: Pipeline, x: Tensor, y: Tensor, device: torch.device) -> int:
    """This rank's parameters and the most bytes that a step holds beside them, gradients included."""
    pipe.zero_grad()
    held = sum(parameter.nbytes for parameter in pipe.parameters())
    if device.type == "cpu":
        with AllocationTracker() as tracker:
            pipe.step(x, target=y)
        return held + tracker.peak
    _synchronize(device)
    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_allocated(device)
    pipe.step(x, target=y)
    _synchronize(device)
    return int(held + torch.accelerator.max_memory_allocated(device) - before)


def cause_fault(fault: str, device: str, backend: str, ranks: int, start: str) -> dict[str, Any]:
    """Cause a fault on the last rank in the middle of a step, and check that it is noticed and named."""
    with tempfile.TemporaryDirectory() as directory:
        mark = Path(directory) / "time"
        text = "no error"
        try:
            launch(fault_rank, ranks, fault, device, backend, os.fspath(mark), start=start, timeout=_MAX_DRILL_SECONDS)
        except PenstockError as error:
            text = str(error)
        ended = time.time()
        seconds = ended - float(mark.read_text()) if mark.exists() else None
    # The line that names the rank and what is wrong with it; without one, the first line is shown.
    expected = FAULTS[fault].format(rank=ranks - 1)
    naming = [line for line in text.splitlines() if line.startswith(expected)]
    line = (naming or text.splitlines())[0]
    is_ok = bool(naming) and seconds is not None and seconds <= _MAX_NOTICE_SECONDS
    cause = {"fault": fault, "backend": backend, "deadline_seconds": _DEADLINE_SECONDS}
    return cause | {"seconds": seconds, "error": line, "ok": is_ok}


def fault_rank(fault: str, kind: str, backend: str, mark: str) -> None:
    """Train one step, and a second one in which the last rank fails."""
    device = use_local_device(kind)
    sizes = _SIZES["quick"]
    model, x, y = _model_and_batch(sizes, device)
    calls = 0

    def failing(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += pipe.num_steps  # 0 in the first step
        if calls > 1:
            Path(mark).write_text(str(time.time()), encoding="utf-8")
            if "killed" in fault:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(10 * _MAX_NOTICE_SECONDS)
        return loss(output, target)

    chosen = _estimated_plan(model, x, sizes, "1f1b")
    # A rank that waits in a kernel of NCCL sees no deadline of penstock: NCCL's own timeout ends it.
    mesh = _mesh(backend, timeout_seconds=_DEADLINE_SECONDS)
    options = RunOptions(deadline_seconds=_DEADLINE_SECONDS)
    pipe = Pipeline(model, chosen, loss_fn=failing, mesh=mesh, reduction="mean", options=options)
    pipe.step(x, target=y)
    pipe.step(x, target=y)
