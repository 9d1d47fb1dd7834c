"""Objectives of pre-training: pure functions from a packed row, its sample and a seed to the row that is learned."""

from phalanx.objectives.pretraining.denoisers import DenoisedRows, DenoisersSettings
from phalanx.objectives.pretraining.fill_in_the_middle import FillInTheMiddleSettings, MiddleRows
from phalanx.objectives.pretraining.masked import MaskedRows, MaskedSettings, mask_token_of
from phalanx.objectives.pretraining.prefix_lm import PrefixRows
from phalanx.objectives.pretraining.rewriting import Row, RowPlace, RowRewriting, TokenTable
from phalanx.objectives.pretraining.span_corruption import CorruptedRows, SpanCorruptionSettings

__all__ = [
    "CorruptedRows",
    "DenoisedRows",
    "DenoisersSettings",
    "FillInTheMiddleSettings",
    "MaskedRows",
    "MaskedSettings",
    "MiddleRows",
    "PrefixRows",
    "Row",
    "RowPlace",
    "RowRewriting",
    "SpanCorruptionSettings",
    "TokenTable",
    "mask_token_of",
]
