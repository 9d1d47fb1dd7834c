"""Objectives of pre-training: pure functions from a packed row, its sample and a seed to the row that is learned."""

from phalanx.objectives.pretraining.denoisers import (
    DenoisedRows as DenoisedRows,
    DenoisersSettings as DenoisersSettings,
)
from phalanx.objectives.pretraining.fill_in_the_middle import (
    FillInTheMiddleSettings as FillInTheMiddleSettings,
    MiddleRows as MiddleRows,
)
from phalanx.objectives.pretraining.masked import (
    MaskedRows as MaskedRows,
    MaskedSettings as MaskedSettings,
    mask_token_of as mask_token_of,
)
from phalanx.objectives.pretraining.prefix_lm import PrefixRows as PrefixRows
from phalanx.objectives.pretraining.rewriting import (
    Row as Row,
    RowPlace as RowPlace,
    RowRewriting as RowRewriting,
    TokenTable as TokenTable,
)
from phalanx.objectives.pretraining.span_corruption import (
    CorruptedRows as CorruptedRows,
    SpanCorruptionSettings as SpanCorruptionSettings,
)
