"""The picture of a graph, read back as XML."""

from xml.etree import ElementTree

from penstock.ir import TensorSpec, Value
from penstock.views import Model, Staged
from penstock.views.flow import Flow
from penstock.views.frame import Frame, Spot
from penstock.views.palette import IDLE, stage_color
from penstock.views.routes import Routes
from tests.views.graphs import HIDDEN, block, cut, decoder, function, graph, unet

SVG = "{http://www.w3.org/2000/svg}"


def read(subject: Staged, **options: int | str) -> ElementTree.Element:
    return ElementTree.fromstring(Model(**options)(subject))


def texts(subject: Staged, **options: int | str) -> list[str]:
    return [text.text or "" for text in read(subject, **options).iter(f"{SVG}text")]


def boxes(subject: Staged, color: str) -> list[ElementTree.Element]:
    return [box for box in read(subject).iter(f"{SVG}rect") if box.get("fill") == color]


def frame(subject: Staged) -> Frame:
    return Frame(Routes(Flow.of(subject, 4)))


def overlap(one: Spot, other: Spot) -> bool:
    return one.x < other.right and other.x < one.right and one.y < other.bottom and other.y < one.bottom


def test_a_block_shows_name_class_and_parameters() -> None:
    assert {"embed", "Embedding, 16 parameters, 64 B"} <= set(texts(decoder(2)))


def test_functions_between_blocks_are_one_slim_box() -> None:
    assert "glue: 2 functions" in texts(decoder(2))


def test_what_depends_on_inputs_only_is_grey_and_says_what_it_makes() -> None:
    assert len(boxes(decoder(2), IDLE)) == 2 + 1  # and the outputs
    assert {"bool[8, 8], 64 B", "labels -> int64[2, 8], 128 B"} <= set(texts(decoder(2)))


def test_an_arrow_carries_shape_and_bytes() -> None:
    assert texts(decoder(2)).count("float32[2, 8, 4], 256 B") == 4


def test_glue_that_nothing_reads_says_so() -> None:
    whole = graph(block("a", "x"), function("/sum", "a"), inputs=(Value("x", HIDDEN),), outputs=("a",))
    assert "glue: sum, read by no other part" in texts(whole)


def test_inputs_are_named_where_they_are_read() -> None:
    assert "ids: int64[2, 8]" in texts(decoder(2))


def test_the_picture_of_many_layers_is_not_longer_than_that_of_few() -> None:
    heights = {read(decoder(layers)).attrib["height"] for layers in (8, 64)}
    assert len(heights) == 1


def test_without_condensing_every_node_has_its_box() -> None:
    assert {f"layers.{layer}" for layer in range(64)} <= set(texts(decoder(64), alike=0))


def test_a_stage_is_a_band_of_its_colour_with_its_parameters() -> None:
    subject = cut(decoder(8), "layers.4")
    assert [len(boxes(subject, stage_color(stage, 0.88))) for stage in range(3)] == [1, 1, 0]
    assert {"stage 0: 80 parameters, 320 B", "stage 1: 80 parameters, 320 B"} <= set(texts(subject))


def test_above_a_stage_stands_what_it_receives() -> None:
    written = texts(cut(unet(), "down.1", "up.1"))
    assert "from stage 0: float32[2, 8, 4], 256 B; gradients 256 B" in written
    assert "from stage 1: float32[2, 8, 4], 256 B; gradients 256 B" in written


def test_a_graph_that_is_not_cut_has_no_bands() -> None:
    assert boxes(decoder(2), stage_color(0, 0.88)) == []


def test_no_two_boxes_overlap_and_all_stand_inside_the_picture() -> None:
    for subject in (decoder(64), cut(decoder(64), "layers.9"), unet(), cut(unet(), "down.1", "up.1")):
        laid = frame(subject)
        spots = list(laid.spots.values())
        assert not any(overlap(one, other) for place, one in enumerate(spots) for other in spots[:place])
        assert all(spot.x >= 0 and spot.right <= laid.width and spot.bottom <= laid.height for spot in spots)


def test_bands_do_not_overlap_and_hold_the_parts_of_their_stage() -> None:
    laid = frame(cut(unet(), "down.1", "up.1"))
    assert not overlap(laid.bands[0], laid.bands[1])
    for place in laid.routes.column[:-1]:
        band = laid.bands[laid.flow.parts[place].stage]
        assert band.y < laid.spots[place].y
        assert laid.spots[place].bottom < band.bottom


def test_a_skip_runs_at_the_side_and_the_next_part_is_reached_straight() -> None:
    routes = Routes(Flow.of(unet(), 4))
    skips = {(trunk.wire.source, trunk.wire.targets) for trunk in routes.right}
    assert skips == {(0, (7,)), (1, (5,))}
    assert set(routes.straight) == set(routes.column[1:])


def test_skips_that_overlap_take_lanes_of_their_own() -> None:
    assert len({trunk.lane for trunk in Routes(Flow.of(unet(), 4)).right}) == 2


def test_skips_that_follow_one_another_share_a_lane() -> None:
    names = "abcdefg"
    blocks = [block(name, "x" if not n else names[n - 1], makes=HIDDEN) for n, name in enumerate(names)]
    blocks[2] = block("c", "b", "a")
    blocks[6] = block("g", "f", "e")
    whole = graph(*blocks, inputs=(Value("x", TensorSpec((1,))),), outputs=("g",))
    assert {trunk.lane for trunk in Routes(Flow.of(whole, 0)).right} == {0}


def test_a_pointer_on_a_box_shows_all_nodes_and_what_they_read_and_make() -> None:
    tips = [title.text or "" for title in read(decoder(2)).iter(f"{SVG}title")]
    tip = next(text for text in tips if text.startswith("Linear"))
    assert tip.splitlines()[2:] == ["stage 0", "head", "reads layers.1", "makes head: float32[2, 8, 4]"]


def test_a_title_wider_than_the_picture_is_cut_off() -> None:
    assert any(text.startswith("MMM") and text.endswith("..") for text in texts(decoder(2), title="M" * 300))


def test_a_document_loads_nothing_from_elsewhere() -> None:
    document = Model()(cut(decoder(8), "layers.4"))
    assert document.count("http") == 1  # the name of the SVG namespace
    assert "<script" not in document
