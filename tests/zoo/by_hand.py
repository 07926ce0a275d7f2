"""By hand: models as people write them without a library: GPTs, recurrent stacks, graph networks, a feature pyramid."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.runtime import gpt as gpts
from tests.zoo.batch import VOCABULARY, WIDTH, Example, noise, ready, scrambled, tokens
from tests.zoo.scored import Scored


class ScoredGpt(gpts.Gpt):
    """A GPT whose loss is its first output."""

    def forward(self, idx: Tensor, labels: Tensor | None = None) -> Any:
        """Logits, or the loss and the logits."""
        if labels is None:
            return super().forward(idx)[0]
        # Ignored labels are -100 in the zoo, and -1 in this model.
        logits, loss = super().forward(idx, labels.clamp(min=-1))
        return loss, logits


def _gpt(**options: Any) -> Example:
    torch.manual_seed(0)
    ids, labels = (tokens(2, gpts.LENGTH, seed, gpts.VOCABULARY) for seed in (0, 1))
    return ready(scrambled(ScoredGpt(**options)), ids, labels=labels)


def gpt() -> Example:
    """Blocks in a ModuleList inside a ModuleDict, tied weights, dropout with p = 0."""
    return _gpt()


def gpt_nested() -> Example:
    """Blocks whose hidden layer is a ModuleDict called by a lambda, dropout, weights not tied."""
    return _gpt(block=gpts.NestedBlock, dropout=0.1, tied=False)


class RecurrentStack(Scored):
    """Recurrent layers one after another, each with a residual and a norm."""

    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layer(WIDTH, WIDTH, batch_first=True) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)

    def answer(self, ids: Tensor) -> tuple[Tensor, list[Any]]:
        """Logits per token, and the last state of every layer."""
        x, states = self.embed(ids), []
        for layer, norm in zip(self.layers, self.norms, strict=True):
            y, state = layer(norm(x))
            x = x + y
            states.append(state)
        return self.head(x), states


def lstm_stack() -> Example:
    """Four LSTMs with residuals, whose states are returned."""
    torch.manual_seed(0)
    return ready(RecurrentStack(nn.LSTM), tokens(length=6), labels=noise(2, 6, 5))


def gru_stack() -> Example:
    """Four GRUs with residuals, whose states are returned."""
    torch.manual_seed(0)
    return ready(RecurrentStack(nn.GRU), tokens(length=6), labels=noise(2, 6, 5))


class Cells(Scored):
    """Recurrent cells in a loop over time, from layer to layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.cells = nn.ModuleList([nn.LSTMCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH), nn.LSTMCell(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, 5)

    def answer(self, ids: Tensor) -> Tensor:
        """Logits per token; every step of a layer calls the same cell."""
        steps = list(self.embed(ids).unbind(1))
        for cell in self.cells:
            state: Any = None
            for time, x in enumerate(steps):
                state = cell(x, state)
                steps[time] = state[0] if isinstance(state, tuple) else state
        return self.head(torch.stack(steps, 1))


def recurrent_cells() -> Example:
    """LSTM and GRU cells called step by step."""
    torch.manual_seed(0)
    return ready(Cells(), tokens(length=4), labels=noise(2, 4, 5))


class Attending(Scored):
    """A GRU encoder, and a GRU cell that attends to it at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.bridge, self.query = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.cell = nn.GRUCell(3 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def answer(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits per token of the target."""
        memory, state = self.encoder(self.source(source))
        hidden = torch.tanh(self.bridge(torch.cat([state[0], state[1]], dim=-1)))
        found = []
        for step in self.target(target).unbind(1):
            weights = torch.softmax(torch.einsum("bd,btd->bt", self.query(hidden), memory), dim=-1)
            context = torch.einsum("bt,btd->bd", weights, memory)
            hidden = self.cell(torch.cat([step, context], dim=-1), hidden)
            found.append(hidden)
        return self.head(torch.stack(found, 1))


def gru_attention() -> Example:
    """A recurrent encoder-decoder with attention."""
    torch.manual_seed(0)
    return ready(Attending(), tokens(length=5), tokens(length=3, seed=1), labels=noise(2, 3, 5))


class GraphConvolution(nn.Module):
    """Sums over neighbours by a dense adjacency matrix of every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        """The mean of the neighbours, projected."""
        degree = adjacency.sum(-1, keepdim=True).clamp(min=1)
        return torch.relu(self.linear(adjacency @ x / degree)) + x


class GraphAttention(nn.Module):
    """Attention that is restricted to neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.left, self.right = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        """A weighted mean of the neighbours."""
        y = self.linear(x)
        scores = functional.leaky_relu(self.left(y) + self.right(y).transpose(1, 2), 0.2)
        return functional.elu(torch.softmax(scores.masked_fill(adjacency == 0, -1e9), dim=-1) @ y) + x


class GraphNetwork(Scored):
    """Layers over a batch of graphs with the same number of nodes, and a class per graph."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.enter = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)

    def answer(self, x: Tensor, adjacency: Tensor) -> Tensor:
        """Logits per graph."""
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x, adjacency)
        return self.head(x.mean(1))


def _graphs(layer: type[nn.Module]) -> Example:
    torch.manual_seed(0)
    edges = (noise(4, 6, 6, seed=2) > 0).float() + torch.eye(6)
    return ready(GraphNetwork(layer), noise(4, 6, 8), edges.clamp(max=1), labels=noise(4, 5, seed=1))


def graph_convolution() -> Example:
    """A graph convolution network with adjacency matrices."""
    return _graphs(GraphConvolution)


def graph_attention() -> Example:
    """A graph attention network with adjacency matrices."""
    return _graphs(GraphAttention)


class MessagePassing(nn.Module):
    """Messages along a list of edges, summed where they arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """The next state of every node."""
        sent = torch.relu(self.message(torch.cat([x[source], x[target]], dim=-1)))
        return self.update(torch.zeros_like(x).index_add(0, target, sent), x)


class EdgeListNetwork(Scored):
    """Edge lists per graph, offset to one list for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(MessagePassing() for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)

    def answer(self, x: Tensor, edges: Tensor) -> Tensor:
        """Logits per graph; edges are (graphs, 2, edges)."""
        graphs, nodes, _ = x.shape
        offsets = torch.arange(graphs, device=x.device)[:, None, None] * nodes
        source, target = (edges + offsets).transpose(0, 1).reshape(2, -1)
        x = self.enter(x).flatten(0, 1)
        for layer in self.layers:
            x = layer(x, source, target)
        return self.head(x.unflatten(0, (graphs, nodes)).amax(1))


def message_passing() -> Example:
    """A message passing network with edge lists and index_add."""
    torch.manual_seed(0)
    return ready(EdgeListNetwork(), noise(4, 6, 8), tokens(4, 2 * 9, below=6).view(4, 2, 9) - 4, labels=noise(4, 5))


def _convolve(before: int, after: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(before, after, 3, stride, 1, bias=False)
    return nn.Sequential(convolution, nn.GroupNorm(2, after), nn.ReLU(inplace=True))


class Detector(nn.Module):
    """A backbone, a feature pyramid and heads that are shared by its levels."""

    def __init__(self) -> None:
        super().__init__()
        widths = [8, 12, 16]
        self.stem = _convolve(3, 8, 2)
        self.body = nn.ModuleDict(
            {f"layer{i}": _convolve(widths[max(i - 1, 0)], width, 2) for i, width in enumerate(widths)}
        )
        self.lateral = nn.ModuleList(nn.Conv2d(width, 8, 1) for width in widths)
        self.smooth = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in widths)
        self.classes = nn.Sequential(_convolve(8, 8), nn.Conv2d(8, 5, 3, padding=1))
        self.boxes = nn.Sequential(_convolve(8, 8), nn.Conv2d(8, 4, 3, padding=1))

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Any:
        """Logits and boxes of all positions; with labels, (samples, positions, 9), the loss first."""
        x, features = self.stem(images), {}
        for name, layer in self.body.items():
            x = features[name] = layer(x)
        levels = [lateral(feature) for lateral, feature in zip(self.lateral, features.values(), strict=True)]
        for upper in (1, 0):
            size = levels[upper].shape[-2:]
            levels[upper] = levels[upper] + functional.interpolate(levels[upper + 1], size=size, mode="nearest")
        levels = [smooth(level) for smooth, level in zip(self.smooth, levels, strict=True)]
        logits = torch.cat([self.classes(level).flatten(2).transpose(1, 2) for level in levels], dim=1)
        boxes = torch.cat([self.boxes(level).flatten(2).transpose(1, 2) for level in levels], dim=1)
        found = {"logits": logits, "boxes": boxes}
        if labels is None:
            return found
        wanted, offsets = labels.split([5, 4], dim=-1)
        loss = functional.binary_cross_entropy_with_logits(logits, wanted.sigmoid())
        return loss + functional.smooth_l1_loss(boxes, offsets), found


def detector() -> Example:
    """A detector with a feature pyramid; its heads are called once per level."""
    torch.manual_seed(0)
    return ready(Detector(), noise(2, 3, 32, 32), labels=noise(2, 84, 9, seed=1))


class WaveNet(Scored):
    """Dilated causal convolutions with gates, whose skips are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv1d(1, 8, 1)
        self.gated = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**number) for number in range(4))
        self.skips = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(4))
        self.leave = nn.Conv1d(8, 3, 1)

    def answer(self, x: Tensor) -> Tensor:
        """Logits per position."""
        x, total = self.enter(x), 0
        for number, (gated, skip) in enumerate(zip(self.gated, self.skips, strict=True)):
            y, gate = gated(functional.pad(x, (2**number, 0))).chunk(2, dim=1)
            y = torch.tanh(y) * torch.sigmoid(gate)
            total = total + skip(y)
            x = x + y
        return self.leave(torch.relu(total))


