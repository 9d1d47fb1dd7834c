"""Texts on which encoders that ought to agree are likeliest to differ."""

from collections.abc import Iterable, Iterator

_LONG = 3_000


def probe_texts(special_tokens: Iterable[str] = ()) -> Iterator[str]:
    """Yield short hard texts: white space, case folding, combining marks, bytes, and the special tokens spelled out."""
    yield from (
        "x",
        "  two  spaces,   three \n\n newlines\r\n\r\ttabs \t ",
        "\u00a0\u2003\u3000\u2028\u2029\u0085 every white space\u200b\ufeff",
        "don't DON'T we'LL I'm he'd 'ſ x'\u017f K'\u212a they'Re 's's ''re",
        "1 12 123 1234 12345 3.14 1,000 x1 1x  1   22 ½ Ⅷ ٣٤ 𝟘𝟙 ²³",
        "e\u0301 é A\u030a Å ﬁ ﬀ ß ẞ İ ı ǆ Ǆ \u1e9b\u0323 \u0958",
        "漢字かなカナ한국어 ไทย العربية עברית हिन्दी \u200d\u200c \u202eright\u202c",
        "🛡️ 👩‍👩‍👧‍👦 🇩🇪 \U000e0041\U000e007f \U0010ffff \ufffd \ufffe",
        "\x00\x01\x1f\x7f\x80\x9f nul and controls \x00",
        "▁ under ▁▁ Ġ Ċ <0x41> <0xFF> <unk> ## ##a </w>",
        "a" * 25 + "b" * 24 + "!" * 23 + "?!" * 11 + "\n" * 9 + " " * 17,
        "ab" * _LONG,
        " " * _LONG + "x" + "\n" * _LONG,
        "=" * 80 + "\n" + "-*-" * 30 + "\n\t\t\tif (x):\n\t\t\t\treturn {'a': [1, 2]}\n",
        "https://example.org/a_b-c?d=e&f=%20#g user@example.org C:\\new\\table $x^2_{i}$ #include <a.h>",
    )
    for token in special_tokens:
        yield f"before {token} after{token}{token} {token[:-1]} {token[1:]}"
