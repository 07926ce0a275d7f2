"""Random numbers that a model draws with Python's or numpy's functions between its blocks, such as for layer drop.

A torch function mode does not see such a draw. While a forward is recorded, the functions of the modules `random` and
`numpy.random` are replaced by ones that record the draw as a call which returns a tensor. The model gets a number or
an array that holds the tensor: comparing it, computing with it or passing it to a torch function is recorded as if
the model had drawn the tensor. Any other use is found by recording a second forward with other draws.
"""

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from penstock.capture.functions import Entry, FunctionHandler, replaced_entries
from penstock.capture.generators import GeneratorStates, python_generators, seed_python
from penstock.capture.objects import code_origin, user_line
from penstock.errors import CaptureError
from penstock.ir import map_leaves

_64_BITS = (1 << 64) - 1
RANDOMNESS_HINT = (
    "turn it off (for Hugging Face models layerdrop=0, mask_time_prob=0, mask_feature_prob=0 in the configuration), "
    "draw with torch, or keep the module whole (basic_blocks)"
)


def splitmix64(number: int) -> int:
    """The finalizer of the generator splitmix64: 64 bits of which each depends on all bits of the number.

    So neighbouring numbers give seeds of unrelated streams.
    """
    number &= _64_BITS
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _64_BITS
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _64_BITS
    return number ^ (number >> 31)


class DrawSeed(NamedTuple):
    """The seed of the random numbers of one microbatch.

    A draw of a single number between blocks depends on the step alone: the unsplit model draws it once for the whole
    batch. All other draws depend on the microbatch as well.
    """

    step_seed: int
    """of one step, already mixed (`mix_seed` of the runtime), so that the seeds of two steps are far apart"""
    microbatch: int = 0

    def of_call(self, name_hash: int, is_shared: bool) -> int:
        """64 bits for a call: they depend on its name, and not on the partition or the order of calls."""
        number = self.step_seed if is_shared else self.step_seed + self.microbatch
        return splitmix64(number * 0x9E3779B97F4A7C15 + name_hash)


FIRST_SEED = DrawSeed(0)


def hash_name(name: str) -> int:
    """64 bits that are the same in every process, unlike `hash(name)`."""
    return int.from_bytes(blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


def seed_torch(seed: int, is_cuda: bool) -> None:
    torch.default_generator.manual_seed(seed)
    if is_cuda:
        torch.cuda.manual_seed(seed)


@contextmanager
def python_seeded(seed: int) -> Iterator[None]:
    """Seed the generators of Python and numpy, and restore them at exit."""
    with GeneratorStates(python_generators()):
        seed_python(seed)
        yield


class CallSeeds:
    """Seeds the generators of Python and numpy for each call of a recording, and finds out which calls draw from them.

    Numpy takes 0.1 ms to read or set the state of its generator, more than many calls take. Therefore each call draws
    from another bit generator, and draws are found by the next number, not by comparing states.
    """

    def __init__(self) -> None:
        self._before = GeneratorStates(python_generators())
        # Numpy draws normal numbers in pairs, and loses the second one of a pair if the bit generator is replaced.
        self._has_kept_normal = bool(np.random.get_state(legacy=False)["has_gauss"])
        self._bits = np.random.MT19937(0)

    def have_moved(self) -> bool:
        """Whether code outside of the seeded calls has drawn from the generators or seeded them."""
        return self._before.have_moved()

    @contextmanager
    def seeded(self, seed: int) -> Iterator[Callable[[], bool]]:
        """Seed the generators, and restore them at exit.

        Yields a function that returns whether the generators have been used. It draws a number: call it once, last.
        """
        if self._has_kept_normal:
            with python_seeded(seed):
                states = GeneratorStates(python_generators())
                yield states.have_moved
            return
        bits, state = np.random.get_bit_generator(), random.getstate()
        np.random.set_bit_generator(self._bits)
        try:
            seed_python(seed)
            first = _next_numbers()
            seed_python(seed)
            yield lambda: _next_numbers() != first
        finally:
            np.random.set_bit_generator(bits)
            random.setstate(state)


_DRAWS = (partial(random.getrandbits, 64), partial(np.random.bytes, 8))
"""held here, because the names in the modules are replaced while a forward is recorded"""


def _next_numbers() -> list[Any]:
    return [draw() for draw in _DRAWS]


# Recorded draws


@dataclass(frozen=True)
class PythonDraw:
    """A function that draws with Python's or numpy's generators; the call returns numbers and arrays as tensors."""

    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def as_tensor(leaf: object) -> object:
            if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
                return torch.from_numpy(leaf.copy())
            if isinstance(leaf, bool) or not isinstance(leaf, int | float | np.integer):
                return leaf
            # In double precision, in which Python computes.
            return torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else torch.int64)

        return map_leaves(self.function(*args, **kwargs), as_tensor)


class DrawnNumber(float):
    """A drawn number, with the tensor that was recorded for it.

    Comparisons, arithmetic and rounding are those of the tensor, and are recorded with it. The number itself is
    another draw, so that two recordings differ if the model uses it in any other way.
    """

    tensor: Tensor

    def __new__(cls, other_draw: float, tensor: Tensor) -> "DrawnNumber":
        made = super().__new__(cls, other_draw)
        made.tensor = tensor
        return made

    __hash__ = float.__hash__


