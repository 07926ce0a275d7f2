"""Finds how to split arguments whose shapes allow several ways, by running the model.

Shapes alone do not determine whether a tensor with 16 rows beside a batch of 4 holds 4 rows for each sample or is a
table for all of them. The results do: with the right rules, the results of two halves of a batch are together those of
the whole batch. `_Search.candidates` lists the combinations of rules that shapes allow, `_Search.decide` runs them.
If shapes allow one only, `_Search.confirm` compares a few samples.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, combinations, islice, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from penstock.batches.microbatches import Batch, BatchSplitter, Microbatch, microbatch_sizes
from penstock.batches.sample_axes import Argument, Split, batch_size, has_rule
from penstock.capture import (
    ROUNDING,
    GeneratorStates,
    copy_leaf,
    hooks_of_model,
    is_close,
    is_inexact,
    is_integer,
    isolated,
    register_containers,
    seed_generators,
    tensors_in,
    uncompiled,
    user_line,
    without_cache,
    without_user_hooks,
)
from penstock.errors import PenstockWarning, RunError
from penstock.ir import Ragged, Rows, SplitRule, leaves, listed, map_leaves, named_arguments
from penstock.launch import one_line

_MAX_CANDIDATES = 24
"""combinations of rules that are tried"""
_FEW = 4
"""samples on which rules that follow from shapes are confirmed"""
_MAX_SHOWN = 4
"""combinations in the hint of an error"""
_MAX_COLUMNS = 4
"""columns of a table of sizes: time, height, width and one more"""
_SEED = 5


def find_split(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], split: Split | None = None
) -> dict[str, SplitRule]:
    """The rules for arguments of this batch that `split` does not name and whose shapes allow several.

    Each combination is tried on two halves of the batch, in eval mode and without gradients, until the results are
    those of the whole batch. The model is left as it was. Empty if shapes decide everything, or if the model cannot be
    run. Raises a RunError if no combination gives these results, unless with exactly one of them only scalars, such as
    a loss, differ. Warns if the results of a sample depend on the samples beside it, or on those before it.
    """
    register_containers((args, kwargs))
    search = _Search(model, tuple(args), dict(kwargs), dict(split or {}))
    candidates = list(islice(search.candidates(), _MAX_CANDIDATES))
    if not candidates:
        return {}
    is_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers(), *tensors_in((args, kwargs))))
    if len(candidates) == 1 and is_meta:
        return candidates[0]
    with isolated(model, _SEED), uncompiled(), without_user_hooks([model], hooks_of_model(model)), torch.no_grad():
        search.check_buffers(candidates[0])
        model.eval()
        return search.decide(candidates) if len(candidates) > 1 else search.confirm(candidates[0])


class _Choice(NamedTuple):
    """Arguments that are split alike, tensors of one shape or a list, and the rules that they may have."""

    names: tuple[str, ...]
    options: tuple[Any, ...]
    """the usual rule first"""


_BY_SHAPE: Any = object()
"""the option to leave an argument out of the rules, so that its shape decides"""


class _Search:
    """The combinations of rules for one batch, and their comparison with the whole batch."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], split: Split) -> None:
        self._model, self._args, self._kwargs, self._split = model, args, kwargs, split
        named = named_arguments(model.forward, args, kwargs)
        self._arguments = [Argument(name, value) for name, value in named.items()]
        self._failures: list[str] = []
        """errors of the model so far"""
        self._is_pure = True
        """whether no run has drawn random numbers or written buffers"""
        self._rounding = max((ROUNDING[each.dtype] for each in model.parameters() if is_inexact(each)), default=0.0)
        """relative rounding error of the parameters' precision, which results of a higher precision have too"""

    def candidates(self) -> Iterator[dict[str, SplitRule]]:
        """Rules to try, the usual ones first; none if there is nothing to split."""
        parts = self._parts_without_rule({})
        try:
            usual = batch_size(self._arguments, self._split)
        except RunError:
            return
        # The first argument may be a table, so every length that occurs may be the number of samples.
        lengths = [len(part.value) for part in parts]
        for num_samples in dict.fromkeys((usual, *lengths)):
            lists = [_Choice((part.name,), _list_options(part, num_samples)) for part in parts if part.is_list]
            for of_lists in _combinations(lists) if num_samples > 1 else ():
                # Parts of a list with an entry per sample need no rule.
                inside = tuple(f"{name}." for name, rule in of_lists.items() if rule == "samples")
                list_rules = {name: rule for name, rule in of_lists.items() if not name.startswith(inside)}
                tensors = [part for part in parts if not part.is_list and not part.name.startswith(inside)]
                for of_tensors in _combinations(list(self._tensor_choices(tensors, num_samples))):
                    if self._has_batch(list_rules | of_tensors, num_samples):
                        yield list_rules | of_tensors

    def _parts_without_rule(self, rules: Split) -> list[Argument]:
        """The tensors and lists, also inside of other arguments, that neither these rules nor the given ones name."""
        found: list[Argument] = []

        def visit(argument: Argument) -> None:
            if has_rule(argument.name, {**self._split, **rules}):
                return
            if isinstance(argument.value, Tensor):
                if argument.value.dim():
                    found.append(argument)
                return
            if argument.is_list and argument.value:
                found.append(argument)
            for item in argument.items():
                visit(item)

        for argument in self._arguments:
            visit(argument)
        return found

    def _has_batch(self, rules: Split, num_samples: int) -> bool:
        """Whether the batch has this number of samples under some rules."""
        try:
            return batch_size(self._arguments, {**self._split, **rules}) == num_samples
        except RunError:
            return False

    def _tensor_choices(self, tensors: Sequence[Argument], num_samples: int) -> Iterator[_Choice]:
        """The rules that tensors of each shape may have; one whose first dimension is the batch needs none.

        So does one whose first dimension is 1, unless another one is as long as the batch: the state of a recurrent
        layer has one row per layer.
        """
        by_shape: dict[tuple[int, ...], list[Argument]] = {}
        for tensor in tensors:
            shape = tuple(tensor.value.shape)
            if shape[0] != num_samples and (shape[0] != 1 or num_samples in shape):
                by_shape.setdefault(shape, []).append(tensor)
        for shape, same in by_shape.items():
            dims = [dim for dim, length in enumerate(shape) if dim and length == num_samples]
            names = tuple(tensor.name for tensor in same)
            if shape[0] == 1:
                yield _Choice(names, (None, *dims))
                continue
            sizes = [other for other in tensors if other not in same and _adds_up(other.value, shape[0])]
            tokens = self._token_rules(tensors, num_samples, shape[0])
            rows = [Rows(shape[0] // num_samples)] if shape[0] % num_samples == 0 else []
            yield _Choice(names, (None, *dims, *(Ragged(other.name) for other in sizes), *tokens, *rows))

    def _token_rules(self, tensors: Sequence[Argument], num_samples: int, length: int) -> Iterator[Ragged]:
        """Rules for a table with a row for every special token in a tensor of token ids, as for every image."""
        config = getattr(self._model, "config", None)
        configs = (config, *getattr(config, "__dict__", {}).values())
        named = (item for part in configs for item in getattr(part, "__dict__", {}).items())
        tokens = dict.fromkeys(value for name, value in named if name.endswith("token_id") and type(value) is int)
        for tensor in tensors:
            if len(tensor.value) == num_samples and is_integer(tensor.value):
                for token in tokens:
                    if not tensor.value.is_meta and int((tensor.value == token).sum()) == length:
                        yield Ragged(tensor.name, token)

    def decide(self, candidates: Sequence[dict[str, SplitRule]]) -> dict[str, SplitRule]:
        """The rules whose results are those of the whole batch."""
        whole = self._run(self._args, self._kwargs)
        if whole is None:
            # The model does not run on the whole batch: capture reports its error.
            return candidates[0]
        # The rules with which only scalars differ, such as a loss, and all rules with which the model runs.
        possible, ran = [], []
        for rules in candidates:
            try:
                microbatches = self._halves(rules)
            except RunError:
                continue
            results = []
            for microbatch in microbatches:
                result = self._run(microbatch.args, microbatch.kwargs)
                if result is None:
                    break
                results.append(result)
            else:
                ran.append(rules)
                sizes = [microbatch.size for microbatch in microbatches]
                agreement = _compare(whole, results, sizes, self._rounding)
                if agreement == _EQUAL:
                    return rules
                if agreement == _POSSIBLE:
                    possible.append(rules)
                    if rules is candidates[0] and self._follows_from_shapes(rules):
                        # Only a loss depends on the argument, and how it is averaged is not known here. Other rules may
                        # fit too, or give nearly the same loss by chance: take those that need no guess.
                        return rules
        if len(possible) == 1:
            return possible[0]
        if not possible and ran == [candidates[0]]:
            # Samples interact in this model, but no other way of splitting its arguments runs.
            return candidates[0]
        raise self._undecided(candidates)

    def confirm(self, rules: dict[str, SplitRule]) -> dict[str, SplitRule]:
        """The only rules that shapes allow; if the model does not run with them, those that pass more arguments whole.

        A mask for all samples may have as many rows as there are samples. Warns if the model runs, but the results of
        a few samples are not those of their halves, as if the first dimension were time instead of samples.
        """
        few = self._few_samples(rules)
        if few.size < 2:
            return rules
        halves = few.split(microbatch_sizes(few.size, 2))
        ran = [result for part in (few, *halves) if (result := self._run(part.args, part.kwargs)) is not None]
        if len(ran) < 3:
            try:
                return self.decide([rules, *islice(self._with_whole_arguments(rules), _MAX_CANDIDATES)])
            except RunError:
                return rules
        # Not if other draws or other buffers may have changed the results.
        if _interact(ran[0], ran[1:], few.size, self._rounding) and self._is_pure:
            self._warn_of_interaction(next(iter(few.axes)), self._whole_arguments_that_fit(rules))
        return rules

    def check_buffers(self, rules: Split) -> None:
        """Warn if the forward uses buffers that it writes, as spectral norm does: it runs once per microbatch.

        The statistics of a norm are written in training and used in evaluation.
        """
        names = [
            f"{path}.{name}" if path else name
            for path, module in self._model.named_modules()
            for name, _ in module.named_buffers(recurse=False)
            if not isinstance(module, _NormBase)
        ]
        if not names:
            return
        try:
            few = self._few_samples(rules)
            halves = few.split(microbatch_sizes(few.size, 2)) if few.size > 1 else (few,)
        except RunError:
            # The error is raised again when the batch is split.
            return
        first, last = halves[0], halves[-1]
        before = dict(self._model.named_buffers(remove_duplicate=False))
        versions = {name: before[name]._version for name in names}
        after_first = alone = None
        with isolated(self._model, written=()):
            is_run = self._run(first.args, first.kwargs) is not None
            after = dict(self._model.named_buffers(remove_duplicate=False))
            # A module may write in place, or set another tensor in the place of its buffer.
            written = [
                name for name in names if after.get(name) is not before[name] or before[name]._version != versions[name]
            ]
            if is_run and written:
                after_first = self._run(last.args, last.kwargs)
        if after_first is not None:
            # The same samples with the buffers that the first half was given. A second run of the same samples would
            # not show what other samples change, such as the ranges of fake quantization.
            alone = self._run(last.args, last.kwargs)
        # Dropout and statistics of norms have no effect in eval mode, in which samples are compared.
        self._is_pure = True
        pairs = [
            (one, two)
            for one, two in zip(alone or (), after_first or (), strict=False)
            if isinstance(one, Tensor) and isinstance(two, Tensor)
        ]
        if any(one.shape != two.shape or not is_close(two, one, self._rounding) for one, two in pairs):
            _warn(
                "the forward uses buffers that it writes, and runs once per microbatch instead of once for the batch: "
                f"{listed(written)}; results are those of a loop over the microbatches"
            )

    def _few_samples(self, rules: Split) -> Microbatch:
        splitter = BatchSplitter(self._model.forward, {**self._split, **rules})
        whole = splitter.whole(Batch(self._args, self._kwargs))
        return whole.take(0, min(whole.size, _FEW))

    def _warn_of_interaction(self, name: str, whole: Sequence[str]) -> None:
        """Warn that samples interact.

        `name` is an argument that was split. With those in `whole` passed whole, if there are any, nothing interacts.
        """
        fix = f"split={{{name!r}: 1}} if another dimension than the first holds the samples"
        if whole:
            fix = f"split={{{', '.join(f'{each!r}: None' for each in whole)}}}, with which they are equal"
        _warn(
            "the results of a sample depend on the samples beside it, so that those of microbatches are not those "
            f"of the batch\ntry: {fix}; penstock.check compares the gradients with those of the whole batch"
        )

    def _whole_arguments_that_fit(self, rules: Split) -> list[str]:
        """The arguments that passed whole, beside the rules, give the results of the whole batch; empty if none do."""
        whole = self._run(self._args, self._kwargs)
        for more in islice(self._with_whole_arguments(rules), _MAX_CANDIDATES) if whole is not None else ():
            try:
                halves = self._halves(more)
            except RunError:  # such as for sizes of a ragged argument, which must be split
                continue
            results = [result for half in halves if (result := self._run(half.args, half.kwargs)) is not None]
            sizes = [half.size for half in halves]
            if len(results) == len(halves) and _compare(whole, results, sizes, self._rounding) == _EQUAL:
                return [name for name in more if name not in rules]
        return []

    def _with_whole_arguments(self, rules: Split) -> Iterator[dict[str, SplitRule]]:
        """The rules with one or two more arguments passed whole, although they have as many rows as samples."""
        batch = batch_size(self._arguments, {**self._split, **rules})
        parts = self._parts_without_rule(rules)
        names = [part.name for part in parts if not part.is_list and len(part.value) == batch]
        for chosen in chain(combinations(names, 1), combinations(names, 2)):
            if self._has_batch(more := {**rules, **dict.fromkeys(chosen)}, batch):
                yield more

    def _follows_from_shapes(self, rules: Split) -> bool:
        """Whether rules are about lists only, and give the axes that the lists have without rules."""
        try:
            is_equal = self._halves({})[0].axes == self._halves(rules)[0].axes
        except RunError:
            return False
        return is_equal and set(rules.values()) <= {"samples", "items"}

    def _halves(self, rules: Split) -> tuple[Microbatch, ...]:
        """The batch in two microbatches, with some rules beside those that were given."""
        splitter = BatchSplitter(self._model.forward, {**self._split, **rules})
        return splitter.split(Batch(self._args, self._kwargs), 2)

    def _run(self, args: Any, kwargs: Any) -> list[object] | None:
        """The leaves of the model's output; None if it raises an error, which is noted."""
        args, kwargs = map_leaves(args, copy_leaf), map_leaves(kwargs, copy_leaf)
        seed_generators(_SEED)
        generators = GeneratorStates.of_process()
        buffers = list(self._model.buffers())
        versions = [(id(buffer), buffer._version) for buffer in buffers]
        try:
            result = leaves(self._model(*args, **without_cache(self._model, kwargs)))
            is_written = versions != [(id(buffer), buffer._version) for buffer in self._model.buffers()]
            self._is_pure &= not is_written and not generators.have_moved()
            return result
        except Exception as error:  # a model may raise anything for arguments that do not belong together
            self._failures.append(one_line(error))
            return None

    def _undecided(self, candidates: Sequence[dict[str, SplitRule]]) -> RunError:
        num_samples = batch_size(self._arguments, self._split)
        tried = [rules for rules in candidates if rules and self._has_batch(rules, num_samples)]
        names = {name for rules in tried for name in rules}
        named = [part for part in self._parts_without_rule({}) if part.name in names]
        shapes = [tuple(value.shape) if isinstance(value, Tensor) else f"of {len(value)}" for _, value in named]
        choices = [", ".join(f"{name!r}: {_rule_text(rule)}" for name, rule in rules.items()) for rules in tried]
        hints = [f"split={{{choice}}}" for choice in choices[:_MAX_SHOWN]]
        return RunError(
            "the batch cannot be split: no way of splitting these arguments is known to give the results of the whole "
            "batch",
            arguments=", ".join(f"{part.name} {shape}" for part, shape in zip(named, shapes, strict=True)),
            batch=num_samples,
            **({"error": self._failures[0]} if self._failures else {}),
            hint=" or ".join((*hints, "microbatches=1, which leaves the batch whole")),
        )


def _warn(text: str) -> None:
    """Warn at the line of the user that plans, however deep in the call stack this is."""
    path, _, line = user_line().rpartition(":")
    warnings.warn_explicit(text, PenstockWarning, path or __file__, int(line or 1))


def _combinations(choices: Sequence[_Choice]) -> Iterator[dict[str, SplitRule]]:
    """All combinations of one option per choice, as rules by name."""
    for rules in product(*(choice.options for choice in choices)):
        pairs = zip(choices, rules, strict=True)
        yield {name: rule for choice, rule in pairs for name in choice.names if rule is not _BY_SHAPE}


def _list_options(part: Argument, num_samples: int) -> tuple[Any, ...]:
    """The rules that a list may have, the likelier one first."""
    tensors = tensors_in(part.value)
    if len(part.value) != num_samples:
        # A rule although the length decides: in another batch the list may have as many entries as there are samples.
        return ("items",) if tensors else (_BY_SHAPE,)
    is_items = not tensors or all(leaf.dim() and leaf.shape[0] == num_samples for leaf in tensors)
    return ("items", "samples") if is_items else ("samples", "items")


def _adds_up(sizes: Tensor, length: int) -> bool:
    """Whether a table of sizes describes a tensor of this length."""
    if not is_integer(sizes) or sizes.dim() not in (1, 2) or sizes.is_meta:
        return False
    if sizes.dim() == 2 and sizes.shape[1] > _MAX_COLUMNS:
        return False
    rows = sizes.reshape(len(sizes), -1).prod(1)
    return bool((rows >= 0).all()) and int(rows.sum()) == length


def _rule_text(rule: Any) -> str:
    """A rule as Python code."""
    if isinstance(rule, Rows):
        return f"penstock.Rows({rule.per_sample})"
    if isinstance(rule, Ragged):
        return f"penstock.Ragged({rule.sizes!r}{'' if rule.token is None else f', {rule.token}'})"
    return repr(rule)


# Comparison

_EQUAL, _POSSIBLE, _DIFFERENT = "equal", "possible", "different"


def _compare(whole: Sequence[object], halves: Sequence[Sequence[object]], sizes: Sequence[int], rounding: float) -> str:
    """Whether the results of microbatches of these sizes are together those of the whole batch.

    `_POSSIBLE` if only scalars differ: a loss may be averaged in a way that is not known here.
    """
    if any(len(half) != len(whole) for half in halves):
        return _DIFFERENT
    agreement = _EQUAL
    for expected, *results in zip(whole, *halves, strict=True):
        if not isinstance(expected, Tensor) or not all(isinstance(result, Tensor) for result in results):
            continue
        shapes = [tuple(result.shape) for result in results]
        dim = additive_dim(tuple(expected.shape), shapes)
        if dim is not None:
            # A result per sample.
            if not is_close(torch.cat(results, dim), expected, rounding):
                return _DIFFERENT
        elif any(shape != tuple(expected.shape) for shape in shapes):
            return _DIFFERENT
        else:
            # A result for the whole batch: the same for all samples, or a mean or sum over samples.
            combined = results[:1] if all(torch.equal(result, results[0]) for result in results) else []
            if is_inexact(expected) and not expected.dim():
                combined.append(sum(result * (size / sum(sizes)) for result, size in zip(results, sizes, strict=True)))
                combined.append(sum(results))
            if not any(is_close(result, expected, rounding) for result in combined):
                if expected.dim():
                    return _DIFFERENT
                agreement = _POSSIBLE
    return agreement


def _interact(whole: Sequence[object], parts: Sequence[Sequence[object]], num_samples: int, rounding: float) -> bool:
    """Whether a result with one row per sample differs in the parts, or has a column per sample too.

    Other results are not compared.
    """
    if any(len(part) != len(whole) for part in parts):
        return False
    for expected, *results in zip(whole, *parts, strict=True):
        tensors = [result for result in results if isinstance(result, Tensor)]
        if isinstance(expected, Tensor) and len(tensors) == len(parts):
            shapes = [tuple(tensor.shape) for tensor in tensors]
            if expected.dim() and len(expected) == num_samples and _is_of_pairs(tuple(expected.shape), shapes):
                return True
            dim = additive_dim(tuple(expected.shape), shapes)
            has_rows = dim is not None and expected.shape[dim] == num_samples
            if has_rows and not is_close(torch.cat(tensors, dim), expected, rounding):
                return True
    return False


def _is_of_pairs(whole: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether a tensor has an entry for each pair of samples, as the similarities of a contrastive loss."""
    if any(len(shape) != len(whole) for shape in shapes):
        return False
    changed = [dim for dim, length in enumerate(whole) if any(shape[dim] != length for shape in shapes)]
    return len(changed) > 1 and all(shape[dim] == shape[0] for shape in (whole, *shapes) for dim in changed)


def additive_dim(whole: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> int | None:
    """The only dimension along which tensors of these shapes can be concatenated to the shape `whole`, or None.

    A batch dimension adds up, and so does one of packed tokens; the length of the longest sample does not.
    """
    if any(len(shape) != len(whole) for shape in shapes):
        return None
    changed = [dim for dim, length in enumerate(whole) if any(shape[dim] != length for shape in shapes)]
    if len(changed) != 1 or sum(shape[changed[0]] for shape in shapes) != whole[changed[0]]:
        return None
    return changed[0]
