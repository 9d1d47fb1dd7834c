"""A verified stage on several ranks: one worker towards its owner, and any layout of ranks inside."""

from phalanx.stage_group.group import open_group
from phalanx.stage_group.rank import WrapShare, follow, honest_share
from phalanx.stage_group.share import Share

__all__ = ["Share", "WrapShare", "follow", "honest_share", "open_group"]
