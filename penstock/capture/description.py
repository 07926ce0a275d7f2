"""Describes a model and its recordings in lines of text that are equal in processes that have the same model.

Ranks compare these lines before the first step. So they leave out everything in which the processes of one training may
differ: devices, attributes that hold the process's own rank, the contents of tensors, and constants that a forward may
compute or take from a cache.
"""

import dis
import functools
import re
import types
from collections.abc import Collection
from dataclasses import is_dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.capture.fingerprint import names_in, referenced_globals
from penstock.capture.objects import MODULE_ATTRIBUTES, PLAIN_TYPES, class_functions, code_lines, code_origin
from penstock.capture.recording import Recording
from penstock.ir import Call, Container, ObjectRef, Ref, State, Tree

_PROCESS_SPECIFIC_ENDINGS = (
    # The process and its position among the others.
    r"rank|rank_?(zero|0)|(is_)?(main|master)(_process|_rank)?|device|device_?(id|index)|pid|host(name)?|port|num_threads",
    # The run.
    r"u?uid|run_?(id|name)|(output|save|log|work)_?(dir|path|file)",
    # Times.
    r"timestamp|created(_at)?|(start|begin|creation|init|last|wall)_?time|t0|elapsed",
    # Output for the user, which one process prints for all.
    r"verbose|verbosity|debug|quiet|silent|tqdm|progress(_?bar)?|(should|do|is|can|will|enable)_log(s|ging)?",
)
_PROCESS_SPECIFIC = re.compile(
    rf"(^|[_.:])({'|'.join(_PROCESS_SPECIFIC_ENDINGS)})$"
    r"|^(log|logs|logging)$|(^|_)(print|wandb|tensorboard)(s|ing)?(_|$)",
    re.IGNORECASE,
)
"""names of attributes and globals whose values differ between processes"""
# fmt: off
_CHANGING_METHODS = frozenset(
    {
        "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popleft", "remove", "setdefault",
        "update",
    }
)
# fmt: on
"""of lists, sets and dicts"""
_DEVICE_INDEX = re.compile(r"\b([a-z]+):\d+")
_MAX_SHOWN, _MAX_ITEMS, _MAX_DEPTH = 120, 256, 3
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_CONSTANT = "a constant tensor"
MODEL_LINE, SEPARATOR = "model ", "; "
"""every line is f"{MODEL_LINE}{place}: {items}", with this separator between the items"""


def describe_model(model: nn.Module, opened: Collection[str] = ()) -> tuple[str, ...]:
    """A line for every module: its class, a hash of the code, and the attributes that the code reads and does not set.

    Then a line for every number among the global variables and class attributes that the user's classes refer to. Of a
    configuration, only the fields that the code reads are described. Left out are:

    - attributes of `opened` modules: those that matter are in the recorded calls, and others, such as a flag of the
      process that prints, may differ;
    - attributes that a method sets or changes, such as a counter or a cache: each rank runs its own stages;
    - strings with digits, except names of dtypes: names of runs, hosts and files have digits.
    """
    lines = []
    for path, module in model.named_modules():
        kind = type(module)
        items = [f"class {kind.__qualname__}", f"code {_code_hash(kind)}"]
        names = _names_in_code(kind)
        for name, value in vars(module).items() if path not in opened else ():
            is_read = name in names or name == "forward"
            if name in MODULE_ATTRIBUTES or not is_read:
                continue
            fields = {name: value}
            if (
                is_dataclass(value)
                or isinstance(value, types.SimpleNamespace)
                or type(value).__name__.endswith("Config")
            ):
                fields = {f"{name}.{field}": item for field, item in vars(value).items() if field in names}
            for field, item in fields.items():
                is_numbered = isinstance(item, str) and any(map(str.isdigit, item)) and not hasattr(torch, item)
                # None may stand for a cache that only some ranks have filled.
                if item is None or is_numbered or _PROCESS_SPECIFIC.search(field):
                    continue
                if text := _shown(item):
                    items.append(f"{field} {text}")
        lines.append(f"{MODEL_LINE}{path or kind.__qualname__}: {SEPARATOR.join(items)}")
    for name, content in sorted(referenced_globals(dict.fromkeys(map(type, model.modules()))).items()):
        match content:
            case (kind, number) if kind in (bool, int, float) and not _PROCESS_SPECIFIC.search(name):
                lines.append(f"{MODEL_LINE}{name}: {number!r}")
    return tuple(lines)


