"""What scripts may do besides plain training steps, run on all ranks of a pool; most return what the test compares."""

import gc
import importlib
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining.schedules import _ComputationType
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import PenstockError, PenstockWarning
from penstock.pipelining import (
    Pipe,
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    SplitPoint,
    TensorChunkSpec,
    build_stage,
    get_schedule_class,
    pipe_split,
    pipeline,
)
from penstock.pipelining.microbatch import _CustomReducer, _Replicate
from penstock.pipelining.schedules import _PipelineScheduleRuntime, _ScheduleForwardOnly
from tests.pipelining.runs import WIDTH, batch, blocks

CPU = torch.device("cpu")


def own_stage(model: nn.Sequential, **options: Any) -> PipelineStage:
    """The stage of this rank, one per rank."""
    rank = dist.get_rank()
    return PipelineStage(model[rank], rank, len(model), CPU, **options)


def is_last() -> bool:
    """Whether this is the last rank."""
    return dist.get_rank() == dist.get_world_size() - 1


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Of the parameters that have one."""
    return {name: each.grad.clone() for name, each in module.named_parameters() if each.grad is not None}


def called_otherwise() -> dict[str, Any]:
    """Keyword arguments, arguments on all ranks, evaluation, forward only, accumulation, and other shapes later."""
    model, (x, y) = blocks(2), batch(8)
    schedule = Schedule1F1B(own_stage(model), 4, loss_fn=mse_loss)
    found: dict[str, Any] = {}
    scale = torch.arange(8.0, dtype=torch.float64).reshape(8, 1)
    losses: list[Tensor] = [torch.ones(())]
    # Every rank gives its own stages their keyword arguments; positional ones and targets elsewhere are not used.
    found["kwargs"] = schedule.step(x, target=y, losses=losses, scale=scale)
    found["losses"], found["first"] = losses, gradients(model[dist.get_rank()])
    assert (schedule.step(x, target=y, return_outputs=False)) is None
    found["accumulated"] = gradients(model[dist.get_rank()])
    eval_losses: list[Tensor] = []
    found["eval"] = schedule.eval(x, target=y, losses=eval_losses)
    found["eval losses"] = eval_losses
    assert schedule.eval(x, target=y, return_outputs=False, loss_kwargs={}) is None
    longer = torch.cat([x, x])
    found["longer"] = schedule.eval(longer)
    model.zero_grad()
    schedule.step(longer, target=torch.cat([y, y]))
    found["longer gradients"] = gradients(model[dist.get_rank()])
    found["after eval"] = schedule.eval(x)
    forward_only = _ScheduleForwardOnly(own_stage(model), 2)
    found["forward only"] = forward_only.step(x)
    return found


class Sums(nn.Module):
    """Positions first, samples second; returns values and their sum."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.layer, self.is_last = nn.Linear(WIDTH, WIDTH).double(), is_last

    def forward(self, x: Tensor, table: Tensor | None = None) -> Any:
        """A table that is not split is added."""
        y = self.layer(x) if table is None else self.layer(x) + table
        return (y, y.sum()) if self.is_last else y


def with_specs() -> Any:
    """Samples in dimension 1, an argument for all microbatches, and outputs merged by a dimension and by a sum."""
    torch.manual_seed(0)
    stages = [Sums(False), Sums(True)]
    rank = dist.get_rank()
    stage = PipelineStage(stages[rank], rank, 2, CPU)
    schedule = ScheduleGPipe(
        stage,
        3,
        args_chunk_spec=(TensorChunkSpec(1), _Replicate),
        output_merge_spec=(TensorChunkSpec(1), _CustomReducer(torch.zeros(()), lambda total, part: total + part)),
    )
    x, table = torch.arange(4.0 * 7 * WIDTH, dtype=torch.float64).reshape(4, 7, WIDTH), torch.ones(4, 1, WIDTH)
    merged = schedule.step(*((x, table) if rank == 0 else ()))
    y, total = stages[1](stages[0](x, table))
    return None if merged is None else (merged[0], merged[1], y.detach(), total.detach())