def wavenet() -> Example:
    """Dilated convolutions with a skip of every layer to the end."""
    torch.manual_seed(0)
    return ready(WaveNet(), noise(2, 1, 16), labels=noise(2, 3, 16, seed=1))


class Recommender(Scored):
    """Embeddings of categories beside a stack for numbers, and products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(VOCABULARY, 8) for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
        self.top = nn.Sequential(nn.Linear(8 + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def answer(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """A score per sample."""
        rows = [table(ids) for table, ids in zip(self.tables, categories.unbind(1), strict=True)]
        dense = self.bottom(numbers)
        vectors = torch.stack([dense, *rows], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        first, second = torch.triu_indices(4, 4, offset=1)
        return self.top(torch.cat([dense, products[:, first, second]], dim=1)).squeeze(1)


def recommender() -> Example:
    """Embeddings of categories and their products."""
    torch.manual_seed(0)
    return ready(Recommender(), noise(4, 6), tokens(4, 3), labels=noise(4, seed=1))


class Experts(nn.Module):
    """Every token goes to its best expert, whose output is weighted by the router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens are sorted by expert, and their results put back."""
        weight, choice = torch.softmax(self.router(x), dim=-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            where = choice == number
            y[where] = expert(x[where])
        return x + y * weight.unsqueeze(-1)


class ExpertStack(Scored):
    """Layers of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Experts() for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)

    def answer(self, ids: Tensor) -> Tensor:
        """Logits per token."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def experts() -> Example:
    """Experts chosen per token, with sizes that depend on the data inside each block."""
    torch.manual_seed(0)
    return ready(ExpertStack(), tokens(), labels=noise(2, 12, 5))


MODELS = {
    "gpt": gpt,
    "gpt_nested": gpt_nested,
    "lstm_stack": lstm_stack,
    "gru_stack": gru_stack,
    "recurrent_cells": recurrent_cells,
    "gru_attention": gru_attention,
    "graph_convolution": graph_convolution,
    "graph_attention": graph_attention,
    "message_passing": message_passing,
    "detector": detector,
    "wavenet": wavenet,
    "recommender": recommender,
    "experts": experts,
}
