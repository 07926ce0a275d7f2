"""Small models in float64 with fixed weights, each with one trait that tests need."""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 4
CLASSES = 5
VOCABULARY = 11

Builder = Callable[[], nn.Module]


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed numbers, the same in every process."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(*shape: int, seed: int = 0, below: int = VOCABULARY) -> Tensor:
    """Random integers, the same in every process."""
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def seeded(model: nn.Module, seed: int = 1) -> nn.Module:
    """The model in float64 with parameters that depend on the seed only."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / WIDTH**0.5)
    return model


def restored(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model repeatedly, each time with its initial state and without gradients."""
    state = copy.deepcopy(model.state_dict())
    while True:
        model.load_state_dict(state)
        model.zero_grad()
        yield model


class Block(nn.Module):
    """A layer that counts the samples it has seen."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """One layer; a cube keeps small differences visible."""
        if self.training:
            self.seen += x.shape[0]
        return x + torch.tanh(self.linear(x)) ** 3


def chain(blocks: int) -> nn.Module:
    """Blocks in a row."""
    return seeded(nn.Sequential(*(Block() for _ in range(blocks))))


def classifier(blocks: int = 4) -> nn.Module:
    """Blocks and scores for some classes, one row per sample."""
    return seeded(nn.Sequential(*(Block() for _ in range(blocks)), nn.Linear(WIDTH, CLASSES)))


class Tied(nn.Module):
    """A language model whose first and last layer are one table, and which uses another weight twice by functions."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.mix = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Scores for the next token."""
        x = functional.linear(self.embed(ids), self.mix)
        for block in self.blocks:
            x = block(x)
        return self.head(functional.linear(x, self.mix))


def tied(blocks: int = 4) -> nn.Module:
    """One table at both ends, and one matrix used twice."""
    return seeded(Tied(blocks))


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean over all labels that are not ignored."""
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())
