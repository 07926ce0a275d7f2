"""A model given as a list of modules."""

import pytest
import torch
from torch import nn

from penstock.errors import PartitionError
from penstock.flat import flatten_model
from penstock.stages import LayerList
from tests.flat.resnet import LAYERS, resnet


def test_a_flat_resnet_is_a_list_of_modules_that_answers_like_the_resnet() -> None:
    model = resnet().eval()
    modules = flatten_model(model, LAYERS, return_list=True)
    assert len(modules) == 4 + 3 + 4 + 6 + 3 + 3
    assert modules[4] is model.layer1[0]
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    assert torch.equal(nn.Sequential(*modules)(images), model(images))


def test_without_return_list_it_is_a_sequential() -> None:
    model = resnet().eval()
    flat = flatten_model(model, LAYERS)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    assert isinstance(flat, nn.Sequential)
    assert torch.equal(flat(images), model(images))


def test_a_part_of_the_list_can_keep_the_original_names() -> None:
    model = resnet()
    part = flatten_model(model, LAYERS, return_list=True)[:6]
    assert set(LayerList(model, part).state_dict()) <= set(model.state_dict())


def test_a_name_that_is_not_there_is_refused_with_one_that_is() -> None:
    with pytest.raises(PartitionError, match="did you mean 'layer1'"):
        flatten_model(resnet(), ["conv1", "layr1"])
