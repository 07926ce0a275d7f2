"""Coupling: says in words why the loss of a batch is not made up of the losses of its microbatches."""

from collections.abc import Collection, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.capture import Recording
from penstock.errors import RunError
from penstock.ir import Cone, LossRule, Node, argument, loss_rule
from penstock.runtime.losses.counting import facts_of
from penstock.runtime.losses.loss_value import loss_name

_NAMED = 3
_PRODUCTS = frozenset(("matmul", "mm", "einsum", "cdist", "linear", "rmatmul", "addmm"))


def couplings(
    model: nn.Module,
    recording: Recording,
    known: Collection[str] | None = None,
    num_samples: int | None = None,
    is_tried: bool = False,
) -> tuple[str, ...]:
    """One sentence for each way in which the samples of a batch act on each other; none if they do not.

    What happens inside blocks that stay whole is seen only for batch norm and embeddings. `known` are the inputs that
    are there before the step, if not all are: to a loss function, the output of the model is an input too. If a trial
    has shown of what follows the last blocks that samples do not act on each other, nothing is said of that.
    """
    cone = Cone(recording.record, recording.graph, known, num_samples=num_samples)
    roots = _roots(recording)
    near = {name for root in roots for name in cone.near(root)} if is_tried else set()
    mixing = [
        node
        for node in {node.name: node for root in roots for node in cone.mixing(root)}.values()
        if not any(made.name in near for made in node.makes)
    ]
    rule = None
    if len(roots) == 1:
        rule = loss_rule(recording.record, recording.graph, roots[0], facts_of(recording, model), known, num_samples)
    found = (
        _batch_norm(model, cone),
        _frequencies(model, cone),
        _contrast(cone, None if is_tried else rule, [node for node in mixing if node.kind in _PRODUCTS]),
        _statistics(cone, rule, [node for node in mixing if node.kind not in _PRODUCTS]),
    )
    return tuple(sentence for sentence in found if sentence)


def _roots(recording: Recording) -> tuple[str, ...]:
    """The loss; all outputs of a model that returns none."""
    try:
        return (loss_name(recording),)
    except RunError:
        return recording.graph.outputs


def _batch_norm(model: nn.Module, cone: Cone) -> str:
    blocks = {node.module for node in cone.graph.nodes if node.is_leaf}
    layers = [name for name, part in model.named_modules() if _takes_statistics(part) and _is_within(name, blocks)]
    layers += [
        node.name
        for node in cone.graph.nodes
        if node.kind == "batch_norm"
        and node.module not in layers
        and argument(cone.calls[node.name], 5, "training") is True
    ]
    if not layers:
        return ""
    return f"batch norm takes its statistics from each microbatch instead of the whole batch: {_listed(layers)}"


def _frequencies(model: nn.Module, cone: Cone) -> str:
    blocks = {node.module for node in cone.graph.nodes if node.is_leaf}
    tables = [name for name, part in model.named_modules() if _counts_rows(part) and _is_within(name, blocks)]
    if not tables:
        return ""
    return f"scale_grad_by_freq counts the words of each microbatch instead of the whole batch: {_listed(tables)}"


def _counts_rows(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq


def _is_within(name: str, blocks: Collection[str]) -> bool:
    words = name.split(".")
    return any(".".join(words[:end]) in blocks for end in range(1, len(words) + 1))


def _takes_statistics(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


def _contrast(cone: Cone, rule: LossRule | None, products: Sequence[Node]) -> str:
    terms = rule.terms if rule else ()
    numbered = [term.value for term in terms for count in term.counts if not cone.depends(count.value)]
    where = [*(node.name for node in products), *numbered]
    if not where:
        return ""
    return (
        "the loss compares the samples of a batch with each other, and in a microbatch there are fewer of them: "
        f"{_listed(where)}"
    )


def _statistics(cone: Cone, rule: LossRule | None, mixing: Sequence[Node]) -> str:
    """A sum over samples that is the loss itself mixes nothing; one that something else is made of does."""
    unknown = [term.value for term in rule.terms if term.kind == "unknown"] if rule else []
    own = {node.name for term in (rule.terms if rule else ()) for node in _own_sums(cone, term.value)}
    where = [node.name for node in mixing if node.name not in own]
    if not where:
        return ""
    if rule and rule.kind == "mixed" and unknown:
        return (
            "a term of the loss is made of means over all tokens of a batch, such as the load of experts, and a "
            f"microbatch has others: {_listed(unknown)}"
        )
    return f"a value is taken over all samples of a batch, and a microbatch has fewer: {_listed(where)}"


def _own_sums(cone: Cone, term: str) -> list[Node]:
    """The function that makes a term, and the sum over samples that it is taken of."""
    node = cone.graph.makers.get(term)
    if node is None:
        return []
    earlier = [cone.sample_reducer(value) for value in node.reads]
    return [node, *(found for found in earlier if found is not None)]


def _listed(names: Sequence[str]) -> str:
    """At most three names and how many there are besides."""
    shown = ", ".join(list(names)[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"
