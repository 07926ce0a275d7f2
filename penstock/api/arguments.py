"""What a Pipeline is given is checked here, once, before anything is built from it."""

import inspect
from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import PlanError, RunError
from penstock.ir import Plan
from penstock.runtime import INPUTS, REDUCTIONS, GradScaler, RunOptions


def check_model_and_plan(model: object, plan: object) -> None:
    """Refuse what is no model or no plan."""
    if not isinstance(model, nn.Module):
        raise PlanError("a Pipeline needs a torch.nn.Module", given=_shown(model), hint="Pipeline(model, plan)")
    if not isinstance(plan, Plan):
        raise PlanError(
            "a Pipeline needs a Plan",
            given=_shown(plan),
            hint="penstock.plan(model, args, ranks=..., microbatches=...), or penstock.Plan.load(path)",
        )


def check_loss_fn(model: nn.Module, loss_fn: object) -> None:
    """Refuse what is no function of output and target, and one beside a forward that wants the target itself."""
    if loss_fn is None:
        return
    if isinstance(loss_fn, type):
        hint = f"an instance: loss_fn={loss_fn.__name__}()"
        raise RunError("loss_fn is a class, not a function", given=loss_fn.__name__, hint=hint)
    if not callable(loss_fn):
        hint = "torch.nn.functional.mse_loss, or any function of output and target"
        raise RunError("loss_fn is a function", given=_shown(loss_fn), hint=hint)
    if "target" in inspect.signature(model.forward).parameters:
        raise RunError(
            "both a loss_fn and the model's forward take the target",
            model=type(model).__name__,
            hint="leave out loss_fn if the model returns its loss, or rename the parameter of its forward",
        )


def check_places(mesh: object, local: object, parallelize_fn: object) -> None:
    """Refuse what is no mesh, and one for a pipeline inside this process."""
    if not isinstance(local, bool):
        raise RunError("local is True or False", given=_shown(local))
    if mesh is not None and local:
        raise RunError("a local pipeline has no mesh", hint="leave out mesh or local")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        hint = 'torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))'
        raise RunError("mesh is a DeviceMesh", given=_shown(mesh), hint=hint)
    if parallelize_fn is not None and (not callable(parallelize_fn) or isinstance(parallelize_fn, nn.Module)):
        hint = "a function of a stage, or of a stage and the mesh"
        raise RunError("parallelize_fn is a function", given=_shown(parallelize_fn), hint=hint)


def check_choices(reduction: object, inputs: object, scaler: object, options: object) -> None:
    """Refuse choices that are none."""
    _check_choice("reduction", reduction, (None, *REDUCTIONS))
    _check_choice("inputs", inputs, INPUTS)
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise RunError("scaler is a GradScaler", given=_shown(scaler), hint="penstock.GradScaler()")
    if not isinstance(options, RunOptions):
        raise RunError("options are RunOptions", given=_shown(options), hint="penstock.RunOptions(seed=1)")


def check_split(split: object, model: nn.Module) -> None:
    """Refuse what names no argument of the model, or gives no dimension."""
    if split is None:
        return
    if not isinstance(split, Mapping):
        hint = '{"mask": 1}, or {"table": None} for what is given whole'
        raise RunError("split has dimensions by the name of an argument", given=_shown(split), hint=hint)
    parameters = inspect.signature(model.forward).parameters
    takes_more = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    for name, dim in split.items():
        if not isinstance(name, str) or not (dim is None or type(dim) is int):
            hint = '{"mask": 1}, or {"table": None} for what is given whole'
            raise RunError("split gives a dimension or None", name=repr(name), given=repr(dim), hint=hint)
        if not takes_more and name.split(".")[0] not in (*parameters, "target"):
            known = ", ".join((*parameters, "target"))
            raise RunError("split names no argument of the model", name=repr(name), hint=f"one of {known}")


def _check_choice(name: str, given: object, choices: tuple[str | None, ...]) -> None:
    if not (given is None or isinstance(given, str)) or given not in choices:
        hint = " or ".join("None" if choice is None else f'"{choice}"' for choice in choices)
        raise RunError(f"unknown {name}", given=_shown(given), hint=hint)


def _shown(value: object) -> str:
    """A value short enough for one line, with its type."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