def describe_recording(recording: Recording) -> tuple[str, ...]:
    """A line for every call that depends on the inputs, parameters or random numbers, with all plain arguments."""
    graph, live = recording.graph, recording.live
    parameters = {value.name for value in graph.parameters}
    # The text for each value: its number, because names depend on the calls before.
    shown = {name: name for name in recording.record.inputs}
    constants: set[str] = set()
    lines: list[str] = []

    def text_of(tree: Tree) -> str:
        match tree:
            case Ref(name):
                return _CONSTANT if name in constants else shown.get(name, name)
            case State(name):
                return name if name in parameters else _CONSTANT
            case ObjectRef(key):
                return _CONSTANT if isinstance(live[key], Tensor) else _shown(live[key]) or type(live[key]).__qualname__
            case Container(kind, keys, items):
                pairs = zip(map(text_of, keys), map(text_of, items), strict=True)
                return f"{live[kind].__qualname__}({', '.join(f'{key}: {item}' for key, item in pairs)})"
        return _shown(tree)

    for step in recording.record.steps:
        if not isinstance(step, Call):
            continue
        node, values = graph[step.name], (*step.results.values, *(name for name, _ in step.results.updates))
        is_fixed = constants.issuperset(step.arg_values) and parameters.isdisjoint(step.arg_states)
        if is_fixed and not (step.is_module or node.is_random or step.writes):
            constants.update(values)
            continue
        function = step.target if step.is_module else _shown(live[step.target]) or step.target
        items = [f"call {len(lines)} {function}", text_of(step.args), text_of(step.kwargs)]
        lines.append(f"{MODEL_LINE}{node.module or step.name}: {SEPARATOR.join(items)}")
        for number, name in enumerate((*values, *(name for name, _ in step.writes))):
            shown[name] = f"%{len(lines)}.{number}"
    return tuple(lines)


def _shown(value: object, depth: int = _MAX_DEPTH) -> str:
    """A value as text; empty if equal text would not mean an equal value."""
    text = ""
    if isinstance(value, str) and ("/" in value or " at 0x" in value):
        return ""  # a path or an address, which may differ between processes
    if type(value) in (*PLAIN_TYPES, complex, bytes) or isinstance(value, torch.dtype | np.generic):
        text = repr(value)
    elif isinstance(value, torch.device):
        text = "a device"
    elif isinstance(value, functools.partial):
        parts = [_shown(part, depth) for part in (value.func, value.args, value.keywords)]
        text = f"partial({', '.join(parts)})" if all(parts) else ""
    elif isinstance(value, type):
        text = value.__qualname__
    elif isinstance(value, _FUNCTIONS):
        code = getattr(value, "__code__", None)
        text = value.__name__ if isinstance(value, types.BuiltinFunctionType) else value.__qualname__
        if code is not None and code_origin(value.__module__) == "user":
            text += f" {_hash(code_lines(code))}"
    elif depth and type(value) in (list, tuple, set, frozenset, dict, torch.Size) and len(value) <= _MAX_ITEMS:
        if isinstance(value, dict):
            same = [(k, item) for k, item in value.items() if not (type(k) is str and _PROCESS_SPECIFIC.search(k))]
            pairs = [(_shown(key, depth - 1), _shown(item, depth - 1)) for key, item in same]
            texts = [f"{key}: {item}" if key and item else "" for key, item in pairs]
        else:
            texts = [_shown(item, depth - 1) for item in value]
        if all(texts):
            # A dict may have been made from a set, whose order differs between processes.
            ordered = sorted(texts) if isinstance(value, set | frozenset | dict) else texts
            text = f"{type(value).__name__}({', '.join(ordered)})"
    text = _DEVICE_INDEX.sub(r"\1", text).replace("\n", " ")
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... {_hash([text])}"


@functools.lru_cache(maxsize=4096)
def _names_in_code(kind: Any) -> frozenset[str]:
    """The names of attributes and globals that methods of a class read and do not change, except its constructor."""
    codes = [code for base in _own_bases(kind) for code in _method_codes(base)]
    return frozenset(name for code in codes for name in names_in(code)).difference(*map(_attributes_set, codes))


def _attributes_set(code: types.CodeType) -> set[str]:
    """The attributes that a function assigns, or changes by a method, with those of the functions in it."""
    instructions = list(dis.get_instructions(code))
    found = {str(each.argval) for each in instructions if each.opname in ("STORE_ATTR", "DELETE_ATTR")}
    for each, following in pairwise(instructions):
        if each.opname == "LOAD_ATTR" and following.argval in _CHANGING_METHODS:
            found.add(str(each.argval))
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return found.union(*map(_attributes_set, inner))


@functools.lru_cache(maxsize=4096)
def _code_hash(kind: Any) -> str:
    """A hash of the methods of a class, except those of torch."""
    bases = [base for base in _own_bases(kind) if code_origin(base.__module__) != "torch"]
    return _hash(line for base in bases for code in _method_codes(base) for line in code_lines(code))


def _own_bases(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if base not in (object, nn.Module)]


def _method_codes(kind: type) -> list[types.CodeType]:
    """The code of the methods and properties that a class itself defines, except its constructor."""
    functions = sorted(class_functions(kind), key=lambda pair: pair[0])
    return [function.__code__ for name, function in functions if name != "__init__"]


def _hash(lines: Any) -> str:
    return blake2b("\n".join(lines).encode(errors="surrogatepass"), digest_size=6).hexdigest()
