"""A small GPT as an nn.Sequential of blocks, for the demo and the benchmarks."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


class Sizes(NamedTuple):
    """Sizes of a GPT and of the batch that it is trained on."""

    layers: int = 8
    width: int = 256
    heads: int = 4
    vocabulary: int = 512
    length: int = 128
    samples: int = 32
    microbatches: int = 16

    @property
    def tokens(self) -> int:
        """Tokens of a batch."""
        return self.samples * self.length


class Embedding(nn.Module):
    """Token and position embeddings."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Parameter(torch.zeros(sizes.length, sizes.width))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions


class Block(nn.Module):
    """A pre-norm transformer block: causal self-attention and an MLP."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.qkv, self.proj = nn.Linear(sizes.width, 3 * sizes.width), nn.Linear(sizes.width, sizes.width)
        self.up, self.down = nn.Linear(sizes.width, 4 * sizes.width), nn.Linear(4 * sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(samples, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(samples, length, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Head(nn.Module):
    """The final norm and the projection to logits."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


def gpt(sizes: Sizes) -> nn.Sequential:
    """The embedding, the blocks and the head."""
    return nn.Sequential(Embedding(sizes), *(Block(sizes) for _ in range(sizes.layers)), Head(sizes))


def cut(sizes: Sizes, num_stages: int) -> list[list[str]]:
    """Module names of stages with equally many blocks; the embedding is on the first, the head on the last."""
    each = sizes.layers // num_stages
    stages = [[str(1 + stage * each + block) for block in range(each)] for stage in range(num_stages)]
    return [["0", *stages[0]], *stages[1:-1], [*stages[-1], str(sizes.layers + 1)]]


def batch(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Random tokens, and the token after each of them."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, sizes.vocabulary, (sizes.samples, sizes.length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss(logits: Tensor, target: Tensor) -> Tensor:
    """The mean cross-entropy over all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())
