"""Views turn a record into a document: text, a picture, or the report. One view per file, one table.

The command line and the tests read the table: `penstock show FILE --view NAME` draws any of its views. Files:

    base.py                                  View and RichView, and the records that views take
    palette.py, drawing.py, bars.py          colours; shapes and SVG or PNG files of them; passes as bars of a timeline
    condense.py                              a graph with repeated parts merged, for views of models
    terminal.py, timeline.py, memory.py, chrome.py, table.py     views of traces
    outline.py, cuts.py, model.py            views of graphs and partitions
    profile.py                               the view of profiles
    report/                                  the HTML report of a plan or run
    emit.py                                  a plan as the configuration of another training framework; not a view
"""

from typing import Any

from penstock.views.base import RichView, Staged, Subject, Traces, View
from penstock.views.chrome import Chrome
from penstock.views.cuts import Cuts
from penstock.views.emit import EMITTERS, TIES_WEIGHTS, check_can_run, module_lists
from penstock.views.memory import Memory
from penstock.views.model import Model
from penstock.views.outline import Outline
from penstock.views.profile import Profile
from penstock.views.report import Report
from penstock.views.report.panels import Advice, Contents
from penstock.views.table import Table, TextTable, summary
from penstock.views.terminal import Terminal
from penstock.views.timeline import Timeline

VIEWS: dict[str, type[View[Any, Any]]] = {
    "terminal": Terminal,
    "table": Table,
    "timeline": Timeline,
    "memory": Memory,
    "chrome": Chrome,
    "outline": Outline,
    "cuts": Cuts,
    "model": Model,
    "profile": Profile,
    "report": Report,
}
