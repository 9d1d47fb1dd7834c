"""Rules that compare documents with each other: a text, or a part of one, that stood before."""

from phalanx.data.rules.duplicates.exact_duplicates import (
    ExactDuplicates as ExactDuplicates,
    ExactDuplicatesConfig as ExactDuplicatesConfig,
)
from phalanx.data.rules.duplicates.near_duplicates import (
    NearDuplicates as NearDuplicates,
    NearDuplicatesConfig as NearDuplicatesConfig,
)
from phalanx.data.rules.duplicates.paragraph_duplicates import (
    ParagraphDuplicates as ParagraphDuplicates,
    ParagraphDuplicatesConfig as ParagraphDuplicatesConfig,
)
from phalanx.data.rules.duplicates.repeated_substrings import (
    RepeatedSubstrings as RepeatedSubstrings,
    RepeatedSubstringsConfig as RepeatedSubstringsConfig,
)
