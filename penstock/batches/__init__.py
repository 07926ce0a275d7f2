"""Splits batches into microbatches.

    split_batch(model.forward, args, kwargs, target, 4) --> Microbatches: arguments and target of some samples each

The files, in the order in which to read them:

    microbatches.py   Microbatch, and `split_batch`: splits the arguments of the model and the target of the loss
    cuts.py           finds the samples of a batch in its arguments, by the rules of `penstock.ir.SplitRule` or by shape
    split_search.py   finds these rules by running the model, where shapes allow several
    padding.py        the lengths of padded samples, and microbatches without the padding, for `budget_tokens`
"""

from penstock.batches.cuts import Cut, Split
from penstock.batches.microbatches import (
    Microbatch,
    Splitting,
    explain_failure,
    longest,
    microbatch_kinds,
    microbatch_sizes,
    split_batch,
    whole_batch,
    with_columns_of,
)
from penstock.batches.padding import Padding, find_padding
from penstock.batches.split_search import additive_dim, find_split
