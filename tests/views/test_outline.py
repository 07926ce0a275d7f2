"""The outline of a graph."""

import io

from rich.console import Console

from penstock.views import Outline, Staged
from tests.views.graphs import cut, decoder, unet


def rows(subject: Staged, collapse: int = 4) -> list[list[str]]:
    lines = [line for line in Outline(collapse)(subject).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]


def test_a_line_per_part_has_its_class_reads_and_results() -> None:
    assert rows(decoder(64)) == [
        ["node", "class", "reads", "makes", "parameters"],
        ["embed", "Embedding", "ids", "float32[2, 8, 4], 256 B", "16"],
        ["/arange … le", "glue: 2 functions", "", "bool[8, 8], 64 B", ""],
        ["layers.0 … layers.63", "64 × Layer", "embed, 1 from inputs", "float32[2, 8, 4], 256 B", "1.02 K"],
        ["head", "Linear", "layers.63", "float32[2, 8, 4], 256 B", "16"],
        ["/view@2", "glue: view", "labels", "int64[2, 8], 128 B", ""],
        ["/view … loss", "glue: 2 functions", "head, 1 from inputs", "float32[], 4 B", ""],
    ]


def test_the_heading_lists_size_inputs_and_outputs() -> None:
    assert Outline()(decoder(2)).splitlines()[:3] == [
        "9 nodes, 48 parameters, 192 B",
        "inputs: ids int64[2, 8], labels int64[2, 8]",
        "outputs: /loss float32[]",
    ]


def test_with_a_partition_the_stage_is_a_column() -> None:
    stages = {row[0]: row[-1] for row in rows(cut(decoder(2), "layers.1"))}
    assert stages == {
        "node": "stage",
        "embed": "0",
        "/arange … le": "all",
        "layers.0": "0",
        "layers.1": "1",
        "head": "1",
        "/view@2": "1",
        "/view … loss": "1",
    }


def test_without_condensing_every_node_is_a_line_with_everything_it_reads() -> None:
    found = {row[0]: row for row in rows(decoder(64), collapse=0)}
    assert len(found) == 1 + len(decoder(64).nodes)
    assert found["layers.9"][2] == "layers.8, /le"


def test_a_long_list_of_reads_is_counted() -> None:
    (last,) = [row for row in rows(cut(unet(), "up.1"), collapse=2) if row[0] == "/cat@2"]
    assert last[2] == "up.0, down.1"


def test_on_a_console_nothing_is_lost() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(Outline().renderable(cut(decoder(64), "layers.20")))
    printed = console.file.getvalue()
    assert all(text in printed for text in ("layers.0 … layers.19", "44 × Layer", "1 from inputs", "704"))


def test_on_a_console_stages_are_separated() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(Outline().renderable(cut(decoder(64), "layers.20")))
    lines = console.file.getvalue().splitlines()
    (place,) = [number for number, line in enumerate(lines) if line.lstrip().startswith("layers.20")]
    assert not lines[place - 1].strip()
