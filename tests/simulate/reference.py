"""A simulator of its own, slow and plain: an event queue in which ranks, links and messages take their turns.

It shares no code with the package but the nouns. Every event is (time, number, what happens then).
"""

import heapq
from itertools import count

from penstock.ir import Kind, Send


class Reference:
    """Runs a Program; `spans[rank]` is [(action, start, end)] in order, `messages[send]` is (sent, arrived)."""

    def __init__(self, program, costs, cluster):
        self.program, self.costs, self.cluster = program, costs, cluster
        self.queue, self.numbers = [], count()
        self.place = [0] * program.num_ranks
        self.is_busy = [False] * program.num_ranks
        self.spans = [[] for _ in range(program.num_ranks)]
        self.here = set()  # (stage that may use it, "out" or "in", stage that made it, microbatch)
        self.messages = {}
        self.link_free = {}
        for rank in range(program.num_ranks):
            self.at(0.0, lambda now, rank=rank: self.go_on(rank, now))
        while self.queue:
            now, _, happen = heapq.heappop(self.queue)
            happen(now)

    def at(self, time, happen):
        heapq.heappush(self.queue, (time, next(self.numbers), happen))

    def go_on(self, rank, now):
        """Do what the rank can do now, up to the end of its order, a pass, or something that is not here yet."""
        order = self.program.orders[rank]
        while self.place[rank] < len(order) and not self.is_busy[rank]:
            action = order[self.place[rank]]
            if action.kind <= Kind.OVERLAP:
                if not all(need in self.here for part in action.parts for need in self.needs(part)):
                    return
                self.is_busy[rank] = True
                self.at(now + self.seconds(action), lambda end, start=now: self.finish(rank, start, end))
            else:
                if isinstance(action, Send):
                    self.send(rank, action, now)
                self.spans[rank].append((action, now, now))
                self.place[rank] += 1

    def finish(self, rank, start, end):
        action = self.program.orders[rank][self.place[rank]]
        self.spans[rank].append((action, start, end))
        for part in action.parts:
            self.here.update((stage, *self.made(part)) for stage in self.program.placement.stages[rank])
        self.place[rank] += 1
        self.is_busy[rank] = False
        self.go_on(rank, end)

    def send(self, rank, action, now):
        target = self.program.placement[action.peer]
        link = self.cluster.link(rank, target)
        start = max(now, self.link_free.get((rank, target), 0.0))
        size = 0
        for message in self.costs.messages:
            if (message.producer, message.consumer) == (action.stage, action.peer):
                size = message.forward_bytes
            if (message.consumer, message.producer) == (action.stage, action.peer):
                size = message.backward_bytes
        sent = start + (size / link.bandwidth if link.bandwidth else 0.0)
        self.link_free[rank, target] = sent
        self.messages[action] = (start, sent + link.latency)
        self.at(sent + link.latency, lambda now: self.arrive(target, action, now))

    def arrive(self, rank, action, now):
        word = "out" if action.stage < action.peer else "in"
        self.here.add((action.peer, word, action.stage, action.microbatch))
        self.go_on(rank, now)

    def needs(self, part):
        stage, microbatch = part.stage, part.microbatch
        edges, silent = self.program.cuts.edges, self.program.cuts.without_gradient
        if part.kind is Kind.FORWARD:
            return [(stage, "out", a, microbatch) for a, b in edges if b == stage]
        if part.kind is Kind.WEIGHT_GRAD:
            return [(stage, "in", stage, microbatch)]
        later = [b for a, b in edges if a == stage and (a, b) not in silent]
        return [(stage, "out", stage, microbatch), *((stage, "in", b, microbatch) for b in later)]

    def made(self, part):
        words = {Kind.FORWARD: "out", Kind.BACKWARD: "in", Kind.INPUT_GRAD: "in", Kind.WEIGHT_GRAD: "weights"}
        return words[part.kind], part.stage, part.microbatch

    def seconds(self, action):
        columns = (self.costs.forward, self.costs.backward, self.costs.input_grad, self.costs.weight_grad)
        times = [columns[part.kind][part.stage] for part in action.parts]
        return sum(times) - self.cluster.overlap * min(times) if len(times) == 2 else times[0]
