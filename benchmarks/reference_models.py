"""The models of `benchmarks.reference`: small networks with fixed weights and batches that depend on a seed only."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock

WIDTH, CLASSES, WORDS, LENGTH = 8, 5, 17, 6
IGNORED = -100


class Batch(NamedTuple):
    """The arguments of one step."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    target: Any = None


@dataclass(frozen=True, eq=False)
class Case:
    """A model, its batches, and how its loss is computed; `options` are keyword arguments of the Pipeline."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    """from the number of samples and a seed"""
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    uses_adam: bool = False

    def model(self) -> nn.Module:
        """A new model in training mode, with the same weights every time."""
        torch.manual_seed(0)
        return self.build().train()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if self.uses_adam:
            return torch.optim.Adam(parameters, lr=1e-2)
        return torch.optim.SGD(parameters, lr=1e-1, momentum=0.9)


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(*shape: int, seed: int, below: int = WORDS) -> Tensor:
    return torch.randint(1, below, shape, generator=torch.Generator().manual_seed(seed))


def labels(samples: int, seed: int, length: int = LENGTH) -> Tensor:
    """Labels of which each sample has a different number that is not ignored, and the first sample at least two."""
    kept = 1 + (3 * torch.arange(samples)[:, None] + seed) % length
    kept[0] = 2 + seed % (length - 1)
    return tokens(samples, length, seed=seed + 1000).masked_fill(torch.arange(length) >= kept, IGNORED)


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))


def mlp(outputs: int = WIDTH, dropout: float = 0.0) -> nn.Module:
    """Layers of different widths, so that the partitioners differ."""
    widths = (WIDTH, 12, 16, 24, 16, 12, 8)
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers, *(Block(dropout=dropout) for _ in range(2)), nn.Linear(WIDTH, outputs))


class Penalised(nn.Module):
    """Blocks that add to the loss: a mean over samples, a sum over samples, and a penalty of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number in (1, 4):
                penstock.add_loss(0.1 * x.square().mean())
            if number == 3:
                penstock.add_loss(0.01 * x.abs().sum(), "sum")
            if number == 6:
                penstock.add_loss(0.01 * block.linear.weight.square().sum())
        return x


class Residual(nn.Module):
    """Two convolutions with batch norm and a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.other = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.last = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.last(self.other(functional.relu(self.norm(self.one(x))))))


def cnn() -> nn.Module:
    """A stem, four residual blocks, pooling and a head."""
    stem = (nn.Conv2d(3, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, CLASSES))
    return nn.Sequential(*stem, *(Residual(WIDTH) for _ in range(4)), *head)


class Transformer(nn.Module):
    """Embeddings, encoder layers under a causal mask, and a head; tied: the head is the embedding."""

    def __init__(self, layers: int = 5, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(32, WIDTH)
        layer = {"nhead": 2, "dim_feedforward": 2 * WIDTH, "dropout": dropout, "batch_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, **layer) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.embed(ids) + self.position(torch.arange(length))
        mask = torch.full((length, length), float("-inf")).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(self.norm(x))


class EncoderDecoder(nn.Module):
    """Every decoder layer reads the result of the encoder."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed_source, self.embed_answer = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        layer = {"nhead": 2, "dim_feedforward": 2 * WIDTH, "dropout": 0.0, "batch_first": True}
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, **layer) for _ in range(layers))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(WIDTH, **layer) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, answer: Tensor) -> Tensor:
        memory = self.embed_source(source)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.embed_answer(answer)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.head(x)


class Skips(nn.Module):
    """Late blocks read the values of early ones, as in a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Block() for _ in range(5))
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
        for layer in self.up:
            x = torch.relu(layer(torch.cat((x, kept.pop()), dim=-1)))
        return x


class Towers(nn.Module):
    """Two inputs, one of them by name, a factor that is not split, and a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.ModuleList(Block() for _ in range(3)) for _ in range(2))
        self.join = nn.Linear(2 * WIDTH, WIDTH)
        self.classes, self.value = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)

    def forward(self, image: Tensor, *, text: Tensor, factor: float = 1.0) -> dict[str, Any]:
        for block in self.left:
            image = block(image)
        for block in self.right:
            text = block(text)
        x = torch.relu(self.join(torch.cat((image, factor * text), dim=-1)))
        return {"classes": self.classes(x), "rest": (self.value(x).squeeze(-1), x)}


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean over all labels that are not ignored."""
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def summed_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target, reduction="sum")


def class_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target)


def tower_loss(output: Any, target: Any) -> Tensor:
    loss = functional.cross_entropy(output["classes"], target["classes"])
    value, x = output["rest"]
    return loss + functional.mse_loss(value, target["value"]) + 0.01 * x.square().mean()


LAYER_NAMES = ["conv", "norm", "relu", "layers", "pool", lambda x: torch.flatten(x, 1), "head"]


def cnn_parts() -> nn.Module:
    """A module without a forward, as `penstock.flat.flatten_model` takes it together with LAYER_NAMES."""
    parts = nn.Module()
    parts.conv, parts.norm, parts.relu = nn.Conv2d(3, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU()
    parts.layers = nn.Sequential(*(Residual(WIDTH) for _ in range(4)))
    parts.pool, parts.head = nn.AdaptiveAvgPool2d(1), nn.Linear(WIDTH, CLASSES)
    return parts


def llama() -> nn.Module:
    """A tiny Llama of transformers with fixed weights."""
    import transformers

    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 4}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))


def gpt2() -> nn.Module:
    """A tiny GPT-2 of transformers with tied embedding and head; it returns its own loss."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    sizes = {"vocab_size": WORDS, "n_positions": 16, "n_embd": WIDTH, "n_layer": 5, "n_head": 2}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, use_cache=False, bos_token_id=1, eos_token_id=2))


