"""Facts that must be equal on all ranks before they exchange data: plan, options, model and batch.

Ranks exchange a digest; the text behind it is sent only if digests differ, to name the first difference.
"""

import hashlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.capture import MODEL_LINE, NUMPY_DTYPES, SEPARATOR, as_bytes, spec_of
from penstock.errors import RunError
from penstock.ir import Crossing, Program

_STAGES, _OPTION = "stages ", "option "
_NUM_SAMPLED, _MAX_WHOLE_BYTES = 4096, 1 << 16
"""about how many entries a sample has, and the size of the largest tensors that are not sampled"""
BATCH_INTERVAL = 2
"""steps between comparisons of batches"""
_DEVICE_INTERVAL = 10
"""steps between samples of tensors that are not on the CPU: reading them waits for the device"""
_NUM_SHOWN = 64
"""how many entries of a tensor, or characters of another value, ranks exchange to find the first that differs"""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Agreement:
    """Facts that must be equal on all ranks, one per line; ranks compare a digest and exchange lines only to report."""

    def __init__(self, lines: Iterable[str] = ()) -> None:
        self.lines = tuple(lines)
        encoded = self.text.encode(errors="replace")
        self.digest = int.from_bytes(hashlib.sha256(encoded).digest()[:8], "big", signed=True)

    @property
    def text(self) -> str:
        """All lines. Not stored: many agreements share the lines of the model."""
        return "\n".join(self.lines)

    @classmethod
    def of_step(
        cls,
        program: Program,
        edges: Sequence[Mapping[tuple[int, int], Crossing]],
        name: str,
        description: Iterable[str] = (),
    ) -> "Agreement":
        """The description of the model, the order of actions and every value that crosses between stages."""
        order = hashlib.sha256(program.table.codes.tobytes() + program.table.starts.tobytes()).hexdigest()
        lines = [*description, name, f"program of {len(program.table.codes)} actions {order[:16]}"]
        for microbatch, crossings in enumerate(edges):
            for (producer, consumer), crossing in sorted(crossings.items()):
                for value in crossing.values:
                    strides = f" order {list(value.spec.order)}" if value.spec.order else ""
                    gradient = " with gradient" if value.spec.requires_grad else ""
                    gradient += ", if it has one" if value.name in crossing.optional_gradients else ""
                    edge = f"{_STAGES}{producer} to {consumer}, microbatch {microbatch}"
                    lines.append(f"{edge}: {value.name!r} {value.spec}{strides}{gradient}")
        return cls(lines)

    @classmethod
    def of_optimizer(cls, optimizer: Any) -> "Agreement":
        """The class of an optimizer and the defaults of its hyperparameters.

        Not its groups: they may differ between ranks, each of which has other parameters.
        """
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper has this attribute
        settings = {}
        for name, value in sorted(getattr(optimizer, "defaults", {}).items()):
            value = value.tolist() if isinstance(value, Tensor) else value
            if type(value) in (*_PLAIN, list, tuple):
                settings[f"{name} of the optimizer"] = repr(value)
        return cls.of_options({"optimizer": type(optimizer).__qualname__, **settings})

    @classmethod
    def of_options(cls, options: Mapping[str, object]) -> "Agreement":
        """Options by name."""
        return cls(f"{_OPTION}{name}: {value}" for name, value in options.items())


def autocast_dtype(device_type: str) -> str:
    """The dtype in which autocast computes on a type of device now, or "off"."""
    is_on = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return str(torch.get_autocast_dtype(device_type)) if is_on else "off"


def first_difference(
    agreements: Sequence[Sequence[str]], kind: str = "rank", ranks: Sequence[int] | None = None
) -> RunError | None:
    """The error for the first line of an agreement that differs between the first rank and another one.

    `ranks` are the numbers of the ranks, by default from 0.
    """
    ranks = ranks or range(len(agreements))
    for rank, lines in zip(ranks, agreements, strict=True):
        for first, other in zip_longest(agreements[0], lines, fillvalue="nothing"):
            if first == other:
                continue
            if first.startswith(_OPTION) and other.startswith(_OPTION):
                (name, _, value), (other_name, _, another) = (
                    line.removeprefix(_OPTION).partition(": ") for line in (first, other)
                )
                if other_name != name:
                    another = "none of this name"
                options: dict[str, object] = {f"{kind}_{ranks[0]}": value, f"{kind}_{rank}": another}
                hint = f"the same arguments, code and versions of packages on every {kind}"
                return RunError(f"{name} must be the same on every {kind}", hint=hint, **options)
            if first.startswith(MODEL_LINE) or other.startswith(MODEL_LINE):
                return _different_models(first, other, kind, (ranks[0], rank))
            values: dict[str, object] = {f"{kind}_{ranks[0]}": first, f"{kind}_{rank}": other}
            edge = next((line for line in (first, other) if line.startswith(_STAGES)), "")
            if edge:
                producer, consumer = edge.removeprefix(_STAGES).split(":")[0].split(" to ")
                values = {"producer": f"stage {producer}", "consumer": f"stage {consumer.split(',')[0]}", **values}
            return RunError(
                f"the {kind}s disagree about the values that pass between the stages",
                hint="give every rank the same model, plan, options and shape of batch; parallelize_fn must keep the "
                "shapes of values between blocks; requires_grad must be set on the whole model on every rank",
                **values,
            )
    return None


