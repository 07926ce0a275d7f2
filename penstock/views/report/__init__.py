"""The HTML report: each section of the page is a function in `panels` or `charts` and a section in `report.html`."""

from penstock.views.report.contents import Advice, Contents
from penstock.views.report.report import Report

__all__ = ["Advice", "Contents", "Report"]
