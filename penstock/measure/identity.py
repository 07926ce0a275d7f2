"""Identity: all that a measurement depends on, as a key that is the same in every process that would measure alike."""

import hashlib

import torch

from penstock.measure.device import device_name, home_of
from penstock.measure.form import Forms, sources
from penstock.measure.kinship import form_of
from penstock.measure.subject import Subject

_METHOD = 1
"""counts the ways of measuring: figures of another one do not compare"""


def identity(subject: Subject) -> str:
    """A digest of the model, its code, the form of its batch, the device, and the settings of torch."""
    forms = Forms(with_places=True)
    nodes = [form_of(subject, node, forms) for node in subject.graph.nodes]
    parts = (_METHOD, subject.graph.fingerprint, sources(subject.model), *_settings(subject), *nodes)
    return hashlib.sha256("\n".join(map(str, parts)).encode("utf-8", "surrogatepass")).hexdigest()


def _settings(subject: Subject) -> tuple[object, ...]:
    device = home_of(subject.model)
    kind = device.type if torch.amp.is_autocast_available(device.type) else "cpu"
    return (
        device_name(device),
        torch.__version__,
        torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
    )
