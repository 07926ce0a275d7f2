"""Finds how to split arguments whose shapes allow several ways, by running the model.

Shapes alone do not show whether a tensor with 16 rows beside a batch of 4 holds 4 rows for each sample or is a table
for all of them. The results do: with the right rules, the results of two halves of a batch are together those of the
whole batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.capture.captured import without_cache
from penstock.capture.cuts import Argument, Split, batch_size, has_rule
from penstock.capture.generators import seed_generators
from penstock.capture.hooks import without_user_hooks
from penstock.capture.isolation import isolated, uncompiled
from penstock.capture.microbatches import split_batch
from penstock.capture.objects import copy_leaf, register_containers
from penstock.errors import RunError
from penstock.ir import Ragged, Rows, SplitRule, leaves, named_arguments, transform

_MAX_TRIALS, _MAX_SHOWN = 24, 4
_MAX_COLUMNS = 4
"""columns of a table of sizes: time, height, width and one more"""
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4}
_COARSE = 5e-2
_SEED = 5


def find_split(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], split: Split | None = None
) -> dict[str, SplitRule]:
    """The rules for arguments of this batch that `split` does not name and whose shapes allow several.

    Each combination is tried on two halves of the batch, in eval mode and without gradients, until the results are
    those of the whole batch. The model is left as it was. Empty if shapes decide everything, or if the model cannot be
    run. Raises a RunError if no combination, or more than one, is right.
    """
    register_containers((args, kwargs))
    split = dict(split or {})
    arguments = [Argument(name, value) for name, value in named_arguments(model.forward, args, kwargs).items()]
    search = _Search(model, args, kwargs, split, arguments)
    trials = list(islice(search.trials(), _MAX_TRIALS))
    if len(trials) < 2:
        return trials[0] if trials else {}
    with isolated(model, _SEED), uncompiled(), without_user_hooks([model]), torch.no_grad():
        model.eval()
        return search.decide(trials)


class _Choice(NamedTuple):
    """Arguments that are split alike, tensors of one shape or a list, and the rules that they may have."""

    names: tuple[str, ...]
    options: tuple[Any, ...]
    """the usual rule first"""


_DEFAULT: Any = object()
"""no rule: by shape"""


class _Search:
    """The combinations of rules for one batch, and their comparison with the whole batch."""

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        split: Split,
        arguments: Sequence[Argument],
    ) -> None:
        self._model, self._args, self._kwargs, self._split = model, tuple(args), dict(kwargs), split
        self._arguments = arguments
        self._failures: list[str] = []

    def trials(self) -> Iterator[dict[str, SplitRule]]:
        """Rules to try, the usual ones first; none if there is nothing to split."""
        all_units = [unit for argument in self._arguments for unit in _units(argument, self._split)]
        try:
            usual = batch_size(self._arguments, self._split)
        except RunError:
            return
        lengths = [len(unit.value) for unit in all_units]
        for batch in dict.fromkeys((usual, *lengths)):
            lists = [_Choice((unit.name,), _list_options(unit, batch)) for unit in all_units if unit.is_list]
            for of_lists in _combinations(lists) if batch > 1 else ():
                # Tensors inside a list with an entry per sample need no rule.
                inside = tuple(f"{name}." for name, rule in of_lists.items() if rule == "samples")
                list_rules = {name: rule for name, rule in of_lists.items() if not name.startswith(inside)}
                units = [unit for unit in all_units if not unit.is_list and not unit.name.startswith(inside)]
                for of_tensors in _combinations(list(self._choices(units, batch))):
                    if self._has_batch(list_rules | of_tensors, batch):
                        yield list_rules | of_tensors

    def _has_batch(self, rules: Split, batch: int) -> bool:
        try:
            return batch_size(self._arguments, {**self._split, **rules}) == batch
        except RunError:
            return False

    def _choices(self, units: Sequence[Argument], batch: int) -> Iterator[_Choice]:
        by_shape: dict[tuple[int, ...], list[Argument]] = {}
        for unit in units:
            if len(unit.value) not in (1, batch):
                by_shape.setdefault(tuple(unit.value.shape), []).append(unit)
        for shape, same in by_shape.items():
            others = [dim for dim, length in enumerate(shape) if dim and length == batch]
            ragged = [Ragged(other.name) for other in units if other not in same and _adds_up(other.value, shape[0])]
            ragged += self._tokens(units, batch, shape[0])
            rows = [Rows(shape[0] // batch)] if shape[0] % batch == 0 else []
            yield _Choice(tuple(unit.name for unit in same), (None, *others, *ragged, *rows))

    def _tokens(self, units: Sequence[Argument], batch: int, length: int) -> Iterator[Ragged]:
        """Rules for a table with a row for every special token in a tensor of token ids, as for every image."""
        config = getattr(self._model, "config", None)
        configs = (config, *getattr(config, "__dict__", {}).values())
        named = (item for part in configs for item in getattr(part, "__dict__", {}).items())
        tokens = dict.fromkeys(value for name, value in named if name.endswith("token_id") and type(value) is int)
        for unit in units:
            if len(unit.value) == batch and _is_integer(unit.value):
                for token in tokens:
                    if not unit.value.is_meta and int((unit.value == token).sum()) == length:
                        yield Ragged(unit.name, token)

    def decide(self, trials: Sequence[dict[str, SplitRule]]) -> dict[str, SplitRule]:
        """The rules whose results are those of the whole batch."""
        whole = self._run(self._args, self._kwargs)
        if whole is None:
            # The error of the model is reported where it is recorded.
            return trials[0]
        possible, ran = [], []
        for rules in trials:
            try:
                parts = split_batch(self._model.forward, self._args, self._kwargs, None, 2, {**self._split, **rules})
            except RunError:
                continue
            results = []
            for part in parts:
                result = self._run(part.args, part.kwargs)
                if result is None:
                    break
                results.append(result)
            else:
                ran.append(rules)
                agreement = _compare(whole, results, [part.size for part in parts])
                if agreement == _EQUAL:
                    return rules
                if agreement == _POSSIBLE:
                    possible.append(rules)
                    if rules is trials[0] and self._is_unambiguous(rules):
                        # Only a loss depends on the argument, and its weights are not known here. Other rules may fit
                        # too, or give nearly the same loss by chance.
                        return rules
        if len(possible) == 1:
            return possible[0]
        if not possible and ran == [trials[0]]:
            # Samples interact in this model, but no other way of splitting its arguments runs.
            return trials[0]
        raise self._undecided(trials)

    def _is_unambiguous(self, rules: Split) -> bool:
        """Whether rules are about lists only, and are those that follow from the lists themselves."""
        call = (self._model.forward, self._args, self._kwargs, None, 2)
        try:
            by_shape = split_batch(*call, self._split)[0].cuts
            by_rules = split_batch(*call, {**self._split, **rules})[0].cuts
        except RunError:
            return False
        return by_shape == by_rules and set(rules.values()) <= {"samples", "items"}

    def _run(self, args: Any, kwargs: Any) -> list[object] | None:
        args, kwargs = transform(args, copy_leaf), transform(kwargs, copy_leaf)
        seed_generators(_SEED)
        try:
            return leaves(self._model(*args, **without_cache(self._model, kwargs)))
        except Exception as error:  # a model may raise anything for arguments that do not belong together
            self._failures.append(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            return None

    def _undecided(self, trials: Sequence[dict[str, SplitRule]]) -> RunError:
        batch = batch_size(self._arguments, self._split)
        tried = [rules for rules in trials if rules and self._has_batch(rules, batch)]
        names = {name for rules in tried for name in rules}
        units = [unit for argument in self._arguments for unit in _units(argument, self._split) if unit.name in names]
        values = [unit.value for unit in units]
        shapes = [tuple(value.shape) if isinstance(value, Tensor) else f"of {len(value)}" for value in values]
        choices = [", ".join(f"{name!r}: {_text(rule)}" for name, rule in rules.items()) for rules in tried]
        return RunError(
            "the batch cannot be split: no way of splitting these arguments is known to give the results of the whole "
            "batch",
            arguments=", ".join(f"{unit.name} {shape}" for unit, shape in zip(units, shapes, strict=True)),
            batch=batch,
            **({"error": self._failures[0]} if self._failures else {}),
            hint=" or ".join(f"split={{{choice}}}" for choice in choices[:_MAX_SHOWN]) or "split={...}",
        )


def _units(argument: Argument, split: Split) -> Iterator[Argument]:
    """The tensors and lists of an argument that no rule names."""
    value = argument.value
    if has_rule(argument.name, split):
        return
    if isinstance(value, Tensor):
        if value.dim():
            yield argument
        return
    if argument.is_list and len(value):
        yield argument
    for item in argument.items():
        yield from _units(item, split)


def _combinations(choices: Sequence[_Choice]) -> Iterator[dict[str, SplitRule]]:
    for rules in product(*(choice.options for choice in choices)):
        pairs = zip(choices, rules, strict=True)
        yield {name: rule for choice, rule in pairs for name in choice.names if rule is not _DEFAULT}


def _list_options(unit: Argument, batch: int) -> tuple[Any, ...]:
    if len(unit.value) != batch:
        # Recorded too: in another batch it may have as many entries as there are samples.
        return ("items",) if any(isinstance(leaf, Tensor) for leaf in leaves(unit.value)) else (_DEFAULT,)
    tensors = [leaf for leaf in leaves(unit.value) if isinstance(leaf, Tensor)]
    is_items = not tensors or all(leaf.dim() and leaf.shape[0] == batch for leaf in tensors)
    return ("items", "samples") if is_items else ("samples", "items")


def _is_integer(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool


def _adds_up(sizes: Tensor, length: int) -> bool:
    """Whether a table of sizes describes a tensor of this length."""
    if not _is_integer(sizes) or sizes.dim() not in (1, 2) or sizes.is_meta:
        return False
    if sizes.dim() == 2 and sizes.shape[1] > _MAX_COLUMNS:
        return False
    rows = sizes.reshape(len(sizes), -1).prod(1)
    return bool((rows >= 0).all()) and int(rows.sum()) == length


def _text(rule: Any) -> str:
    if isinstance(rule, Rows):
        return f"penstock.Rows({rule.per_sample})"
    if isinstance(rule, Ragged):
        return f"penstock.Ragged({rule.sizes!r}{'' if rule.token is None else f', {rule.token}'})"
    return repr(rule)


# Comparison

_EQUAL, _POSSIBLE, _DIFFERENT = "equal", "possible", "different"


def _compare(whole: Sequence[object], parts: Sequence[Sequence[object]], sizes: Sequence[int]) -> str:
    """Whether results of parts are those of the whole batch; only possible if single numbers cannot be compared."""
    if any(len(part) != len(whole) for part in parts):
        return _DIFFERENT
    agreement = _EQUAL
    for expected, *results in zip(whole, *parts, strict=True):
        if not isinstance(expected, Tensor) or not all(isinstance(result, Tensor) for result in results):
            continue
        shapes = [tuple(result.shape) for result in results]  # type: ignore[attr-defined]
        dim = additive_dim(tuple(expected.shape), shapes)
        if dim is not None:
            if not _is_close(torch.cat(results, dim), expected):  # type: ignore[arg-type]
                return _DIFFERENT
        elif any(shape != tuple(expected.shape) for shape in shapes):
            return _DIFFERENT
        else:
            tensors: Any = results
            combined = [*tensors[:1]] if all(torch.equal(result, tensors[0]) for result in tensors) else []
            if expected.is_floating_point() and not expected.dim():
                combined.append(sum(result * (size / sum(sizes)) for result, size in zip(tensors, sizes, strict=True)))
                combined.append(sum(tensors))
            if not any(_is_close(result, expected) for result in combined):
                if expected.dim():
                    return _DIFFERENT
                agreement = _POSSIBLE
    return agreement


def additive_dim(whole: tuple[int, ...], parts: Sequence[tuple[int, ...]]) -> int | None:
    """The only dimension along which concatenating tensors of some shapes gives another shape, or None.

    A batch dimension adds up, and so does one of packed tokens; the length of the longest sample does not.
    """
    if any(len(part) != len(whole) for part in parts):
        return None
    changed = [dim for dim, length in enumerate(whole) if any(part[dim] != length for part in parts)]
    if len(changed) != 1 or sum(part[changed[0]] for part in parts) != whole[changed[0]]:
        return None
    return changed[0]


def _is_close(tensor: Tensor, expected: Tensor) -> bool:
    if tensor.is_meta or expected.is_meta:
        return tensor.shape == expected.shape
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return torch.equal(tensor, expected)
    if not tensor.numel():
        return True
    apart = (tensor - expected).abs().double()
    # NaN and Inf at the same places are equal.
    apart = apart[(tensor.isfinite() | expected.isfinite())]
    scale = float(expected[expected.isfinite()].abs().max()) if bool(expected.isfinite().any()) else 1.0
    return not apart.numel() or float(apart.max()) <= _TOLERANCES.get(expected.dtype, _COARSE) * scale
