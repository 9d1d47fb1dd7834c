"""Masked offload of a model's frozen linear layers; all but the config loads at its first use.

WorkerPort <- SimulatedWorker, RemoteWorker     workers that multiply
MaskingClient on PadSources                     masks, asks, checks, unmasks
MaskedLinear, mask_linears                      layers of a model with products from such a client
"""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names
from phalanx.split.masked.config import MaskedConfig as MaskedConfig, MaskedWorkerConfig as MaskedWorkerConfig

if TYPE_CHECKING:
    from phalanx.split.masked.idle import open_masking_client as open_masking_client
    from phalanx.split.masked.linear import MaskedLinear as MaskedLinear, mask_linears as mask_linears
    from phalanx.split.masked.offload_client import MaskingClient as MaskingClient
    from phalanx.split.masked.pad_sources import process_pads as process_pads
    from phalanx.split.masked.port import SimulatedWorker as SimulatedWorker
    from phalanx.split.masked.remote import (
        RemoteWorker as RemoteWorker,
        local_masked_workers as local_masked_workers,
        remote_workers as remote_workers,
    )
    from phalanx.split.masked.serving import run_masked_worker as run_masked_worker


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
