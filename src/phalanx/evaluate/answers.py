"""Answers of a model are hostile data: a number, a choice or JSON is read by a grammar of bounded size.

Nothing of an answer is evaluated, expanded or fetched. Every pattern is linear in its input, which is cut first.
"""

import re
import unicodedata
from fractions import Fraction
from typing import Any

from phalanx.config import parse_strict_json

MAX_ANSWER = 16_384
"""Characters of an answer that are read; the rest is as if it had not been written."""
_MAX_DEPTH = 32
_NUMBER = re.compile(
    r"(?<![\w.,^*/+\u2212-])[-+\u2212]?\$?(?:\d{1,3}(?:,\d{3}){1,5}|\d{1,18})(?:\.\d{1,18})?(?:/\d{1,18})?(?![\w^*!(]|[.,]\d)"
)
_CHOICE = re.compile(r"(?<!\w)\(?([A-Z])\)?(?!\w)")
_STATED_CHOICE = re.compile(r"\b(?:answer|choice|option)(?: is)?:? {0,3}\(?([A-Z])\)?(?!\w)", re.IGNORECASE)


def cut_answer(text: str) -> str:
    """Return the part of an answer that is read, as text that UTF-8 can hold."""
    return text[:MAX_ANSWER].encode("utf-8", "replace").decode()


def parse_number(text: str) -> Fraction | None:
    """Return the last number of an answer, exactly; None where there is none.

    A number is decimal digits with thousands commas, a decimal point and one fraction bar. Powers, factorials, words,
    digits of other scripts and exponents are no numbers: ``9**9**9`` has none.
    """
    numbers = [
        match.group()
        for match in _NUMBER.finditer(cut_answer(text))
        if match.group().isascii() or "\u2212" in match.group()
    ]
    if not numbers:
        return None
    digits = numbers[-1].replace(",", "").replace("$", "").replace("\u2212", "-")
    above, _, below = digits.partition("/")
    if below and not int(below):
        return None
    return Fraction(above) / (int(below) if below else 1)


def parse_choice(text: str, num_choices: int) -> int | None:
    """Return the number of the choice that an answer states by its letter; None where it states none, or several."""
    answer = cut_answer(text)
    stated = _STATED_CHOICE.findall(answer) or _CHOICE.findall(answer)
    letters = {ord(letter.upper()) - ord("A") for letter in stated}
    # an article at the beginning of a sentence is no choice where another letter is stated
    if len(letters) > 1 and re.match(r"A (?!or\b|and\b)[a-z]", answer):
        letters.discard(0)
    number = letters.pop() if len(letters) == 1 else None
    return number if number is not None and number < num_choices else None


def parse_json_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object that an answer is; None where it is none, nested too deep, or holds a key twice."""
    answer = cut_answer(text).strip()
    depth = max_depth = 0
    for character in answer:
        depth += (character in "[{") - (character in "]}")
        max_depth = max(max_depth, depth)
    if not answer.startswith("{") or max_depth > _MAX_DEPTH:
        return None
    try:
        value = parse_strict_json(answer, parse_int=_bounded_int)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _bounded_int(digits: str) -> int:
    if len(digits) > 18:
        raise ValueError("an integer has too many digits")
    return int(digits)


def list_words(text: str) -> list[str]:
    """Return the words of an answer in lower case, by letters and digits, with compatibility forms made plain."""
    plain = unicodedata.normalize("NFKC", cut_answer(text)).casefold()
    visible = "".join(character for character in plain if unicodedata.category(character) != "Cf")
    return re.findall(r"[^\W_]+(?:['\u2019][^\W_]+)?", visible)
