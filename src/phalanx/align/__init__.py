"""Training data that a model makes of its own answers, by written principles; refusals; and scores by values."""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.align.choice import PairChoice
    from phalanx.align.judges import JudgeFile, ModelJudge, ServerJudge
    from phalanx.align.outcomes import feedback_rows, read_outcomes
    from phalanx.align.principles import load_constitution
    from phalanx.align.prompts import AskedPrompt, read_prompts
    from phalanx.align.revision import Revision
    from phalanx.align.row_file import ResumableRows
    from phalanx.align.safety import SafetyCheck, safety_prompts
    from phalanx.align.values import value_gaps

__all__ = [
    "AskedPrompt",
    "JudgeFile",
    "ModelJudge",
    "PairChoice",
    "ResumableRows",
    "Revision",
    "SafetyCheck",
    "ServerJudge",
    "feedback_rows",
    "load_constitution",
    "read_outcomes",
    "read_prompts",
    "safety_prompts",
    "value_gaps",
]

if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
