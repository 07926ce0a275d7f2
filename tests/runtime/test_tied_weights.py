"""Parameters that several ranks use start alike, or the pipeline is refused."""

import torch
import torch.distributed as dist
from torch import nn

import penstock
from penstock.errors import RunError
from tests.plans import quick_plan


class Tied(nn.Module):
    """An embedding whose weight is the head's."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        """Logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made_with_seeds(plan, is_alike):
    torch.manual_seed(0 if is_alike else dist.get_rank())
    try:
        penstock.Pipeline(Tied(), plan, loss_fn=nn.functional.cross_entropy)
    except RunError as error:
        return str(error)
    return ""


def test_tied_parameters_that_begin_differently_are_refused_on_every_rank():
    plan = quick_plan(Tied(), (torch.randint(0, 10, (4, 3)),), ranks=2, microbatches=2, schedule="1f1b")
    assert penstock.launch(made_with_seeds, 2, plan, True) == ["", ""]
    texts = penstock.launch(made_with_seeds, 2, plan, False)
    problem = "a parameter that several ranks use must have the same values on all of them (name: embedding.weight"
    assert all(text.startswith(problem) for text in texts)
