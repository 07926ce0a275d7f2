"""Pipelines built by AutoPipeline train on processes like the unsplit model."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import penstock
from penstock import AutoPipeline, AutoPipelineConfig, generate_hf_model_fqn_per_model_part
from tests.auto.models import SAMPLES, alone, batches, decoder, mean_loss, piped
from tests.selection import some

STEPS = 2
pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module")
def llama_losses():
    return alone(decoder(), batches(STEPS))


def built(model, shape=(2,), names=("pp",), parallelize_fn=None, **settings):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    config = AutoPipelineConfig(world_mesh=mesh, **{"pp_batch_size": SAMPLES, **settings})
    return AutoPipeline(config).build(model, loss_fn=mean_loss, parallelize_fn=parallelize_fn)


def llama_job(settings):
    return piped(built(decoder(), **settings), batches(STEPS))


def assert_all_close(found, expected):
    for losses in found:
        assert losses == pytest.approx(expected, rel=1e-12)


NAMES = (
    *("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"),
    *("zb_h1", "zb_h2", "v_half", "v_min"),
)
# Two stages per rank in a V with split backward, and one; other tests here have 1F1B and a loop.
SELECTED = ("ZBVZeroBubble", "zb_h1")


@pytest.mark.parametrize("name", some(SELECTED, NAMES))
def test_every_schedule_has_the_losses_of_the_unsplit_model(pools, name, llama_losses):
    assert_all_close(pools[2].run(llama_job, {"pp_schedule": name}), llama_losses)


def test_a_csv_without_a_name_has_the_losses_of_the_unsplit_model(pools, tmp_path, llama_losses):
    penstock.schedule("interleaved", 2, SAMPLES).to_csv(tmp_path / "orders.csv")
    settings = {"pp_schedule": None, "pp_schedule_csv": str(tmp_path / "orders.csv")}
    assert_all_close(pools[2].run(llama_job, settings), llama_losses)


def torch_calls_job():
    """The batch on the first rank, the target on the last, as with torch's schedules; and the same without `inputs`."""
    model, ((ids, labels),) = decoder(), batches(1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    config = AutoPipelineConfig(world_mesh=mesh, pp_batch_size=SAMPLES)
    losses, texts = [], []
    for inputs in ("first", "all"):
        info = AutoPipeline(config).build(model, loss_fn=mean_loss, inputs=inputs).info
        args, kwargs = ((ids,), {}) if info.has_first_stage else ((), {"target": labels})
        try:
            info.schedule.step(*args, **kwargs, losses=losses)
        except penstock.RunError as error:
            texts.append(str(error))
    return [float(loss) for loss in losses], texts


def test_the_calls_of_torchs_schedules_train_with_inputs_first_and_are_refused_without(pools):
    ((ids, labels),) = batches(1)
    model = decoder()
    rows = [slice(row, row + 1) for row in range(SAMPLES)]
    expected = [mean_loss(model(ids[row]).logits, labels[row]).item() for row in rows]
    for losses, (text,) in pools[2].run(torch_calls_job):
        assert losses == pytest.approx(expected, rel=1e-12)
        assert text.startswith("every rank must be given the batch")
        assert 'inputs="first"' in text


def family_job(kind, settings, changes):
    return piped(built(decoder(kind, **changes), (4,), **settings), batches(STEPS))


@pytest.mark.parametrize(
    ("kind", "settings", "changes"),
    [
        ("Llama", {"module_fqns_per_model_part": generate_hf_model_fqn_per_model_part(4, 4)}, {}),
        ("Qwen3", {}, {"head_dim": 4, "tie_word_embeddings": True}),
        pytest.param("Mistral", {}, {"sliding_window": 3}, marks=pytest.mark.whole),
    ],
)
def test_families_on_four_ranks_have_the_losses_of_the_unsplit_model(pools, kind, settings, changes):
    expected = alone(decoder(kind, **changes), batches(STEPS))
    assert_all_close(pools[4].run(family_job, kind, settings, changes), expected)


def shard(model, world_mesh, moe_mesh, *, pp_enabled, dp_axis_names, **axes):
    assert pp_enabled
    assert moe_mesh is None
    for layer in model.model.layers.children():
        fully_shard(layer, mesh=world_mesh[dp_axis_names])
    fully_shard(model, mesh=world_mesh[dp_axis_names])


def sharded_job(names):
    """Two replicas of two ranks, whose axes have other names, each with half of every batch."""
    axes = {"pp_axis_name": names[1], "dp_axis_names": (names[0],), "pp_batch_size": 2}
    ap = built(decoder(), (2, 2), names, shard, **axes)
    first = 2 * ap.config.world_mesh.get_local_rank(names[0])
    halves = [(ids[first : first + 2], labels[first : first + 2]) for ids, labels in batches(3)]
    return piped(ap, halves), {name: value.full_tensor() for name, value in ap.pipeline.named_parameters()}


def test_stages_sharded_over_replicas_train_like_the_unsplit_model(pools):
    model = decoder()
    expected, whole = alone(model, batches(3)), dict(model.named_parameters())
    found = pools[4].run(sharded_job, ("replica", "stage"))
    assert [(a + b) / 2 for a, b in zip(found[0][0], found[2][0], strict=True)] == pytest.approx(expected, rel=1e-12)
    for _, parameters in found:
        for name, value in parameters.items():
            torch.testing.assert_close(value, whole[name].detach(), rtol=0, atol=1e-12)


def quickstart_job(directory):
    """All that is asked of an AutoPipeline after it is built, on every rank at once."""
    ap = built(decoder(), (4,), pp_axis_name="pp", pp_schedule="1f1b", pp_microbatch_size=1, layers_per_stage=None)
    ap.log_debug_summary()
    for suffix in ("png", "svg", "html"):
        ap.visualize_current_schedule(f"{directory}/schedule.{suffix}")
    info = ap.info
    facts = (info.has_first_stage, info.has_last_stage, [stage.stage_index for stage in info.stages])
    texts = (ap.debug_summary(), ap.pretty_print_stages())
    return facts, texts, ap.get_total_param_count(), ap.list_stage_modules(), sorted(ap.parts[0].state_dict())


def test_every_rank_knows_its_own_stages_and_draws_the_same_picture(pools, tmp_path):
    model = decoder()
    facts, texts, counts, modules, keys = zip(*pools[4].run(quickstart_job, str(tmp_path)), strict=True)
    assert facts == ((True, False, [0]), (False, False, [1]), (False, False, [2]), (False, True, [3]))
    assert [f"stages here: {rank}" in summary for rank, (summary, _) in enumerate(texts)] == [True] * 4
    assert texts[3][1].startswith("stage 3 of 4 (last): ")
    assert sum(counts) == model.num_parameters()
    assert "model.embed_tokens" in modules[0][0]
    assert {"model.norm", "lm_head"} <= set(modules[3][0])
    assert sorted(key for own in keys for key in own) == sorted(model.state_dict())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["schedule.html", "schedule.png", "schedule.svg"]
