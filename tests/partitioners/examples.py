"""Random small graphs, and their best partitions by trying all."""

import itertools
import random
from itertools import pairwise

from penstock.ir import Graph, Node, NodeBytes, NodeCost, Profile, SavedTensors, TensorSpec, Value


def wild(seed, num_nodes, knows_held=False):
    """Nodes with several values, skips, nodes from inputs only, shared parameters and uneven costs."""
    draw = random.Random(seed)
    nodes, values, from_inputs, parameters, costs = [], ["x"], {"x"}, [], []
    for at in range(num_nodes):
        is_free = draw.random() < 0.2 and at > 0
        pool = [value for value in values if not is_free or value in from_inputs][-6:]
        reads = tuple(dict.fromkeys(draw.choice(pool) for _ in range(draw.randint(1, 3))))
        names = [f"p{at}"] if draw.random() < 0.6 else []
        parameters += [Value(name, _tensor(draw, 0.8)) for name in names]
        names += [draw.choice(parameters).name] if len(parameters) > 2 and draw.random() < 0.3 else []
        made = tuple(Value(f"v{at}.{number}", _tensor(draw, 0.7)) for number in range(draw.randint(1, 2)))
        nodes.append(Node(f"n{at}", reads, made, tuple(dict.fromkeys(names)), from_inputs=is_free))
        values += [value.name for value in made]
        from_inputs |= {value.name for value in made} if is_free else set()
        memory = NodeBytes(kept=draw.randint(0, 20))
        holds = SavedTensors(draw.randint(0, 9), tuple(value for value in (*reads, made[0].name) if value != "x"))
        seconds = (draw.choice([0, 1, 2, 3, 4 * draw.random()]), draw.choice([0, 1, 2, 3]))
        costs.append(NodeCost(f"n{at}", *seconds, 0.0, 0.0, memory, holds))
    outputs = tuple(dict.fromkeys((values[-1], draw.choice(values[1:]))))
    graph = Graph(tuple(nodes), (Value("x", TensorSpec((1,))),), outputs, tuple(parameters))
    held = tuple((value.name, value.spec.bytes) for node in nodes for value in node.makes) if knows_held else ()
    return graph, Profile(tuple(costs), 1.0, graph.fingerprint, "made up", held=held)


def _tensor(draw, share):
    return TensorSpec((draw.randint(1, 9),), requires_grad=draw.random() < share)


def branches(number, length):
    """Parallel chains that meet in one node."""
    names = [
        (f"b{branch}.{at}", f"b{branch}.{at - 1}" if at else "x") for at in range(length) for branch in range(number)
    ]
    ends = tuple(f"b{branch}.{length - 1}" for branch in range(number))
    nodes = [Node(name, (source,), (Value(name, TensorSpec((10,), "uint8")),)) for name, source in names]
    graph = Graph(
        (*nodes, Node("end", ends, (Value("y", TensorSpec((1,), "uint8")),))), (Value("x", TensorSpec((1,))),), ("y",)
    )
    costs = tuple(NodeCost(node.name, 1.0, 0.0, 0.0, 0.0) for node in graph.nodes)
    return graph, Profile(costs, 1.0, graph.fingerprint, "made up")


