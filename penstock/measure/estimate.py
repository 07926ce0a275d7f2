"""estimate: every node alone, its seconds told from its work and the speed of a device."""

from penstock.ir import DeviceSpeed, Profile
from penstock.measure.findings import Findings, versions
from penstock.measure.fused import fused_attention
from penstock.measure.kinship import families, told_of
from penstock.measure.memory import Memory, memory_of
from penstock.measure.subject import Subject, Tell, silent
from penstock.measure.times import Times
from penstock.measure.timing import Timing
from penstock.measure.walk import Situation, walk
from penstock.measure.work import Work


def estimate(subject: Subject, speed: DeviceSpeed, tell: Tell = silent) -> Profile:
    """The profile of a model on a device of that speed. No clock is asked: the same model has the same profile.

    A model on the meta device needs no memory for its numbers. The model is left as it was.
    """
    groups = families(subject)
    firsts = {family[0].name for family in groups}
    known: dict[str, tuple[Times, Memory]] = {}

    def visit(situation: Situation) -> None:
        name = situation.node.name
        if name in firsts:
            # The first backward, made with it, makes the gradients of the parameters; the next one adds to them.
            times = Timing.of_node(situation, Work(speed)).once(1)
            known[name] = times, memory_of(situation)
            tell(len(known), len(groups))

    with subject.undisturbed(), fused_attention():
        sizes = walk(subject, visit)
    looked_at = [family for family in groups if family[0].name in known]
    times = {node.name: known[family[0].name][0] for family in looked_at for node in family}
    memory = {n.name: told_of(known[family[0].name][1], family[0], n) for family in looked_at for n in family}
    return Findings(subject.graph, times, memory, sizes).profile(None, f"estimated at {speed}", versions())
