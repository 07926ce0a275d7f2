"""measure: sum of the measured nodes compared with a step of the unsplit model, and the time of measuring."""

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from benchmarks.capture import batch as tokens
from benchmarks.capture import llama
from benchmarks.table import Line, Table
from penstock.api.measuring import measured_model
from penstock.demo.gpt import Sizes, gpt
from penstock.demo.gpt import batch as gpt_batch
from penstock.measure.timing import Clock, time_whole, typical

_ERROR = 0.10
"""maximum relative difference of the sum of the nodes and the step"""
_GPU = penstock.DeviceSpeed(3.12e14, 2.0e12)
"""about an A100 in half precision"""


class Example(NamedTuple):
    """A model with an example batch."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}  # noqa: RUF012  # not modified


class Residual(nn.Module):
    """Two convolutions with batch norm and a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.other = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.last = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the same shape."""
        return functional.relu(x + self.last(self.other(functional.relu(self.norm(self.one(x))))))


def small_gpt(size: int = 256) -> Example:
    """Six blocks of attention."""
    sizes = Sizes(layers=6, width=size, vocabulary=2 * size, length=128, samples=2, microbatches=1)
    return Example(gpt(sizes), (gpt_batch(sizes)[0],))


def cnn(size: int = 32) -> Example:
    """A stem, six residual blocks and a head."""
    blocks = (Residual(size) for _ in range(6))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(size, 10))
    return Example(nn.Sequential(nn.Conv2d(3, size, 3, padding=1), *blocks, *head), (torch.randn(8, 3, size, size),))


def t5(size: int = 256) -> Example:
    """An encoder and a decoder of four blocks each, and the loss."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=size, d_kv=size // 8, d_ff=4 * size, num_layers=4, num_heads=8, vocab_size=2048)
    config.decoder_start_token_id = 0
    given = torch.randint(1, 2048, (4, 64))
    return Example(T5ForConditionalGeneration(config), (), {"input_ids": given, "labels": given, "use_cache": False})


def mlp(size: int = 1024) -> Example:
    """Eight layers with a nonlinearity after each."""
    layers = (part for _ in range(8) for part in (nn.Linear(size, size), nn.GELU()))
    return Example(nn.Sequential(*layers), (torch.randn(64, size),))


MODELS: dict[str, Callable[[], Example]] = {"small GPT": small_gpt, "residual CNN": cnn, "T5": t5, "MLP": mlp}


def tables() -> tuple[Table, ...]:
    """All tables of this benchmark."""
    return (sums(), cached(), without_weights())


def sums(models: dict[str, Callable[[], Example]] = MODELS, iterations: int = 10) -> Table:
    """The sum of the calibrated nodes, compared with steps of the unsplit model timed before and after."""

    def lines() -> Iterator[Line]:
        for name, build in models.items():
            captured = penstock.capture(*build())
            before = _steps(captured, iterations)
            start = time.perf_counter()
            profile = penstock.measure(captured, iterations=iterations, cache=False)
            seconds = time.perf_counter() - start
            step = typical([*before, *_steps(captured, iterations)])
            error = abs(profile.seconds / step - 1)
            raw = 1 / _factor(profile)
            cells = (name, str(len(profile)), f"{1e3 * profile.seconds:.2f}", f"{1e3 * step:.2f}")
            yield Line((*cells, f"{raw:.3f}", f"{seconds:.1f} s", f"{error:.3f}"), error, _ERROR, at_least=False)

    columns = ("model", "nodes", "sum ms", "step ms", "raw / step", "measuring", "error")
    return Table("sum of all nodes compared with a step of the unsplit model", columns, lines())


def cached(build: Callable[[], Example] = small_gpt) -> Table:
    """Seconds to read a profile from the cache."""

    def lines() -> Iterator[Line]:
        captured = penstock.capture(*build())
        with tempfile.TemporaryDirectory() as directory:
            first = penstock.measure(captured, iterations=1, cache=directory)
            start = time.perf_counter()
            again = penstock.measure(captured, iterations=1, cache=directory)
            seconds = time.perf_counter() - start
        assert again == first
        yield Line(("small GPT", f"{1e3 * seconds:.1f} ms"), seconds, 0.5, at_least=False)

    return Table("profile in the cache", ("model", "seconds"), lines())


def without_weights() -> Table:
    """Seconds and peak memory of capturing and estimating a model of 8 billion parameters on the meta device."""

    def lines() -> Iterator[Line]:
        done = subprocess.run([sys.executable, "-m", "benchmarks.measure"], capture_output=True, text=True, check=True)
        seconds, gigabytes, share = map(float, done.stdout.split()[-3:])
        yield Line(("time", f"{seconds:.1f} s"), seconds, 10.0, at_least=False)
        yield Line(("peak", f"{gigabytes:.2f} GB"), gigabytes, 2.0, at_least=False)
        yield Line(("step / 6NT", f"{share:.3f}"), share, 1.0)

    return Table("capture and estimate of an 8-billion-parameter Llama without weights", ("what", "value"), lines())


def _steps(captured: Any, times: int) -> list[float]:
    """Times steps of the unsplit model after one warmup step."""
    subject, clock = measured_model(captured), Clock(torch.device("cpu"))
    with subject.isolated():
        return [time_whole(subject, clock).step for _ in range(times + 1)][1:]


def _factor(profile: penstock.Profile) -> float:
    """The calibration factor of the sum of the nodes."""
    words = dict(profile.versions)["calibrated"].replace(",", "").split()
    forward, backward = (float(word.removeprefix("x")) for word in words[1::2])
    raw = sum(cost.forward / forward + cost.backward / backward for cost in profile.costs)
    return profile.seconds / raw


def _eight_billion() -> None:
    llama(1, 64)  # imports transformers, which is not measured
    start = time.perf_counter()
    with torch.device("meta"):
        sizes = {"intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
        model = llama(32, 4096, **sizes)
    given = tokens(1, 2048)
    profile = penstock.measure(penstock.capture(model, (), given), speed=_GPU)
    seconds = time.perf_counter() - start
    # The usual estimate: six operations per parameter and token, without the embeddings.
    parameters = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    estimate = 6 * parameters * given["input_ids"].numel() / _GPU.flops_per_second
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(seconds, peak, profile.seconds / estimate)


if __name__ == "__main__":
    _eight_billion()
