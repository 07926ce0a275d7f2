"""Loss origin: reads from a record by what a loss is divided."""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from penstock.ir.graph import Graph, Node
from penstock.ir.loss import Count, LossRule, Measure, Term, combined
from penstock.ir.loss_cone import ADD, DIVIDE, RESHAPE, SAME, Cone, Read, argument, operands
from penstock.ir.record import Call, Container, ObjectRef, Record, Ref, State, Tree

Attribute = Callable[[str, str], Any]
"""`attribute("criterion", "reduction")`: what a module of the model holds under a name"""


@dataclass(frozen=True)
class Facts:
    """What a record knows only by name: what modules hold, and what was read from tensors."""

    attribute: Attribute
    read: Read


_LABELLED = frozenset(("cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss", "NLLLoss2d"))
# fmt: off
_MEAN = frozenset((
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "kl_div", "gaussian_nll_loss", "poisson_nll_loss", "cosine_embedding_loss", "hinge_embedding_loss",
    "margin_ranking_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss", "multi_margin_loss",
    "soft_margin_loss", "triplet_margin_loss", "triplet_margin_with_distance_loss", "ctc_loss",
))
_MEAN_MODULES = frozenset((
    "MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BCELoss", "BCEWithLogitsLoss", "KLDivLoss", "GaussianNLLLoss",
    "PoissonNLLLoss", "CosineEmbeddingLoss", "HingeEmbeddingLoss", "MarginRankingLoss", "MultiLabelMarginLoss",
    "MultiLabelSoftMarginLoss", "MultiMarginLoss", "SoftMarginLoss", "TripletMarginLoss",
    "TripletMarginWithDistanceLoss", "CTCLoss",
))
# fmt: on
_PLACES = {"weight": 2, "ignore_index": 4, "reduction": 6}
"""where cross_entropy and nll_loss take them when they are given by position"""
_PAIRED = frozenset(("mse_loss", "MSELoss"))


class _Part(NamedTuple):
    """A summand still to be looked at, and by what it is divided so far."""

    tree: Tree
    divisors: tuple[Tree, ...]


def loss_rule(
    record: Record,
    graph: Graph,
    value: str,
    facts: Facts | None = None,
    known: Collection[str] | None = None,
    num_samples: int | None = None,
) -> LossRule:
    """How the value comes about.

    `known` are the inputs that are there before the step: all, unless the record is that of a loss function, to which
    the output of the model is an input too. Without facts, modules that are losses are unknown.
    """
    facts = facts or Facts(lambda module, name: None, lambda key: None)
    return _Origin(Cone(record, graph, known, facts.read, num_samples), facts.attribute).rule(value)


