"""Checks of the arguments of `Pipeline`, most of which `plan` and `check` take too, and their comparison over ranks."""

import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import PenstockError, PlanError, RunError
from penstock.ir import SPLIT_HINT, Plan, choices_text, from_json, is_split_rule, to_json
from penstock.loss import REDUCTIONS
from penstock.planner import check_stream
from penstock.runtime import INPUTS, TENSOR, Agreement, GradScaler, ProcessGroups, RankSync, RunOptions

LossFn = Callable[[Any, Any], Tensor]
_DIGITS = 12  # of a digest, so that a float holds it exactly


def check_model_and_plan(model: object, plan: object) -> None:
    """Refuse arguments of other types, such as a path in place of a plan."""
    if not isinstance(model, nn.Module):
        raise PlanError("model must be a torch.nn.Module", got=shown(model), hint="Pipeline(model, plan)")
    if not isinstance(plan, Plan):
        raise PlanError(
            "plan must be a Plan",
            got=shown(plan),
            hint="penstock.plan(model, args, ranks=..., microbatches=...), or penstock.Plan.load(path)",
        )


def check_batch(args: object, kwargs: object, error: type[PenstockError], hint: str = "(x,)") -> None:
    """Raise `error` if the arguments of a batch are not a sequence and a mapping, such as a tensor in place of both."""
    if not isinstance(args, list | tuple):
        raise error("args must be a tuple of the model's arguments", got=type(args).__name__, hint=hint)
    if kwargs is not None and not isinstance(kwargs, Mapping):
        got = type(kwargs).__name__
        raise error("kwargs must be a dict of the model's arguments", got=got, hint='{"mask": mask}')


def check_loss_fn(model: nn.Module, loss_fn: object) -> None:
    """Refuse a loss_fn that is not a function, or whose target the model's forward takes as well."""
    if loss_fn is None:
        return
    if isinstance(loss_fn, type):
        hint = f"an instance: loss_fn={loss_fn.__name__}()"
        raise RunError("loss_fn must be a function, got a class", got=loss_fn.__name__, hint=hint)
    if not callable(loss_fn):
        hint = "torch.nn.functional.mse_loss, or any function of output and target"
        raise RunError("loss_fn must be a function", got=shown(loss_fn), hint=hint)
    if "target" in inspect.signature(model.forward).parameters:
        raise RunError(
            "both a loss_fn and the model's forward take the target",
            model=type(model).__name__,
            hint="leave out loss_fn if the model returns its loss, or rename the parameter of its forward",
        )


def check_execution(mesh: object, local: object, parallelize_fn: object) -> None:
    if not isinstance(local, bool):
        raise RunError("local must be True or False", got=shown(local))
    if mesh is not None and local:
        raise RunError("mesh must be None with local=True", got=shown(mesh), hint="leave out mesh or local")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        hint = 'torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))'
        raise RunError("mesh must be a DeviceMesh", got=shown(mesh), hint=hint)
    has_tensor_axis = mesh is not None and TENSOR in (mesh.mesh_dim_names or ())
    if parallelize_fn is None and has_tensor_axis and mesh[TENSOR].size() > 1:
        hint = "a parallelize_fn that calls parallelize_module(stage, mesh['tp'], ...), or an axis 'dp' of replicas"
        raise RunError("an axis 'tp' needs a parallelize_fn, which splits the stages along it", hint=hint)
    if parallelize_fn is not None and (not callable(parallelize_fn) or isinstance(parallelize_fn, nn.Module)):
        hint = "a function of a stage, or of a stage and the mesh"
        raise RunError("parallelize_fn must be a function", got=shown(parallelize_fn), hint=hint)


def check_choices(reduction: object, inputs: object, scaler: object, options: object) -> None:
    _check_choice("reduction", reduction, (*REDUCTIONS, None))
    _check_choice("inputs", inputs, INPUTS)
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise RunError("scaler must be a GradScaler", got=shown(scaler), hint="penstock.GradScaler()")
    if not isinstance(options, RunOptions):
        raise RunError("options must be RunOptions", got=shown(options), hint="penstock.RunOptions(seed=1)")


