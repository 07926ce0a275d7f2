"""AutoPipelineConfig: meshes, stages, schedule and batch sizes of an AutoPipeline, checked when it is constructed."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from penstock.capture import Granularity
from penstock.errors import PlanError
from penstock.ir import as_int
from penstock.runtime import PIPELINE, REPLICAS, TENSOR
from penstock.schedules import find


@dataclass(frozen=True)
class AutoPipelineConfig:
    """The configuration of an AutoPipeline."""

    world_mesh: DeviceMesh
    """all processes; needs the pipeline axis, and may have axes of replicas and of tensor-parallel ranks"""
    moe_mesh: DeviceMesh | None = None
    """another mesh of the same processes, passed to `parallelize_fn`"""
    pp_axis_name: str = "pp"
    """the axis of `world_mesh` along which the stages lie"""
    dp_axis_names: tuple[str, ...] = ("dp",)
    """the axes of `world_mesh` along which replicas lie; gradients are averaged over them"""
    cp_axis_name: str | None = None
    """an axis of size 1, passed to `parallelize_fn`: sequences are not split over processes"""
    tp_axis_name: str | None = None
    """the axis of `world_mesh` along which `parallelize_fn` splits tensors; its ranks are given the same batch"""
    ep_axis_name: str | None = None
    """an axis of `moe_mesh`, passed to `parallelize_fn`, along which replicas have different experts"""
    ep_shard_axis_names: tuple[str, ...] | None = None
    """axes of `moe_mesh`, passed to `parallelize_fn`"""
    pp_schedule: str | None = "1f1b"
    """the name of a schedule; case and punctuation do not matter"""
    pp_schedule_csv: str | Path | None = None
    """the CSV file of an order, instead of a name"""
    pp_microbatch_size: int = 1
    """samples per microbatch"""
    pp_batch_size: int = 1
    """samples per batch of one replica, a multiple of the microbatch size"""
    layers_per_stage: int | None = None
    """layers per stage, which gives the number of stages; None: as many stages as the schedule needs"""
    round_virtual_stages_to_pp_multiple: str | None = None
    """"up" or "down": how to round a number of stages that the ranks do not divide; None: refuse it.

    No effect without `layers_per_stage`.
    """
    module_fqns_per_model_part: Any = None
    """the module names of every stage, instead of `layers_per_stage`"""
    patch_inner_model: bool = True
    """disable the key-value cache; if False, the model's own configuration decides"""
    patch_causal_lm_model: bool = True
    """pass the logits of the output to the loss function; if False, the whole output"""
    device: torch.device | str | int | None = None
    """the device to move the model to before it is cut; None: leave it"""
    dtype: torch.dtype | None = None
    """the dtype to convert the model to before it is cut; None: leave it"""
    scale_grads_in_schedule: bool = False
    """average gradients over microbatches; if False, sum them, and the caller divides"""
    depth: int | None = None
    """how deep modules are opened, as in `penstock.capture`; None: blocks stay whole"""
    basic_blocks: tuple[str | type, ...] = ()
    """modules that stay whole, by name or class, as in `penstock.capture`"""

    patch_stage_backward_maybe_with_nosync: bool = False
    """without effect: replicated and sharded stages reduce their gradients once, with the last microbatch, anyway"""
    visualization_font_size_offset: int = 0
    """without effect: pictures of schedules choose font sizes by the size of their cells"""

    def __post_init__(self) -> None:
        self._check_meshes()
        for field in ("pp_microbatch_size", "pp_batch_size", "layers_per_stage"):
            value = getattr(self, field)
            if (as_int(value) or 0) < 1 and not (field == "layers_per_stage" and value is None):
                raise PlanError(f"{field} must be a whole number, 1 or more", got=repr(value), hint=f"{field}=1")
        if self.pp_batch_size % self.pp_microbatch_size:
            sizes = {"pp_batch_size": self.pp_batch_size, "pp_microbatch_size": self.pp_microbatch_size}
            hint = f"pp_batch_size={-(-self.pp_batch_size // self.pp_microbatch_size) * self.pp_microbatch_size}"
            raise PlanError("the batch size must be a multiple of the microbatch size", **sizes, hint=hint)
        self._check_choices()
        Granularity(self.depth, self.basic_blocks)

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches per batch."""
        return self.pp_batch_size // self.pp_microbatch_size

    @property
    def num_ranks(self) -> int:
        """The number of pipeline ranks."""
        return int(self.world_mesh[self.pp_axis_name].size())

    @property
    def own_dp_axis_names(self) -> tuple[str, ...]:
        """The replica axes that the mesh has."""
        return tuple(name for name in self.dp_axis_names if name in (self.world_mesh.mesh_dim_names or ()))

    def pipeline_mesh(self) -> DeviceMesh:
        """The mesh with the axis names "pp", "dp" and "tp" that a Pipeline expects. Collective.

        Several replica axes become one.
        """
        mesh, replicas = self.world_mesh, self.own_dp_axis_names
        names = tuple(mesh.mesh_dim_names or ())
        tensor = () if self.tp_axis_name is None else (self.tp_axis_name,)
        expected = (*((REPLICAS,) if replicas else ()), PIPELINE, *((TENSOR,) if tensor else ()))
        if (*replicas, self.pp_axis_name, *tensor) == expected and set(names) <= set(expected):
            return mesh
        order = [names.index(name) for name in (*replicas, self.pp_axis_name, *tensor)]
        rest = [axis for axis in range(len(names)) if axis not in order]
        moved = mesh.mesh.permute(*order, *rest)
        sizes = [math.prod(moved.shape[: len(replicas)]), self.num_ranks, *(mesh[name].size() for name in tensor)]
        shared = (TENSOR,) if tensor else ()
        return DeviceMesh(mesh.device_type, moved.reshape(sizes), mesh_dim_names=(REPLICAS, PIPELINE, *shared))

    def _check_meshes(self) -> None:
        """Raise PlanError for a mesh without the named axes, or with axes that the pipeline would ignore."""
        mesh = self.world_mesh
        if not isinstance(mesh, DeviceMesh) or not mesh.mesh_dim_names:
            got = type(mesh).__name__ if not isinstance(mesh, DeviceMesh) else "a mesh without names"
            hint = 'init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))'
            raise PlanError("world_mesh must be a DeviceMesh with named axes", got=got, hint=hint)
        if self.moe_mesh is not None and not isinstance(self.moe_mesh, DeviceMesh):
            hint = 'init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "pp")), or None'
            raise PlanError("moe_mesh must be a DeviceMesh", got=type(self.moe_mesh).__name__, hint=hint)
        _check_names("dp_axis_names", self.dp_axis_names)
        if self.pp_axis_name in self.dp_axis_names:
            hint = f"dp_axis_names without {self.pp_axis_name!r}"
            raise PlanError("the pipeline axis must not be a replica axis", name=repr(self.pp_axis_name), hint=hint)
        # The default ("dp",) may be missing in the mesh: then there are no replicas.
        replicas = () if tuple(self.dp_axis_names) == ("dp",) else tuple(self.dp_axis_names)
        _check_axes(mesh, "world_mesh", "pp_axis_name", (self.pp_axis_name,))
        _check_axes(mesh, "world_mesh", "dp_axis_names", replicas)
        for field in ("tp_axis_name", "cp_axis_name"):
            if getattr(self, field) is not None:
                _check_axes(mesh, "world_mesh", field, (getattr(self, field),))
        if self.tp_axis_name in (self.pp_axis_name, *self.dp_axis_names):
            problem = "the tensor-parallel axis must be neither the pipeline axis nor a replica axis"
            raise PlanError(problem, name=repr(self.tp_axis_name))
        # Processes along any other axis would repeat the same work or, if they split a stage, compute wrong gradients.
        used = {self.pp_axis_name, *self.dp_axis_names, self.tp_axis_name}
        for name, size in zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True):
            if name == self.cp_axis_name and size > 1:
                raise PlanError(
                    "cp_axis_name must name an axis of size 1: sequences are not split over processes, because torch's "
                    "context-parallel attention has no CPU kernels to test the gradients with",
                    axis=repr(name),
                    size=size,
                    hint="tensor parallelism (tp_axis_name) with SequenceParallel also splits activations",
                )
            if name not in used and size > 1:
                raise PlanError(
                    "every axis of world_mesh above size 1 must be the pipeline axis, a replica axis or the "
                    "tensor-parallel axis",
                    axis=repr(name),
                    size=size,
                    hint=f"dp_axis_names=({name!r},) for replicas, tp_axis_name={name!r} for ranks that share tensors",
                )
        experts = {"ep_axis_name": self.ep_axis_name, "ep_shard_axis_names": self.ep_shard_axis_names}
        given = {field: value for field, value in experts.items() if value is not None}
        if self.ep_shard_axis_names is not None:
            _check_names("ep_shard_axis_names", self.ep_shard_axis_names)
        if given and self.moe_mesh is None:
            raise PlanError("expert axes need moe_mesh", hint="moe_mesh=...", **given)
        for field, value in given.items():
            _check_axes(self.moe_mesh, "moe_mesh", field, (value,) if isinstance(value, str) else tuple(value))

    def _check_choices(self) -> None:
        """Raise PlanError for other fields with wrong values, or that exclude each other."""
        name, csv = self.pp_schedule, self.pp_schedule_csv
        if name is None and csv is None:
            hint = 'pp_schedule="1f1b", or pp_schedule_csv="orders.csv"'
            raise PlanError("a schedule must be given", hint=hint)
        if csv is not None and name not in (None, "1f1b"):  # "1f1b" is the default: it may not have been given
            hint = "pp_schedule=None"
            raise PlanError("a schedule must be given by name or by CSV, not both", pp_schedule=name, hint=hint)
        if csv is None:
            find(str(name))
        rounding = self.round_virtual_stages_to_pp_multiple
        if rounding not in (None, "up", "down"):
            field = "round_virtual_stages_to_pp_multiple"
            raise PlanError(f"{field} must be None, 'up' or 'down'", got=repr(rounding), hint=f'{field}="up"')
        if self.module_fqns_per_model_part is not None and self.layers_per_stage is not None:
            problem = "stages must be given by module_fqns_per_model_part or by layers_per_stage, not both"
            raise PlanError(problem, layers_per_stage=self.layers_per_stage, hint="layers_per_stage=None")
        for field in (
            "patch_inner_model",
            "patch_causal_lm_model",
            "scale_grads_in_schedule",
            "patch_stage_backward_maybe_with_nosync",
        ):
            if not isinstance(getattr(self, field), bool):
                raise PlanError(f"{field} must be True or False", got=repr(getattr(self, field)))
        if as_int(self.visualization_font_size_offset) is None:
            problem = "visualization_font_size_offset must be a whole number"
            raise PlanError(problem, got=repr(self.visualization_font_size_offset))
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise PlanError("dtype must be a floating-point torch.dtype", got=repr(self.dtype), hint="torch.bfloat16")
        try:
            device = None if self.device is None else torch.device(self.device)
        except (RuntimeError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise PlanError("device must be a torch.device", got=repr(self.device), reason=reason) from None
        if device is not None and device.type == "meta":
            raise PlanError("device must not be meta: nothing can be trained there", hint="a device with memory")


def _check_names(field: str, names: Any) -> None:
    is_sequence = isinstance(names, list | tuple)
    if not is_sequence or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise PlanError(f"{field} must be a tuple of different names", got=repr(names), hint=f'{field}=("dp",)')


def _check_axes(mesh: DeviceMesh, where: str, field: str, names: tuple[Any, ...]) -> None:
    axes = mesh.mesh_dim_names or ()
    for name in names:
        if name not in axes:
            raise PlanError(f"{field} must name an axis of {where}", got=repr(name), hint=f"one of {', '.join(axes)}")