class NoWeightGrad(torch.autograd.Function):
    """A product whose backward leaves the weight gradient to the caller."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, pending: list[Any]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.pending = pending
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        ctx.pending.append((x, gradient))
        return gradient @ weight, None, None


class OwnWeightGrad(nn.Module):
    """Computes its weight gradient in a function that `dw_builder` returns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.pending: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        """A product."""
        x = x if x.requires_grad else x.clone().requires_grad_()
        return NoWeightGrad.apply(x, self.weight, self.pending)

    def build(self) -> Any:
        """Take what backward left; the result computes the weight gradient."""
        entry = self.pending.pop()

        def compute() -> None:
            x, gradient = entry
            grad = gradient.t() @ x
            self.weight.grad = grad if self.weight.grad is None else self.weight.grad + grad

        return compute


def own_weight_gradients(library: str) -> list[tuple[int, Tensor]]:
    """dw_builder under a schedule that splits backward."""
    pipelining = importlib.import_module(library)
    torch.manual_seed(0)
    modules, rank = [OwnWeightGrad() for _ in range(4)], dist.get_rank()
    stages = [
        pipelining.PipelineStage(modules[index], index, 4, CPU, dw_builder=modules[index].build)
        for index in (rank, rank + 2)
    ]
    schedule = pipelining.ScheduleInterleavedZeroBubble(stages, 4, loss_fn=nn.MSELoss())
    x, y = batch(8)
    _ = schedule.step(x) if rank == 0 else schedule.step(target=y)
    return [(stage.stage_index, modules[stage.stage_index].weight.grad) for stage in stages]


def loaded_orders(directory: str) -> dict[str, Any]:
    """Orders written to CSV and read again, without and with messages, and custom functions around actions."""
    model, (x, y), rank = blocks(4), batch(8), dist.get_rank()
    stages = [PipelineStage(model[index], index, 4, CPU) for index in (rank, rank + 2)]
    written = ScheduleInterleavedZeroBubble(stages, 4, loss_fn=mse_loss)
    found: dict[str, Any] = {}
    for form in ("compute_only", "compute_comms"):
        path = Path(directory) / f"{form}-{rank}.csv"
        written._dump_csv(path, form)
        schedule = _PipelineScheduleRuntime(stages, 4, loss_fn=mse_loss)
        schedule._load_csv(path, form)
        again = Path(directory) / f"again-{form}-{rank}.csv"
        schedule._dump_csv(again, form)
        assert path.read_text() == again.read_text()
        seen: list[str] = []

        def custom(action: Any, context: Any, seen: list[str] = seen) -> None:
            seen.append(str(action))
            assert len(context.arg_mbs) == len(context.kwarg_mbs) == 4
            context.run()

        schedule.register_custom_function("F", custom)
        schedule.register_custom_function("W", custom)
        model.zero_grad()
        _ = schedule.step(x) if rank == 0 else schedule.step(target=y)
        found[form] = {index: gradients(model[index]) for index in (rank, rank + 2)}
        found[f"{form} seen"] = seen
        found[f"{form} order"] = [str(action) for action in schedule.pipeline_order[rank]]
    return found


def live_tensors() -> int:
    """How many activations are alive after a step; the second step sends without headers."""
    model, (x, y), alive = blocks(2), batch(8), []
    stage = own_stage(model)

    def note(_: nn.Module, __: Any, output: Tensor) -> None:
        alive.append(weakref.ref(output))

    stage.submod.first.register_forward_hook(note)
    schedule = Schedule1F1B(stage, 4, loss_fn=mse_loss)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            schedule.step(x, target=y, return_outputs=False)
        return sum(ref() is not None for ref in alive)
    finally:
        gc.enable()


