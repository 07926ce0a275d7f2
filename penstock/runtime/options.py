"""Run options of a Pipeline: transport, seed, handling of NaN and Inf, timeouts."""

from dataclasses import dataclass

from penstock.errors import RunError
from penstock.ir import as_int, choices_text, is_finite

NONFINITE = ("raise", "skip", "ignore")
TRANSPORTS = ("auto", "shared", "distributed")


@dataclass(frozen=True)
class RunOptions:
    """Options of a Pipeline that do not depend on its model."""

    seed: int = 0
    """random numbers inside the model depend only on it, the step, the microbatch and the block"""
    nonfinite: str = "raise"
    """what to do when a loss or gradient is NaN or Inf: "raise", "skip" the step, or "ignore" it"""
    deadline_seconds: float = 60.0
    """how long a rank waits for another before it raises an error; in a first step, the time in which ranks record the
    model, compile the step or compute is added"""
    check_inputs_every: int = 100
    """interval in steps at which the ranks compare their whole batches; in every second step between, they compare a
    sample of every tensor, of those on other devices than the CPU every 10 steps; 0: never"""
    check_model: bool = True
    """whether the ranks compare their models before the first step: code and constants, and the values of parameters
    unless weights are loaded; otherwise only names, shapes and dtypes"""
    restore_gradients: bool = True
    """whether a failed step restores the gradients of earlier steps, which takes the memory of one more set of them
    while several steps accumulate; otherwise a failed step drops all gradients"""

    max_active_stages: int = 3
    """how many stages of a rank may have their sharded parameters gathered at once, if `parallelize_fn` shards them"""

    transport: str = "auto"
    """how messages are sent between processes: "distributed", with the process group of torch.distributed (gloo, NCCL);
    "shared", in memory that the ranks share, which must all compute on the CPUs of one host; "auto", in shared memory
    between ranks on the CPUs of one host, and with torch.distributed between all others"""

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            got = repr(self.transport)
            raise RunError(f"transport must be {choices_text(TRANSPORTS)}", got=got, hint='"auto"')
        if (as_int(self.max_active_stages) or 0) < 1:
            raise RunError("max_active_stages must be an integer of 1 or more", got=repr(self.max_active_stages))
        if self.nonfinite not in NONFINITE:
            got = repr(self.nonfinite)
            raise RunError(f"nonfinite must be {choices_text(NONFINITE)}", got=got, hint='"skip"')
        if not (is_finite(self.deadline_seconds) and self.deadline_seconds > 0):
            raise RunError("deadline_seconds must be a number above 0", got=repr(self.deadline_seconds), hint="60.0")
        for name, value in (("seed", self.seed), ("check_inputs_every", self.check_inputs_every)):
            number = as_int(value)
            if number is None or number < 0:
                raise RunError(f"{name} must be an integer of 0 or more", got=repr(value))
        for name, flag in (("restore_gradients", self.restore_gradients), ("check_model", self.check_model)):
            if not isinstance(flag, bool):
                raise RunError(f"{name} must be True or False", got=repr(flag))
