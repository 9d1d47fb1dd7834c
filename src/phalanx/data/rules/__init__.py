"""Rules of a data build; to add one: one file with its config, one line of the table."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx.data.rules.bad_words import BadWords as BadWords, BadWordsConfig as BadWordsConfig
from phalanx.data.rules.c4 import C4 as C4, C4Config as C4Config
from phalanx.data.rules.decontamination import (
    Decontamination as Decontamination,
    DecontaminationConfig as DecontaminationConfig,
    EvaluationSetConfig as EvaluationSetConfig,
)
from phalanx.data.rules.duplicates import (
    ExactDuplicates as ExactDuplicates,
    ExactDuplicatesConfig as ExactDuplicatesConfig,
    NearDuplicates as NearDuplicates,
    NearDuplicatesConfig as NearDuplicatesConfig,
    ParagraphDuplicates as ParagraphDuplicates,
    ParagraphDuplicatesConfig as ParagraphDuplicatesConfig,
    RepeatedSubstrings as RepeatedSubstrings,
    RepeatedSubstringsConfig as RepeatedSubstringsConfig,
)
from phalanx.data.rules.fineweb import FineWeb as FineWeb, FineWebConfig as FineWebConfig
from phalanx.data.rules.gopher_quality import GopherQuality as GopherQuality, GopherQualityConfig as GopherQualityConfig
from phalanx.data.rules.gopher_repetition import (
    GopherRepetition as GopherRepetition,
    GopherRepetitionConfig as GopherRepetitionConfig,
)
from phalanx.data.rules.language import Language as Language, LanguageConfig as LanguageConfig
from phalanx.data.rules.language_mixing import (
    LanguageMixing as LanguageMixing,
    LanguageMixingConfig as LanguageMixingConfig,
)
from phalanx.data.rules.characters import Length as Length, LengthConfig as LengthConfig
from phalanx.data.rules.characters import Mojibake as Mojibake, MojibakeConfig as MojibakeConfig
from phalanx.data.rules.page import Page as Page
from phalanx.data.rules.pii import Pii as Pii, PiiConfig as PiiConfig
from phalanx.data.rules.rule import (
    CorpusRule as CorpusRule,
    DocumentRule as DocumentRule,
    Drop as Drop,
    Edit as Edit,
    Outcome as Outcome,
    Quarantine as Quarantine,
    Rule as Rule,
    RuleReason as RuleReason,
    RuleSettings as RuleSettings,
    Tag as Tag,
)
from phalanx.data.rules.secrets import Secrets as Secrets, SecretsConfig as SecretsConfig
from phalanx.data.rules.text_classifier import (
    HarmConfig as HarmConfig,
    QualityConfig as QualityConfig,
    ScoreRule as ScoreRule,
)
from phalanx.data.rules.characters import Unicode as Unicode, UnicodeConfig as UnicodeConfig
from phalanx.data.rules.url_blocklist import UrlBlocklist as UrlBlocklist, UrlBlocklistConfig as UrlBlocklistConfig


@dataclass(frozen=True)
class RuleEntry:
    """One line of the table.

    Attributes:
        config: Section of a recipe; its `kind` is the name.
        make: Builds it; an extra that is missing is a DataError that names it.
    """

    config: type[RuleSettings]
    make: Callable[[Any], Rule]
    reference: str = ""


RULES: dict[str, RuleEntry] = {
    "unicode": RuleEntry(UnicodeConfig, Unicode, "Unicode Standard Annex 15"),
    "mojibake": RuleEntry(MojibakeConfig, Mojibake, "Speer 2019 (ftfy)"),
    "length": RuleEntry(LengthConfig, Length),
    "language": RuleEntry(LanguageConfig, Language, "Joulin et al. 2017; Penedo et al. 2024"),
    "language_mixing": RuleEntry(LanguageMixingConfig, LanguageMixing, "our own, on Joulin et al. 2017"),
    "gopher_quality": RuleEntry(GopherQualityConfig, GopherQuality, "Rae et al. 2021, A.1.1"),
    "gopher_repetition": RuleEntry(GopherRepetitionConfig, GopherRepetition, "Rae et al. 2021, table A1"),
    "c4": RuleEntry(C4Config, C4, "Raffel et al. 2020, section 2.2"),
    "fineweb": RuleEntry(FineWebConfig, FineWeb, "Penedo et al. 2024, section 3.6"),
    "exact_duplicates": RuleEntry(ExactDuplicatesConfig, ExactDuplicates, "Lee et al. 2022, section 4"),
    "near_duplicates": RuleEntry(NearDuplicatesConfig, NearDuplicates, "Broder 1997; Lee et al. 2022, section 4.2"),
    "paragraph_duplicates": RuleEntry(
        ParagraphDuplicatesConfig, ParagraphDuplicates, "Wenzek et al. 2020, section 3.1"
    ),
    "repeated_substrings": RuleEntry(RepeatedSubstringsConfig, RepeatedSubstrings, "Lee et al. 2022, section 4.1"),
    "decontamination": RuleEntry(DecontaminationConfig, Decontamination, "Brown et al. 2020, appendix C"),
    "bad_words": RuleEntry(BadWordsConfig, BadWords),
    "quality": RuleEntry(QualityConfig, ScoreRule, "Brown et al. 2020, appendix A"),
    "harm": RuleEntry(HarmConfig, ScoreRule),
    "pii": RuleEntry(PiiConfig, Pii, "ISO/IEC 7812, ISO 13616, ISO 7064"),
    "secrets": RuleEntry(SecretsConfig, Secrets),
    "url_blocklist": RuleEntry(UrlBlocklistConfig, UrlBlocklist),
}


def make_rule(config: RuleSettings) -> Rule:
    """Build a rule from its section of a recipe."""
    return RULES[config.kind].make(config)
