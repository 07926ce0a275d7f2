"""Text: batches of the documentation that ships with Python, letter by letter, the same in every process."""

import builtins
import inspect
from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.demo.gpt import Sizes

NUM_LETTERS = 128
"""plain ASCII; other letters become spaces"""


def shipped_text() -> str:
    """The topics of Python's help, or, where a distribution leaves them out, the docstrings of its builtins."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return "\n\n".join(filter(None, map(inspect.getdoc, vars(builtins).values())))
    return "\n\n".join(topics.values())


def batches(sizes: Sizes, steps: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces from random places of the text, and the letters that follow each letter."""
    letters = torch.tensor([ord(letter) if ord(letter) < NUM_LETTERS else 32 for letter in shipped_text()])
    generator = torch.Generator().manual_seed(seed)
    places = torch.arange(sizes.length + 1)
    for _ in range(steps):
        starts = torch.randint(0, len(letters) - len(places), (sizes.samples, 1), generator=generator)
        pieces = letters[starts + places]
        yield pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()
