"""Masked offload: products with frozen matrices on a machine that must not see the factors. Loads no torch."""

from phalanx.security.mask.fixed_point import (
    worst_error,
)
from phalanx.security.mask.freivalds import ProductCheck
from phalanx.security.mask.ledger import PadLedger, begin_ledger
from phalanx.security.mask.message import MaskedMessage, ProductMessage
from phalanx.security.mask.offload import MaskedProduct, MaskedWorker, PendingProduct, masked_linear
from phalanx.security.mask.pads import AesPads, OsPads, PadSource
from phalanx.security.mask.ring import P

__all__ = [
    "AesPads",
    "MaskedMessage",
    "MaskedProduct",
    "MaskedWorker",
    "OsPads",
    "P",
    "PadLedger",
    "PadSource",
    "PendingProduct",
    "ProductCheck",
    "ProductMessage",
    "begin_ledger",
    "masked_linear",
    "worst_error",
]
