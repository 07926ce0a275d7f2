"""Constants: tensors that are no part of the model, in the code if they are small, else in a file beside it."""

import hashlib
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from penstock.codegen.layout import Chain, Code, call, lines, named, quoted

_SMALL = 16
_INLINE = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


class Constants:
    """The expressions for tensors, and the content of the file that some are read from."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[str, Tensor]] = {}

    def code(self, tensor: Tensor) -> Code:
        """The expression for a tensor."""
        if self._is_small(tensor):
            return call("torch.tensor", [repr(tensor.tolist()), named("dtype", str(tensor.dtype))])
        name, _ = self._kept.setdefault(id(tensor), (f"constant{len(self._kept)}", tensor))
        return f"CONSTANTS[{quoted(name)}]"

    def _is_small(self, tensor: Tensor) -> bool:
        is_usual = tensor.layout is torch.strided and tensor.dtype in _INLINE and tensor.device.type == "cpu"
        return is_usual and 0 < tensor.numel() <= _SMALL and bool(tensor.isfinite().all())

    @property
    def content(self) -> bytes:
        """What the file beside the code holds; nothing if it is not needed."""
        held = {name: tensor.detach().cpu().contiguous() for name, tensor in self._kept.values()}
        return save(held) if held else b""

    def lines(self, path: Path) -> list[str]:
        """The statements that read the file."""
        content = self.content
        digest = hashlib.sha256(content).hexdigest()
        reading = Chain(("CONSTANTS = ", call("constants", [quoted(path.name), quoted(digest)])))
        return lines(reading) if content else []
