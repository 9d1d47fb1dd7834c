"""A run directory as a page and as pictures that open offline."""

from phalanx.report.loss import write_curve_svg
from phalanx.report.page import report_page, write_report

__all__ = ["report_page", "write_curve_svg", "write_report"]
