"""Published iteration times of large GPT training runs, and their prediction from the configuration.

A layer takes its flops at the calibrated rate, its element-wise operations at the memory bandwidth of an A100, and its
tensor-parallel collectives at the bandwidth of NVLink. The pipeline schedule with its messages is simulated. Replicas
reduce gradients after the last backward or, where the source says so, in parallel with it. One measurement of each
system gives its rate.
"""

from dataclasses import dataclass, replace
from functools import cache, cached_property

from penstock.ir import (
    LINKS,
    Cluster,
    DeviceSpeed,
    MessageCost,
    Program,
    Replicas,
    StageCosts,
    StateBytes,
    find_link,
)
from penstock.passes import lower
from penstock.schedules import build
from penstock.simulate import simulate

SEQUENCE, VOCABULARY, TENSOR = 2048, 51200, 8
_HALF, _SINGLE = 2, 4
"""bytes of a value, and of one in float32"""
_OPTIMIZER_BYTES = 30
"""read and written per parameter: gradient, master weight, two moments, and the new weight"""
_MEMORY = DeviceSpeed.named("a100").bytes_per_second
_NVLINK, _NETWORK = LINKS["nvlink3"], find_link("200G")
_RATES = (1.5e14, 3e14)
"""flop/s between which predictions are interpolated"""


@dataclass(frozen=True)
class Setting:
    """The configuration of a training run on A100 with 8-way tensor parallelism, and its measured iteration."""

    name: str
    layers: int
    hidden: int
    heads: int
    pipeline: int
    replicas: int
    batch: int
    """samples in a batch, of all replicas"""
    seconds: float
    """measured, of an iteration"""
    depth: int = 1
    """stages per rank"""
    microbatch: int = 1
    recompute: str = "full"
    """"full", or "selective": only the core of attention"""
    sequence_parallel: bool = False
    flash: bool = False
    """whether attention scores stay on the chip"""
    shards_optimizer: bool = False
    """whether replicas shard the optimizer: they reduce-scatter gradients in float32 and all-gather parameters"""
    overlaps_reduction: bool = False
    """whether gradients are reduced in parallel with backwards, and parameters gathered in parallel with forwards"""

    @property
    def parameters(self) -> float:
        """Number of parameters, without biases and norms."""
        return 12.0 * self.layers * self.hidden**2 + VOCABULARY * self.hidden

    @property
    def flops(self) -> float:
        """Operations of an iteration with full recomputation, by the formula of Narayanan et al."""
        h, layers, s = self.hidden, self.layers, SEQUENCE
        return 96 * self.batch * s * layers * h**2 * (1 + s / (6 * h) + VOCABULARY / (16 * layers * h))

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return TENSOR * self.pipeline * self.replicas

    def predicted(self, rate: float) -> float:
        """Seconds of an iteration if matrix products run at this rate.

        A path through the schedule takes a + b / rate seconds; a and b are those of two simulated rates.
        """
        constant, flops = self._line
        return constant + flops / rate

    @property
    def rate(self) -> float:
        """The rate at which the prediction equals the measurement."""
        constant, flops = self._line
        return flops / (self.seconds - constant)

    @cached_property
    def _line(self) -> tuple[float, float]:
        slow, fast = _RATES
        low, high = self._simulated(slow), self._simulated(fast)
        flops = (low - high) / (1 / slow - 1 / fast)
        return low - flops / slow, flops

    def _simulated(self, rate: float) -> float:
        """Seconds of an iteration: the pipeline, the reduction over replicas if it is not overlapped, the optimizer."""
        count = self.batch // self.replicas // self.microbatch
        num_stages = self.pipeline * self.depth
        forward, backward = self._layer(rate)
        stage = self.layers / num_stages
        head = 2 * self._tokens * self.hidden * VOCABULARY / TENSOR / rate
        costs = [(stage * forward, stage * backward)] * (num_stages - 1)
        costs.append((stage * forward + head, stage * backward + 2 * head))
        held = int(self.parameters / num_stages / TENSOR)
        message = self._tokens * self.hidden * _HALF // TENSOR
        made = StageCosts(
            tuple(f for f, _ in costs),
            tuple(b / 2 for _, b in costs),
            tuple(b / 2 for _, b in costs),
            messages=tuple(MessageCost(s, s + 1, message, message) for s in range(num_stages - 1)),
            state=(StateBytes(_HALF * held, _HALF * held, 0),) * num_stages,
        )
        network = _NETWORK.latency, _NETWORK.bandwidth
        cluster = Cluster(self.pipeline, None, *network)
        if self.overlaps_reduction:
            # To scatter four bytes per parameter takes as long as to all-reduce the two of `state`.
            cluster = replace(cluster, replicas=Replicas(self.replicas, *network))
        seconds = simulate(_program(self.pipeline, count, self.depth), made, cluster).makespan
        parameters = held * self.depth
        if not self.overlaps_reduction:
            reduced = (_SINGLE + _HALF) / 2 if self.shards_optimizer else _HALF
            seconds += _NETWORK.ring_seconds(self.replicas, reduced * parameters)
        shards = self.replicas if self.shards_optimizer else 1
        return seconds + _OPTIMIZER_BYTES * parameters / shards / _MEMORY

    @property
    def _tokens(self) -> int:
        return self.microbatch * SEQUENCE

    def _layer(self, rate: float) -> tuple[float, float]:
        """Seconds of the forward and of the backward of one layer and microbatch on one GPU."""
        s, h = SEQUENCE, self.hidden
        core = 4 * self._tokens * s * h / TENSOR
        flops = 24 * self._tokens * h**2 / TENSOR + core
        values = self._tokens * h * _HALF
        # Of the scores: softmax reads and writes them, dropout too, with a mask of a byte.
        scores = 0.0 if self.flash else 4.5 * self.microbatch * self.heads * s**2 * _HALF / TENSOR
        # Two norms, two sums of bias, dropout and residual; and GeLU on four times the width.
        moved = 11 * values / (TENSOR if self.sequence_parallel else 1) + 8 * values / TENSOR + scores
        reduced = 2 * (TENSOR - 1) / TENSOR * values / _NVLINK.bandwidth
        forward = flops / rate + moved / _MEMORY + 2 * reduced
        # With sequence parallelism a backward gathers its two inputs again.
        backward = 2 * (flops / rate + moved / _MEMORY) + (3 if self.sequence_parallel else 2) * reduced
        again = forward if self.recompute == "full" else core / rate + scores / _MEMORY
        return forward, backward + again


