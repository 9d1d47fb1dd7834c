"""Write prompts and vocabulary for ``grpo.toml``: three digits that are to be sorted.

``python examples/digits.py`` writes ``digits.jsonl`` and ``digits_tokenizer.json`` beside itself; both are in the
repository.
"""

import itertools
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HERE = Path(__file__).parent
END = "<|endoftext|>"


def main() -> None:
    """Write both files."""
    words = {word: number for number, word in enumerate([END, *"0123456789", ">"])}
    vocabulary = Tokenizer(models.WordLevel(words, ">"))
    vocabulary.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    vocabulary.decoder = decoders.Fuse()
    vocabulary.add_special_tokens([AddedToken(END, special=True)])
    vocabulary.save(str(HERE / "digits_tokenizer.json"))
    digits = ("".join(three) for three in itertools.product("0123456789", repeat=3))
    lines = [json.dumps({"prompt": f"{one}>", "answer": "".join(sorted(one))}) for one in digits]
    (HERE / "digits.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