def _different_models(first: str, other: str, kind: str, ranks: tuple[int, int]) -> RunError:
    """The error for the lines of two ranks that describe parts of a model, with their first difference."""
    place, _, text = first.removeprefix(MODEL_LINE).partition(": ")
    other_place, _, other_text = other.removeprefix(MODEL_LINE).partition(": ")
    shown = (first.removeprefix(MODEL_LINE), other.removeprefix(MODEL_LINE))
    if not first.startswith(MODEL_LINE):
        place, shown = other_place, ("no such call", shown[1])
    elif not other.startswith(MODEL_LINE):
        shown = (shown[0], "no such call")
    elif place == other_place:
        pairs = zip_longest(text.split(SEPARATOR), other_text.split(SEPARATOR), fillvalue="nothing")
        shown = next(pair for pair in pairs if pair[0] != pair[1])
    values = dict(zip((f"{kind}_{rank}" for rank in ranks), shown, strict=True))
    return RunError(
        f"the {kind}s have different models",
        where=place,
        **values,
        hint=f"the same code, constants and arguments of the model on every {kind}",
    )


# Batches


def checksum(values: Mapping[str, object], step: int | None = None) -> int:
    """A number that differs, almost certainly, if a tensor entry or plain value differs.

    Never 0, which stands for batches that are not compared. With `step`, large tensors are sampled: different entries
    each time, so that n / 4096 successive comparisons use every entry of a tensor of n entries. Of tensors that are not
    on the CPU, entries are used in every tenth step, and otherwise shape and dtype only.
    """
    total = 0
    for name, leaf in values.items():
        if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            name = f"{name} {leaf.dtype} {leaf.shape}"
            leaf = torch.from_numpy(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8))
        if isinstance(leaf, Tensor):
            crc = _spec_crc(name, leaf.dtype, leaf.shape)
            is_host = leaf.device.type == "cpu"
            if step is None or is_host or step % _DEVICE_INTERVAL == 0:
                entries = leaf.detach() if leaf.requires_grad else leaf
                if step is not None and leaf.nbytes > _MAX_WHOLE_BYTES:
                    number = step // (BATCH_INTERVAL if is_host else _DEVICE_INTERVAL)
                    entries = sample(entries, _NUM_SAMPLED, number)
                has_numpy_view = is_host and entries.is_contiguous() and entries.dtype in NUMPY_DTYPES
                if not has_numpy_view or entries.is_neg():  # numpy() refuses a negated view
                    entries = as_bytes(entries.cpu())
                crc = zlib.crc32(entries.numpy(), crc)
        elif type(leaf) in _PLAIN:
            crc = zlib.crc32(f"{name} {leaf!r}".encode())
        else:
            continue
        # A sum, as ranks may pass arguments by name in different orders.
        total += crc
    return total & 0xFFFFFFFF or 1


@lru_cache(maxsize=4096)  # each kind of batch adds an entry for each of its tensors
def _spec_crc(name: str, dtype: torch.dtype, shape: torch.Size) -> int:
    return zlib.crc32(f"{name} {dtype} {tuple(shape)}".encode())


def sample(tensor: Tensor, count: int, number: int = 0) -> Tensor:
    """About `count` entries at equal distances, others for each `number`; the same ones for any memory layout."""
    interval = max(1, tensor.numel() // count)
    start = number % interval
    if tensor.is_contiguous():
        return tensor.view(-1)[start::interval]
    # Flattening would copy all of it.
    indices = torch.arange(start, tensor.numel(), interval, device=tensor.device)
    return tensor[torch.unravel_index(indices, tensor.shape)]


def describe_batch(leaves: Mapping[str, object]) -> dict[str, list[Any]]:
    """By name: the shape and dtype of a tensor, the checksum of all entries, and the first entries as text."""
    found: dict[str, list[Any]] = {}
    for name, leaf in leaves.items():
        content = checksum({name: leaf})
        if isinstance(leaf, Tensor):
            entries = leaf.detach().flatten()[:_NUM_SHOWN].cpu().tolist()
            found[name] = [str(spec_of(leaf)), content, [str(entry) for entry in entries]]
        else:
            found[name] = [f"{str(leaf)[:_NUM_SHOWN]} ({type(leaf).__name__})", content, []]
    return found


def different_batches(batches: Sequence[Mapping[str, Sequence[Any]]]) -> RunError:
    """The error for ranks whose batches differ, with the first input that differs between rank 0 and another rank."""
    hint = 'the same batch on every rank (with the same seed of the data loader), or inputs="first"'
    for rank, batch in enumerate(batches):
        for name in dict.fromkeys((*batches[0], *batch)):
            first, other = (found.get(name) for found in (batches[0], batch))
            if first == other:
                continue
            shown = [each[0] if each else "not given" for each in (first, other)]
            if first and other and shown[0] == shown[1]:
                pairs = enumerate(zip(first[2], other[2], strict=True))
                index = next((index for index, (one, another) in pairs if one != another), None)
                if index is not None:
                    texts = [f"entry {index}: {each[2][index]}" for each in (first, other)]
                else:
                    # Only tensors are described by their entries.
                    after = f"entry {len(first[2]) - 1}" if first[2] else f"the first {_NUM_SHOWN} characters"
                    texts = [f"after {after}"] * 2
                shown = [f"{spec} {text}" for spec, text in zip(shown, texts, strict=True)]
            values = {"rank_0": shown[0], f"rank_{rank}": shown[1]}
            return RunError("the ranks were given different batches", input=name, **values, hint=hint)
    return RunError("the ranks were given different batches", hint=hint)
