"""Every field of the configuration acts or is refused."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from penstock import AutoPipeline, AutoPipelineConfig, PenstockError


def test_defaults_are_those_of_one_microbatch_of_one_sample_in_1f1b(wide_mesh):
    config = AutoPipelineConfig(wide_mesh)
    assert (config.pp_schedule, config.num_microbatches, config.num_ranks) == ("1f1b", 1, 4)


WRONG = [
    ({"pp_axis_name": "stages"}, "pp_axis_name must name an axis"),
    ({"dp_axis_names": ("rows",)}, "dp_axis_names must name an axis"),
    ({"dp_axis_names": "dp"}, "dp_axis_names must be a tuple"),
    ({"dp_axis_names": ("dp", "pp")}, "must not be a replica axis"),
    ({"dp_axis_names": ("dp", "dp")}, "dp_axis_names must be a tuple of different names"),
    ({"dp_axis_names": None}, "dp_axis_names must be a tuple of different names"),
    ({"dp_axis_names": ()}, "must be the pipeline axis, a replica axis or the tensor-parallel axis"),
    ({"tp_axis_name": "dp"}, "must be neither the pipeline axis nor a replica axis"),
    ({"dp_axis_names": (), "cp_axis_name": "dp"}, "torch's context-parallel attention has no CPU kernels"),
    ({"tp_axis_name": "tp"}, "tp_axis_name must name an axis"),
    ({"cp_axis_name": "cp"}, "cp_axis_name must name an axis"),
    ({"ep_axis_name": "ep"}, "expert axes need moe_mesh"),
    ({"ep_shard_axis_names": ("ep",)}, "expert axes need moe_mesh"),
    ({"moe_mesh": "mesh"}, "moe_mesh must be a DeviceMesh"),
    ({"pp_schedule": None}, "a schedule must be given"),
    ({"pp_schedule": "1f2b"}, "unknown schedule"),
    ({"pp_schedule": "gpipe", "pp_schedule_csv": "orders.csv"}, "by name or by CSV, not both"),
    ({"pp_microbatch_size": 0}, "pp_microbatch_size must be a whole number"),
    ({"pp_batch_size": 2.5}, "pp_batch_size must be a whole number"),
    ({"pp_batch_size": 3, "pp_microbatch_size": 2}, "multiple of the microbatch size"),
    ({"layers_per_stage": 0}, "layers_per_stage must be a whole number"),
    ({"round_virtual_stages_to_pp_multiple": "nearest"}, "round_virtual_stages_to_pp_multiple must be"),
    ({"module_fqns_per_model_part": [["a"], ["b"]], "layers_per_stage": 2}, "or by layers_per_stage, not both"),
    ({"patch_stage_backward_maybe_with_nosync": 1}, "patch_stage_backward_maybe_with_nosync must be True or False"),
    ({"visualization_font_size_offset": "big"}, "visualization_font_size_offset must be a whole number"),
    ({"patch_inner_model": 1}, "patch_inner_model must be True or False"),
    ({"patch_causal_lm_model": None}, "patch_causal_lm_model must be True or False"),
    ({"scale_grads_in_schedule": "yes"}, "scale_grads_in_schedule must be True or False"),
    ({"dtype": torch.int64}, "floating-point torch.dtype"),
    ({"device": "meta"}, "must not be meta"),
    ({"device": "abacus"}, "device must be a torch.device"),
]


@pytest.mark.parametrize(("fields", "words"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_invalid_settings_are_refused(wide_mesh, fields, words):
    with pytest.raises(PenstockError, match=words):
        AutoPipelineConfig(world_mesh=wide_mesh, **fields)


@pytest.mark.parametrize("mesh", [None, "pp"])
def test_a_mesh_is_needed(mesh):
    with pytest.raises(PenstockError, match="world_mesh must be a DeviceMesh"):
        AutoPipelineConfig(world_mesh=mesh)


def test_axes_of_experts_must_be_those_of_their_mesh(wide_mesh):
    with pytest.raises(PenstockError, match="ep_axis_name must name an axis of moe_mesh"):
        AutoPipelineConfig(wide_mesh, moe_mesh=wide_mesh, ep_axis_name="ep")


@pytest.mark.parametrize("field", ["moe_mesh", "ep_axis_name"])
def test_what_only_parallelize_fn_would_look_at_is_refused_without_one(wide_mesh, field):
    fields = {"moe_mesh": wide_mesh, **({"ep_axis_name": "dp"} if field == "ep_axis_name" else {})}
    with pytest.raises(PenstockError, match="needs a parallelize_fn"):
        AutoPipeline(AutoPipelineConfig(wide_mesh, **fields)).build(torch.nn.Linear(1, 1))


def test_a_model_without_weights_is_not_moved(wide_mesh):
    with pytest.raises(PenstockError, match="a model on the meta device cannot be moved"):
        AutoPipeline(AutoPipelineConfig(wide_mesh, device="cpu")).build(torch.nn.Linear(1, 1, device="meta"))


def test_a_configuration_and_a_model_are_required(wide_mesh):
    with pytest.raises(PenstockError, match="must be an AutoPipelineConfig"):
        AutoPipeline({"world_mesh": wide_mesh})
    with pytest.raises(PenstockError, match=r"torch\.nn\.Module"):
        AutoPipeline(AutoPipelineConfig(wide_mesh)).build("model")


def test_a_mesh_with_the_usual_names_is_taken_as_it_is(wide_mesh):
    assert AutoPipelineConfig(wide_mesh).pipeline_mesh() is wide_mesh


def test_axes_of_other_names_become_those_of_a_pipeline_and_its_replicas(wide_mesh):
    names = ("stage", "outer", "inner", "tensor")
    mesh = init_device_mesh("cpu", (2, 1, 2, 2), mesh_dim_names=names)
    config = AutoPipelineConfig(mesh, pp_axis_name="stage", dp_axis_names=("outer", "inner"), tp_axis_name="tensor")
    found = config.pipeline_mesh()
    assert found.mesh_dim_names == ("dp", "pp", "tp")
    assert found.mesh.tolist() == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
