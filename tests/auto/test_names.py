"""The names of the modules of every stage."""

import pytest

from penstock import PenstockError, generate_hf_model_fqn_per_model_part
from penstock.auto.planning import layers_per_stage


def test_the_first_stages_get_one_layer_more():
    assert layers_per_stage(30, 4) == [8, 8, 7, 7]


def test_embeddings_come_first_norm_and_head_last_and_rotary_everywhere():
    assert generate_hf_model_fqn_per_model_part(num_stages=2, num_layers=3) == [
        ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.rotary_emb"],
        ["model.layers.2", "model.norm", "lm_head", "model.rotary_emb"],
    ]


def test_parts_can_be_left_out_and_the_prefix_be_another():
    bare = generate_hf_model_fqn_per_model_part(2, 2, False, False, False, fqn_prefix="")
    assert bare == [["layers.0"], ["layers.1", "norm"]]


@pytest.mark.parametrize(("stages", "layers"), [(0, 4), (5, 4), (2.5, 4), (2, "4")])
def test_a_stage_without_a_layer_is_refused(stages, layers):
    with pytest.raises(PenstockError, match="every stage needs a layer"):
        generate_hf_model_fqn_per_model_part(stages, layers)