def t5() -> nn.Module:
    """A tiny T5 of transformers."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": WORDS, "d_model": WIDTH, "d_kv": 4, "d_ff": 2 * WIDTH, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, use_cache=False, dropout_rate=0.0))


def bert() -> nn.Module:
    """A tiny BERT of transformers with a class per token."""
    from transformers import BertConfig, BertForTokenClassification

    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 5, "num_attention_heads": 2}
    config = BertConfig(**sizes, intermediate_size=2 * WIDTH, max_position_embeddings=16, num_labels=CLASSES)
    return BertForTokenClassification(config)


def rows_batch(samples: int, seed: int) -> Batch:
    return Batch((noise(samples, WIDTH, seed=seed),), {}, noise(samples, WIDTH, seed=seed + 1000))


def class_batch(samples: int, seed: int) -> Batch:
    return Batch((noise(samples, WIDTH, seed=seed),), {}, tokens(samples, seed=seed + 1000, below=CLASSES))


def image_batch(samples: int, seed: int) -> Batch:
    return Batch((noise(samples, 3, 6, 6, seed=seed),), {}, tokens(samples, seed=seed + 1000, below=CLASSES))


def token_batch(samples: int, seed: int) -> Batch:
    return Batch((tokens(samples, LENGTH, seed=seed),), {}, labels(samples, seed))


def pair_batch(samples: int, seed: int) -> Batch:
    source, answer = tokens(samples, LENGTH, seed=seed), tokens(samples, LENGTH - 1, seed=seed + 500)
    return Batch((source, answer), {}, tokens(samples, LENGTH - 1, seed=seed + 1000))


def tower_batch(samples: int, seed: int) -> Batch:
    kwargs = {"text": noise(samples, WIDTH, seed=seed + 500), "factor": 0.5}
    target = {"classes": tokens(samples, seed=seed + 1000, below=CLASSES), "value": noise(samples, seed=seed + 1500)}
    return Batch((noise(samples, WIDTH, seed=seed),), kwargs, target)


def causal_batch(samples: int, seed: int) -> Batch:
    return Batch((), {"input_ids": tokens(samples, LENGTH, seed=seed), "labels": labels(samples, seed)})


def t5_batch(samples: int, seed: int) -> Batch:
    ids = tokens(samples, LENGTH, seed=seed)
    mask = (torch.arange(LENGTH) < LENGTH - torch.arange(samples)[:, None] % 3).long()
    return Batch((), {"input_ids": ids, "attention_mask": mask, "labels": labels(samples, seed, LENGTH - 1)})


def bert_batch(samples: int, seed: int) -> Batch:
    ids = tokens(samples, LENGTH, seed=seed)
    classes = labels(samples, seed)
    mask = (torch.arange(LENGTH) < LENGTH - torch.arange(samples)[:, None] % 3).long()
    kept = classes.where(classes == IGNORED, classes % CLASSES)
    return Batch((), {"input_ids": ids, "attention_mask": mask, "labels": kept})


CASES: dict[str, Case] = {
    "mlp": Case(mlp, rows_batch, functional.mse_loss),
    "classifier": Case(lambda: mlp(CLASSES), class_batch, class_loss, uses_adam=True),
    "summed": Case(mlp, rows_batch, summed_loss, {"reduction": "sum"}),
    "cnn": Case(cnn, image_batch, class_loss),
    "transformer": Case(Transformer, token_batch, token_loss, {"reduction": "tokens"}, uses_adam=True),
    "tied": Case(lambda: Transformer(tied=True), token_batch, token_loss),
    "encoder_decoder": Case(EncoderDecoder, pair_batch, token_loss),
    "skips": Case(Skips, rows_batch, functional.mse_loss, uses_adam=True),
    "dropout": Case(lambda: mlp(dropout=0.3), rows_batch, functional.mse_loss),
    "towers": Case(Towers, tower_batch, tower_loss),
    "penalised": Case(Penalised, rows_batch, functional.mse_loss),
    "gpt2": Case(gpt2, causal_batch, uses_adam=True),
    "t5": Case(t5, t5_batch),
    "bert": Case(bert, bert_batch),
}
TRANSFORMERS = ("gpt2", "t5", "bert")
