"""Disturbances of a text that a reader hardly notices: typos, keyboard, OCR, homoglyphs and others."""

import hashlib
import random
import re
from collections.abc import Callable, Mapping

_KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
_NEIGHBOURS = {
    letter: [row[place + step] for step in (-1, 1) if 0 <= place + step < len(row)]
    for row in _KEYBOARD
    for place, letter in enumerate(row)
}
_OCR = {"o": "0", "l": "1", "i": "1", "s": "5", "b": "6", "g": "9", "e": "c", "z": "2", "B": "8", "S": "5", "O": "0"}
_HOMOGLYPHS = {"a": "\u0430", "e": "\u0435", "o": "\u043e", "p": "\u0440", "c": "\u0441", "x": "\u0445", "i": "\u0456"}
_HOMOGLYPHS |= {"A": "\u0391", "B": "\u0392", "E": "\u0395", "O": "\u039f", "T": "\u03a4", "H": "\u0397"}
_ZERO_WIDTH = ("\u200b", "\u200c", "\u200d", "\u2060")
_PARAPHRASES = (
    "Please tell me: {}",
    "Here is a question. {}",
    "{} What do you think?",
    "I would like to know this: {}",
)


def _swap_letters(letters: list[str], place: int, _draw: random.Random) -> None:
    if place + 1 < len(letters) and letters[place + 1].isalpha():
        letters[place], letters[place + 1] = letters[place + 1], letters[place]


def _press_neighbour(letters: list[str], place: int, draw: random.Random) -> None:
    near = _NEIGHBOURS.get(letters[place].lower())
    if near:
        letters[place] = draw.choice(near)


def _misread(letters: list[str], place: int, _draw: random.Random) -> None:
    letters[place] = _OCR.get(letters[place], letters[place])


def _look_alike(letters: list[str], place: int, _draw: random.Random) -> None:
    letters[place] = _HOMOGLYPHS.get(letters[place], letters[place])


def _insert_invisible(letters: list[str], place: int, draw: random.Random) -> None:
    letters[place] += draw.choice(_ZERO_WIDTH)


_BY_LETTER: Mapping[str, Callable[[list[str], int, random.Random], None]] = {
    "typos": _swap_letters,
    "keyboard": _press_neighbour,
    "ocr": _misread,
    "homoglyphs": _look_alike,
    "zero_width": _insert_invisible,
}
PERTURBATIONS = (*_BY_LETTER, "casing", "paraphrase")
"""Names of all disturbances."""


def disturb_text(name: str, text: str, seed: int, strength: float = 0.1) -> str:
    """Return a text with one kind of disturbance: a public function of name, text and seed.

    Args:
        name: One of `PERTURBATIONS`.
        strength: Share of letters that are touched; at least one is. Casing and paraphrase touch the whole text.
    """
    digest = hashlib.sha256(f"{name}\n{seed}\n{text}".encode()).digest()
    draw = random.Random(int.from_bytes(digest[:8], "big"))  # noqa: S311 - a public draw
    if name == "casing":
        return draw.choice((text.upper(), text.lower(), text.swapcase()))
    if name == "paraphrase":
        return draw.choice(_PARAPHRASES).replace("{}", text)
    letters = list(text)
    table = {"ocr": _OCR, "homoglyphs": _HOMOGLYPHS}.get(name)
    places = [match.start() for match in re.finditer(r"[^\W\d_]", text) if table is None or match.group() in table]
    if places:
        for place in draw.sample(places, max(1, round(strength * len(places)))):
            _BY_LETTER[name](letters, place, draw)
    return "".join(letters)
