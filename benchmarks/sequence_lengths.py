"""sequence_lengths: CPU time of steps with changing sequence lengths, compared with one length; memory; a Trainer."""

import gc
import resource
import sys
import time
from collections.abc import Iterator
from subprocess import run
from tempfile import TemporaryDirectory
from typing import Any

import torch

import penstock
from benchmarks.capture import batch, llama
from benchmarks.table import Line, Table

_RANKS, _MICROBATCHES, _SAMPLES = 2, 4, 8
_NEW_LENGTH, _KNOWN_LENGTH = 3.0, 1.3
"""maximum time of a step with a new length, and with one that occurred before, divided by one with a constant length"""
_GROWTH = 0.05
"""maximum relative growth of memory during the second half of the lengths"""
_LENGTHS = range(65, 129)
_TRAINER = 3.0
"""maximum time of a PipelineTrainer divided by that of a Trainer"""
_MANY, _STRIDE = 1000, 397
"""number of lengths for the memory test, and a stride that is coprime to it, so that every length occurs"""


def tables() -> tuple[Table, ...]:
    """All tables of this benchmark."""
    return (steps(), memory(), trainer())


def steps(lengths: range = _LENGTHS, rounds: int = 3) -> Table:
    """CPU seconds of steps with different lengths compared with steps of the longest one; maximum of two ranks."""

    def lines() -> Iterator[Line]:
        model = llama(8, 64)
        plan = _plan(model, lengths[-1])
        ranks = penstock.launch(_seconds, _RANKS, plan, model, lengths, rounds)
        same, new, known = (max(column) for column in zip(*ranks, strict=True))
        for name, seconds, target in (("new length", new, _NEW_LENGTH), ("known length", known, _KNOWN_LENGTH)):
            cells = (name, f"{1e3 * same:.1f}", f"{1e3 * seconds:.1f}", f"{seconds / same:.2f}")
            yield Line(cells, seconds / same, target, at_least=False)

    title = f"Llama with 8 layers on {_RANKS} ranks, {len(lengths)} lengths; CPU milliseconds per step"
    return Table(title, ("step", "one length", "lengths", "ratio"), lines())


def memory(count: int = _MANY) -> Table:
    """Memory of a new process after all lengths, compared with that after half of them."""

    def lines() -> Iterator[Line]:
        command = [sys.executable, "-m", "benchmarks.sequence_lengths", str(count)]
        half, whole = map(float, run(command, capture_output=True, text=True, check=True).stdout.split()[-2:])
        cells = (f"{count} lengths", f"{half:.0f} MiB", f"{whole:.0f} MiB", f"{whole / half - 1:+.1%}")
        yield Line(cells, whole / half - 1, _GROWTH, at_least=False)

    return Table("memory when every step has a new length", ("run", "half", "all", "growth"), lines())


def trainer(num_steps: int = 128) -> Table:
    """CPU seconds of a PipelineTrainer on batches of random lengths, compared with a Trainer; with construction."""

    def lines() -> Iterator[Line]:
        from transformers import Trainer

        from penstock.hf import PipelineTrainer

        _trainer_seconds(Trainer, 2)
        plain = _trainer_seconds(Trainer, num_steps)
        options = {"ranks": _RANKS, "microbatches": _MICROBATCHES, "local": True}
        seconds = _trainer_seconds(PipelineTrainer, num_steps, schedule="1f1b", **options)
        cells = (f"{num_steps} steps", f"{plain:.1f}", f"{seconds:.1f}", f"{seconds / plain:.2f}")
        yield Line(cells, seconds / plain, _TRAINER, at_least=False)

    columns = ("run", "Trainer", "Pipeline", "ratio")
    title = f"Trainer with {len(_LENGTHS)} random lengths, both in one process; CPU seconds"
    return Table(title, columns, lines())


def _trainer_seconds(kind: Any, num_steps: int, **options: Any) -> float:
    """CPU seconds of a training from the construction of the Trainer to the end."""
    import random

    from transformers import TrainingArguments

    torch.manual_seed(0)
    draw, model = random.Random(0), llama(8, 64)
    lengths = draw.choices(_LENGTHS, k=num_steps)
    tokens = [torch.randint(0, 256, (length,)) for length in lengths for _ in range(_SAMPLES)]
    data = [{"input_ids": row, "labels": row} for row in tokens]
    with TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory,
            max_steps=num_steps,
            per_device_train_batch_size=_SAMPLES,
            train_sampling_strategy="sequential",
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            log_level="error",
            save_strategy="no",
        )
        start = time.process_time()
        kind(model=model, args=arguments, train_dataset=data, **options).train()
        return time.process_time() - start


def _plan(model: Any, length: int) -> penstock.Plan:
    return penstock.plan(model, kwargs=batch(_SAMPLES, length), ranks=_RANKS, microbatches=_MICROBATCHES)


def _seconds(plan: penstock.Plan, model: Any, lengths: range, rounds: int) -> tuple[float, float, float]:
    """CPU seconds of a step on this rank: with the longest length, with a new length, and with a known length.

    The first and last are the minimum over the rounds of the mean over lengths. A new length occurs once: the median.
    """
    torch.set_num_threads(1)
    pipe = penstock.Pipeline(model, plan)

    def seconds(length: int) -> float:
        given = batch(_SAMPLES, length)
        start = time.process_time()
        pipe.step(**given)
        cpu = time.process_time() - start
        model.zero_grad()
        return cpu

    # The first step also detects the reduction of the loss.
    seconds(lengths[-1] + 1)
    seconds(lengths[-1])
    new = sorted(map(seconds, lengths[:-1]))
    # Interleaved, because other load on the machine changes over time.
    means = [
        [sum(map(seconds, taken)) / len(lengths) for taken in ([lengths[-1]] * len(lengths), lengths)]
        for _ in range(rounds)
    ]
    same, known = map(min, zip(*means, strict=True))
    return same, new[len(new) // 2], known


def _memory(count: int) -> None:
    """Prints the resident memory after half of the lengths and after all, in MiB."""
    model = llama(2, 16)
    pipe = penstock.Pipeline(model, _plan(model, 8), local=True)
    for number in range(count):
        if number == count // 2:
            print(_resident())
        # Short and long lengths are mixed, so that both halves need the same memory for activations.
        pipe.step(**batch(_SAMPLES, 8 + number * _STRIDE % count))
    print(_resident())


def _resident() -> float:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


if __name__ == "__main__":
    _memory(int(sys.argv[1]))
