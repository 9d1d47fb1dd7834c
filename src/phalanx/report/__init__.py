"""A run directory as a page and as pictures that open offline; what draws them is imported at its first use."""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.report.data_page import write_data_report as write_data_report
    from phalanx.report.evaluation_page import write_evaluation_page as write_evaluation_page
    from phalanx.report.bars import write_fertility_svg as write_fertility_svg
    from phalanx.report.loss import write_curve_svg as write_curve_svg
    from phalanx.report.page import report_page as report_page, write_report as write_report
    from phalanx.report.rates import write_rate_svg as write_rate_svg
    from phalanx.report.read import check_run as check_run


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
