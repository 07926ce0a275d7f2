"""The picture of a graph: two pictures as wholes, and the texts of others read back as XML."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from penstock.ir import Value
from penstock.views import Model, Staged
from penstock.views.palette import stage_color
from tests.views.graphs import HIDDEN, block, cut, decoder, function, graph, unet

SVG = "{http://www.w3.org/2000/svg}"
GOLDEN = Path(__file__).parent / "golden"


def read(subject: Staged, **options: int | str) -> ElementTree.Element:
    return ElementTree.fromstring(Model(**options)(subject))


def texts(subject: Staged, **options: int | str) -> list[str]:
    return [text.text or "" for text in read(subject, **options).iter(f"{SVG}text")]


@pytest.mark.parametrize(
    ("name", "subject"),
    [
        ("decoder", cut(decoder(8), "layers.4")),  # a run of layers, values from inputs only, tied weights
        ("unet", cut(unet(), "down.1", "up.1")),  # skips inside a stage, to the next and past one
    ],
)
def test_a_picture_is_the_one_that_was_looked_at(name: str, subject: Staged) -> None:
    """To change a picture on purpose: write it to the file, and look at it in a browser."""
    assert Model(title=name)(subject) == (GOLDEN / f"model_{name}.svg").read_text(encoding="utf-8")


def test_a_block_shows_name_class_and_parameters() -> None:
    assert {"embed", "Embedding, 16 parameters, 64 B"} <= set(texts(decoder(2)))


def test_functions_between_blocks_are_one_slim_box() -> None:
    assert "glue: 2 functions" in texts(decoder(2))


def test_values_computed_from_inputs_are_named_at_their_readers() -> None:
    shown = texts(decoder(2))
    assert shown.count("from inputs: bool[8, 8]") == 2
    assert "from inputs: int64[2, 8]" in shown


def test_inputs_are_named_at_their_readers() -> None:
    assert "ids: int64[2, 8]" in texts(decoder(2))


def test_an_arrow_carries_shape_and_bytes() -> None:
    assert texts(decoder(2)).count("float32[2, 8, 4], 256 B") == 4


def test_functions_that_nothing_reads_have_a_note() -> None:
    whole = graph(block("a", "x"), function("/sum", "a"), inputs=(Value("x", HIDDEN),), outputs=("a",))
    assert "glue: sum, read by no other part" in texts(whole)


def test_the_picture_of_many_layers_is_not_longer_than_that_of_few() -> None:
    heights = {read(decoder(layers)).attrib["height"] for layers in (8, 64)}
    assert len(heights) == 1
    assert {"layers.0 … layers.63", "64 × Layer, each 16 parameters, 64 B"} <= set(texts(decoder(64)))


def test_without_collapsing_every_node_has_its_box() -> None:
    assert {f"layers.{layer}" for layer in range(64)} <= set(texts(decoder(64), collapse=0))


def test_a_stage_is_a_band_of_its_colour_with_its_parameters() -> None:
    subject = cut(decoder(8), "layers.4")
    fills = [box.get("fill") for box in read(subject).iter(f"{SVG}rect")]
    assert [fills.count(stage_color(stage, 0.88)) for stage in range(3)] == [1, 1, 0]
    assert {"stage 0: 80 parameters, 320 B", "stage 1: 80 parameters, 320 B"} <= set(texts(subject))
    assert stage_color(0, 0.88) not in Model()(decoder(8))


def test_the_tensors_that_a_stage_receives_are_listed_above_it() -> None:
    written = texts(cut(unet(), "down.1", "up.1"))
    assert "from stage 0: float32[2, 8, 4], 256 B; gradients 256 B" in written
    assert "from stage 1: float32[2, 8, 4], 256 B; gradients 256 B" in written


def test_a_pointer_on_a_box_shows_all_nodes_and_their_reads_and_results() -> None:
    tips = [title.text or "" for title in read(decoder(2)).iter(f"{SVG}title")]
    tip = next(text for text in tips if text.startswith("Linear"))
    assert tip.splitlines()[2:] == ["stage 0", "head", "reads layers.1", "makes head: float32[2, 8, 4]"]


def test_a_title_wider_than_the_picture_is_cut_off() -> None:
    assert any(text.startswith("MMM") and text.endswith("..") for text in texts(decoder(2), title="M" * 300))


def test_a_document_loads_nothing_from_elsewhere() -> None:
    document = Model()(cut(decoder(8), "layers.4"))
    assert document.count("http") == 1  # the name of the SVG namespace
    assert "<script" not in document
