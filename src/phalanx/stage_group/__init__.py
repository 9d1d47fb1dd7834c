"""A verified stage on several ranks: one worker towards its owner, tensor parallel inside."""

from phalanx.stage_group.group import StageGroup, open_group
from phalanx.stage_group.rank import follow

__all__ = ["StageGroup", "follow", "open_group"]
