"""Plain: whole models written from torch.nn."""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.zoo.batch import VOCABULARY, WIDTH, Example, noise, ready, scrambled, tokens
from tests.zoo.scored import Scored


class Bottleneck(nn.Module):
    """The block of ResNet-50, with torchvision's names."""

    def __init__(self, wide: int, narrow: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(wide, narrow, 1, bias=False), nn.BatchNorm2d(narrow)
        self.conv2 = nn.Conv2d(narrow, narrow, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(narrow)
        self.conv3, self.bn3 = nn.Conv2d(narrow, 4 * narrow, 1, bias=False), nn.BatchNorm2d(4 * narrow)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or wide != 4 * narrow:
            self.downsample = nn.Sequential(
                nn.Conv2d(wide, 4 * narrow, 1, stride, bias=False), nn.BatchNorm2d(4 * narrow)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Three convolutions beside a shortcut; the activations are in place."""
        short = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        x += short
        return self.relu(x)


class ResNet50(nn.Module):
    """ResNet-50 with torchvision's attribute names and few channels."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = _layer(width, width, 3, 1)
        self.layer2 = _layer(4 * width, 2 * width, 4, 2)
        self.layer3 = _layer(8 * width, 4 * width, 6, 2)
        self.layer4 = _layer(16 * width, 8 * width, 3, 2)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(32 * width, 5)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Logits, or the loss and the logits."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = self.fc(torch.flatten(self.avgpool(x), 1))
        return x if labels is None else (functional.cross_entropy(x, labels), x)


def _layer(wide: int, narrow: int, depth: int, stride: int) -> nn.Sequential:
    rest = [Bottleneck(4 * narrow, narrow, 1) for _ in range(depth - 1)]
    return nn.Sequential(Bottleneck(wide, narrow, stride), *rest)


def resnet50() -> Example:
    """ResNet-50: batch norm and in-place activations throughout."""
    torch.manual_seed(0)
    return ready(scrambled(ResNet50()), noise(4, 3, 64, 64), labels=torch.tensor([0, 1, 2, 3]))


class UNet(Scored):
    """Three levels down and up; every level hands a skip to its opposite."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width]
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(_convolve(size, 2 * size) for size in sizes)
        self.middle = _convolve(8 * width, 8 * width)
        self.up = nn.ModuleList(_convolve(4 * size, size) for size in reversed(sizes))
        self.leave = nn.Conv2d(width, 2, 1)

    def answer(self, x: Tensor) -> Tensor:
        """A map of the same size."""
        x, skips = self.enter(x), []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = torch.cat([functional.interpolate(x, scale_factor=2), skips.pop()], dim=1)
            x = block(x)
        return self.leave(x)


def _convolve(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True))


def unet() -> Example:
    """U-Net with long skips."""
    torch.manual_seed(0)
    return ready(scrambled(UNet()), noise(2, 3, 16, 16), labels=noise(2, 2, 16, 16, seed=1))


class Translator(Scored):
    """torch's own Transformer between embeddings and a head, with a causal mask made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 4, 3, 3, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def answer(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits of the target."""
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        x = self.transformer(self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True)
        return self.head(x)


def transformer() -> Example:
    """nn.Transformer."""
    torch.manual_seed(0)
    return ready(scrambled(Translator()), tokens(), tokens(length=9, seed=1), labels=noise(2, 9, VOCABULARY, seed=2))


class Tagger(Scored):
    """Two LSTMs over packed sequences and a few linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.first = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.second = nn.LSTM(2 * WIDTH, WIDTH, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Sequential(OrderedDict(a=nn.Linear(WIDTH, WIDTH), b=nn.Tanh(), c=nn.Linear(WIDTH, 5)))

    def answer(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Logits per token, and the last state."""
        x = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        x, _ = self.first(x)
        x, (state, _) = self.second(x)
        x, _ = pad_packed_sequence(x, batch_first=True, total_length=ids.shape[1])
        return self.head(x), state


def lstm() -> Example:
    """LSTMs with packed sequences of unsorted lengths."""
    torch.manual_seed(0)
    return ready(scrambled(Tagger()), tokens(3), torch.tensor([9, 12, 5]), labels=noise(3, 12, 5, seed=1))


class Branches(Scored):
    """Three branches of unlike depth that meet, part and meet again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.left = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())
        self.right = nn.Linear(WIDTH, WIDTH)
        self.join = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def answer(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The head's answer and a value from the middle."""
        x = self.stem(x)
        left, gate, right = self.left(x), self.middle(x), self.right(x)
        x = left * gate + right + x
        for layer in self.join:
            x = x + gate * torch.tanh(layer(x))
        return self.head(x), right.mean(-1)


def branches() -> Example:
    """A model of several branches."""
    torch.manual_seed(0)
    return ready(Branches(), noise(4, WIDTH), labels=noise(4, 5, seed=1))


class Tied(Scored):
    """A language model whose head is its embedding, and whose middle layers are one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.layers[3] = self.layers[1]
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def answer(self, ids: Tensor) -> Tensor:
        """Logits per token."""
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def tied() -> Example:
    """Embedding and head are one parameter; one layer is used twice."""
    torch.manual_seed(0)
    return ready(Tied(), tokens(), labels=noise(2, 12, VOCABULARY, seed=1))


class TwiceUsed(Scored):
    """One weight used by functions at both ends of the model, beside layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def answer(self, x: Tensor) -> Tensor:
        """The weight enters first, and last transposed."""
        x = functional.linear(x, self.weight)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return functional.linear(x, self.weight.t())


def weight_used_twice() -> Example:
    """A weight used twice, in different stages."""
    torch.manual_seed(0)
    return ready(TwiceUsed(), noise(4, WIDTH), labels=noise(4, WIDTH, seed=1))


def batch_norm() -> Example:
    """Batch norm in every layer: buffers move with each forward."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(6)]
    return ready(nn.Sequential(*layers), noise(8, WIDTH))


def dropout() -> Example:
    """Dropout as module and as function: the generator is drawn from in the order of the original."""
    torch.manual_seed(0)
    return ready(_Dropping(), noise(4, WIDTH), labels=noise(4, WIDTH, seed=1))


class _Dropping(Scored):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)) for _ in range(5))

    def answer(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + functional.dropout(layer(x), 0.2, self.training)
        return x
