"""Texts that an exported file is asked about: fuzzed strings, prompts, chats, and a reference text."""

import random
import unicodedata
from collections.abc import Iterator, Sequence

from phalanx.data.tokenizers.probes import probe_texts

_RANGES = (
    (0x20, 0x7E),
    (0x20, 0x7E),
    (0xA0, 0x17F),
    (0x300, 0x36F),
    (0x370, 0x5FF),
    (0x600, 0x6FF),
    (0x900, 0x97F),
    (0x2000, 0x206F),
    (0x2190, 0x27BF),
    (0x3040, 0x30FF),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0x1F300, 0x1FAFF),
    (0x01, 0x10FFFF),
)
_SPACES = (" ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", " \n ", "   ")
_WORDS = (
    "the",
    "Owner",
    "don't",
    "I'LL",
    "3.14",
    "2026",
    "x1",
    "def f(x):",
    "http://a.b/c?d=1",
    "ﬁ",
    "naïve",
    "123456",
)

REFERENCE_TEXT = """A lighthouse keeper wrote a line in her book every evening. On some days it was a ship, on others
the weather, and on quiet days she wrote how many gulls sat on the rail. After thirty years the book was the best record
of wind and rain on that coast, and a young researcher asked to copy it. She agreed, on one condition: that the gulls be
copied too. Nobody knew then that their number told more about the fish than any of the boats did.

Water boils at a lower temperature on a mountain, because less air presses on it from above. Bread rises faster there as
well. A cook who moves up a valley learns both within a week, and writes the new times on the wall beside the oven. The
old times stay on the other side of the card, for visits of relatives from the plain, who trust nothing else.

The committee met on Tuesday. It heard three reports, asked two questions and postponed one decision until the spring.
The minutes are two pages long, signed by the chair, and kept in the blue folder with all the others since 1987.
"""
"""Written for this purpose; no corpus has it."""

PROMPTS = (
    "The lighthouse keeper",
    "Water boils at",
    "Once upon a time",
    "The answer to the question is",
    "def add(a, b):",
    "Dear Sir or Madam,",
    "My password is",
    "Is it safe to",
)
"""For models without a chat template."""

CHATS: tuple[tuple[dict[str, str], ...], ...] = (
    ({"role": "user", "content": "Why is the sky blue?"},),
    ({"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Capital of France?"}),
    (
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello. What can I do?"},
        {"role": "user", "content": "Count to three,\n  slowly; <b>bold</b> & 'quoted' \"twice\" {{ x }} ümlaut 漢字"},
    ),
)
"""For the comparison of templates."""


def fuzz_texts(count: int, seed: int, special_tokens: Sequence[str], *, is_composed: bool) -> Iterator[str]:
    """Yield texts on which tokenizers are likely to differ; the same for the same seed.

    Args:
        special_tokens: Spelled out in some of the texts.
        is_composed: Whether texts are in the normal form NFC.

    Guarantees:
        No drawn text has a NUL, a surrogate or a code point that Unicode has not assigned; the first texts come from
        `probe_texts`.
    """
    rng = random.Random(seed)  # noqa: S311 - texts, not keys
    probes = [text.replace("\x00", "") for text in probe_texts(special_tokens)]
    for number in range(count):
        text = probes[number] if number < len(probes) else _draw_text(rng, special_tokens)
        yield unicodedata.normalize("NFC", text) if is_composed else text


def _draw_text(rng: random.Random, special_tokens: Sequence[str]) -> str:
    pieces = []
    for _ in range(rng.randint(1, 8)):
        kind = rng.random()
        if kind < 0.25:
            pieces.append(rng.choice(_SPACES))
        elif kind < 0.45:
            pieces.append(rng.choice(_WORDS))
        elif kind < 0.5 and special_tokens:
            token = rng.choice(special_tokens)
            pieces.append(token if rng.random() < 0.7 else token[: rng.randint(1, len(token))])
        else:
            low, high = rng.choice(_RANGES)
            pieces.append("".join(_character(rng, low, high) for _ in range(rng.randint(1, 6))))
    return "".join(pieces)


def _character(rng: random.Random, low: int, high: int) -> str:
    point = rng.randint(low, high)
    return "x" if unicodedata.category(chr(point)) in ("Cn", "Cs") else chr(point)


def unassigned_texts(count: int, seed: int) -> Iterator[str]:
    """Yield texts with code points that Unicode has not assigned, which libraries sort into different classes."""
    rng = random.Random(seed)  # noqa: S311 - texts, not keys
    planes = [point for point in range(0x40000, 0x40400) if unicodedata.category(chr(point)) == "Cn"]
    for _ in range(count):
        yield "".join(chr(rng.choice(planes) + 0x10000 * rng.randint(0, 9)) for _ in range(6))
