"""Bytes that training holds besides parameters and activations: gradients, optimizer state, master weights."""

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.errors import CostError
from penstock.ir.arguments import choices_text, find_named, is_count
from penstock.ir.dtypes import ITEM_BYTES
from penstock.ir.graph import TensorSpec

_FLOAT32 = 4
_HALF = 2

OPTIMIZERS = {
    "adamw": "two values per parameter",
    "adam8bit": "two bytes per parameter, as in bitsandbytes",
    "sgd": "nothing, as without momentum",
    "muon": "one value per entry of a matrix, and two, as AdamW, per entry of any other parameter",
    "none": "nothing",
}
"""the state that each optimizer holds"""
PRECISIONS = ("fp32", "bf16", "fp16", "pure-bf16")


@dataclass(frozen=True)
class StateBytes:
    """Bytes that a stage holds during the whole step."""

    parameters: int = 0
    """bytes of the parameters"""
    gradients: int = 0
    """bytes of their gradients"""
    optimizer: int = 0
    """bytes of the optimizer's state"""
    stashed: int = 0
    """other versions of the parameters that an asynchronous pipeline keeps"""

    @property
    def total(self) -> int:
        """Parameters, gradients, optimizer state and stashed parameters together."""
        return self.parameters + self.gradients + self.optimizer + self.stashed


@dataclass(frozen=True)
class TrainingState:
    """What is held per trained parameter.

    Optimizer state has the dtype of the parameters, as in torch.optim. With precision "bf16" or "fp16", parameters of
    two bytes have master weights and optimizer state in float32: 16 bytes per parameter with AdamW, as many as for
    float32 parameters under autocast.
    """

    optimizer: str = "none"
    """one of OPTIMIZERS"""
    precision: str | None = None
    """one of PRECISIONS; None: as the model is"""
    optimizer_shards: int = 1
    """replicas over which the optimizer's state and the master weights are sharded, as in ZeRO stage 1"""

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise CostError("unknown optimizer", got=repr(self.optimizer), hint=f"one of {', '.join(OPTIMIZERS)}")
        if self.precision not in (None, *PRECISIONS):
            problem = f"precision must be {choices_text((*PRECISIONS, None))}"
            raise CostError(problem, got=repr(self.precision), hint=f'precision="{PRECISIONS[0]}"')
        if not is_count(self.optimizer_shards):
            raise CostError("optimizer_shards must be a whole number, 1 or more", got=repr(self.optimizer_shards))

    @classmethod
    def named(cls, optimizer: str | None, precision: str | None = None) -> "TrainingState":
        """The state of an optimizer by name; case and punctuation do not matter.

        Args:
            optimizer: one of OPTIMIZERS; None: no state
            precision: one of PRECISIONS; None: as the model is
        """
        if optimizer is not None and not isinstance(optimizer, str):
            raise CostError("optimizer must be a name", got=repr(optimizer), hint=f"one of {', '.join(OPTIMIZERS)}")
        names = {name: name for name in OPTIMIZERS}
        found = find_named("optimizer", optimizer or "none", names, CostError, {"adam": "adamw"})
        return cls(found, precision)

    def state_bytes(self, specs: Iterable[TensorSpec]) -> StateBytes:
        """Bytes that one replica holds for parameters and buffers during the whole step."""
        found = list(specs)
        return StateBytes(
            sum(spec.bytes for spec in found),
            sum(map(self.gradient_bytes, found)),
            sum(map(self.optimizer_bytes, found)),
        )

    def gradient_bytes(self, spec: TensorSpec) -> int:
        """Bytes of the gradient of a parameter."""
        return spec.bytes if spec.requires_grad else 0

    def optimizer_bytes(self, spec: TensorSpec) -> int:
        """Bytes of the optimizer's state for a parameter that one replica holds, master weights included."""
        if not spec.requires_grad or self.optimizer == "none":
            return 0
        size = ITEM_BYTES[spec.dtype]
        count = spec.bytes // size
        has_master = size == _HALF and self.precision in ("bf16", "fp16")
        value = _FLOAT32 if has_master else size
        master = count * _FLOAT32 if has_master else 0
        if self.optimizer == "adam8bit":
            state = 2 * count
        else:
            state = {"adamw": 2, "sgd": 0, "muon": 1 if len(spec.shape) > 1 else 2}[self.optimizer] * value * count
        return -(-(master + state) // self.optimizer_shards)