class _Origin:
    """Walks back from a loss through what keeps a sum of terms a sum of terms."""

    def __init__(self, cone: Cone, attribute: Attribute) -> None:
        self.cone, self.graph, self.attribute = cone, cone.graph, attribute

    def rule(self, value: str) -> LossRule:
        """The rule of all terms, each of them once."""
        waiting, seen, terms = [_Part(Ref(value), ())], set[_Part](), list[Term]()
        while waiting:
            part = waiting.pop(0)
            if part in seen:
                continue
            seen.add(part)
            inner = self._inner(part)
            if inner is None:
                terms.append(self._divided(self._term(part.tree), part.divisors))
            else:
                waiting = [*inner, *waiting]
        return combined(terms)

    # Through sums, factors and changes of form

    def _inner(self, part: _Part) -> list[_Part] | None:
        """The summands of a part; none if it is a term."""
        if not isinstance(part.tree, Ref) or not self.cone.depends(part.tree.value):
            return None
        node, call = self.cone.maker(part.tree.value)
        if node is None or call is None or call.is_module:
            return None
        if node.kind in DIVIDE:
            return self._quotient(call, part)
        if node.kind == "mul":
            return self._product(call, part)
        found = self._summands(node, call)
        return None if found is None else [_Part(tree, part.divisors) for tree in found]

    def _summands(self, node: Node, call: Call) -> list[Tree] | None:
        given = operands(call)
        if node.kind in ADD:
            return [tree for tree in given[:2] if not (isinstance(tree, bool | int | float) and not tree)]
        if node.kind in SAME | RESHAPE and self.cone.size(given[0]) == 1:
            return [given[0]]
        if node.kind in ("sum", "mean") and isinstance(given[0], Ref):
            return self._scalars(given[0])
        return None

    def _scalars(self, tree: Ref) -> list[Tree] | None:
        """The numbers that a tensor is made of, if it is made of numbers."""
        node, call = self.cone.maker(tree.value)
        if not self.graph.spec(tree.value).shape:
            return [tree]
        if node is None or call is None or call.is_module:
            return None
        first = operands(call)[0]
        if node.kind in ("stack", "cat") and isinstance(first, Container):
            return list(first.items) if all(self.cone.size(item) == 1 for item in first.items) else None
        if node.kind in RESHAPE and isinstance(first, Ref) and self.cone.size(first) == 1:
            return self._scalars(first)
        return None

    def _product(self, call: Call, part: _Part) -> list[_Part] | None:
        varying = [tree for tree in operands(call)[:2] if self.cone.varies(tree)]
        return [_Part(varying[0], part.divisors)] if len(varying) == 1 else None

    def _quotient(self, call: Call, part: _Part) -> list[_Part] | None:
        above, below = operands(call)[:2]
        if isinstance(below, Ref) and self.cone.varies(below) and not self.cone.is_known(below.value):
            return None
        return [_Part(above, (*part.divisors, below))]

    # What a term is

    def _term(self, tree: Tree) -> Term:
        if not isinstance(tree, Ref):
            return Term("constant", tree.name if isinstance(tree, State) else str(tree))
        value = tree.value
        if not self.cone.depends(value):
            return Term("constant", value)
        node, call = self.cone.maker(value)
        if node is None or call is None:
            return Term("unknown", value)
        if node.kind in _LABELLED:
            return self._labelled(node, call, value)
        if node.kind in _MEAN | _MEAN_MODULES:
            return self._averaged(node, call, value)
        if node.kind in ("sum", "mean") and not call.is_module:
            return self._reduced(node, call, value)
        return Term("curved" if self._is_of_numbers(call) else "unknown", value)

    def _is_of_numbers(self, call: Call) -> bool:
        """Whether all that varies of what a function is given are single numbers, so that it is no sum over samples."""
        varying = [tree for tree in operands(call) if self.cone.varies(tree)]
        return not call.is_module and bool(varying) and all(self.cone.size(tree) == 1 for tree in varying)

    def _labelled(self, node: Node, call: Call, value: str) -> Term:
        """cross_entropy and nll_loss: a mean is over the labels that are not ignored."""
        reduction = self._reduction(call)
        if reduction != "mean":
            return Term("sum" if reduction == "sum" else "unknown", value)
        target = argument(call, 1, "target")
        if not isinstance(target, Ref) or not self.cone.is_known(target.value):
            return Term("unknown", value)
        if self.graph.spec(target.value).dtype.startswith(("float", "bfloat")):
            # Probabilities of classes: every sample counts alike, whatever the weights.
            return self._checked(Term("mean", value), call)
        ignored, weight = self._setting(call, "ignore_index", -100), self._setting(call, "weight", None)
        held = f"{call.target}.weight" if call.is_module and weight is not None else ""
        if isinstance(weight, Ref) and not self.cone.is_known(weight.value):
            return Term("unknown", value)
        labels = self.cone.first_like(target.value)
        refs = [labels, *([weight.value] if isinstance(weight, Ref) else [])]
        name = held or _shown(weight) if weight is not None else ""
        return Term("tokens", value, (Count(labels, "labels", ignored, name, self.cone.nodes_of(refs)),))

    def _averaged(self, node: Node, call: Call, value: str) -> Term:
        reduction = self._reduction(call)
        weight = argument(call, 5, "weight") if node.kind in _PAIRED and not call.is_module else None
        if reduction not in ("mean", "batchmean", "sum"):
            return Term("unknown", value)
        if weight is not None and reduction != "sum":
            return self._weighted(weight, value)
        return self._checked(Term("sum" if reduction == "sum" else "mean", value), call)

    def _weighted(self, weight: Tree, value: str) -> Term:
        """A mean of squares in which each entry counts as much as its weight."""
        if not isinstance(weight, Ref) or not self.cone.is_known(weight.value):
            return Term("unknown", value)
        return Term("tokens", value, (Count(weight.value, "total", nodes=self.cone.nodes_of([weight.value])),))

    def _reduced(self, node: Node, call: Call, value: str) -> Term:
        """A plain sum or mean; if samples were summed up before, that decides."""
        source = operands(call)[0]
        earlier = self.cone.sample_reducer(source.value) if isinstance(source, Ref) else None
        kind = (earlier or node).kind
        return self._checked(Term("sum" if kind == "sum" else "mean", value), call)

    def _checked(self, term: Term, call: Call) -> Term:
        """The term, unless samples act on each other before it, or are left out of its mean."""
        reads = [tree.value for tree in operands(call)[:2] if isinstance(tree, Ref)]
        if any(self.cone.statistics(name) for name in reads):
            return replace(term, kind="unknown")
        chosen = next((choice for name in reads for choice in self.cone.choices(name)), "")
        chosen = self.cone.first_like(chosen)
        if not chosen or term.kind == "sum":
            return term
        if not self.cone.is_known(chosen):
            return replace(term, kind="unknown")
        measure: Measure = "labels" if self.graph.spec(chosen).dtype == "bool" else "entries"
        return replace(term, kind="tokens", counts=(Count(chosen, measure, 0, "", self.cone.nodes_of([chosen])),))

    def _reduction(self, call: Call) -> Any:
        if call.is_module:
            return self.attribute(call.target, "reduction")
        by_size, by_batch = argument(call, -1, "size_average"), argument(call, -1, "reduce")
        if by_size is not None or by_batch is not None:
            return "none" if by_batch is False else "sum" if by_size is False else "mean"
        found = argument(call, -1, "reduction")
        return found if isinstance(found, str) else next(self._words(call), "mean")

    def _words(self, call: Call) -> Iterator[str]:
        """A reduction given by position: the only text among the arguments."""
        yield from (tree for tree in operands(call) if tree in ("none", "mean", "sum", "batchmean"))

    def _setting(self, call: Call, name: str, default: Any) -> Any:
        if call.is_module:
            return self.attribute(call.target, name)
        found = argument(call, _PLACES[name], name)
        return default if found is None else found

    # By what a term is divided outside of its function

    def _divided(self, term: Term, divisors: tuple[Tree, ...]) -> Term:
        for divisor in divisors:
            term = self._divided_once(term, divisor)
        return term

    def _divided_once(self, term: Term, divisor: Tree) -> Term:
        if term.kind in ("unknown", "curved") or (term.kind == "constant" and not self.cone.varies(divisor)):
            return term
        if isinstance(divisor, bool | int | float):
            return self._divided_by_number(term, divisor)
        if not self.cone.varies(divisor) or not isinstance(divisor, Ref):
            return replace(term, divided_by=_shown(divisor)) if term.kind == "sum" else term
        count = self._count_of(divisor.value) if term.kind == "sum" else self._share_of(divisor.value)
        if term.kind not in ("sum", "mean") or count is None:
            return replace(term, kind="unknown")
        return replace(term, kind="tokens", counts=(count,), divided_by="")

    def _share_of(self, value: str) -> Count | None:
        """The count of a mean that is divided by the mean of a mask."""
        node, _ = self.cone.maker(value)
        if node is None or node.kind != "mean" or self.cone.size(Ref(value)) != 1 or not self.cone.is_known(value):
            return None
        return Count(value, "share", nodes=self.cone.nodes_of([value]))

    def _divided_by_number(self, term: Term, number: float) -> Term:
        if term.kind != "sum":
            return term
        if value := self.cone.counted_as(number):
            # A number that was read from a value of the inputs, such as mask.sum().item().
            count = self._count_of(value)
            return replace(term, kind="unknown") if count is None else replace(term, kind="tokens", counts=(count,))
        return replace(term, kind="mean") if self._is_size(term, number) else replace(term, divided_by=str(number))

    def _is_size(self, term: Term, number: float) -> bool:
        """Whether a number is how many rows a tensor near the loss has, which the model has looked at."""
        near = self.cone.near(term.value) & self.cone.sized
        shapes = [self.graph.spec(name).shape for name in near if self.cone.depends(name)]
        return any(number == math.prod(shape[:end]) for shape in shapes for end in range(1, len(shape) + 1))

    def _count_of(self, value: str) -> Count | None:
        """The count whose divisor is a value; None if it is no plain number of entries."""
        at_least = plus = 0.0
        name = value
        while True:
            node, call = self.cone.maker(name)
            if node is None or call is None or call.is_module:
                break
            given = operands(call)
            if node.kind in ("clamp", "clamp_min", "clip") and not plus:
                least = argument(call, 1, "min")
                if not isinstance(least, int | float):
                    return None
                at_least = max(at_least, float(least))
            elif node.kind == "add" and len(given) > 1 and isinstance(given[1], int | float):
                plus += float(given[1])
            elif node.kind not in SAME:
                break
            if not isinstance(given[0], Ref):
                return None
            name = given[0].value
        is_count = node is not None and node.kind in ("sum", "count_nonzero")
        if not is_count or self.cone.size(Ref(name)) != 1 or not self.cone.is_known(name):
            return None
        name = self.cone.first_like(name)
        dtype, nodes = self.graph.spec(value).dtype, self.cone.nodes_of([name])
        return Count(name, "number", nodes=nodes, at_least=at_least, plus=plus, dtype=dtype)


def _shown(tree: Tree) -> str:
    if isinstance(tree, Ref):
        return tree.value
    return tree.name if isinstance(tree, State) else tree.key if isinstance(tree, ObjectRef) else str(tree)
