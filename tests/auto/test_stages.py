"""How many stages there are, where the cuts lie, and in which order the stages run."""

import pytest
import transformers as hf
from torch import nn

import penstock
from penstock import AutoPipelineConfig, PenstockError, generate_hf_model_fqn_per_model_part
from penstock.auto.planning import example_of, layers_of, num_stages_of, plan_of
from tests.auto.models import decoder


def planned(mesh, model, has_loss_fn=True, **settings):
    config = AutoPipelineConfig(mesh, **{"pp_batch_size": 4, **settings})
    return plan_of(config, model, example_of(config, model, (), {}, has_loss_fn, None)[0], has_loss_fn)


def layers_per_stage(plan):
    return [len({node.split(".")[2] for node in stage if ".layers." in node}) for stage in plan.partition.stages]


@pytest.mark.parametrize(
    ("layers", "each", "rounding", "stages"),
    [(32, 4, None, 8), (30, 4, None, 8), (30, 5, "up", 8), (30, 5, "down", 4), (8, None, None, 8), (8, None, "up", 8)],
)
def test_the_number_of_stages_follows_from_the_layers_of_each(wide_mesh, layers, each, rounding, stages):
    fields = {"layers_per_stage": each, "round_virtual_stages_to_pp_multiple": rounding}
    config = AutoPipelineConfig(wide_mesh, pp_schedule="interleaved1f1b", **fields)
    assert num_stages_of(config, layers, None) == stages


@pytest.mark.parametrize(("each", "rounding"), [(5, None), (16, "down")])
def test_stages_that_do_not_divide_among_the_ranks_are_refused(wide_mesh, each, rounding):
    fields = {"layers_per_stage": each, "round_virtual_stages_to_pp_multiple": rounding}
    config = AutoPipelineConfig(wide_mesh, pp_schedule="interleaved1f1b", **fields)
    with pytest.raises(PenstockError, match="must be a multiple of the ranks"):
        num_stages_of(config, 30, None)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("1f1b", (0, 1, 2, 3)),
        ("interleaved1f1b", (0, 1, 2, 3, 0, 1, 2, 3)),
        ("dualpipev", (0, 1, 2, 3, 3, 2, 1, 0)),
    ],
)
def test_stages_lie_where_the_schedule_wants_them(wide_mesh, name, ranks):
    plan = planned(wide_mesh, decoder(layers=10), pp_schedule=name)
    assert plan.schedule.placement.ranks == ranks
    assert layers_per_stage(plan) == ([3, 3, 2, 2] if len(ranks) == 4 else [2, 2, 1, 1, 1, 1, 1, 1])


def test_a_named_schedule_is_the_one_of_that_name(wide_mesh):
    plan = planned(wide_mesh, decoder(layers=8), pp_schedule="ZBVZeroBubble")
    assert plan.schedule == penstock.schedule("zbv", 4, 4)


def test_modules_are_opened_and_kept_whole_as_configured(wide_mesh):
    def names(**settings):
        return {node.name for node in planned(wide_mesh, decoder(layers=4), **settings).graph.nodes}

    assert "model.layers.0" in names()
    assert "model.layers.0.mlp.up_proj" in names(depth=4)
    assert "model.layers.0.mlp" in names(depth=4, basic_blocks=("model.layers.0.mlp",))
    with pytest.raises(PenstockError, match="depth must be 1 or more"):
        names(depth=0)


def test_named_modules_are_cut_as_automatic_ones(wide_mesh):
    model, names = decoder(layers=6), generate_hf_model_fqn_per_model_part(4, 6)
    assert planned(wide_mesh, model, module_fqns_per_model_part=names).partition.num_stages == 4
    assert layers_per_stage(planned(wide_mesh, model, module_fqns_per_model_part=names)) == [2, 2, 1, 1]


@pytest.mark.parametrize(("name", "other"), [("1f1b", "interleaved"), ("gpipe", "looped_bfs"), ("zbv", "zbv")])
def test_more_lists_of_modules_than_ranks_are_interleaved(wide_mesh, name, other):
    names = generate_hf_model_fqn_per_model_part(num_stages=8, num_layers=8)
    plan = planned(wide_mesh, decoder(layers=8), pp_schedule=name, module_fqns_per_model_part=names)
    assert plan.schedule == penstock.schedule(other, 4, 4)


def test_lists_of_modules_that_do_not_divide_among_the_ranks_are_refused(wide_mesh):
    names = generate_hf_model_fqn_per_model_part(num_stages=6, num_layers=6)
    with pytest.raises(PenstockError, match="must be a multiple of the ranks"):
        planned(wide_mesh, decoder(layers=6), module_fqns_per_model_part=names)


def test_a_schedule_of_one_stage_per_rank_refuses_more(wide_mesh):
    with pytest.raises(PenstockError, match=r"stages_per_rank must be 1 for(.|\n)*pp_schedule=.interleaved1f1b"):
        planned(wide_mesh, decoder(layers=8), pp_schedule="1f1b", layers_per_stage=1)


def test_more_stages_than_layers_are_refused(wide_mesh):
    with pytest.raises(PenstockError, match="every stage needs a layer"):
        planned(wide_mesh, decoder(layers=4), pp_schedule="zbvzerobubble")


def test_a_misspelt_module_is_refused_with_the_nearest_name(wide_mesh):
    names = generate_hf_model_fqn_per_model_part(4, 4)
    names[2][0] = "model.layer.2"
    with pytest.raises(PenstockError, match="did you mean"):
        planned(wide_mesh, decoder(), module_fqns_per_model_part=names)


def test_a_csv_for_other_sizes_is_refused(wide_mesh, tmp_path):
    penstock.schedule("1f1b", 4, 3).to_csv(tmp_path / "orders.csv")
    with pytest.raises(PenstockError, match="the CSV must have the configured"):
        planned(wide_mesh, decoder(), pp_schedule=None, pp_schedule_csv=tmp_path / "orders.csv")


def test_a_csv_that_would_deadlock_is_refused_with_the_action(wide_mesh, tmp_path):
    text = penstock.schedule("1f1b", 4, 4).to_csv().replace("3F0,3B0", "3B0,3F0")
    (tmp_path / "orders.csv").write_text(text)
    with pytest.raises(PenstockError, match="3B0"):
        planned(wide_mesh, decoder(), pp_schedule=None, pp_schedule_csv=tmp_path / "orders.csv")


def test_an_encoder_decoder_has_the_layers_of_both(wide_mesh):
    config = hf.T5Config(vocab_size=40, d_model=8, d_ff=16, num_layers=2, num_heads=2, d_kv=4, decoder_start_token_id=0)
    model = hf.T5ForConditionalGeneration(config)
    plan = planned(wide_mesh, model)
    found = layers_of(model, plan.graph)
    assert found == ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]
    assert plan.num_stages == 4


def test_a_model_of_the_user_needs_an_example(wide_mesh):
    with pytest.raises(PenstockError, match="needs an example"):
        planned(wide_mesh, nn.Sequential(nn.Linear(1, 1)))
