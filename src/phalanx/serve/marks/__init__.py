"""Marked text: drawn by a secret key, so that its holder finds it again, from exactly the model's distribution."""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.serve.marks.detect import MarkVerdict as MarkVerdict, detect_mark as detect_mark
    from phalanx.serve.marks.keys import MarkKey as MarkKey, MarkKeyRing as MarkKeyRing
    from phalanx.serve.marks.mark import (
        MarkPolicy as MarkPolicy,
        MarkRefused as MarkRefused,
        TextDraw as TextDraw,
        TokenMark as TokenMark,
        draw_next as draw_next,
    )
    from phalanx.serve.marks.wrapper import TextWrapper as TextWrapper, set_aside as set_aside


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
