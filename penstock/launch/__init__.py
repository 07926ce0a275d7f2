"""MECHANISM: a function -> processes joined by torch.distributed, what each of them is doing, and why it stopped."""

from penstock.launch.board import LARGEST_FAILURE, VARIABLE, Board
from penstock.launch.failure import Failure, one_line
from penstock.launch.faults import allowed
from penstock.launch.hang import explain
from penstock.launch.injection import Injection
from penstock.launch.launch import launch
from penstock.launch.leaving import wait_before_leaving
from penstock.launch.liveness import host
from penstock.launch.lives import Death, Endurance, Lives, Next
from penstock.launch.meeting import shared_directory
from penstock.launch.scratch import scratch_directory
from penstock.launch.status import Status, occasion_code
from penstock.launch.stopping import Wish, passing_on, wish_to_stop
from penstock.launch.watch import Watch

__all__ = [
    "LARGEST_FAILURE",
    "VARIABLE",
    "Board",
    "Death",
    "Endurance",
    "Failure",
    "Injection",
    "Lives",
    "Next",
    "Status",
    "Watch",
    "Wish",
    "allowed",
    "explain",
    "host",
    "launch",
    "occasion_code",
    "one_line",
    "passing_on",
    "scratch_directory",
    "shared_directory",
    "wait_before_leaving",
    "wish_to_stop",
]
