"""Signatures of batches and fingerprints of models: all that a recording depends on besides the values of tensors.

A recording holds for another batch if the two batches have the same signature and the model has the same fingerprint.
The fingerprint covers the state the Python code between the blocks may branch on: training modes, attributes of
modules, class attributes, and global variables that the code refers to. It is computed once per step, so it must be
cheap; it is compared within one process only.
"""

import argparse
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from hashlib import blake2b
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from penstock.capture.granularity import Granularity
from penstock.capture.objects import (
    MODULE_ATTRIBUTES,
    PLAIN_TYPES,
    class_functions,
    code_origin,
    object_items,
)

_SCALARS = (*PLAIN_TYPES, complex, bytes, torch.dtype, torch.device)
_NUMPY = (np.generic, np.ndarray)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_CONTAINERS = (list, tuple, dict, set, frozenset)
_MAX_DEPTH, _MAX_ITEMS = 5, 256
"""limits on the depth, and on the items per container, to which a value is inspected"""


def batch_signature(named_leaves: Mapping[str, object]) -> Any:
    """Equal for two batches if one recording may serve both, as far as can be seen without reading tensors.

    The batch is given as its leaves by name. Shapes, strides, dtypes, devices, `requires_grad` and all Python values
    count, and also which leaves are one and the same tensor.
    """
    tensors = [leaf for leaf in named_leaves.values() if isinstance(leaf, Tensor)]
    return (
        tuple((name, _leaf_signature(leaf)) for name, leaf in named_leaves.items()),
        tuple(next(index for index, other in enumerate(tensors) if other is leaf) for leaf in tensors),
    )


def _leaf_signature(leaf: object) -> object:
    if isinstance(leaf, Tensor):
        strides = leaf.stride() if leaf.layout is torch.strided else leaf.layout
        return tuple(leaf.shape), strides, leaf.dtype, leaf.device, leaf.requires_grad
    if isinstance(leaf, (*_SCALARS, *_NUMPY)):
        return type(leaf), content_of(leaf)
    # By contents, not by identity as in a model: the caller may make an equal object for every batch.
    content = _content_of_items(leaf, _MAX_DEPTH)
    if isinstance(leaf, types.FunctionType):
        return leaf.__code__, content
    if isinstance(leaf, types.BuiltinFunctionType) or not (content or hasattr(leaf, "__dict__")):
        return type(leaf), repr(leaf)
    return type(leaf), content


