"""Small models, each with one peculiarity."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Stack(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, blocks: int = 4, size: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(4, size)
        self.blocks = nn.ModuleList(Block(size) for _ in range(blocks))
        self.norm = nn.BatchNorm1d(size)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(size, 3)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = self.embed(x) * scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(self.norm(x)))


class Parametric(Stack):
    """Uses the parameters of modules that it never calls, in different places."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.randn(8) for _ in range(4))
        self.shift = nn.Linear(1, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.shift.weight[:, 0]
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = block(x) * scale
        return self.head(x + self.shift.bias)


class Deciding(Stack):
    """Goes another way when an activation is large: a decision between blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if x.abs().max() > 100:
            x = x / 2
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Masking(Stack):
    """Goes another way for padded batches: a decision on the inputs."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(x)
        if not bool(mask.all()):
            x = x * mask[:, None]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Counting(Stack):
    """Keeps count in Python and uses it between blocks."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Counting.calls += 1
        return self.head(self.blocks[0](self.embed(x)) * Counting.calls)


class Box:
    """An object that is no container."""

    def __init__(self, content: Tensor) -> None:
        self.content = content


class Boxing(Stack):
    """Hands a tensor from block to block inside an object."""

    def forward(self, x: Tensor) -> Tensor:
        box = Box(self.embed(x))
        return self.head(Unboxed()(box, self.blocks[0]))


class Unboxed(nn.Module):
    """Looks into the object."""

    def forward(self, box: Box, block: nn.Module) -> Tensor:
        return block(box.content)


class Leaking(nn.Module):
    """Reads, between blocks, what was made inside one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noting() for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        return x, sum(block.noted for block in self.blocks)


class Noting(Block):
    """Keeps what it computed on the way."""

    def forward(self, x: Tensor) -> Tensor:
        self.noted = self.linear(x).mean()
        return x + torch.tanh(self.linear(x))


class Wrapped(nn.Module):
    """Modules that are never called hold its blocks: lists in lists, a bare module, a Sequential that is iterated."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.lists = nn.ModuleList(nn.ModuleList([Block(), nn.Dropout(dropout)]) for _ in range(2))
        self.bare = nn.Module()
        self.bare.blocks = nn.ModuleList(Block() for _ in range(2))
        self.iterated = nn.ModuleList(nn.Sequential(Block(), nn.Dropout(dropout)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for parts in (*self.lists, self.bare.blocks, *self.iterated):
            for part in parts:
                x = part(x)
        return x
