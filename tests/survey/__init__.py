"""The survey: which models train exactly as a pipeline, of the zoo and of libraries that `make test` does not need.

`python -m tests.survey` runs it and writes docs/architectures.md.
"""

from importlib.util import find_spec

import torch

_declarations: list[torch.library.Library] = []  # a declaration lasts as long as its library


def _make_torchvision_importable() -> None:
    """Declare operators of torchvision that cannot be loaded.

    The wheels of package indexes are built for CUDA. With torch for CPUs their operators do not load, and the import
    fails where torchvision describes two of them to torch. No model of the survey calls them.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declarations.append(library)


# Before the zoo is imported, as transformers imports torchvision if it is there.
if find_spec("torchvision"):
    _make_torchvision_importable()
