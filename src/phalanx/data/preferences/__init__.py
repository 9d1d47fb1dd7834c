"""Preferences: which of two answers is better, or whether one is wanted; as pairs of rows."""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.data.preferences.pairs import (
        PairCorpus as PairCorpus,
        PairRows as PairRows,
        prepare_preferences as prepare_preferences,
        trim_padding as trim_padding,
    )


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