def misused(directory: str) -> dict[str, str]:
    """Mistakes that a rank finds alone, before any step."""
    model, rank = blocks(2), dist.get_rank()
    path = Path(directory) / f"forwards-{rank}.csv"
    path.write_text("0F0,0F1\n1F0,1F1\n", encoding="utf-8")
    stage = own_stage(model)
    multi = _PipelineScheduleRuntime([stage], 2, loss_fn=mse_loss)
    calls: dict[str, Any] = {
        "no orders": lambda: multi.step(),
        "another place": lambda: Schedule1F1B(PipelineStage(model[0], 1 - rank, 2, CPU), 2),
        "too many": lambda: Schedule1F1B(PipelineStage(model[0], rank, 4, CPU), 2),
        "index": lambda: PipelineStage(model[0], 2, 2, CPU),
        "microbatches": lambda: Schedule1F1B(stage, 0),
        "message": lambda: multi.register_custom_function(_ComputationType.SEND_F, print),
        "forwards only": lambda: (multi._load_csv(path), multi.step()),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except PenstockError as error:
            found[name] = str(error)
    with pytest.warns(PenstockWarning, match="use_full_backward has no effect"):
        _PipelineScheduleRuntime([stage], 2, loss_fn=mse_loss, use_full_backward=True, defer_pp_recv=True)
    # torch's own enumeration is accepted.
    multi.register_custom_function(_ComputationType.FORWARD, print)
    return found


def refused(kind: str) -> str:
    """The error of a wrong call, the same on every rank; the next call works."""
    model, (x, y), rank = blocks(2), batch(8), dist.get_rank()
    schedule = Schedule1F1B(own_stage(model), 4, loss_fn=mse_loss)
    calls: dict[str, Any] = {
        "target": lambda: schedule.step(x),
        "rows": lambda: schedule.step(x, target=y[:7]),
        "few": lambda: schedule.step(x[:3], target=y),
        "losses": lambda: schedule.step(x, target=y, losses=()),
        "no input": lambda: schedule.step(target=y),
        "keywords": lambda: schedule.step(x, target=y, **({"factor": 2} if rank else {})),
        "loss_kwargs": lambda: schedule.step(x, target=y, loss_kwargs={"factor": 2}),
        "no dict": lambda: schedule.step(x, target=y, loss_kwargs=[2]),  # type: ignore[arg-type]
        "second target": lambda: schedule.step(x, target=(y, {"weights": y[:6]})),
        "few targets": lambda: schedule.step(x, target=(y, y[:2])),
        "different": lambda: schedule.step(x, target=y) if rank else schedule.eval(x),
    }
    try:
        calls[kind]()
    except PenstockError as error:
        schedule.step(x, target=y)
        return str(error)
    return ""


def late_to_a_step() -> None:
    """The last rank spends longer than the deadline in other code."""
    model, (x, y) = blocks(2), batch(8)
    schedule = Schedule1F1B(own_stage(model), 4, loss_fn=mse_loss)
    schedule.deadline_seconds = 2.0
    schedule.step(x, target=y)
    if is_last():
        time.sleep(60)
    schedule.step(x, target=y)


def replicated(wrapper: str, schedule: str) -> dict[str, Tensor]:
    """Two replicas of a pipeline of two ranks, each with half of the batch, wrapped by torch's own wrappers."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    rank, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    own = [rank] if schedule == "Schedule1F1B" else [rank, 3 - rank]
    count = 2 * len(own)
    model, (x, y) = blocks(count), batch(8)
    stages = []
    for index in own:
        module: nn.Module = model[index]
        if wrapper == "ddp":
            module = DistributedDataParallel(module, process_group=mesh.get_group("dp"))
        else:
            fully_shard(module, mesh=mesh["dp"])
        stages.append(PipelineStage(module, index, count, CPU, group=mesh.get_group("pp")))
    schedule_class = get_schedule_class(schedule)
    runs = schedule_class(stages[0] if len(own) == 1 else stages, 2, loss_fn=mse_loss)  # type: ignore[call-arg]
    half = slice(4 * replica, 4 * replica + 4)
    for _ in range(2):
        model.zero_grad()
        runs.step(x[half], target=y[half])
    found = {f"{index}.{name}": grad for index in own for name, grad in gradients(model[index]).items()}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


class Tied(nn.Module):
    """The first and the last stage share a parameter, the first value skips a stage, all read `mask`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Logits."""
        x = first = self.embedding(ids)
        for number, layer in enumerate(self.layers):
            if number == 2:
                pipe_split()
            x = torch.tanh(layer(x)) * mask
        return {"logits": self.head(x + first).transpose(1, 2)}


def tied_model() -> tuple[Tied, Tensor, Tensor, Tensor]:
    """The model, ids, mask, and labels of which each microbatch ignores another number."""
    torch.manual_seed(0)
    model = Tied().double()
    ids, mask = torch.randint(0, 10, (8, 5)), torch.rand(8, 5, 1, dtype=torch.float64)
    labels = torch.randint(0, 10, (8, 5))
    labels[:3, 1:] = -100
    return model, ids, mask, labels


def loss_of(output: dict[str, Tensor], labels: Tensor) -> Tensor:
    """The mean over the labels that count."""
    return cross_entropy(output["logits"], labels)


def traced(schedules: list[str]) -> list[dict[str, Tensor]]:
    """A model with a tied parameter and a skip connection; the mean of each microbatch is over other labels."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = []
    for name in schedules:
        model, ids, mask, labels = tied_model()
        spec = {"layers.1": SplitPoint.BEGINNING, "layers.2": SplitPoint.BEGINNING, "layers.3": SplitPoint.BEGINNING}
        pipe: Pipe = pipeline(model, (ids[:2],), {"mask": mask[:2]}, split_spec=None if ranks == 2 else spec)
        if ranks == 2 and name == "ScheduleZBVZeroBubble":
            pipe = pipeline(model, (ids[:2],), {"mask": mask[:2]}, spec)
        own = [rank, pipe.num_stages - 1 - rank] if pipe.num_stages > ranks else [rank]
        stages = [build_stage(pipe.get_stage_module(index), index, pipe.info(), CPU) for index in own]
        schedule_class = getattr(importlib.import_module("penstock.pipelining"), name)
        schedule = schedule_class(stages if len(own) > 1 else stages[0], 4, loss_fn=loss_of)
        for _ in range(2):
            args, kwargs = ((ids,), {"mask": mask}) if rank == 0 else ((), {})
            target = labels if pipe.num_stages - 1 in own else None
            schedule.step(*args, target=target, return_outputs=target is not None, **kwargs)
        found.append({key: each for stage in stages for key, each in gradients(stage.submod).items()})
    return found


def traced_script(library: str) -> tuple[dict[str, Tensor], Any]:
    """A script with the tracer of torch or of penstock."""
    pipelining = importlib.import_module(library)
    model, (x, y), rank = blocks(4), batch(8), dist.get_rank()
    split_spec = {"2": pipelining.SplitPoint.BEGINNING}
    pipe = pipelining.pipeline(module=model, mb_args=(x[:2],), split_spec=split_spec)
    assert pipe.num_stages == 2
    stage = pipe.build_stage(rank, CPU)
    schedule = pipelining.ScheduleGPipe(stage, 4, loss_fn=nn.MSELoss())
    output = schedule.step(x) if rank == 0 else schedule.step(target=y)
    return gradients(stage.submod), None if output is None else output.detach()


def of_other_shapes() -> str:
    """Microbatches that the recorded model was not recorded for."""
    model, rank = blocks(2), dist.get_rank()
    x, y = batch(6)
    pipe = pipeline(model, (x[:2],), split_spec={"1": SplitPoint.BEGINNING})
    schedule = ScheduleGPipe(pipe.build_stage(rank, CPU), 4, loss_fn=mse_loss)
    try:
        schedule.step(x, target=y)
    except PenstockError as error:
        return str(error)
    return ""