@cache
def _program(ranks: int, microbatches: int, depth: int) -> Program:
    return lower(build("1f1b" if depth == 1 else "interleaved", ranks, microbatches, depth))


# Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys 2023, tables 3 and 5.
_KORTHIKANTI = [
    Setting("22B", 48, 6144, 64, 1, 1, 4, 1.10, microbatch=4),
    Setting("175B", 96, 12288, 96, 8, 1, 64, 13.75, depth=3),
    Setting("530B", 105, 20480, 128, 35, 1, 280, 37.83, depth=3),
    Setting("1T", 128, 25600, 160, 64, 1, 512, 71.49),
]
_FULL = {"22B": 1.42, "175B": 18.13, "530B": 49.05, "1T": 94.42}


def _korthikanti(each: Setting) -> tuple[Setting, Setting]:
    """A model with full recomputation, and as the authors propose: selective, with sequence parallelism."""
    full = replace(each, name=f"{each.name}, full", seconds=_FULL[each.name])
    return full, replace(each, recompute="selective", sequence_parallel=True)


def _narayanan(
    name: str, shape: tuple[int, int, int], pipeline: int, replicas: int, batch: int, rate: float
) -> Setting:
    """A row of Narayanan et al., who give the flop/s per GPU."""
    plain = Setting(name, *shape, pipeline, replicas, batch, 1.0)
    return replace(plain, seconds=plain.flops / plain.gpus / rate)


_175B, _530B = (96, 12288, 96), (105, 20480, 128)


def _megascale(gpus: int, batch: int, seconds: float, overlaps: bool) -> Setting:
    """A row of Jiang et al.: 175B, 8-way tensor and pipeline parallelism, six stages per rank."""
    name, replicas = f"{gpus} GPUs", gpus // 64
    return Setting(
        *(name, *_175B, 8, replicas, batch, seconds, 6),
        recompute="selective",
        sequence_parallel=True,
        flash=True,
        shards_optimizer=True,
        overlaps_reduction=overlaps,
    )


PAPERS: dict[str, list[Setting]] = {
    "Korthikanti et al., table 5": [setting for each in _KORTHIKANTI for setting in _korthikanti(each)],
    # Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, SC 2021, table 2, PTD-P.
    "Narayanan et al., table 2": [
        _narayanan("175B, 384", _175B, 12, 4, 1536, 153e12),
        _narayanan("175B, 768", _175B, 12, 8, 1536, 149e12),
        _narayanan("175B, 1536", _175B, 12, 16, 1536, 141e12),
        _narayanan("530B, 560", _530B, 35, 2, 2240, 171e12),
        _narayanan("530B, 1120", _530B, 35, 4, 2240, 167e12),
        _narayanan("530B, 2240", _530B, 35, 8, 2240, 159e12),
    ],
    # Jiang et al., MegaScale, NSDI 2024, table 2. Section 3.2: MegaScale gathers and scatters stage by stage, beside
    # the passes of other stages, and prefetches the first gather. Megatron-LM does both after the last backward; with
    # bfloat16 it reduces gradients in float32 (arguments.py: accumulate_allreduce_grads_in_fp32).
    "Jiang et al., table 2, MegaScale": [
        *(_megascale(gpus, 768, s, True) for gpus, s in ((256, 32.0), (512, 16.5), (768, 11.5), (1024, 8.9))),
        *(_megascale(gpus, 6144, s, True) for gpus, s in ((3072, 23.66), (6144, 12.21), (8192, 9.56), (12288, 6.34))),
    ],
    "Jiang et al., table 2, Megatron-LM": [
        *(_megascale(gpus, 768, s, False) for gpus, s in ((256, 40.0), (512, 21.2), (768, 15.2), (1024, 11.9))),
        *(_megascale(gpus, 6144, s, False) for gpus, s in ((3072, 29.02), (6144, 14.78), (8192, 12.24), (12288, 8.57))),
    ],
}
"""measurements of A100 by system, in the order of its table; the one in the middle calibrates the rate"""
