"""A Drawing as a self-contained SVG document; every text in it is data and is escaped."""

from functools import cache

from jinja2 import Environment, Template

from penstock.views.drawing import Drawing
from penstock.views.palette import PAPER

_TEMPLATE = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{{ d.width|px }}" height="{{ d.height|px }}" \
viewBox="0 0 {{ d.width|px }} {{ d.height|px }}" font-family="DejaVu Sans, Verdana, Arial, sans-serif">
<title>{{ title }}</title>
<rect width="100%" height="100%" fill="{{ paper }}"/>
{% for b in d.boxes -%}
<rect x="{{ b.x|px }}" y="{{ b.y|px }}" width="{{ b.width|px }}" height="{{ b.height|px }}" fill="{{ b.fill }}"
{%- if b.tip %}><title>{{ b.tip }}</title></rect>{% else %}/>{% endif %}
{% endfor -%}
{% for a in d.areas -%}
<polygon points="{{ a.points|points }}" fill="{{ a.fill }}"/>
{% endfor -%}
{% for l in d.lines -%}
<polyline points="{{ l.points|points }}" fill="none" stroke="{{ l.color }}" stroke-width="{{ l.width|px }}"
{%- if l.dashed %} stroke-dasharray="5 3"{% endif %} stroke-linejoin="round"/>
{% endfor -%}
{% for t in d.labels -%}
<text x="{{ t.x|px }}" y="{{ (t.y + 0.36 * t.size)|px }}" font-size="{{ t.size|px }}" fill="{{ t.color }}"
{%- if t.anchor != "start" %} text-anchor="{{ t.anchor }}"{% endif %}>{{ t.text }}</text>
{% endfor -%}
</svg>
"""


def svg_document(drawing: Drawing, title: str) -> str:
    """The SVG text."""
    return _template().render(d=drawing, title=title, paper=PAPER)


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, keep_trailing_newline=True)
    environment.filters["px"] = _pixels
    environment.filters["points"] = lambda points: " ".join(f"{_pixels(x)},{_pixels(y)}" for x, y in points)
    return environment.from_string(_TEMPLATE)


def _pixels(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
