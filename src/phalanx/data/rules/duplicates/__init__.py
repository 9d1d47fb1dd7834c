"""Rules that compare documents with each other: a text, or a part of one, that stood before."""

from phalanx.data.rules.duplicates.exact_duplicates import ExactDuplicates, ExactDuplicatesConfig
from phalanx.data.rules.duplicates.near_duplicates import NearDuplicates, NearDuplicatesConfig
from phalanx.data.rules.duplicates.paragraph_duplicates import ParagraphDuplicates, ParagraphDuplicatesConfig
from phalanx.data.rules.duplicates.repeated_substrings import RepeatedSubstrings, RepeatedSubstringsConfig

__all__ = [
    "ExactDuplicates",
    "ExactDuplicatesConfig",
    "NearDuplicates",
    "NearDuplicatesConfig",
    "ParagraphDuplicates",
    "ParagraphDuplicatesConfig",
    "RepeatedSubstrings",
    "RepeatedSubstringsConfig",
]
