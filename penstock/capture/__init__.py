"""Records the forward of any nn.Module on an example batch, and replays parts of it.

    capture(model, args) --> Captured: the Graph, and a Recording for every kind of batch
    Replay(recording, nodes, ...).run(values) --> the values that these calls of the recording make

    Record (penstock.ir)  the calls of one forward as plain data
    Recording             a Record, the functions and constants that it refers to, and its Graph
    Captured              a model with all recordings of it

The files, in the order in which to read them:

    captured.py       `capture`, and Captured: finds the recording that holds for a batch, or records the model
    recording.py      Recording, and the comparison of two; record_forward.py: runs the forward, with retries
    recorder.py       Recorder: turns every call between blocks into a step of the record
    replay.py         Replay: runs some steps of a record again
    granularity.py    which modules are blocks: they stay whole
    hooks.py          intercepts modules, autograd functions and scripted functions; disables the user's hooks
    functions.py      functions of the user that are recorded as one call; transforms.py: those of torch.vmap
    random_draws.py   random numbers of Python and numpy, and the seeds of all draws; generators.py: their generators
    tensor_table.py   names of tensors, shared memory; tensors.py: gradients, memory and content of tensors
    dtypes.py         properties that depend on the dtype of a tensor: NaN and Inf, rounding, complex numbers, bytes
    arguments.py      arguments as plain data, and back; structures.py: results as text; objects.py: any other object
    effects.py        a running call and its side effects; call_context.py: grad mode and autocast around it
    function_kinds.py which torch functions read metadata, write in place or draw random numbers
    isolation.py      restores everything that a forward changes
    graph_builder.py  the Graph of a record
    fingerprint.py    signatures of batches and models; guards.py: values that a batch must have for a recording to hold
    description.py    models and recordings as text, which ranks compare
    sharded_logits.py an output layer and its loss in shards along the vocabulary; split_output_layer.py: models with it
    lru_cache.py      a bounded cache
"""

from penstock.capture.captured import Captured, capture, check_model, without_cache
from penstock.capture.description import MODEL_LINE, SEPARATOR, describe_model, describe_recording
from penstock.capture.dtypes import (
    ARITHMETIC_DTYPES,
    INEXACT_DTYPES,
    NUMPY_DTYPES,
    ROUNDING,
    as_bytes,
    coarsest,
    contiguous_entries,
    dtype_name,
    dtype_named,
    extremes,
    from_real_entries,
    in_double,
    in_precision,
    is_close,
    is_inexact,
    is_integer,
    is_ordered,
    largest_magnitude,
    real_entries,
    real_inner_product,
)
from penstock.capture.function_kinds import GRADIENT_FUNCTIONS
from penstock.capture.generators import GeneratorStates, seed_generators
from penstock.capture.granularity import Granularity, outer_modules
from penstock.capture.hooks import hooks_of_model, intercept_modules, without_user_hooks
from penstock.capture.isolation import (
    DispatchMode,
    internal_call,
    is_internal_call,
    isolated,
    set_mode,
    uncompiled,
    without_accumulation_hooks,
)
from penstock.capture.lru_cache import LruCache
from penstock.capture.objects import (
    MODULE_ATTRIBUTES,
    PLAIN_TYPES,
    code_lines,
    code_origin,
    copy_leaf,
    object_items,
    register_containers,
    user_line,
)
from penstock.capture.random_draws import DrawSeed
from penstock.capture.recording import Recording
from penstock.capture.replay import Replay, call_hook
from penstock.capture.split_output_layer import (
    RowSlice,
    find_head,
    row_slices,
    shard_vocabulary,
    sharded_granularity,
    sharded_head,
    unsharded_granularity,
    whole_parameters,
    with_loss,
)
from penstock.capture.structures import structure_with_names
from penstock.capture.tensors import (
    device_of,
    has_gradient,
    is_dtensor,
    restore_content,
    spec_of,
    storage_id,
    tensors_in,
)
