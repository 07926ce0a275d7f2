"""The mesh of one pipeline and its replicas, under the names that a Pipeline knows."""

import math

from torch.distributed.device_mesh import DeviceMesh

from penstock.auto.config import AutoPipelineConfig

_PIPELINE, _REPLICAS = "pp", "dp"


def pipeline_mesh(config: AutoPipelineConfig) -> DeviceMesh:
    """The world mesh itself if its axes are called as a Pipeline calls them, else one with the same processes.

    Several axes of replicas become one. All processes must ask for it.
    """
    mesh, replicas = config.world_mesh, config.own_dp_axis_names
    names = tuple(mesh.mesh_dim_names or ())
    if config.pp_axis_name == _PIPELINE and set(names) <= {_PIPELINE, *((_REPLICAS,) if replicas else ())}:
        return mesh
    order = [names.index(name) for name in (*replicas, config.pp_axis_name)]
    rest = [place for place in range(len(names)) if place not in order]
    moved = mesh.mesh.permute(*order, *rest)
    count = math.prod(moved.shape[: len(replicas)])
    return DeviceMesh(mesh.device_type, moved.reshape(count, config.num_ranks), mesh_dim_names=(_REPLICAS, _PIPELINE))
