"""Evaluation of a model by suites: figures with their intervals, samples, digests, and comparisons of two models."""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.evaluate.comparison import compare_results as compare_results
    from phalanx.evaluate.evaluation import (
        EvaluationResult as EvaluationResult,
        read_result as read_result,
        result_text as result_text,
        run_suites as run_suites,
    )
    from phalanx.evaluate.intervals import share_with_interval as share_with_interval
    from phalanx.evaluate.refusals import refusal_matcher as refusal_matcher
    from phalanx.evaluate.scorer import LocalScorer as LocalScorer, RowScorer as RowScorer, Scorer as Scorer
    from phalanx.evaluate.suite import (
        SAFETY_SET as SAFETY_SET,
        list_suites as list_suites,
        open_suite as open_suite,
        text_suite as text_suite,
    )


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
