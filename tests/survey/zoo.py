"""The entry of a model of the zoo: as a pipeline, and as stages cut in every way that is tested."""

from functools import partial

from penstock.partitioners import uniform
from tests.stages.architectures import DEPTHS, Architecture
from tests.survey.cases import Case, Outcome, run, squares
from tests.survey.results import Entry
from tests.zoo import UNSCORED, ZOO, ambient


def run_zoo_model(name: str) -> Outcome:
    """The outcome of a model of the zoo as a pipeline, with labels if it takes any."""
    model, args, kwargs = ZOO[name]()
    return run(Case(model, args, kwargs, squares if name in UNSCORED else None, context=partial(ambient, name)))


def survey_zoo_model(name: str) -> Entry:
    """The outcome, and the differences of its stages from the model at every granularity."""
    outcome = run_zoo_model(name)
    architectures = [Architecture(name, granularity) for granularity in DEPTHS]
    with ambient(name):
        sizes = [found.size for each in architectures for found in each.differences().values()]
        graphs = [each.captured("plain")[0].graph for each in architectures]
    sent = [len(crossing.values) for crossing in uniform(graphs[0], 4).crossings(graphs[0])]
    return Entry(
        outcome.result,
        outcome.reason,
        "exact" if max(sizes) <= architectures[0].tolerance else "wrong",
        tuple(len(graph.nodes) for graph in graphs),
        tuple(sent),
        float(f"{max(sizes):.0e}"),
    )
