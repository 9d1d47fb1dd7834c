"""A verified stage on several ranks: one worker towards its owner, and any layout of ranks inside."""

from phalanx.stage_group.group import open_group as open_group
from phalanx.stage_group.rank import (
    WrapShare as WrapShare,
    run_group_rank as run_group_rank,
    honest_share as honest_share,
)
from phalanx.stage_group.share import Share as Share
