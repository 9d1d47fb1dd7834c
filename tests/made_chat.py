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


def byte_tokenizer():
    """256 bytes, the end of text, and the two marks of ChatML."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={one: number for number, one in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END, "<|im_start|>", "<|im_end|>"])
    return made
