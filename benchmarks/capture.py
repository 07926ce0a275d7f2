"""capture: CPU time of recording a model and of replaying the recording, compared with the model's own forward."""

import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.table import Line, Table
from benchmarks.timing import cpu_seconds
from penstock.capture import Replay, capture
from penstock.partitioners import uniform
from penstock.stages import split

_FIXED_SECONDS = 0.5
"""CPU seconds that a capture may take in addition to ten forwards"""


def tables() -> tuple[Table, ...]:
    """All tables of this benchmark."""
    return (recording(), replaying(), without_weights())


def llama(layers: int, size: int, **sizes: int) -> Any:
    """A Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    defaults = {"intermediate_size": 2 * size, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256}
    return LlamaForCausalLM(LlamaConfig(hidden_size=size, num_hidden_layers=layers, **(defaults | sizes)))


def batch(samples: int, length: int) -> dict[str, Any]:
    """Random tokens, which are also the labels."""
    tokens = torch.randint(0, 256, (samples, length))
    return {"input_ids": tokens, "labels": tokens, "use_cache": False}


def recording(layers: int = 64, size: int = 64, times: int = 3) -> Table:
    """CPU seconds of a capture as a share of its limit, ten forwards and half a second."""

    def lines() -> Iterator[Line]:
        model, given = llama(layers, size), batch(2, 32)
        forward = cpu_seconds(lambda: model(**given), times)
        seconds = cpu_seconds(lambda: capture(model, (), given), times)
        share = seconds / (10 * forward + _FIXED_SECONDS)
        yield Line((f"{layers} layers", f"{forward:.3f}", f"{seconds:.3f}", f"{share:.2f}"), share, 1.0, at_least=False)

    columns = ("model", "forward", "capture", "of limit")
    return Table("capture compared with 10 forwards + 0.5 s, CPU seconds", columns, lines())


def replaying(layers: int = 12, size: int = 256, times: int = 15) -> Table:
    """CPU seconds of a forward by replay, compared with the model's own forward; interleaved."""

    def lines() -> Iterator[Line]:
        model, given = llama(layers, size), batch(4, 64)
        captured = capture(model, (), given)
        nodes = [node.name for node in captured.graph.nodes]
        replay = Replay(captured.recording((), given), nodes, model, captured.graph.outputs)
        inputs = captured.inputs((), given)
        pairs = [(cpu_seconds(lambda: model(**given)), cpu_seconds(lambda: replay.run(inputs))) for _ in range(times)]
        own, replayed = (min(column) for column in zip(*pairs, strict=True))
        cells = (f"{layers} layers, d={size}", f"{own:.4f}", f"{replayed:.4f}", f"{replayed / own:.3f}")
        yield Line(cells, replayed / own, 1.05, at_least=False)

    return Table(
        "replayed forward compared with the model's own, CPU seconds", ("model", "own", "replay", "ratio"), lines()
    )


def without_weights() -> Table:
    """Seconds and peak memory of capturing and splitting a model of 8 billion parameters on the meta device."""

    def lines() -> Iterator[Line]:
        done = subprocess.run([sys.executable, "-m", "benchmarks.capture"], capture_output=True, text=True, check=True)
        seconds, gigabytes = map(float, done.stdout.split()[-2:])
        yield Line(("8 billion, time", f"{seconds:.1f} s"), seconds, 10.0, at_least=False)
        yield Line(("8 billion, peak", f"{gigabytes:.2f} GB"), gigabytes, 2.0, at_least=False)

    return Table("capture and split of an 8-billion-parameter Llama without weights", ("what", "value"), lines())


def _eight_billion() -> None:
    llama(1, 64)  # imports transformers, which is not measured
    start = time.perf_counter()
    with torch.device("meta"):
        sizes = {"intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
        model = llama(32, 4096, **sizes)
    captured = capture(model, (), batch(2, 128))
    split(captured, uniform(captured.graph, 8))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(time.perf_counter() - start, peak)


if __name__ == "__main__":
    _eight_billion()
