"""Identity: the same wherever the same is measured, and another for whatever could take another time."""

import os
import subprocess
import sys
from dataclasses import make_dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from penstock.ir import NodeCost
from penstock.measure import profile_key
from tests.measure.subjects import WIDTH, Block, batch, chain, measured

PROGRAM = """
from penstock.measure import profile_key
from tests.measure.subjects import chain, measured
print(profile_key(measured(chain())))
"""


def test_it_is_the_same_in_another_process():
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == profile_key(measured(chain()))


def test_numbers_do_not_matter():
    assert profile_key(measured(chain())) == profile_key(measured(chain(*(Block(number) for number in range(3)))))


@pytest.mark.parametrize(
    "other",
    [chain(Block(slope=0.2), Block(1), Block(2)), chain().eval(), chain().requires_grad_(False), chain(Block(1))],
    ids=["setting", "mode", "frozen", "number"],
)
def test_another_form_is_another_identity(other: nn.Module):
    assert profile_key(measured(chain())) != profile_key(measured(other))


def test_another_size_of_the_batch_is_another_identity():
    assert profile_key(measured(chain())) != profile_key(measured(chain(), torch.ones(9, WIDTH)))


def test_other_threads_are_another_identity():
    before, threads = profile_key(measured(chain())), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert profile_key(measured(chain())) != before
    finally:
        torch.set_num_threads(threads)


def test_a_new_field_of_costs_is_another_identity(monkeypatch: pytest.MonkeyPatch):
    before = profile_key(measured(chain()))
    extended = make_dataclass("NodeCost", [("collective", float, 0.0)], bases=(NodeCost,), frozen=True)
    # By its name in sys.modules: the package has a function of the name of the file.
    monkeypatch.setattr(sys.modules["penstock.measure.identity"], "NodeCost", extended)
    assert profile_key(measured(chain())) != before


def test_other_code_is_another_identity():
    bodies = (lambda self, x: x + 1, lambda self, x: x + 2, lambda self, x: x + 1)
    kinds = [type("Own", (nn.Module,), {"forward": body}) for body in bodies]
    one, other, same = (profile_key(measured(chain(kind()), batch())) for kind in kinds)
    assert one == same != other
