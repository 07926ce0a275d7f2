"""The plan of an AutoPipeline: cuts and order as configured, nothing measured and nothing searched."""

from torch import nn

from penstock.auto.config import AutoPipelineConfig
from penstock.auto.stages import partition_of, schedule_of
from penstock.capture import Microbatch, capture
from penstock.errors import PlanError
from penstock.ir import Plan, Profile, Schedule
from penstock.passes import verify
from penstock.planner import Measured, PlanOptions, search
from penstock.runtime import Solo


def plan_of(config: AutoPipelineConfig, model: nn.Module, example: Microbatch, has_loss_fn: bool) -> Plan:
    """The plan that all ranks find alike, because it hangs on no clock."""
    given = _given(config)
    graph = Solo.of(capture(model, example.args, example.kwargs), has_loss_fn).graph
    partition = partition_of(config, model, graph, given)
    schedule = given or schedule_of(config, partition.num_stages)
    if partition.num_stages != schedule.num_stages:
        stages = {"stages": partition.num_stages, "stages_of_the_CSV": schedule.num_stages}
        raise PlanError("the CSV is for another number of stages", hint="", **stages)
    options = PlanOptions(config.num_ranks, schedule=schedule, partitioner=partition, budget_seconds=0.0)
    return search({config.num_microbatches: Measured(graph, Profile.alike(graph))}, options)


def _given(config: AutoPipelineConfig) -> Schedule | None:
    """The schedule of the CSV, proven; None if there is no CSV."""
    if config.pp_schedule_csv is None:
        return None
    schedule = Schedule.from_csv(config.pp_schedule_csv)
    found = {"ranks": schedule.num_ranks, "microbatches": schedule.num_microbatches}
    asked = {"ranks": config.num_ranks, "microbatches": config.num_microbatches}
    if found != asked:
        raise PlanError("the CSV is for other numbers than configured", csv=found, configured=asked)
    verify(schedule)
    return schedule