class Trial:
    """All partitions of a small problem, costed from the graph itself; every node is an atom of its own."""

    def __init__(self, problem):
        self.problem, self.graph = problem, problem.graph
        self.nodes = [node for node in self.graph.nodes if not node.from_inputs]
        self.known = {}

    def best_runs(self):
        """The least bottleneck of all cuts into runs that fit, and the fewest bytes at which it is reached."""
        number, stages = len(self.nodes), self.problem.num_stages
        cuts = ((0, *inner, number) for inner in itertools.combinations(range(1, number), stages - 1))
        return self._best(tuple(tuple(range(low, high)) for low, high in pairwise(each)) for each in cuts)

    def best_partition(self):
        """The same of all partitions in which values go forward only."""
        number, stages = len(self.nodes), self.problem.num_stages
        maker = {value.name: at for at, node in enumerate(self.nodes) for value in node.makes}
        arrows = [(maker[value], at) for at, node in enumerate(self.nodes) for value in node.reads if value in maker]
        found = (
            each
            for each in itertools.product(range(stages), repeat=number)
            if len(set(each)) == stages and all(each[source] <= each[target] for source, target in arrows)
        )
        return self._best(
            tuple(tuple(at for at in range(number) if each[at] == stage) for stage in range(stages)) for each in found
        )

    def _best(self, partitions):
        scores = (self._score(stages) for stages in partitions)
        return min((score for score in scores if score is not None), default=None)

    def _score(self, stages):
        """The busiest rank and the bytes; None if a rank exceeds its memory. Messages are for one stage per rank."""
        ranks = self.problem.placed.ranks
        loads, memory, bytes_ = [0.0] * len(set(ranks)), [0] * len(set(ranks)), 0
        for stage, nodes in enumerate(stages):
            load, held, sent = self._stage(nodes, stage)
            loads[ranks[stage]] += load
            memory[ranks[stage]] += held
            bytes_ += sent
        limits = self.problem.cluster.limits
        if limits and any(held > limit for held, limit in zip(memory, limits, strict=True)):
            return None
        return float(f"{max(loads):.11g}"), bytes_ - self._parameters(self.graph.nodes)

    def _stage(self, nodes, stage):
        if (nodes, stage) not in self.known:
            self.known[nodes, stage] = self._work_out([self.nodes[at] for at in nodes], stage)
        return self.known[nodes, stage]

    def _work_out(self, own, stage):
        problem, graph, is_last = self.problem, self.graph, stage == self.problem.num_stages - 1
        wanted = {value for node in own for value in node.reads} | set(graph.outputs if is_last else ())
        run = list(own)
        for node in reversed(graph.nodes):
            if node.from_inputs and (wanted & {value.name for value in node.makes} or self._is_dead(node, own)):
                run.append(node)
                wanted |= set(node.reads)
        made = {value.name for node in own for value in node.makes}
        received = [v for node in self.nodes for v in node.makes if v.name in wanted - made]
        others = [node for node in self.nodes if node not in own]
        outside = {value for node in others for value in node.reads} | set(() if is_last else graph.outputs)
        sent = [v for node in own for v in node.makes if v.name in outside]
        seconds = sum(problem.profile[node.name].forward + problem.profile[node.name].backward for node in run)
        kept = sum(problem.profile[node.name].memory.kept for node in run) + size(received)
        copies = 3 if problem.training.optimizer == "adamw" else 1
        state = self._parameters(run) + copies * self._parameters(run, trained=True)
        load = self._load(seconds * problem.slowness_of[problem.placed.ranks[stage]], received, sent)
        bytes_ = size(received) + size(received, trained=True) + self._parameters(run)
        return load, state + problem.in_flight * kept, bytes_

    def _load(self, seconds, received, sent):
        cluster = self.problem.cluster
        if not cluster.bandwidth:
            return seconds
        ways = [size(received), size(received, trained=True)]
        if self.problem.overlaps:
            return max(seconds, *(way / cluster.bandwidth for way in ways))
        ways += [size(sent), size(sent, trained=True)]
        return seconds + sum(way / cluster.bandwidth + cluster.latency * (way > 0) for way in ways)

    def _parameters(self, nodes, trained=False):
        names = {name for node in nodes for name in node.parameters}
        return size([value for value in self.graph.parameters if value.name in names], trained)

    def _is_dead(self, node, own):
        """A node that nothing needs runs with the first node."""
        made = {value.name for value in node.makes}
        used = {value for other in self.graph.nodes for value in other.reads} | set(self.graph.outputs)
        return self.nodes[0] in own and not made & used


def size(values, trained=False):
    return sum(value.spec.bytes for value in values if value.spec.requires_grad or not trained)


def outcome(division):
    """Bottleneck and bytes of a division, rounded as a trial is."""
    return float(f"{division.bottleneck_seconds:.11g}"), division.cut_bytes
