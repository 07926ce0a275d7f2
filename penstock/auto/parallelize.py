"""What a user's function that shards or wraps stages is called with, and the call."""

from typing import Any, Protocol

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.auto.config import AutoPipelineConfig
from penstock.errors import PlanError


class ParallelizeFnProtocol(Protocol):
    """Changes one stage in place, for example with `fully_shard`; it may name the axes that it uses one by one.

    `axes` are cp_axis_name, tp_axis_name, ep_axis_name and ep_shard_axis_names of the configuration.
    """

    def __call__(
        self,
        model: nn.Module,
        world_mesh: DeviceMesh,
        moe_mesh: DeviceMesh | None,
        *,
        pp_enabled: bool,
        dp_axis_names: tuple[str, ...],
        **axes: Any,
    ) -> None: ...


def parallelize(given: ParallelizeFnProtocol, config: AutoPipelineConfig, stage: nn.Module) -> None:
    """Let the user's function change a stage; one that returns another module would change nothing."""
    found: object = given(  # type: ignore[func-returns-value]
        stage,
        config.world_mesh,
        config.moe_mesh,
        pp_enabled=True,
        dp_axis_names=config.own_dp_axis_names,
        cp_axis_name=config.cp_axis_name,
        tp_axis_name=config.tp_axis_name,
        ep_axis_name=config.ep_axis_name,
        ep_shard_axis_names=config.ep_shard_axis_names,
    )
    if isinstance(found, nn.Module) and found is not stage:
        raise PlanError("parallelize_fn changes a stage in place", returned=type(found).__name__, hint="return nothing")
