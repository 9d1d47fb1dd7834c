"""Marked text: drawn by a secret key, so that its holder finds it again, from exactly the model's distribution."""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.serve.marks.detect import MarkVerdict, detect_mark
    from phalanx.serve.marks.keys import MarkKey, MarkKeyRing
    from phalanx.serve.marks.mark import MarkPolicy, MarkRefused, TextDraw, TokenMark, draw_next
    from phalanx.serve.marks.wrapper import TextWrapper, set_aside

__all__ = [
    "MarkKey",
    "MarkKeyRing",
    "MarkPolicy",
    "MarkRefused",
    "MarkVerdict",
    "TextDraw",
    "TextWrapper",
    "TokenMark",
    "detect_mark",
    "draw_next",
    "set_aside",
]


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
