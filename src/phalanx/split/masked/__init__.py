"""Masked offload of a model's frozen linear layers; all but the config loads at its first use.

WorkerPort <- SimulatedWorker, RemoteWorker     workers that multiply
MaskingClient on PadSources                     masks, asks, checks, unmasks
MaskedLinear, mask_linears                      layers of a model with products from such a client
"""

import importlib
from typing import TYPE_CHECKING, Any

from phalanx.split.masked.config import OWNER, MaskedConfig, MaskedWorkerConfig

if TYPE_CHECKING:
    from phalanx.split.masked.idle import IdlePads, open_masking_client
    from phalanx.split.masked.linear import MaskedLinear, mask_linears
    from phalanx.split.masked.offload_client import MaskingClient, OffloadClient
    from phalanx.split.masked.pad_sources import PadSources, ledger_pads, process_pads, system_pads
    from phalanx.split.masked.port import SimulatedWorker, WorkerPort
    from phalanx.split.masked.process import LocalMaskedWorkers
    from phalanx.split.masked.remote import RemoteWorker, remote_workers
    from phalanx.split.masked.serving import Multiplier, run_masked_worker

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
    "ledger_pads",
    "mask_linears",
    "open_masking_client",
    "process_pads",
    "remote_workers",
    "run_masked_worker",
    "system_pads",
]

_HOMES = {
    "IdlePads": "idle",
    "LocalMaskedWorkers": "process",
    "MaskedLinear": "linear",
    "MaskingClient": "offload_client",
    "Multiplier": "serving",
    "OffloadClient": "offload_client",
    "PadSources": "pad_sources",
    "RemoteWorker": "remote",
    "SimulatedWorker": "port",
    "WorkerPort": "port",
    "ledger_pads": "pad_sources",
    "mask_linears": "linear",
    "open_masking_client": "idle",
    "process_pads": "pad_sources",
    "remote_workers": "remote",
    "run_masked_worker": "serving",
    "system_pads": "pad_sources",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'phalanx.split.masked' has no attribute {name!r}")
    return getattr(importlib.import_module(f"phalanx.split.masked.{_HOMES[name]}"), name)
