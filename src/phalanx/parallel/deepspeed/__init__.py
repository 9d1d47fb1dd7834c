"""DeepSpeed's ZeRO as what joins data parallel copies, with parameters and optimizer in host memory or on disk.

The config and its checks are there at once; what needs torch is imported at its first use.
"""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names
from phalanx.parallel.deepspeed.config import DeepSpeedConfig as DeepSpeedConfig
from phalanx.parallel.deepspeed.settings import check_machine as check_machine

if TYPE_CHECKING:
    from phalanx.parallel.deepspeed.member import opened_member as opened_member


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
