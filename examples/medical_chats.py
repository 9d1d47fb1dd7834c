"""Make conversations of MedQuAD's questions and answers: those about one condition follow each other in one chat.

    python examples/medical_chats.py medical_chats.jsonl [--medquad ../shared/data/medquad.jsonl.gz] [--turns 3]

MedQuAD (Ben Abacha and Demner-Fushman 2019, CC BY 4.0) is on GitHub as abachaa/MedQuAD; the file has one JSON object
a line with ``q``, ``a``, ``source`` and ``focus``. Answers of more than 400 characters end at the last sentence before.
The same file gives the same bytes.
"""

import argparse
import gzip
import json
import sys
from pathlib import Path

_ANSWER_CHARACTERS = 400


def shortened(answer: str) -> str | None:
    """Return the first sentences of an answer; None where the first one is too long."""
    text = " ".join(answer.split())
    if len(text) <= _ANSWER_CHARACTERS:
        return text or None
    end = text.rfind(". ", 0, _ANSWER_CHARACTERS)
    return text[: end + 1] if end > 0 else None


def main(words: list[str]) -> int:
    """Write the conversations; return an exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--medquad", type=Path, default=Path("../shared/data/medquad.jsonl.gz"))
    parser.add_argument("--turns", type=int, default=3, help="questions of one conversation at most")
    asked = parser.parse_args(words)
    chats: dict[tuple[str, str], list[dict[str, str]]] = {}
    with gzip.open(asked.medquad, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            answer = shortened(row["a"])
            said = chats.setdefault((row["source"], row["focus"]), [])
            if answer is not None and row["q"].strip() and len(said) < 2 * asked.turns:
                said += [{"role": "user", "content": row["q"].strip()}, {"role": "assistant", "content": answer}]
    written = [said for said in chats.values() if said]
    with asked.out.open("w", encoding="utf-8", newline="\n") as out:
        out.writelines(json.dumps({"messages": said}, ensure_ascii=False) + "\n" for said in written)
    sys.stdout.write(f"{asked.out}: {len(written)} conversations\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
