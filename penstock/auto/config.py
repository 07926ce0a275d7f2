"""AutoPipelineConfig: everything that an AutoPipeline is told about meshes, stages, schedule and batches."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from penstock.auto.mistakes import check_batches, check_choices, check_meshes


@dataclass(frozen=True)
class Axes:
    """Which processes work together, and what the axes of their meshes are called."""

    world_mesh: DeviceMesh
    """all processes; needs the axis of the pipeline, and may have axes of replicas"""
    moe_mesh: DeviceMesh | None = None
    """another mesh of the same processes, for `parallelize_fn`"""
    pp_axis_name: str = "pp"
    """the axis of `world_mesh` along which the stages lie"""
    dp_axis_names: tuple[str, ...] = ("dp",)
    """the axes of `world_mesh` along which replicas lie; they average their gradients"""
    cp_axis_name: str | None = None
    """an axis for `parallelize_fn`; of size 1, because sequences are not divided among processes"""
    tp_axis_name: str | None = None
    """an axis for `parallelize_fn`; of size 1, because tensors are not divided among processes"""
    ep_axis_name: str | None = None
    """an axis of `moe_mesh` for `parallelize_fn`"""
    ep_shard_axis_names: tuple[str, ...] | None = None
    """axes of `moe_mesh` for `parallelize_fn`"""


@dataclass(frozen=True)
class Staging(Axes):
    """How the model is cut, and in which order the pieces of a batch go through it."""

    pp_schedule: str | None = "1f1b"
    """the name of a schedule; case and punctuation do not matter"""
    pp_schedule_csv: str | Path | None = None
    """an order of actions in a CSV file, in place of a name"""
    pp_microbatch_size: int = 1
    """samples of a microbatch"""
    pp_batch_size: int = 1
    """samples of a batch of one replica, a multiple of those of a microbatch"""
    layers_per_stage: int | None = None
    """layers of a stage, from which the number of stages follows; None: as many stages as the schedule wants"""
    round_virtual_stages_to_pp_multiple: str | None = None
    """"up" or "down": how a number of stages that the ranks do not divide is rounded; None: it is refused"""
    module_fqns_per_model_part: Any = None
    """the names of the modules of every stage, in place of `layers_per_stage`"""


@dataclass(frozen=True)
class AutoPipelineConfig(Staging):
    """The configuration of an AutoPipeline; what contradicts itself is refused when it is made."""

    patch_inner_model: bool = True
    """whether keys and values are never cached; else the model does as its own configuration says"""
    patch_causal_lm_model: bool = True
    """whether the loss function is given the logits of what a model returns; else all that it returns"""
    device: torch.device | str | int | None = None
    """where the model is moved to before it is cut; None: it stays where it is"""
    dtype: torch.dtype | None = None
    """the type that the numbers of the model get before it is cut; None: they keep theirs"""
    scale_grads_in_schedule: bool = False
    """whether a step adds the mean over its microbatches to the gradients; else the sum, for the caller to divide"""

    def __post_init__(self) -> None:
        check_meshes(self)
        check_batches(self)
        check_choices(self)

    @property
    def num_microbatches(self) -> int:
        """Into how many microbatches a batch is cut."""
        return self.pp_batch_size // self.pp_microbatch_size

    @property
    def num_ranks(self) -> int:
        """How many ranks a pipeline has."""
        return int(self.world_mesh[self.pp_axis_name].size())

    @property
    def own_dp_axis_names(self) -> tuple[str, ...]:
        """The axes of replicas that the mesh has."""
        return tuple(name for name in self.dp_axis_names if name in (self.world_mesh.mesh_dim_names or ()))
