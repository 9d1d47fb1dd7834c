"""A byte-level tokenizer with the marks of a chat, and a conversation of a few words."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

END = "<|endoftext|>"
TALK = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi é"},
        {"role": "assistant", "content": "yo 😀"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "ok"},
    ]
}


def byte_tokenizer(*, is_special=True):
    """256 bytes, the end of text, and the two marks of ChatML, which some models have as plain tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={one: number for number, one in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END])
    add_marks = made.add_special_tokens if is_special else made.add_tokens
    add_marks([tokenizers.AddedToken(mark, normalized=False) for mark in ("<|im_start|>", "<|im_end|>")])
    return made