class Fingerprinter:
    """Computes the fingerprint of a model: equal at two times if a recording made at one of them holds at the other."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.modules: dict[str, nn.Module] = {}
        """all modules of the model, when the fingerprint was last computed"""
        self._children: list[tuple[nn.Module, list[tuple[str, nn.Module | None]]]] = []
        """every module with its submodules"""
        self._blocks: dict[str, nn.Module] = {}
        self._opened: list[nn.Module] = []

    def find_modules(self, granularity: Granularity) -> None:
        """Find the blocks and the opened modules; call this after every recording, which may have opened blocks.

        Until the next recording they change only with the modules of the model: everything else that determines the
        blocks is part of the fingerprint.
        """
        self.modules = dict(self._model.named_modules())
        self._children = [(module, list(module._modules.items())) for module in self.modules.values()]
        self._blocks = granularity.find_blocks(self._model)
        self._opened = _opened_modules(self.modules.values(), self._blocks)

    def compute(self, granularity: Granularity, volatile: Collection[str] = ()) -> Any:
        """The fingerprint. `volatile` names settings that the forward itself changes; they are left out."""
        # Much faster than finding all modules again by walking through the model.
        unchanged = [list(module._modules.items()) == children for module, children in self._children]
        if not unchanged or not all(unchanged):
            self.find_modules(granularity)
        modules, settings = self.modules, _settings(self._blocks, self._opened)
        state = [
            tensor
            for module in modules.values()
            for kind in (module._parameters, module._buffers)
            for tensor in kind.values()
            if tensor is not None
        ]
        # By their keys, which are never used again: a hook of an opened module is recorded with it.
        hooks = [(*module._forward_hooks, "pre", *module._forward_pre_hooks) for module in self._opened]
        # By identity: a parameter that is assigned to an opened module would not be the recorded one.
        own_state = [(*module._parameters.values(), *module._buffers.values()) for module in self._opened]
        autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
        return (
            tuple([(tensor.dtype, tensor.requires_grad, tensor.device) for tensor in state]),
            tuple([(name, id(module), type(module), module.training) for name, module in modules.items()]),
            tuple(hooks),
            tuple([tuple(map(id, tensors)) for tensors in own_state]),
            tuple([item for item in settings.items() if item[0] not in volatile]),
            (torch.is_grad_enabled(), *autocast, torch.get_default_dtype()),
        )


def model_settings(model: nn.Module, granularity: Granularity) -> dict[str, object]:
    """The Python state that the code between blocks may depend on, by name."""
    blocks = granularity.find_blocks(model)
    return _settings(blocks, _opened_modules(model.modules(), blocks))


def _opened_modules(modules: Iterable[nn.Module], blocks: Mapping[str, nn.Module]) -> list[nn.Module]:
    inside = {id(part) for block in blocks.values() for part in block.modules()}
    return [module for module in modules if id(module) not in inside]


def _settings(blocks: Mapping[str, nn.Module], opened: list[nn.Module]) -> dict[str, object]:
    settings: dict[str, object] = {}
    for index, module in enumerate(opened):
        for name, value in vars(module).items():
            if name not in MODULE_ATTRIBUTES:
                settings[f"{index}/{name}"] = content_of(value)
    for path, block in blocks.items():
        for name, value in vars(block).items():
            # Code outside a block seldom reads more of it than plain values, and many blocks cache objects inside.
            if type(value) in PLAIN_TYPES and name not in MODULE_ATTRIBUTES:
                settings[f"{path}.{name}"] = type(value), value
    return settings | referenced_globals(dict.fromkeys(map(type, opened)))


# Contents of Python values


def content_of(value: object, depth: int = _MAX_DEPTH) -> object:
    """A key that compares equal to a later one if the value has the same content, down to `depth` levels."""
    if isinstance(value, _SCALARS):
        # True, 1 and 1.0 are equal, but not the same to a model.
        return type(value), value
    if isinstance(value, np.generic):
        return type(value), value.tobytes()
    if isinstance(value, np.ndarray):
        content = repr(value).encode() if value.dtype.hasobject else value.tobytes()
        return value.shape, value.dtype.str, blake2b(content, digest_size=16).digest()
    if not depth or isinstance(value, nn.Module | Tensor | type | types.ModuleType):
        return id(value)
    if isinstance(value, dict):
        items = islice(value.items(), _MAX_ITEMS)
        return tuple((str(key), content_of(item, depth - 1)) for key, item in items), len(value)
    if isinstance(value, list | tuple | deque):
        return tuple(content_of(item, depth - 1) for item in islice(value, _MAX_ITEMS)), len(value)
    if isinstance(value, set | frozenset):
        return frozenset(content_of(item, depth - 1) for item in islice(value, _MAX_ITEMS)), len(value)
    return id(value), _content_of_items(value, depth)


def _content_of_items(value: object, depth: int) -> tuple[tuple[str, object], ...]:
    # Two levels, as for an object that holds a dict of its attributes.
    item_depth = max(depth - 2, 0)
    return tuple((name, content_of(item, item_depth)) for name, item in islice(object_items(value), _MAX_ITEMS))


# Global variables and class attributes

_Reference = tuple[dict[str, Any], str]
"""a namespace and a name in it"""
_references: "WeakKeyDictionary[type, tuple[_Reference, ...]]" = WeakKeyDictionary()
"""by class; the code of a class does not change, the values of the names do"""
_user_bases: "WeakKeyDictionary[type, tuple[type, ...]]" = WeakKeyDictionary()
"""by class: itself and its bases, as far as the user wrote them"""


def referenced_globals(classes: Iterable[type]) -> dict[str, object]:
    """The contents of the settings that the user's classes may depend on besides attributes of their instances.

    These are class attributes and the global variables that their methods refer to, directly or through functions and
    modules of the user that they call.
    """
    user_classes: dict[type, None] = {}
    for cls in classes:
        # Checked before the call: this runs in every step.
        if cls not in _user_bases:
            _find_user_bases(cls)
        user_classes.update(dict.fromkeys(_user_bases[cls]))
    contents: dict[str, object] = {}
    for cls in user_classes:
        for name, value in vars(cls).items():
            if not name.startswith("__") and _is_setting(value):
                contents[f"{cls.__module__}.{cls.__qualname__}.{name}"] = content_of(value)
        for namespace, name in _references_of(cls):
            if name in namespace and _is_setting(namespace[name]):
                contents[f"{namespace.get('__name__')}:{name}"] = content_of(namespace[name])
    return contents


def global_objects(classes: Iterable[type]) -> Iterator[object]:
    """The values of the global variables that the methods of the user's classes refer to."""
    for cls in classes:
        for base in _find_user_bases(cls):
            yield from (namespace[name] for namespace, name in _references_of(base) if name in namespace)


def _find_user_bases(cls: type) -> tuple[type, ...]:
    """The class and its bases, without those that the user did not write; kept in `_user_bases`."""
    if cls not in _user_bases:
        _user_bases[cls] = tuple(base for base in cls.__mro__ if code_origin(base.__module__) == "user")
    return _user_bases[cls]


def _references_of(cls: type) -> tuple[_Reference, ...]:
    if cls not in _references:
        _references[cls] = tuple(_find_references(cls))
    return _references[cls]


def _is_setting(value: object) -> bool:
    """Whether a value is data, rather than code or part of the model."""
    if isinstance(value, (*PLAIN_TYPES, *_CONTAINERS, *_NAMESPACES)):
        return True
    if isinstance(value, type | types.ModuleType | nn.Module | Tensor) or callable(value):
        return False
    return code_origin(type(value).__module__) == "user" and hasattr(value, "__dict__")


def _find_references(cls: type) -> Iterator[_Reference]:
    """The global names that the methods of a class refer to, and the user's functions that these call by name."""
    pending = [function for _, function in class_functions(cls)]
    seen: set[int] = set()
    while pending:
        function = pending.pop()
        if id(function.__code__) in seen:
            continue
        seen.add(id(function.__code__))
        names, global_names = set(names_in(function.__code__)), function.__globals__
        used = [global_names[name] for name in names & global_names.keys()]
        modules = [value for value in used if isinstance(value, types.ModuleType)]
        # The code object of `settings.scale` has both names: `scale` may be a global of the user's module `settings`.
        user_modules = [vars(module) for module in modules if code_origin(module.__name__) == "user"]
        for namespace in (global_names, *user_modules):
            for name in names & namespace.keys():
                value = namespace[name]
                if isinstance(value, types.FunctionType) and code_origin(value.__module__) == "user":
                    pending.append(value)
                elif not isinstance(value, types.FunctionType | types.ModuleType | type):
                    yield namespace, name


def names_in(code: types.CodeType) -> Iterator[str]:
    """The names of attributes and globals in a code object and those inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)
