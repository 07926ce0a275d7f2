"""What an AutoPipeline is told is checked here, once, before anything is built from it."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import PlanError
from penstock.ir import as_int
from penstock.schedules import find

_DEFAULT_SCHEDULE, _DEFAULT_REPLICAS = "1f1b", ("dp",)
_ROUNDINGS = (None, "up", "down")
_MESH_HINT = 'init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))'


def check_meshes(config: Any) -> None:
    """Refuse what is no mesh, names of axes that the meshes lack, and axes that a pipeline does not know."""
    mesh = config.world_mesh
    if not isinstance(mesh, DeviceMesh) or not mesh.mesh_dim_names:
        given = type(mesh).__name__ if not isinstance(mesh, DeviceMesh) else "a mesh without names"
        raise PlanError("world_mesh is a DeviceMesh whose axes have names", given=given, hint=_MESH_HINT)
    if config.moe_mesh is not None and not isinstance(config.moe_mesh, DeviceMesh):
        raise PlanError("moe_mesh is a DeviceMesh", given=type(config.moe_mesh).__name__)
    _check_names("dp_axis_names", config.dp_axis_names)
    replicas = () if tuple(config.dp_axis_names) == _DEFAULT_REPLICAS else tuple(config.dp_axis_names)
    _check_axes(mesh, "world_mesh", pp_axis_name=(config.pp_axis_name,), dp_axis_names=replicas)
    _check_whole_axes(config, mesh)
    _check_experts(config)


def _check_names(field: str, names: Any) -> None:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise PlanError(f"{field} is a tuple of names", given=repr(names), hint=f'{field}=("dp",)')


def _check_axes(mesh: DeviceMesh, where: str, **fields: tuple[Any, ...]) -> None:
    axes = mesh.mesh_dim_names or ()
    for field, names in fields.items():
        for name in names:
            if name not in axes:
                raise PlanError(f"{field} names no axis of {where}", name=repr(name), axes=axes)


def _check_whole_axes(config: Any, mesh: DeviceMesh) -> None:
    """Processes that are neither ranks nor replicas would compute the same or, if stages are divided, wrong numbers."""
    for field in ("tp_axis_name", "cp_axis_name"):
        name = getattr(config, field)
        if name is not None:
            _check_axes(mesh, "world_mesh", **{field: (name,)})
    if config.pp_axis_name in config.dp_axis_names:
        raise PlanError("one axis for the pipeline and for its replicas", name=repr(config.pp_axis_name))
    used = {config.pp_axis_name, *config.dp_axis_names}
    for name, size in zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=True):
        if name not in used and size > 1:
            raise PlanError(
                "an axis of world_mesh is neither that of the pipeline nor one of replicas",
                axis=repr(name),
                size=size,
                hint=f"add it to dp_axis_names, or leave it at size 1: stages are not divided along {name!r}",
            )


def _check_experts(config: Any) -> None:
    shards = config.ep_shard_axis_names
    if shards is not None:
        _check_names("ep_shard_axis_names", shards)
    names = {"ep_axis_name": config.ep_axis_name, "ep_shard_axis_names": shards}
    given = {field: value for field, value in names.items() if value is not None}
    if given and config.moe_mesh is None:
        raise PlanError("axes of experts need a mesh of theirs", hint="moe_mesh=...", **given)
    for field, value in given.items():
        _check_axes(config.moe_mesh, "moe_mesh", **{field: (value,) if isinstance(value, str) else tuple(value)})


def check_batches(config: Any) -> None:
    """Refuse sizes that are none, and batches that microbatches do not divide."""
    for field in ("pp_microbatch_size", "pp_batch_size", "layers_per_stage"):
        value = getattr(config, field)
        if (as_int(value) or 0) < 1 and not (field == "layers_per_stage" and value is None):
            raise PlanError(f"{field} is a whole number, 1 or more", given=repr(value))
    if config.pp_batch_size % config.pp_microbatch_size:
        raise PlanError(
            "a batch is not a whole number of microbatches",
            pp_batch_size=config.pp_batch_size,
            pp_microbatch_size=config.pp_microbatch_size,
        )


def check_choices(config: Any) -> None:
    """Refuse choices that are none, and a schedule given twice or not at all."""
    name, csv = config.pp_schedule, config.pp_schedule_csv
    if name is None and csv is None:
        raise PlanError("no schedule is given", hint='pp_schedule="1f1b", or pp_schedule_csv="orders.csv"')
    if csv is not None and name not in (None, _DEFAULT_SCHEDULE):
        raise PlanError("a schedule is given by its name and by a CSV", pp_schedule=name, hint="pp_schedule=None")
    if csv is None:
        find(name)
    rounding = config.round_virtual_stages_to_pp_multiple
    if rounding not in _ROUNDINGS:
        field = "round_virtual_stages_to_pp_multiple"
        raise PlanError(f"unknown {field}", given=repr(rounding), hint='None, "up" or "down"')
    for field in ("patch_inner_model", "patch_causal_lm_model", "scale_grads_in_schedule"):
        if not isinstance(getattr(config, field), bool):
            raise PlanError(f"{field} is True or False", given=repr(getattr(config, field)))
    _check_numbers(config.device, config.dtype)


def _check_numbers(device: Any, dtype: Any) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise PlanError("dtype is a floating-point type of torch", given=repr(dtype), hint="torch.bfloat16")
    try:
        found = None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise PlanError("device is a device of torch", given=repr(device), reason=reason) from None
    if found is not None and found.type == "meta":
        raise PlanError("nothing can be trained on the meta device", hint="a device with memory")


def check_build(config: Any, model: object, parallelize_fn: object) -> None:
    """Refuse what is no model, and settings that only a missing `parallelize_fn` would look at."""
    if not isinstance(model, nn.Module):
        raise PlanError("AutoPipeline builds from a torch.nn.Module", given=type(model).__name__)
    if parallelize_fn is not None:
        return
    for field in ("moe_mesh", "tp_axis_name", "cp_axis_name", "ep_axis_name", "ep_shard_axis_names"):
        if getattr(config, field) is not None:
            hint = f"build(model, parallelize_fn=...), or leave out {field}"
            raise PlanError(f"{field} is for parallelize_fn, and there is none", hint=hint)
