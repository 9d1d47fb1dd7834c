"""Training data that a model makes of its own answers, by written principles; refusals; and scores by values."""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.align.choice import PairChoice as PairChoice
    from phalanx.align.judges import JudgeFile as JudgeFile, ModelJudge as ModelJudge, ServerJudge as ServerJudge
    from phalanx.align.outcomes import feedback_rows as feedback_rows, read_outcomes as read_outcomes
    from phalanx.align.principles import load_constitution as load_constitution
    from phalanx.align.prompts import AskedPrompt as AskedPrompt, read_prompts as read_prompts
    from phalanx.align.revision import Revision as Revision
    from phalanx.align.row_file import ResumableRows as ResumableRows
    from phalanx.align.safety import SafetyCheck as SafetyCheck, safety_prompts as safety_prompts
    from phalanx.align.values import value_gaps as value_gaps


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
