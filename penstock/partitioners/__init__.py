"""FAMILY: (Graph, ...) -> Partition, one way to cut per file."""

from penstock.partitioners.explicit import by_modules, cut_after, cut_before
from penstock.partitioners.uniform import uniform

PARTITIONERS = {"uniform": uniform}

__all__ = ["PARTITIONERS", "by_modules", "cut_after", "cut_before", "uniform"]
