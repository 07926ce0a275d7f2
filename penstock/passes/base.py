"""The contract of a pass: a frozen record of its options that returns a new program and leaves its input unchanged."""

from abc import ABC, abstractmethod
from typing import ClassVar

from penstock.ir import Program


class Pass(ABC):
    """One step of lowering, by its name in the table PASSES: adds actions to a program or moves them."""

    name: ClassVar[str]

    @abstractmethod
    def __call__(self, program: Program) -> Program: ...
