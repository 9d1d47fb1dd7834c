"""The attentions that are computed in a ring and in one process; imports no torch."""

LARGEST, LENGTH, WIDTH = 3, 24, 8

CASES = [
    # ranks, heads, heads of keys and values, type
    (2, 3, 3, "float32"),
    (2, 4, 2, "float32"),
    (3, 4, 4, "float64"),
    (3, 4, 1, "float32"),
    (2, 2, 2, "bfloat16"),
]