def check_split(split: object, model: nn.Module) -> None:
    """Refuse a split that names no argument of the model or gives no rule."""
    if split is None:
        return
    if not isinstance(split, Mapping):
        raise RunError("split must be a dict from argument names to rules", got=shown(split), hint=SPLIT_HINT)
    parameters = inspect.signature(model.forward).parameters
    takes_any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for name, rule in split.items():
        if not isinstance(name, str):
            raise RunError("split must name arguments by strings", got=repr(name), hint=SPLIT_HINT)
        if not is_split_rule(rule):
            raise RunError("a value of split must be a rule", name=repr(name), got=repr(rule), hint=SPLIT_HINT)
        if not takes_any_name and name.split(".")[0] not in (*parameters, "target"):
            known = ", ".join((*parameters, "target"))
            raise RunError("split must name arguments of the model", name=repr(name), hint=f"one of {known}")


def _check_choice(name: str, given: object, choices: tuple[str | None, ...]) -> None:
    if not (given is None or isinstance(given, str)) or given not in choices:
        raise RunError(f"{name} must be {choices_text(choices)}", got=shown(given), hint=f'{name}="{choices[0]}"')


def check_staleness(
    staleness: object,
    optimizer: object,
    plan: Plan,
    scaler: object,
    inputs: str,
    parallelize_fn: object,
    options: RunOptions,
) -> None:
    """Refuse what an asynchronous pipeline does not combine with."""
    example = "optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)"
    if staleness is None:
        if optimizer is not None:
            hint = 'staleness="stash", or optimizer.step() after pipe.step()'
            raise RunError("only an asynchronous pipeline takes an optimizer", hint=hint)
        return
    if not isinstance(staleness, str):
        raise RunError(
            "staleness must be one of the three modes", got=shown(staleness), hint='"stash", "2bw" or "predict"'
        )
    check_stream(plan, staleness)
    if optimizer is None:
        raise RunError("staleness needs an optimizer: weights are updated inside step", hint=example)
    refused = {
        "a scaler, which needs the gradients of all stages before an update": scaler is not None,
        'inputs="first"': inputs != "all",
        "parallelize_fn": parallelize_fn is not None,
        'nonfinite="skip": other stages may have applied the batch already': options.nonfinite == "skip",
    }
    for name, is_given in refused.items():
        if is_given:
            raise RunError(f"staleness does not combine with {name}", staleness=staleness, hint="leave out one of them")


def shown(value: object) -> str:
    """A value in one short line, with its type."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def agree_on_plan(
    model: nn.Module,
    plan: Plan,
    groups: ProcessGroups,
    sync: RankSync,
    loss_fn: object,
    options: RunOptions,
    **choices: Any,
) -> Plan:
    """Compare the arguments of all ranks, and return the plan that all of them follow.

    Ranks that searched for a plan with the same options may have different plans, because their measurements, or the
    lengths of their example batches, differ: then all ranks follow that of the first rank. `choices` are the options of
    the Pipeline that must be equal.
    """
    graph, orders, stages = plan.graph, plan.orders, plan.partition.stages
    summary = {
        "number of microbatches": plan.num_microbatches,
        "schedule": f"{plan.choices.schedule}, orders {_digest(orders.table.codes.tobytes())}",
        "placement": [orders.placement[stage] for stage in range(plan.num_stages)],
        "stages": f"{len(stages)} of {list(map(len, stages))} nodes {_digest(repr(stages).encode())}",
        "recompute": list(plan.choices.recompute),
    }
    given = {
        # Plans that were searched for are compared by the options of the search, given ones by their content.
        **(dict(plan.search.asked) or summary),
        "loss_fn": "none" if loss_fn is None else "given",
        **{name: repr(value) for name, value in choices.items()},
        # Ranks may have different deadlines.
        **{name: value for name, value in asdict(options).items() if name != "deadline_seconds"},
        "version of penstock": version("penstock"),
        "version of torch": str(torch.__version__),
        "version of Python": ".".join(map(str, sys.version_info[:2])),
        # The model without the shapes of its values: ranks may have planned with batches of different lengths.
        **{
            f"parameter {name}": f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            for name, tensor in model.named_parameters(remove_duplicate=False)
        },
        "model": f"{len(graph.nodes)} nodes, {graph.model_fingerprint[:_DIGITS]}",
    }
    plan_digest = _digest(repr((summary, graph.fingerprint)).encode())
    if sync.first_sync(Agreement.of_options(given), int(plan_digest, 16)):
        return plan
    return from_json(groups.broadcast_text_to_all(to_json(plan)), Plan)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGITS]
