"""Masked offload: products with frozen matrices on a machine that must not see what is multiplied. Loads no torch."""

from phalanx.security.mask.fixed_point import (
    FixedColumns,
    FixedRows,
    decode,
    encode_columns,
    encode_rows,
    typical_error,
    worst_error,
)
from phalanx.security.mask.freivalds import Check, ProductCheck, UnsafeNoCheck
from phalanx.security.mask.ledger import LedgerStore, PadLedger, Ticket, begin_ledger
from phalanx.security.mask.matrix import RingMatrix, ring_matrix
from phalanx.security.mask.message import MaskedMessage, ProductMessage
from phalanx.security.mask.offload import LinearProducts, MaskedProduct, MaskedWorker, PendingProduct, masked_linear
from phalanx.security.mask.pads import AesPads, OsPads, Pad, PadSource
from phalanx.security.mask.pool import PadPool
from phalanx.security.mask.ring import P

__all__ = [
    "AesPads",
    "Check",
    "FixedColumns",
    "FixedRows",
    "LedgerStore",
    "LinearProducts",
    "MaskedMessage",
    "MaskedProduct",
    "MaskedWorker",
    "OsPads",
    "P",
    "Pad",
    "PadLedger",
    "PadPool",
    "PadSource",
    "PendingProduct",
    "ProductCheck",
    "ProductMessage",
    "RingMatrix",
    "Ticket",
    "UnsafeNoCheck",
    "begin_ledger",
    "decode",
    "encode_columns",
    "encode_rows",
    "masked_linear",
    "ring_matrix",
    "typical_error",
    "worst_error",
]
