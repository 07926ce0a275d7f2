"""The contract of a pass: a frozen record of its options that turns one noun into the next and mutates nothing."""

from abc import ABC, abstractmethod
from typing import ClassVar

from penstock.ir import Program, Schedule


class Pass(ABC):
    """One named step of lowering."""

    name: ClassVar[str]


class ScheduleToSchedule(Pass):
    """A step that rewrites the order of compute actions."""

    @abstractmethod
    def __call__(self, schedule: Schedule) -> Schedule: ...


class ScheduleToProgram(Pass):
    """The step that spells out what the ranks say to each other."""

    @abstractmethod
    def __call__(self, schedule: Schedule) -> Program: ...


class ProgramToProgram(Pass):
    """A step that adds to a program or moves what is in it."""

    @abstractmethod
    def __call__(self, program: Program) -> Program: ...
