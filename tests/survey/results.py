"""The stored results of the survey: one entry per model, by part, and which versions they were found with."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

RESULTS = Path(__file__).with_name("results.json")


@dataclass(frozen=True)
class Entry:
    """What became of one model."""

    result: str
    """as a pipeline: exact, warned, refused, wrong or broken"""
    reason: str = ""
    stages: str = "exact"
    """the same for stages without microbatches, which are exact if the pipeline is exact or warned of"""
    nodes: tuple[int, ...] = ()
    """for a model of the zoo: the number of nodes, by granularity"""
    sent: tuple[int, ...] = ()
    """how many tensors cross each cut of four stages"""
    difference: float = 0.0
    """the largest relative difference between the model and its stages, over all cuts and granularities"""


@dataclass
class Part:
    """The models of the zoo, of a library, or of the tests of transformers."""

    versions: dict[str, str] = field(default_factory=dict)
    models: dict[str, Entry] = field(default_factory=dict)


def load(path: Path = RESULTS) -> dict[str, Part]:
    """The stored results by part."""
    if not path.exists():
        return {}
    stored = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: Part(part["versions"], {model: _entry(entry) for model, entry in part["models"].items()})
        for name, part in stored.items()
    }


def save(parts: dict[str, Part], path: Path = RESULTS) -> None:
    """Store the results, one line per model, without the fields that have their usual values."""
    usual = asdict(Entry(""))
    lines = []
    for name, part in parts.items():
        models = [
            f"   {json.dumps(model)}: {json.dumps({k: v for k, v in asdict(entry).items() if v != usual[k]})}"
            for model, entry in part.models.items()
        ]
        shown = ",\n".join(models)
        lines.append(
            f' {json.dumps(name)}: {{\n  "versions": {json.dumps(part.versions)},\n  "models": {{\n{shown}\n  }}\n }}'
        )
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _entry(stored: dict[str, object]) -> Entry:
    lists = {name: tuple(value) for name, value in stored.items() if isinstance(value, list)}
    return Entry(**{**stored, **lists})
