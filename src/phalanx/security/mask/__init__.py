"""Masked offload: products with frozen matrices on a machine that must not see the factors. Loads no torch."""

from phalanx.security.mask.fixed_point import worst_error as worst_error
from phalanx.security.mask.freivalds import ProductCheck as ProductCheck
from phalanx.security.mask.ledger import PadLedger as PadLedger, begin_ledger as begin_ledger
from phalanx.security.mask.message import MaskedMessage as MaskedMessage, ProductMessage as ProductMessage
from phalanx.security.mask.offload import (
    MaskedProduct as MaskedProduct,
    MaskedWorker as MaskedWorker,
    PendingProduct as PendingProduct,
    masked_linear as masked_linear,
)
from phalanx.security.mask.pads import AesPads as AesPads, OsPads as OsPads, PadSource as PadSource
from phalanx.security.mask.ring import P as P
