"""Masked offload of a model's frozen linear layers; torch loads with the first name that needs it.

WorkerPort <- SimulatedWorker, RemoteWorker     workers that multiply
MaskingClient on PadSources                     masks, asks, checks, unmasks
MaskedLinear, mask_linears                      layers of a model with products from such a client
"""

import importlib
from typing import TYPE_CHECKING, Any

from phalanx.split.masked.config import OWNER, MaskedConfig, MaskedWorkerConfig
from phalanx.split.masked.idle import IdlePads, open_masking_client
from phalanx.split.masked.offload_client import MaskingClient, OffloadClient
from phalanx.split.masked.pad_sources import PadSources, ledger_pads, pad_sources, process_pads, system_pads
from phalanx.split.masked.port import SimulatedWorker, WorkerPort
from phalanx.split.masked.process import LocalMaskedWorkers, end_with_parent
from phalanx.split.masked.remote import RemoteWorker, remote_workers
from phalanx.split.masked.serving import Multiplier, run_masked_worker

if TYPE_CHECKING:
    from phalanx.split.masked.linear import MaskedLinear, mask_linears

__all__ = [
    "OWNER",
    "IdlePads",
    "LocalMaskedWorkers",
    "MaskedConfig",
    "MaskedLinear",
    "MaskedWorkerConfig",
    "MaskingClient",
    "Multiplier",
    "OffloadClient",
    "PadSources",
    "RemoteWorker",
    "SimulatedWorker",
    "WorkerPort",
    "end_with_parent",
    "ledger_pads",
    "mask_linears",
    "open_masking_client",
    "pad_sources",
    "process_pads",
    "remote_workers",
    "run_masked_worker",
    "system_pads",
]

_WITH_TORCH = ("MaskedLinear", "mask_linears")


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module 'phalanx.split.masked' has no attribute {name!r}")
    return getattr(importlib.import_module("phalanx.split.masked.linear"), name)
