"""Chooses cuts, placement, order, microbatches and recomputation, and synthesises schedules. Files in reading order:

options.py                  PlanOptions: what is asked for, and what is left open
candidates.py               layouts (cuts and placement) for the options, and plans made from them
plan_search.py              `search`: the best candidate within a budget of seconds
explain.py                  why the plan was chosen, why others lost, why none fits
synthesis/                  orders made for given costs, and lower bounds of any order
device_search.py            `DeviceSearch`: replicas x pipeline ranks x tensor parallelism over a number of devices
tensor_parallel_costs.py    the costs of stages whose tensors are split over ranks
resize.py                   plans and profiles for other numbers and sizes of microbatches
token_groups.py             microbatches of at most N padded tokens, and their order
streams.py                  steps without a flush between them, and the staleness of their weights
slow_ranks.py               finds a slow rank while training, with advice
training_traces.py          passes recorded by any framework; training_trace_files.py reads them
what_if.py                  where the time of a recording goes, and what would be faster
"""

from penstock.planner.candidates import Measured
from penstock.planner.device_search import DevicePool, DeviceSearch
from penstock.planner.options import AUTO, PartitionerChoice, PlanOptions, ScheduleChoice
from penstock.planner.plan_search import search
from penstock.planner.resize import interpolate_profile, resized_schedule, with_microbatches
from penstock.planner.slow_ranks import SlowRankAdvisor
from penstock.planner.streams import (
    STALENESS,
    StageStaleness,
    Stream,
    check_stream,
    plan_staleness,
    simulate_stream,
    staleness_lines,
    staleness_table,
)
from penstock.planner.synthesis import ScheduleProblem, is_too_large, synthesise
from penstock.planner.tensor_parallel_costs import TensorParallel, split_tensors
from penstock.planner.token_groups import TokenGroup, TokenPlanner, balance, group_samples, padded_length
from penstock.planner.training_trace_files import read_recording
from penstock.planner.training_traces import RecordedPass, RecordedStep, RecordedTraining
from penstock.planner.what_if import Alternative, Straggler, WhatIf, what_if, what_if_document
