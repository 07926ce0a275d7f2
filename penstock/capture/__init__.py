"""Records the forward of any nn.Module on an example batch, and replays parts of it.

    capture(model, args) --> Captured: the Graph, and a Recording for every kind of batch
    Captured.replay(recording, nodes, ...) --> Replay: some calls of the recording, run on new values

The forward runs under a `Recorder` (`recorder.py`), which names tensors (`tensor_table.py`), encodes arguments as plain
data (`arguments.py`; `objects.py` makes containers of objects that hold tensors) and detects side effects
(`effects.py`, `call_context.py`). Everything that it changes is restored (`isolation.py`, `generators.py`).
`captured.py` decides which recording holds for a batch (`fingerprint.py`, `guards.py`), and keeps the recordings used
last (`lru_cache.py`). `description.py` describes models and recordings in text, which ranks compare.
"""

from penstock.capture.captured import Captured, capture, without_cache
from penstock.capture.cuts import Cut, Split
from penstock.capture.description import MODEL_LINE, SEPARATOR, describe_model, describe_recording
from penstock.capture.draws import DrawSeed
from penstock.capture.generators import GeneratorStates, python_generators, seed_generators, torch_generators
from penstock.capture.granularity import Granularity
from penstock.capture.hooks import intercept_modules, without_user_hooks
from penstock.capture.isolation import internal_call, is_internal_call, isolated, uncompiled
from penstock.capture.lru_cache import LruCache
from penstock.capture.microbatches import Microbatch, Splitting, explain_failure, microbatch_sizes, split_batch
from penstock.capture.objects import MODULE_ATTRIBUTES, code_origin, copy_leaf, object_items, register_containers
from penstock.capture.recording import Recording, make_recording
from penstock.capture.replay import Replay, call_hook
from penstock.capture.split_search import additive_dim, find_split
from penstock.capture.tensor_table import device_of, has_gradient, spec_of, storage_id

__all__ = [
    "MODEL_LINE",
    "MODULE_ATTRIBUTES",
    "SEPARATOR",
    "Captured",
    "Cut",
    "DrawSeed",
    "GeneratorStates",
    "Granularity",
    "LruCache",
    "Microbatch",
    "Recording",
    "Replay",
    "Split",
    "Splitting",
    "additive_dim",
    "call_hook",
    "capture",
    "code_origin",
    "copy_leaf",
    "describe_model",
    "describe_recording",
    "device_of",
    "explain_failure",
    "find_split",
    "has_gradient",
    "intercept_modules",
    "internal_call",
    "is_internal_call",
    "isolated",
    "make_recording",
    "microbatch_sizes",
    "object_items",
    "python_generators",
    "register_containers",
    "seed_generators",
    "spec_of",
    "split_batch",
    "storage_id",
    "torch_generators",
    "uncompiled",
    "without_cache",
    "without_user_hooks",
]
