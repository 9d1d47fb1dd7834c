"""A served model whose middle layers run at parties that are not trusted: signed pieces, drawn checks, one judge."""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names
from phalanx.serve.stages.config import StagesConfig as StagesConfig, StageWorkerConfig as StageWorkerConfig

if TYPE_CHECKING:
    from phalanx.serve.stages.evidence import explain_served_evidence as explain_served_evidence
    from phalanx.serve.stages.relay import StageRelay as StageRelay
    from phalanx.serve.stages.staged_model import StagedModel as StagedModel, open_staged_model as open_staged_model
    from phalanx.serve.stages.worker import (
        StageHolder as StageHolder,
        StageService as StageService,
        run_stage_worker as run_stage_worker,
    )


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
