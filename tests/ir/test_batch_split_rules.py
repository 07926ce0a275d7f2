"""Rules by which arguments are split into microbatches."""

import numpy as np
import pytest

from penstock.ir import Ragged, Rows, is_split_rule


@pytest.mark.parametrize("rule", [0, -1, None, "samples", "items", Rows(4), Ragged("sizes")])
def test_rules_are_known(rule: object) -> None:
    assert is_split_rule(rule)


@pytest.mark.parametrize("value", ["sample", True, 1.0, (0, 1), np.array([0, 1])])
def test_other_values_are_no_rules(value: object) -> None:
    assert not is_split_rule(value)
