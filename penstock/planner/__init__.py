"""Chooses cuts, placement, order, microbatches and recomputation, and synthesises schedules."""

from penstock.planner.candidates import Measured
from penstock.planner.devices import DevicePool, compare_layouts, predict_layout, search_devices
from penstock.planner.options import AUTO, PlanOptions
from penstock.planner.plan_search import search
from penstock.planner.recording import RecordedPass, RecordedStep, RecordedTraining
from penstock.planner.recording_files import read_recording
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
from penstock.planner.tensor_parallel_costs import split_tensors
from penstock.planner.token_groups import TokenGroup, TokenPlanner, balance, group_samples, padded_length
from penstock.planner.what_if import Alternative, Part, WhatIf, what_if, what_if_document
