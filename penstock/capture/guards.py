"""Checks whether a recording holds for another batch: the Python values and sizes read from tensors must be the same.

A recording freezes the branches that the model took. It holds for another batch only if every value that the model read
is the same again. Reads from inputs, from random numbers that the model draws between its blocks (layer drop), or
from values computed from these alone, are checked before the step, with the same outcome on every rank; the replay
checks all others as soon as the value exists.
"""

from typing import Any

import torch
from torch import nn

from penstock.capture.generators import GeneratorStates, torch_generators
from penstock.capture.hooks import without_user_hooks
from penstock.capture.random_draws import DrawSeed
from penstock.capture.recording import Recording
from penstock.capture.replay import Replay
from penstock.ir import TENSOR, Guard


class InputGuards:
    """The guards of a recording on inputs and random numbers, prepared to be checked for other batches and seeds."""

    def __init__(self, recording: Recording, model: nn.Module) -> None:
        self._written = recording.graph.written
        nodes = _nodes_to_check(recording)
        self._replay = None if nodes is None else Replay(recording, nodes, model, ())
        self.always_hold = self._replay is None
        """whether there is no guard to check"""
        chosen = [recording.graph[name] for name in nodes or ()]
        self.depend_on_draws = any(node.is_random for node in chosen)
        """whether guards read random numbers, which decide, for example, whether a layer is dropped"""
        self._blocks = [model.get_submodule(node.module) for node in chosen if node.is_block]

    def hold(self, inputs: dict[str, Any], seed: DrawSeed) -> bool:
        """Whether all guards read the recorded values in this batch, with the random numbers of this seed."""
        if self._replay is None:
            return True
        copies = {name: tensor.clone() if name in self._written else tensor for name, tensor in inputs.items()}
        # Drawing must not move the user's generators.
        drawn_from = torch_generators(torch.cuda.is_initialized()) if self.depend_on_draws else ()
        try:
            with GeneratorStates(drawn_from), without_user_hooks(self._blocks):
                self._replay.run(copies, seed)
        except Exception:
            # A guard that fails raises, and so does a batch that the model cannot run on; then the recording that is
            # made next reports the reason.
            return False
        return True


def _nodes_to_check(recording: Recording) -> list[str] | None:
    """The nodes that must run to check all guards on the inputs; None if there are no such guards."""
    graph, record = recording.graph, recording.record
    weightless = recording.nodes_without_weights
    available = recording.available_values(weightless)
    has_guards, wanted = False, set[str]()
    # Values that may differ between two batches of the same signature.
    varying = {*record.inputs, *(value.name for node in graph.nodes if node.is_random for value in node.makes)}
    for step in record.steps:
        if isinstance(step, Guard):
            names = set(step.arg_values)
            if names <= available:
                has_guards, wanted = True, wanted | names
        elif step.name in weightless and (graph[step.name].buffers or varying & set(graph[step.name].reads)):
            # The result of a call may vary in structure or size, as after `nonzero`: an implicit guard if the model
            # depends on it.
            made = {value.name for value in graph[step.name].makes}
            varying |= made
            if step.results.structure != TENSOR or not recording.size_reads.keys().isdisjoint(step.results.values):
                has_guards, wanted = True, wanted | made
    if not has_guards:
        return None
    # The nodes that make the wanted values, and all nodes that these need, in the order of the graph.
    needed: list[str] = []
    for node in reversed(graph.nodes):
        if wanted & {value.name for value in node.makes}:
            needed.append(node.name)
            wanted |= set(node.reads)
    return needed[::-1]
