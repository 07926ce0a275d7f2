"""GPTs as people write them by hand: blocks in a ModuleList inside a ModuleDict, tied weights, logits and loss."""

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, LENGTH, WIDTH, HEADS = 23, 6, 8, 2


class Norm(nn.Module):
    """A layer norm whose bias is optional."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    """Causal attention; its first dropout is never called."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.attn_dropout = nn.Dropout(dropout)
        self.resid_dropout = nn.Dropout(dropout)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.size()
        parts = self.c_attn(x).split(width, dim=2)
        q, k, v = (part.view(samples, length, HEADS, width // HEADS).transpose(1, 2) for part in parts)
        share = self.dropout if self.training else 0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=share, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(samples, length, width)))


class Mlp(nn.Module):
    """A hidden layer and a dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    """Attention and a hidden layer, each with a norm before it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.attn = Norm(True), Attention(dropout)
        self.ln_2, self.mlp = Norm(False), Mlp(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NestedBlock(nn.Module):
    """A block whose hidden layer is a ModuleDict, called by a lambda."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), Attention(dropout), nn.LayerNorm(WIDTH)
        parts = {"c_fc": nn.Linear(WIDTH, 4 * WIDTH), "c_proj": nn.Linear(4 * WIDTH, WIDTH)}
        self.mlp = nn.ModuleDict({**parts, "act": nn.GELU(), "dropout": nn.Dropout(dropout)})
        m = self.mlp
        self.mlpf = lambda x: m.dropout(m.c_proj(m.act(m.c_fc(x))))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))


class Gpt(nn.Module):
    """Returns logits and, if it is given targets, the loss; labels of -1 do not count."""

    def __init__(
        self, blocks: int = 4, dropout: float = 0.0, block: type[nn.Module] = Block, tied: bool = True
    ) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList(block(dropout) for _ in range(blocks)),
                "ln_f": Norm(True),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        positions = torch.arange(0, idx.size(1), device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(positions))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, functional.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1), ignore_index=-1)
