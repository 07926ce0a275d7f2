"""The data model: frozen records of a model, its costs, schedules, plans and traces, and their file formats.

The files, in the order in which to read them:

    graph.py              the model: nodes, values, parameters; dtypes.py: supported dtypes, sizes and tolerances
    profile.py            measured seconds and bytes of every node
    partition.py          the nodes of every stage, and the values that cross each cut
    placement.py          the rank of every stage, and the edges between stages
    action.py             the instructions of a rank, and the rules for what an action needs and makes
    orders.py             the orders of all ranks as one array, and the dependencies between their actions
    schedule.py           Schedule and Program: orders before and after lowering
    costs.py              seconds and bytes per stage; training_state.py: gradients and optimizer
    cluster.py            ranks, memory and links; overhead.py: CPU seconds of the runtime
    devices.py            speed of a device, presets
    order_times.py        runs orders to their end, or to where they block
    trace.py              when every action and message of a step happened
    plan.py               the choices for one model, with the predicted step; run.py: a training that followed them
    record.py             one forward of a model as a list of calls, for `penstock.capture`
    batch_split_rules.py  how arguments are split into microbatches, for `penstock.batches`
    containers.py         flattens and rebuilds nested Python structures
    comparison.py         tensors of two runs, and whether rounding explains the differences
    text.py               CSV and text of orders; json_format.py: JSON of every record
    arguments.py          checks of argument values; units.py, notebook.py: numbers and records for people
"""

from penstock.ir.action import (
    COMPUTE_KINDS,
    MAX_MICROBATCHES,
    PASS_ACTIONS,
    PASS_KINDS,
    RULES,
    Action,
    Backward,
    ComputeAction,
    Fact,
    Forward,
    Free,
    InputGrad,
    Kind,
    Message,
    Need,
    Overlap,
    Recv,
    Reduce,
    Reshard,
    Send,
    Unshard,
    WeightGrad,
    makes,
    needs,
)
from penstock.ir.arguments import as_int, choices_text, did_you_mean, find_named, is_count, is_finite, parse_bytes
from penstock.ir.batch_split_rules import SPLIT_HINT, Ragged, Rows, SplitRule, is_split_rule
from penstock.ir.cluster import MAX_RANKS, Cluster, Link, LinkRates, LinkSpeed, Replicas
from penstock.ir.comparison import GRADIENT, Comparison, Difference, Distance, compare_tensors
from penstock.ir.containers import (
    Parts,
    attributes_of,
    copy_into,
    flatten_one_level,
    is_attributes_only,
    leaves,
    map_leaves,
    named_arguments,
    named_inputs,
    named_leaves,
    num_registered,
    register_attributes,
    register_container,
    signature_of,
    unflatten_one_level,
)
from penstock.ir.costs import MessageCost, StageCosts, compute_stage_costs
from penstock.ir.devices import DEVICES, LINKS, Device, DeviceSpeed, find_device, find_link, node_cluster
from penstock.ir.dtypes import ITEM_BYTES
from penstock.ir.graph import (
    ADDED_LOSS,
    Edge,
    Graph,
    Node,
    StorageGroup,
    TensorSpec,
    Update,
    Value,
    prune_gradients,
)
from penstock.ir.json_format import MAX_JSON_BYTES, RECORDS, from_json, load_record, save_record, to_json
from penstock.ir.notebook import PASS_COLORS, html_page, html_table, paragraph, preformatted
from penstock.ir.order_times import (
    Length,
    Needs,
    find_waits,
    look_up_seconds,
    pass_seconds,
    schedule_length,
    walk,
    walk_passes,
)
from penstock.ir.orders import (
    MAX_ACTIONS,
    Bools,
    Codes,
    Dependencies,
    Floats,
    Ints,
    Makers,
    Orders,
    Passes,
    decode,
    decode_one,
    encode,
    find_dependencies,
    first_microbatches,
    kind_of,
    microbatch_of,
    number_microbatches,
    pack,
    peer_microbatch_of,
    peer_of,
    stage_of,
)
from penstock.ir.overhead import MessageCpu, Overhead
from penstock.ir.partition import Crossing, Partition
from penstock.ir.placement import MAX_STAGES, Cuts, Placement
from penstock.ir.plan import Candidate, Choices, DeviceLayout, Plan, Prediction, Search
from penstock.ir.profile import NODE_SECONDS, PASS_NAMES, NodeBytes, NodeCost, Profile, SavedTensors
from penstock.ir.record import (
    TENSOR,
    Call,
    CallContext,
    Container,
    Guard,
    ObjectRef,
    Record,
    Ref,
    Results,
    State,
    Tree,
    bind_state,
    leaf_names,
    object_keys,
    refs,
    states,
)
from penstock.ir.run import Run, StepMetrics
from penstock.ir.schedule import Program, Schedule, read_schedule
from penstock.ir.text import format_lines, parse_action, read_orders, replace_file, write_atomic, write_csv
from penstock.ir.trace import Curve, Idle, Series, Span, Trace, Transfer, critical_path
from penstock.ir.training_state import OPTIMIZERS, PRECISIONS, StateBytes, TrainingState
from penstock.ir.units import (
    align_columns,
    bytes_text,
    count_text,
    counted,
    listed,
    number_text,
    percent_text,
    printable,
    round_step,
    seconds_text,
    seconds_unit,
)
