"""The patterns by which byte-level vocabularies cut a text into words before any merge."""

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"

GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
"""As GPT-2 cuts; the library has it built in (Radford et al. 2019)."""

GPT2_DIGITS = rf"{_CONTRACTIONS}| ?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|\s+(?=\p{{N}})|\s+(?!\S)|\s+"
"""The same on a text of which each digit was cut out beforehand, in one pattern."""

_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ANY_CASE = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = rf"{_ANY_CASE}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
"""As Llama 3 and GPT-4 cut: digits by threes."""
QWEN2 = rf"{_ANY_CASE}|{_LETTERS}|\p{{N}}|{_REST}"
"""As Qwen 2 and 3 cut: each digit apart."""

KNOWN_PATTERNS = frozenset({GPT2, GPT2_DIGITS, LLAMA3, QWEN2})
"""Each matches every character of every text, so that nothing falls between two matches."""
