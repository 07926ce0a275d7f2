"""layouts: published layouts of large training runs compared with those that `plan(devices=...)` finds.

For each training, the published layout and all others are predicted for the preset of its device, with 1F1B or
interleaved stages. A layout is near if its predicted step is within 3 % of the best one. The rank correlation is that
of predicted and published utilization over the trainings of a source. Both are reported without a target: a published
layout need not be the best. The last table has the seconds in which layouts of a 70B model are found.
`benchmarks/documents.py` writes a row per training into docs/accuracy.md.
"""

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from subprocess import DEVNULL
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.literature import PAPERS, SEQUENCE, TENSOR, VOCABULARY, Setting
from benchmarks.table import Line, Table
from penstock.api.example_batch import ExampleBatch
from penstock.demo.gpt import Head, Sizes, gpt, loss
from penstock.ir import DeviceLayout, DeviceSpeed, TrainingState, find_device, find_link
from penstock.planner import DevicePool, DeviceSearch, Measured, PlanOptions, TensorParallel

_SIZES, _DEGREES = (1, 2, 4), (1, 2, 4, 8)
_NEAR = 0.03
_MIN_TRAININGS = 4
"""no rank correlation is computed from fewer training runs"""
_OPTIONS = PlanOptions(1, recompute="auto", budget_seconds=12.0, training=TrainingState("adamw", "bf16"))
_KORTHIKANTI, _NARAYANAN, _MEGASCALE, _BRIDGE = (
    "Korthikanti et al., table 5",
    "Narayanan et al., table 2",
    "Jiang et al., table 2, MegaScale",
    "Megatron-Bridge",
)


class System(NamedTuple):
    """Features of the software of a source, for the published layout and all others."""

    options: PlanOptions = _OPTIONS
    tensor_parallel: TensorParallel = TensorParallel(_DEGREES)
    has_eight_bits: bool = False
    """whether matrix products are in 8 bits, at twice the rate of 16"""


_SHARDED = replace(_OPTIONS, shard_optimizer=True)
_SEQUENCE_PARALLEL = TensorParallel(_DEGREES, sequence_parallel=True)
SYSTEMS = {
    # Selective recomputation, as a fused attention does it, and sequence parallelism.
    _KORTHIKANTI: System(_OPTIONS, _SEQUENCE_PARALLEL),
    # Section 5: activations of all layers are recomputed.
    _NARAYANAN: System(replace(_OPTIONS, recompute="full")),
    # Section 3: ZeRO stage 2 and sequence parallelism. It overlaps collectives with matrix products, as does
    # Megatron-Bridge; which share of them is hidden is not known, and none is taken to be.
    _MEGASCALE: System(_SHARDED, _SEQUENCE_PARALLEL),
    # The recipes have the distributed optimizer and sequence parallelism.
    _BRIDGE: System(_SHARDED, _SEQUENCE_PARALLEL, has_eight_bits=True),
}


class Shape(NamedTuple):
    """The sizes of a decoder."""

    kind: str
    """gpt, or llama with 8 heads of keys and values"""
    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    inner: int = 0
    """width of the MLP of a llama"""


class Published(NamedTuple):
    """A training run: its layout and the measured seconds of a step."""

    source: str
    name: str
    device: str
    shape: Shape
    layout: DeviceLayout
    seconds: float
    memory: int | None = None
    """bytes of a device, if other than the preset's"""
    per_node: int = 8

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.layout.replicas * self.layout.ranks * self.layout.tensor_parallel

    @property
    def samples(self) -> int:
        """Samples in a batch, of all replicas."""
        return self.layout.replicas * self.layout.microbatches * self.layout.samples


