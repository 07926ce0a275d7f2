"""A colour per kind and a shade per stage of a rank, distinct for colour-blind readers and in greyscale.

Hues follow Okabe and Ito's set; kinds differ in lightness as well. The later stages of a rank are lighter.
"""

from penstock.ir import PASS_COLORS, Kind

KIND_COLORS = {**PASS_COLORS, **dict.fromkeys((Kind.REDUCE, Kind.UNSHARD, Kind.RESHARD), "#8a6fb0")}
STAGE_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800")
IDLE = "#eef0f3"  # time without a pass
INK = "#1b1f24"  # text
FAINT = "#6b7280"  # secondary text
RULE = "#c3c8cf"  # axes and borders
PAPER = "#ffffff"  # the background
MARK = "#000000"  # the critical path, and text on light colours
ALARM = "#b00020"  # memory above its limit
LIGHTEST = 0.45  # share of PAPER in the colour of the last stage of a rank


def fill(kind: int, chunk: int, num_chunks: int) -> str:
    """The colour of a pass; `chunk` is the position of its stage among the `num_chunks` stages of its rank."""
    share = LIGHTEST * chunk / (num_chunks - 1) if num_chunks > 1 else 0.0
    return mix(KIND_COLORS[Kind(kind)], PAPER, share)


def stage_color(stage: int, lightness: float) -> str:
    """The colour of a stage, mixed with PAPER; colours repeat after len(STAGE_COLORS) stages."""
    return mix(STAGE_COLORS[stage % len(STAGE_COLORS)], PAPER, lightness)


def mix(one: str, other: str, share: float) -> str:
    """The first colour with the given share of the other."""
    pairs = zip(channels(one), channels(other), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def text_on(color: str) -> str:
    """Black or white, whichever has more contrast with the colour."""
    return max((MARK, PAPER), key=lambda ink: contrast(ink, color))


def contrast(one: str, other: str) -> float:
    """Contrast of two colours as defined for the web: 1 to 21, good from 4.5."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def luminance(color: str) -> float:
    """Relative luminance as defined for web contrast, 0 to 1."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in channels(color))]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def channels(color: str) -> tuple[int, int, int]:
    """Red, green and blue of `#rrggbb`, 0 to 255."""
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)
