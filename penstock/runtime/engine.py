"""Runs the training and evaluation steps of one plan."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from penstock.errors import PenstockError, PenstockWarning, RunError
from penstock.ir import Plan
from penstock.passes import DEFAULT_PASSES
from penstock.runtime.compile import CompiledStep, StepCompiler
from penstock.runtime.executor import ActionTimes, execute, execute_local, watch_step
from penstock.runtime.health import NonfiniteProbe, agree_on_origin, last_nonfinite_gradient
from penstock.runtime.inputs import Batch, BatchSender, BatchSplitter, SplitBatch
from penstock.runtime.loss_head import LossHead, StepWarnings
from penstock.runtime.model_part import ModelPart
from penstock.runtime.options import RunOptions
from penstock.runtime.outputs import share_outputs
from penstock.runtime.stage_runner import StageRunner
from penstock.runtime.step import Result, Step
from penstock.runtime.sync import MAX_CONTENT, Agreement, RankSync, SyncRequest, SyncResult, SyncVote
from penstock.runtime.trace import recorded_trace
from penstock.runtime.transports import make_transport

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""of a loss; ranks exchange the index of its dtype"""
_MASK = (1 << 64) - 1


class Engine:
    """Runs training and evaluation steps on this process's stages, together with all other ranks."""

    def __init__(
        self,
        part: ModelPart,
        plan: Plan,
        sync: RankSync,
        loss_head: LossHead,
        options: RunOptions,
        inputs: str = "all",
        split: Mapping[str, int | None] | None = None,
    ) -> None:
        """`inputs` and `split` are those of `Pipeline`."""
        groups = part.groups
        self._part, self._plan, self._sync, self._options = part, plan, sync, options
        self._groups, self._loss_head = groups, loss_head
        self._runner = StageRunner(part, plan.num_stages - 1, loss_head)
        self._transport = make_transport(groups, part.device)
        ranks = range(plan.num_ranks) if groups.is_local else (groups.rank,)
        passes = (*DEFAULT_PASSES, "add_shard_moves") if part.sharded.modules else DEFAULT_PASSES
        self._compiler = StepCompiler(plan, ranks, self._runner, self._transport, passes)
        self.compiled_steps: dict[tuple[object, ...], CompiledStep] = {}
        self._splitter = BatchSplitter(part, plan, split or {})
        self._sender = BatchSender(part, self._splitter) if inputs == "first" and not groups.is_local else None
        self._agreed_kinds: set[tuple[int, bool]] = set()
        self._warnings = StepWarnings(groups)
        self._last_rank = plan.schedule.placement[plan.num_stages - 1]

    def train(self, batch: Batch, number: int, keeps_outputs: bool, records: bool) -> Result:
        """Run forward and backward of one batch (args, kwargs, target) as step `number`."""
        flags = {"return_outputs": keeps_outputs, "record": records}
        request = SyncRequest("step", number, ", ".join(f"{name}=True" for name, is_on in flags.items() if is_on))
        snapshot = self._part.snapshot
        with watch_step(self._groups.monitor, number, True):
            step, compiled = self._begin_step(batch, request, True, keeps_outputs)
            try:
                times = self._run_training(step, compiled, records)
                result = self._end_step(step, compiled, number, times)
            except BaseException:
                self._undo()
                raise
            if result.skipped:
                self._undo()
            else:
                snapshot.commit()
            return result

    def evaluate(self, batch: Batch, number: int, keeps_outputs: bool) -> Result:
        """Run the forward of one batch in eval mode, without gradients."""
        request = SyncRequest("eval", number, "return_outputs=True" if keeps_outputs else "")
        with watch_step(self._groups.monitor, number, False), torch.no_grad(), _eval_mode(self._part.captured.model):
            step, compiled = self._begin_step(batch, request, False, keeps_outputs)
            self._execute(step, compiled, False)
            return self._end_step(step, compiled, number, None)

    def _begin_step(
        self, batch: Batch, request: SyncRequest, is_training: bool, keeps_outputs: bool
    ) -> tuple[Step, CompiledStep]:
        """Split the batch and agree with all ranks on the step; raises the same error on every rank if one cannot."""
        if self._sender is None:
            split, compiled, mean_size = self._begin_given(batch, request, is_training)
        else:
            split, compiled, mean_size = self._begin_sent(self._sender, batch, request, is_training)
        seed = _mix(self._options.seed, request.step, self._groups.replica)
        microbatches, recordings, inputs = split
        step = Step(
            microbatches,
            recordings,
            is_training,
            inputs=inputs,
            keeps_outputs=keeps_outputs,
            seed=seed,
            mean_size=mean_size,
        )
        return step, compiled

    def _begin_given(
        self, batch: Batch, request: SyncRequest, is_training: bool
    ) -> tuple[SplitBatch, CompiledStep, float]:
        """Begin a step whose batch every rank was given; the ranks compare the steps that they derive from it."""
        groups, every = self._groups, self._options.check_inputs_every
        with self._refusing(request):
            split = self._splitter.split(self._splitter.arranged(batch))
            compiled = self._compiled(split, is_training)
            compares = every and request.step % every == 0 and not groups.is_local
            checksum = self._splitter.checksum(split) if compares else 0
        sums = self._size_and_loss(split, compiled)
        # Only rank 0 of each pipeline contributes, so that the sum over all ranks is a sum over the replicas.
        own_sums = sums if groups.rank == 0 else (0.0, 0.0)
        vote = SyncVote(compiled.agreement, checksum, own_sums)
        if groups.monitor is not None and groups.replicas is None:
            self._sync.start(request, vote)
            # The first stage computes while the votes travel: only the first message waits for the result.
            self._transport.check_before_sending(self._sync.finish)
            return split, compiled, sums[0]
        # Replicas exchange collectives before the first message, so they wait now.
        return split, compiled, self._mean_size(self._sync.exchange(request, vote))

    def _begin_sent(
        self, sender: BatchSender, batch: Batch, request: SyncRequest, is_training: bool
    ) -> tuple[SplitBatch, CompiledStep, float]:
        """Begin a step whose batch only rank 0 was given; the ranks sync first, then receive their parts of it."""
        # The ranks must know the same kinds of batches, or they would wait for tensors that are not sent.
        count = self._plan.num_microbatches
        agreement = Agreement.of_options(
            {"microbatches": f"{count}, after {sender.num_kinds} kinds of batches"}
        )
        offer, vote = None, SyncVote(agreement, sums=(0.0, 0.0), maxes=(0.0,))
        if self._groups.rank == 0:
            with self._refusing(request):
                offer = sender.offer(self._splitter.arranged(batch))
                sums = self._size_and_loss(offer.split, self._compiled(offer.split, is_training))
            is_new = (offer.number, is_training) not in self._agreed_kinds
            vote = SyncVote(agreement, sums=sums, maxes=(float(is_new),), content=(float(offer.number),))
        result = self._sync.exchange(request, vote)
        number = int(result.content(0)[0])
        if result.maxes[0] <= 0:
            split = sender.receive(number) if offer is None else sender.send(offer)
            compiled = self._compiled(split, is_training)
        else:
            # The kind is new to at least one replica: all ranks agree on the step that they derive from it.
            new = SyncRequest("the shapes of a batch", request.step)
            with self._refusing(new):
                split = sender.receive(number) if offer is None else sender.send(offer)
                compiled = self._compiled(split, is_training)
            self._sync.exchange(new, SyncVote(compiled.agreement))
            sender.commit()
            self._agreed_kinds.add((number, is_training))
        return split, compiled, self._mean_size(result)

    def _compiled(self, split: SplitBatch, is_training: bool) -> CompiledStep:
        """The compiled step for a batch; the first batch of each kind compiles it."""
        roots = tuple([self._loss_head.roots(recording, is_training) for recording in split.recordings])
        key = (is_training, roots, *map(id, split.recordings))
        if key not in self.compiled_steps:
            self.compiled_steps[key] = self._compiler.compile(is_training, split.recordings, roots)
        return self.compiled_steps[key]

    @contextmanager
    def _refusing(self, request: SyncRequest) -> Iterator[None]:
        """Raise an error that occurs inside on every rank, at the sync of this request."""
        try:
            yield
        except Exception as error:
            own = error if isinstance(error, PenstockError) else RunError(f"{type(error).__name__}: {error}")
            self._sync.refuse(request, own)
            if isinstance(own, RunError) and not self._groups.is_local:
                own = own.at(rank=self._groups.rank)
            own.is_shared = True
            raise own from (error.__cause__ if isinstance(error, PenstockError) else error)

    def _size_and_loss(self, split: SplitBatch, compiled: CompiledStep) -> tuple[float, float]:
        """The number of samples of this pipeline's batch, and whether it has a loss (1 or 0)."""
        has_target = compiled.is_training or split.microbatches[0].target is not None
        has_loss = has_target if self._loss_head.has_loss_fn else all(compiled.roots)
        return float(sum([microbatch.size for microbatch in split.microbatches])), float(has_loss)

    def _mean_size(self, result: SyncResult) -> float:
        """The number of samples, averaged over the replicas; raises an error if only some replicas have a loss."""
        count, (samples, losses) = self._groups.num_replicas, result.sums[:2]
        if losses not in (0.0, count):
            error = RunError(
                "some replicas have a target or labels and others do not",
                with_loss=int(losses),
                replicas=count,
                hint="give a target, or labels, on every replica or on none",
            )
            error.is_shared = True
            raise error
        return samples / count

    def _run_training(self, step: Step, compiled: CompiledStep, records: bool) -> list[ActionTimes] | None:
        """Run forward and backward, and reduce the gradients."""
        self._part.snapshot.take()
        if self._part.sharded.modules:
            self._part.sharded.begin_step(len(step.microbatches))
        times = self._execute(step, compiled, records)
        self._part.replicas.finish()
        self._part.tied.finish()
        return times

    def _undo(self) -> None:
        """Restore gradients and buffers to their values before the step."""
        self._part.replicas.clear()
        self._part.sharded.clear()
        self._part.snapshot.restore()

    def _execute(self, step: Step, compiled: CompiledStep, records: bool) -> list[ActionTimes] | None:
        times = [ActionTimes() for _ in compiled.ranks] if records else None
        monitor = self._groups.monitor
        self._runner.step = step
        try:
            with _generators_restored():
                if monitor is None:
                    execute_local(compiled.ranks, times)
                else:
                    execute(compiled.ranks[0], monitor.working, times[0] if times else None)
                for rank in compiled.ranks:
                    for slot in rank.send_slots:
                        slot.finish()
                if monitor is not None:
                    # A rank without any message has not checked yet that all ranks take the same step.
                    self._transport.run_check()
        except BaseException as error:
            compiled.clear()
            self._transport.clear()
            if self._transport.problem is not None:
                # The ranks disagree about the step: the action that ran the check did not cause that.
                raise self._transport.problem from None
            cause, lacks_target = error.__cause__, self._loss_head.has_loss_fn and step.microbatches[0].target is None
            if isinstance(error, RunError) and isinstance(cause, TypeError | AttributeError) and not error.hint:
                # The loss function may have failed because it was given None.
                hint = "pipe.step(x, target=y), if the loss function needs a target"
                raise (error.with_hint(hint) if lacks_target else error) from cause
            raise
        finally:
            self._runner.step = None
        return times

    def _end_step(self, step: Step, compiled: CompiledStep, number: int, times: Sequence[ActionTimes] | None) -> Result:
        """Gather losses on every rank, and check losses and gradients for NaN and Inf."""
        groups, count = self._groups, len(step.microbatches)
        own: tuple[float, ...] = ()
        loss, has_loss, dtype = 0.0, 0.0, -1.0
        if step.losses:
            # Only the rank of the last stage has losses: it sends them, and their weights, with its vote.
            weights, losses = self._loss_head.weights(step), [step.losses[index] for index in range(count)]
            values = torch.stack(losses).tolist()
            own, has_loss, dtype = (*values, *weights), 1.0, float(_DTYPES.index(losses[0].dtype))
            # A microbatch of weight 0 does not count, even if its loss is NaN.
            loss = sum([weights[index] * values[index] for index in step.losses if weights[index]])
        added = sum([float(value) for values in step.added.values() for value in values])
        first, last = math.inf, -math.inf
        if step.is_training and self._options.nonfinite != "ignore" and self._loss_head.scaler is None:
            first = step.extremes.first_nonfinite_stage()
            last = last_nonfinite_gradient({i: stage.parameters() for i, stage in self._part.stages.items()})
        found = self._warnings.new(step, self._loss_head, lambda: self._part.parameters)
        request = SyncRequest("the end of step" if step.is_training else "the end of eval", number)
        content = own if len(own) <= MAX_CONTENT else ()
        # The first stage is negated, so that the maximum over the ranks gives the minimum.
        vote = SyncVote(sums=(loss, added, len(found)), maxes=(has_loss, dtype, -first, last), content=content)
        result = self._sync.exchange(request, vote)
        if result.sums[2]:
            self._warnings.issue(found, step.is_training)
        has_loss, dtype, first, last = result.maxes
        kind = _DTYPES[int(dtype)] if has_loss > 0 else torch.float64
        if has_loss > 0:
            own = own if groups.is_local else result.content(self._last_rank) or self._broadcast_losses(own, count)
        total = (result.sums[0] + result.sums[1]) / groups.num_replicas
        outputs = None
        if step.keeps_outputs:
            merged_weights = self._loss_head.weights(step) if step.losses else None
            kept = [step.outputs.get(index) for index in range(count)]
            sizes = [microbatch.size for microbatch in step.microbatches]
            outputs = share_outputs(groups, self._last_rank, self._part.device, kept, sizes, merged_weights)
        return Result(
            torch.tensor(total, dtype=torch.float64).to(kind) if has_loss > 0 else None,
            tuple(torch.tensor(own[:count], dtype=torch.float64).to(kind).unbind()),
            tuple(own[count:]),
            outputs,
            None if times is None else recorded_trace(compiled.program, self._plan.costs, groups, times),
            self._check_finite(step, compiled, number, -first, last) if step.is_training else "",
        )

    def _broadcast_losses(self, own: Sequence[float], count: int) -> tuple[float, ...]:
        """Broadcast losses and weights of more microbatches than fit into a vote."""
        values = torch.tensor(own or [0.0] * 2 * count, dtype=torch.float64)
        return tuple(self._groups.broadcast(values, self._last_rank).tolist())

    def _check_finite(self, step: Step, compiled: CompiledStep, number: int, first: float, last: float) -> str:
        """Raise an error if NaN or Inf was produced; with nonfinite="skip", warn and return why the step is skipped."""
        is_forward = math.isfinite(first)
        if not is_forward and not math.isfinite(last):
            return ""
        stage = int(first) if is_forward else int(last)
        probe = self._run_again(step, compiled)
        origin = agree_on_origin(self._groups, probe.origin(stage if is_forward else None))
        nodes = self._plan.partition.stages[stage]
        is_restored = self._options.restore_gradients
        left = ", gradients, weights and buffers are as before it" if is_restored else ", and with it all gradients"
        error = RunError(
            f"a loss or gradient is not a finite number; this step was dropped{left}",
            step=number,
            stage=origin.stage if origin else stage,
            during="forward" if is_forward else "backward",
            **(origin.error_values if origin else {"nodes": f"{nodes[0]} to {nodes[-1]}"}),
            hint='a smaller learning rate, clip_grad_norm_, or nonfinite="skip" to continue without this batch',
        )
        if self._options.nonfinite == "raise":
            error.is_shared = True
            raise error
        if self._groups.is_first:
            # Points at the user's call of step.
            warnings.warn(str(error), PenstockWarning, stacklevel=5)
        return str(error)

    def _run_again(self, step: Step, compiled: CompiledStep) -> NonfiniteProbe:
        """Run a step once more from the state before it, on every rank, to find where NaN or Inf came from.

        The second run is deterministic, so gradients and buffers end up as after the first.
        """
        self._undo()
        # The weights are reused: a loss function that keeps state could give other weights in a second run.
        again = Step(
            step.microbatches,
            step.recordings,
            True,
            inputs=step.inputs,
            seed=step.seed,
            mean_size=step.mean_size,
            weights=step.weights,
        )
        with NonfiniteProbe(self._part.stages).active() as probe:
            self._runner.probe = probe
            try:
                self._run_training(again, compiled, False)
            finally:
                self._runner.probe = None
        return probe


@contextmanager
def _eval_mode(model: torch.nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


@contextmanager
def _generators_restored() -> Iterator[None]:
    """Restore torch's generators, which replay seeds, so that the user's random numbers continue as without it."""
    host = torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.set_rng_state(host)
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)


def _mix(*numbers: int) -> int:
    """A 63-bit seed in which every bit depends on all numbers and their order (the finisher of splitmix64)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 29) * 0x94D049BB133111EB & _MASK
        state ^= state >> 32
    return state >> 1
