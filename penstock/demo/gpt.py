"""A small GPT from torch.nn, as blocks that may be cut anywhere."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


class Sizes(NamedTuple):
    """Sizes of a GPT and of the batch that it is trained on."""

    layers: int = 8
    width: int = 256
    heads: int = 4
    words: int = 512
    length: int = 128
    samples: int = 32
    microbatches: int = 16

    @property
    def tokens(self) -> int:
        """Tokens of a batch."""
        return self.samples * self.length


class Embedding(nn.Module):
    """Words and places."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.words, sizes.width)
        self.places = nn.Parameter(torch.zeros(sizes.length, sizes.width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Vectors of the tokens."""
        vectors: Tensor = self.words(tokens) + self.places
        return vectors


class Block(nn.Module):
    """Causal attention and two layers, each on what the norm before it leaves."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.before, self.between = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.mixed, self.joined = nn.Linear(sizes.width, 3 * sizes.width), nn.Linear(sizes.width, sizes.width)
        self.up, self.down = nn.Linear(sizes.width, 4 * sizes.width), nn.Linear(4 * sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        samples, length, width = x.shape
        parts = self.mixed(self.before(x)).view(samples, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind()
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.joined(seen.transpose(1, 2).reshape(samples, length, width))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class Head(nn.Module):
    """The norm and the scores of the words."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm, self.scores = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """One score per word and place."""
        scores: Tensor = self.scores(self.norm(x))
        return scores


def gpt(sizes: Sizes) -> nn.Sequential:
    """The embedding, the blocks and the head, one after the other."""
    return nn.Sequential(Embedding(sizes), *(Block(sizes) for _ in range(sizes.layers)), Head(sizes))


def cut(sizes: Sizes, num_stages: int) -> list[list[str]]:
    """As many blocks in each stage as in the others; the embedding with the first, the head with the last."""
    each = sizes.layers // num_stages
    stages = [[str(1 + stage * each + block) for block in range(each)] for stage in range(num_stages)]
    return [["0", *stages[0]], *stages[1:-1], [*stages[-1], str(sizes.layers + 1)]]


def batch(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Tokens and the tokens that follow them."""
    words = torch.randint(0, sizes.words, (sizes.samples, sizes.length + 1), generator=torch.Generator().manual_seed(0))
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def loss(scores: Tensor, wanted: Tensor) -> Tensor:
    """The mean over all tokens."""
    return functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())