# Operators of DrawnNumber. Each is applied to the tensor, where a torch function mode records it.


def _comparing(name: str) -> Callable[[DrawnNumber, Any], Any]:
    def compare(self: DrawnNumber, other: Any) -> Any:
        other = other.tensor if isinstance(other, DrawnNumber) else other
        return bool(getattr(self.tensor, name)(other)) if isinstance(other, int | float | Tensor) else NotImplemented

    return compare


def _computing(name: str) -> Callable[[DrawnNumber, Any], Any]:
    def compute(self: DrawnNumber, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        plain = getattr(float, name)(self, float(other))
        return DrawnNumber(plain, getattr(self.tensor, name)(other.tensor if isinstance(other, DrawnNumber) else other))

    return compute


def _rounding(name: str) -> Callable[[DrawnNumber], int]:
    return lambda self: int(getattr(torch, name)(self.tensor))


for _name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"):
    setattr(DrawnNumber, _name, _comparing(_name))
for _name in ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__"):
    setattr(DrawnNumber, _name, _computing(_name))
for _name, _function in {"__int__": "trunc", "__trunc__": "trunc", "__floor__": "floor", "__ceil__": "ceil"}.items():
    setattr(DrawnNumber, _name, _rounding(_function))


class DrawnArray(np.ndarray):
    """A drawn array, with the tensor that was recorded for it. Only torch functions may use it.

    As in a DrawnNumber, the content is another draw.
    """

    tensor: Tensor

    @classmethod
    def of(cls, other_draw: Any, tensor: Tensor) -> "DrawnArray":
        """The other draw as an array that holds the tensor."""
        made = other_draw.view(cls)
        made.tensor = tensor
        return made

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise CaptureError(
            "the model computes with an array that numpy drew between its blocks, where no call can be recorded",
            line=user_line(),
            hint=RANDOMNESS_HINT,
        )


# fmt: off
for _name in (
    "__array_ufunc__", "__array_function__", "__getitem__", "__setitem__", "__iter__", "__bool__", "__int__",
    "__float__", "__index__", "__contains__", "item", "tolist", "astype", "copy", "any", "all", "sum", "nonzero",
    "argsort", "sort", "mean", "max", "min", "argmax", "argmin", "take", "fill", "put", "tobytes", "cumsum",
):
    setattr(DrawnArray, _name, DrawnArray._refuse)
# fmt: on


def exposed_draw(other_draw: Any, recorded: Any) -> Any:
    """The drawn number or array that the model gets, with the tensor that was recorded for it."""
    if not isinstance(recorded, Tensor) or isinstance(other_draw, Tensor):
        return recorded
    if isinstance(other_draw, np.ndarray):
        return DrawnArray.of(other_draw, recorded)
    # An integer may be used as an index: reading it from the tensor records a guard.
    return DrawnNumber(other_draw, recorded) if isinstance(other_draw, float) else type(other_draw)(int(recorded))


def recorded_draw(leaf: object) -> object:
    """The number or array that was recorded for a drawn one, for calls that must see the real draw."""
    if isinstance(leaf, DrawnArray):
        return leaf.tensor.numpy()
    return leaf.tensor.item() if isinstance(leaf, DrawnNumber) else leaf


class NumberOf(tuple):
    """In the arguments of a recorded call: the number in a tensor."""

    def __new__(cls, items: Iterable[Tensor]) -> Any:
        (tensor,) = items
        return tensor.item()


class ArrayOf(tuple):
    """In the arguments of a recorded call: the array in a tensor."""

    def __new__(cls, items: Iterable[Tensor]) -> Any:
        (tensor,) = items
        return tensor.numpy()


# Interception

_NOT_DRAWS = frozenset(("seed", "getstate", "setstate", "get_state", "set_state", "shuffle", "get_bit_generator"))
_DRAWING_FUNCTIONS: list[Entry] = [
    (vars(module), name, function)
    for module, generator in ((random, random._inst), (np.random, np.random.mtrand._rand))
    for name, function in vars(module).items()
    # The functions of the modules are methods of their global generators.
    if getattr(function, "__self__", None) is generator and callable(function)
    if not name.startswith("_") and name not in _NOT_DRAWS
]


def intercept_draws(handler: FunctionHandler, model: nn.Module) -> AbstractContextManager[None]:
    """Route calls of `random.*` and `numpy.random.*` through the handler.

    It is called as `handler(function, args, kwargs)`. Names that the files of the model's classes import
    (`from random import random`) are replaced too.
    """
    functions = {id(function): function for _, _, function in _DRAWING_FUNCTIONS}
    classes = {owner for kind in set(map(type, model.modules())) for owner in kind.__mro__}
    owners = {owner.__module__ for owner in classes}
    files = [vars(sys.modules[name]) for name in owners if name in sys.modules and code_origin(name) != "torch"]
    imported = [
        (file, name, functions[id(value)]) for file in files for name, value in file.items() if id(value) in functions
    ]
    return replaced_entries(handler, [*_DRAWING_FUNCTIONS, *imported])