def layout_of(gpus: int, batch: int, tensor: int, ranks: int, depth: int, size: int = 1) -> DeviceLayout:
    """The layout of a training, without a prediction."""
    replicas = gpus // (tensor * ranks)
    schedule = "1f1b" if depth == 1 else "interleaved"
    return DeviceLayout(replicas, ranks, tensor, size, batch // (replicas * size), depth, schedule)


def _of_setting(source: str, each: Setting) -> Published:
    shape = Shape("gpt", each.layers, each.hidden, each.heads, SEQUENCE, VOCABULARY)
    layout = layout_of(each.gpus, each.batch, TENSOR, each.pipeline, each.depth, each.microbatch)
    return Published(source, each.name, "a100", shape, layout, each.seconds)


_8B = Shape("llama", 32, 4096, 32, 8192, 128256, 14336)
_70B = Shape("llama", 80, 8192, 64, 8192, 128256, 28672)
_405B = Shape("llama", 126, 16384, 128, 8192, 128256, 53248)


def _bridge(
    name: str,
    device: str,
    shape: Shape,
    layout: DeviceLayout,
    tokens: float,
    memory: int | None = None,
    per_node: int = 8,
) -> Published:
    """A row of Megatron-Bridge, which has the tokens per second of a GPU."""
    seconds = layout.samples * layout.microbatches * shape.sequence / layout.ranks / layout.tensor_parallel / tokens
    return Published(_BRIDGE, name, device, shape, layout, seconds, memory, per_node)


def published() -> Iterator[Published]:
    """The trainings whose parallelism is replicas, pipeline ranks and tensor parallelism alone."""
    for source in (_KORTHIKANTI, _NARAYANAN, _MEGASCALE):
        yield from (_of_setting(source, each) for each in PAPERS[source] if "full" not in each.name)
    # Docs of NVIDIA-NeMo/Megatron-Bridge, performance-summary and its archive, dense models without FSDP and context
    # parallelism. All ran in 8 bits; GB200 and GB300 are taken as b200 with 64 GPUs in a node and their own memory.
    yield _bridge("70B, 64 H100, 25.11", "h100", _70B, layout_of(64, 128, 4, 8, 5), 1602)
    yield _bridge("70B, 64 H100, 26.02", "h100", _70B, layout_of(64, 256, 4, 8, 5), 1621)
    yield _bridge("8B, 8 B200, 25.11", "b200", _8B, layout_of(8, 128, 1, 1, 1, 2), 30624)
    gb200, gb300 = 186_000_000_000, 279_000_000_000
    yield _bridge("70B, 64 GB200, 26.02", "b200", _70B, layout_of(64, 256, 2, 4, 5), 3613, gb200, 64)
    yield _bridge("70B, 64 GB300, 26.02", "b200", _70B, layout_of(64, 256, 1, 4, 5), 4596, gb300, 64)
    yield _bridge("405B, 256 GB200, 26.02", "b200", _405B, layout_of(256, 1536, 4, 16, 4), 793, gb200, 64)
    yield _bridge("405B, 256 GB300, 26.02", "b200", _405B, layout_of(256, 1536, 4, 8, 4), 988, gb300, 64)


class _LlamaEmbedding(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        embeddings: Tensor = self.tokens(tokens)
        return embeddings


class _LlamaBlock(nn.Module):
    """A block whose operations are fused as in Megatron: a layer norm moves the bytes of a fused RMS norm.

    Rotary embeddings, a part of its attention, are left out.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, inner = shape.hidden, shape.inner
        self.heads, self.size = shape.heads, hidden // shape.heads
        self.norm_1, self.norm_2 = (nn.LayerNorm(hidden, bias=False) for _ in range(2))
        self.query, self.proj = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(hidden, 8 * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, hidden = x.shape
        found = self.norm_1(x)
        query, key, value = (
            each(found).view(samples, length, -1, self.size).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        key, value = (
            each[:, :, None].expand(-1, -1, self.heads // 8, -1, -1).reshape(samples, self.heads, length, self.size)
            for each in (key, value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(samples, length, hidden))
        found = self.norm_2(x)
        return x + self.down(functional.silu(self.gate(found)) * self.up(found))


def _decoder(shape: Shape) -> nn.Module:
    """The model, with fused operations only, and without a loss: that of Megatron is split over ranks as well."""
    sizes = Sizes(shape.layers, shape.hidden, shape.heads, shape.vocabulary, shape.sequence)
    if shape.kind == "gpt":
        return gpt(sizes)
    return nn.Sequential(_LlamaEmbedding(shape), *(_LlamaBlock(shape) for _ in range(shape.layers)), Head(sizes))


@cache
def _measured(shape: Shape, device: str, has_eight_bits: bool) -> dict[int, Measured]:
    """The model without weights, estimated for microbatches of every size."""
    most, speed = max(_SIZES), DeviceSpeed.named(device)
    if has_eight_bits:
        speed = replace(speed, rates=tuple((dtype, 2 * rate) for dtype, rate in speed.rates))
    with torch.device("meta"):
        tokens = torch.empty((most, shape.sequence), dtype=torch.int64)
        batch = ExampleBatch(_decoder(shape).to(torch.bfloat16), (tokens,), None, loss_fn=loss, speed=speed)
    counts = {size: most // size for size in _SIZES}
    return {size: batch.measured([count])[count] for size, count in counts.items()}


class Row(NamedTuple):
    """A published layout and the best one, both as predicted."""

    training: Published
    layout: DeviceLayout
    best: DeviceLayout

    @property
    def slower(self) -> float:
        """Relative slowdown of the published layout; infinite if it does not fit into memory."""
        if self.layout.lost or self.layout.makespan is None or self.best.makespan is None:
            return float("inf")
        return self.layout.makespan / self.best.makespan - 1

    @property
    def published_mfu(self) -> float:
        """The utilization at the published time, with the operations that penstock counts."""
        if self.layout.mfu is None or self.layout.makespan is None:
            return float("nan")
        return self.layout.mfu * self.layout.makespan / self.training.seconds


def compare(training: Published) -> Row:
    """Predicts the published layout and compares all others."""
    _, preset = find_device(training.device)
    memory, links = training.memory or preset.memory, (find_link(preset.within), find_link(preset.across))
    pool = DevicePool(training.devices, memory, *links, training.per_node, preset.peak_flops("bfloat16"))
    system = SYSTEMS.get(training.source, System())
    measured = _measured(training.shape, training.device, system.has_eight_bits)
    search = DeviceSearch(measured, system.options, pool, training.samples, system.tensor_parallel)
    best = search.compared()[0][0]
    layout = search.simulated(training.layout)
    if not layout.lost and layout.makespan is not None and layout.makespan < (best.makespan or 0.0):
        best = layout
    return Row(training, layout, best)


def tables() -> tuple[Table, ...]:
    """All tables of this benchmark."""
    return (
        Table("layouts: published, within 3 % of the best predicted", ("source", "layouts", "share"), _near()),
        Table("layouts: rank correlation of predicted and published MFU", ("source", "trainings", "value"), _ranked()),
        Table("layouts: seconds to plan a 70B model, from start to end", ("H100", "batch", "seconds"), planned()),
    )


@cache
def rows() -> tuple[Row, ...]:
    """All trainings, compared."""
    return tuple(map(compare, published()))


def _near() -> Iterator[Line]:
    for source in dict.fromkeys(row.training.source for row in rows()):
        near = [row.slower <= _NEAR for row in rows() if row.training.source == source]
        share = sum(near) / len(near)
        yield Line((source, f"{sum(near)} of {len(near)}", f"{share:.0%}"), share, -math.inf)


def _ranked() -> Iterator[Line]:
    for source in dict.fromkeys(row.training.source for row in rows()):
        # Utilizations of different devices and precisions are not compared.
        devices = {row.training.device for row in rows() if row.training.source == source}
        for device in sorted(devices):
            found = [row for row in rows() if (row.training.source, row.training.device) == (source, device)]
            known = [(row.layout.mfu, row.published_mfu) for row in found if row.layout.mfu is not None]
            if len(known) >= _MIN_TRAININGS:
                value = rank_correlation(known)
                yield Line((f"{source}, {device}", str(len(known)), f"{value:.2f}"), value, -math.inf)


def planned(
    sizes: Sequence[tuple[int, int, float]] = ((64, 512, 60.0), (1024, 2048, 30.0), (10_000, 10_000, 120.0)),
) -> Iterator[Line]:
    """`penstock plan` of the 70B model with 4,096 tokens per sample, in a process of its own."""
    with TemporaryDirectory() as folder:
        config = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
        config |= {"num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 4096}
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 32000, **config}))
        for devices, batch, target in sizes:
            command = f"plan hf:{folder} --devices {devices} --device h100 --global-batch {batch} --sequence 4096"
            more = "--precision bf16 --recompute auto --tensor-parallel auto"
            start = time.monotonic()
            subprocess.run(
                [sys.executable, "-m", "penstock", *command.split(), *more.split()], check=True, stdout=DEVNULL
            )
            seconds = time.monotonic() - start
            yield Line((str(devices), str(batch), f"{seconds:.1f}"), seconds, target, at_least=False)


def rank_correlation(pairs: list[tuple[float, float]]) -> float:
    """Spearman's rank correlation; equal values have their mean rank."""

    def ranks(values: list[float]) -> list[float]:
        array = np.array(values)
        return [float((array < value).sum() + (array <= value).sum()) for value in values]

    first, second = (ranks([pair[side] for pair in pairs]) for side in (0, 1))
    return float(np.corrcoef(first, second)[0, 1])


def _sizes(layout: DeviceLayout) -> str:
    stages = f" v{layout.stages_per_rank}" if layout.stages_per_rank > 1 else ""
    return f"{layout.replicas}x{layout.ranks}x{layout.tensor_parallel}{stages} b{layout.samples}"


def table_of_trainings() -> str:
    """A table in Markdown with a row per training."""
    lines = [
        "| source | training | published layout | predicted MFU | published MFU | best layout | slower |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows():
        why = row.layout.lost or f"{row.slower:.1%}"
        mfu = "" if row.layout.mfu is None else f"{row.layout.mfu:.1%}"
        measured = "" if row.layout.mfu is None else f"{row.published_mfu:.1%}"
        cells = (row.training.source, row.training.name, _sizes(row.layout), mfu, measured, _sizes(row.best), why)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def summary() -> str:
    """A table in Markdown with a row per source."""
    lines = ["| source | within 3 % | same division as the best | rank correlation of MFU |", "|---|---|---|---|"]
    ranked = {line.cells[0]: f"{line.cells[2]} ({line.cells[1]} rows)" for line in _ranked()}
    for source in dict.fromkeys(row.training.source for row in rows()):
        found = [row for row in rows() if row.training.source == source]
        values = [text for name, text in ranked.items() if name.startswith(source)]
        lines.append(f"| {source} | {_counts(found)} | {', '.join(values)} |")
    return "\n".join((*lines, f"| all | {_counts(rows())} | |"))


def _counts(found: Sequence[Row]) -> str:
    """How many published layouts are near the best one, and how many differ from it in stages and microbatches only."""
    near = sum(row.slower <= _NEAR for row in found)
    same = sum(_division(row.layout) == _division(row.best) for row in found)
    return f"{near} of {len(found)} | {same} of {len(found)}"


def _division(layout: DeviceLayout) -> tuple[int, int, int]:
    return layout.replicas, layout.ranks, layout.tensor_parallel
