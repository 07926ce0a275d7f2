"""The contract of a pass: a frozen record of its options that returns a new program and leaves its input unchanged."""

from abc import ABC, abstractmethod
from typing import ClassVar

from penstock.ir import Program


class Pass(ABC):
    """One named step of lowering, by its name in the table PASSES."""

    name: ClassVar[str]


class ProgramPass(Pass):
    """A step that adds actions to a program or moves them."""

    @abstractmethod
    def __call__(self, program: Program) -> Program: ...
