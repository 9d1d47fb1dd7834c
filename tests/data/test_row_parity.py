"""Awkward rows of every objective, token by token beside TRL's: twelve makes of tokenizers and templates.

`parity_readers` makes the rows as TRL does, by transformers alone; that it does is held by the digests of TRL's own
rows (``scripts/row_parity.py``). Where Phalanx's are others, the reason is one of `REASONS`, and where, in
``row_parity.json`` beside this file.
"""

import json
from pathlib import Path

import pytest

from parity_makes import MAKES
from parity_readers import OBJECTIVES, REFUSED, HandReader, digest_of, messages_of
from parity_rows import ROWS, row_of
from phalanx.data.chat import parse_conversation
from phalanx.data.chat.encoding import open_chat
from phalanx.data.config import ModelTokenizerConfig
from phalanx.data.preferences.encoder import AnswerEncoder
from phalanx.data.preferences.preference import parse_preference
from phalanx.data.prompts import encode_prompt
from phalanx.data.tokenizers.tokenizer import load_tokenizer
from phalanx.errors import DataError

ROOT = Path(__file__).parent.parent.parent
TRL = json.loads((ROOT / "benchmarks/results/row-parity-trl.json").read_text())["rows"]
OUTCOMES = json.loads((ROOT / "tests/data/row_parity.json").read_text())
EQUAL, BOTH_REFUSE = "=", "x"
REASONS = {
    "n": "TRL also learns the blanks that the template writes after the token that ends a turn",
    "b": "TRL's answer begins where the tokens of prompt and whole part, of two answers at the earlier place; here it "
    "begins with the token in which the prompt's text ends",
    "e": "the tokenizer writes the end of text itself; TRL has it twice, and behind prompts too",
    "w": "TRL knows no weights of messages; here a turn of weight 0 is not learned",
    "t": "TRL encodes the text of a special token as that token, so that a text can forge the end of another; here "
    "it is text",
    "f": "a message has the text of a special token; refused, because it could forge a turn",
    "l": "the template omits a call or a thought; refused, because less would be learned",
    "a": "the answer, or the prompt, is empty; refused",
    "d": "the template writes a learned turn differently in its context (a default message, a removed thought); "
    "refused",
    "m": "transformers finds no token of the assistant where the tokenizer trims spaces off its offsets; TRL refuses",
}
REFUSALS = {
    "special token of the model": "f",
    "is not written by chat template": "l",
    "is empty": "a",
    "is an empty conversation": "a",
    "the assistant's text cannot be located": "d",
}


class OurReader:
    """The rows that Phalanx makes with a tokenizer directory."""

    def __init__(self, directory, end):
        self.tokenizer = load_tokenizer(ModelTokenizerConfig(), directory)
        self._chat = open_chat("model", self.tokenizer.backend, end, directory)
        self._answers = AnswerEncoder("model", self.tokenizer, directory / "tokenizer.json", 4096)

    def close(self):
        self._chat.close()
        self._answers.close()

    def rows(self, objective, row):
        beside = {"tools": row["tools"]} if "tools" in row else {}
        if objective == "sft":
            found = self._chat.encode_conversation(parse_conversation({"messages": messages_of(row), **beside}))
            return [(found.ids.tolist(), flags_of(found.target_labels.tolist()))]
        if objective == "grpo":
            ids = list(encode_prompt("line 1", {"prompt": row["prompt"], **beside}, self.tokenizer, self._chat).ids)
            return [(ids, [0] * len(ids))]
        rows = [
            self._answers.encode_with_prompt("line 1", one, answer)
            for one, answer in self._judged(objective, row, beside)
        ]
        return [(one.ids, [1] * len(one.ids) if objective == "reward" else flags_of(one.labels)) for one in rows]

    def _judged(self, objective, row, beside):
        sides = {side: row[side] for side in ("chosen", "rejected")}
        if objective == "kto":
            for side, answer in sides.items():
                found = {"prompt": row["prompt"], "completion": answer, "label": side == "chosen", **beside}
                one = parse_preference(found, "labelled")
                yield one, one.answers[0]
            return
        whole = {side: [*row["prompt"], *answer] for side, answer in sides.items()} if row.get("whole") else None
        one = parse_preference({**(whole or {"prompt": row["prompt"], **sides}), **beside}, "pairs")
        yield from ((one, answer) for answer in one.answers)


def flags_of(labels):
    """Which tokens are learned."""
    return [0, *(int(label >= 0) for label in labels[:-1])]


def outcome_of(ours, theirs, row, reader, end_id):
    """One letter for the rows of both: equal, or the first reason that is theirs to differ."""
    if isinstance(ours, str):
        return BOTH_REFUSE if theirs == REFUSED else REFUSALS[next(key for key in REFUSALS if key in ours)]
    if theirs == REFUSED:
        return "m"
    found = [_one_outcome(*pair, row, reader, end_id) for pair in zip(ours, theirs, strict=True)]
    return next((one for one in found if one != EQUAL), EQUAL)


def _one_outcome(ours, theirs, row, reader, end_id):
    (ids, flags), (their_ids, their_flags) = (tuple(map(list, one)) for one in (ours, theirs))
    if (ids, flags) == (their_ids, their_flags):
        return EQUAL
    if ids != their_ids[: len(ids)]:
        # of the text of a special token nothing is equal but what stands before it
        return "t" if "[END]" in str(row) else "?"
    tail, cut = their_ids[len(ids) :], their_flags[: len(ids)]
    if tail and set(tail) != {end_id} and not reader.is_blank(tail):
        return "?"
    if flags != cut:
        is_weighted = any("weight" in one for one in messages_of(row))
        is_later = sorted(cut, key=bool) == cut and all(one <= other for one, other in zip(flags, cut, strict=True))
        return "w" if is_weighted and is_later is False else "b" if is_later else "?"
    return "e" if set(tail) == {end_id} else "n"


QUICK = ("smollm2", "llama2", "mistral", "unigram")
"""One of each kind of vocabulary: byte-level, prepended, metaspace, unigram."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MAKES]
)
def test_rows_are_those_of_trl_or_differ_for_a_reason_that_is_listed(tmp_path, name):
    make = MAKES[name]
    make.write(tmp_path)
    reader, own = HandReader(tmp_path, make.marked_template), OurReader(tmp_path, make.end)
    found = {}
    for row in ROWS:
        given, letters = row_of(row, make.end), ""
        for objective in OBJECTIVES:
            theirs = reader.rows(objective, given)
            assert digest_of(theirs) == TRL[name][objective][row], (objective, row)
            try:
                ours = own.rows(objective, given)
            except DataError as exc:
                ours = str(exc)
            letters += outcome_of(ours, theirs, ROWS[row], reader, own.tokenizer.eos_id)
        found[row] = letters
    own.close()

    assert found == OUTCOMES[name]


def test_every_difference_has_a_reason_and_the_page_counts_them():
    letters = "".join(one for rows in OUTCOMES.values() for one in rows.values())
    page = (ROOT / "docs/preferences.md").read_text(encoding="utf-8")

    assert set(letters) <= {EQUAL, BOTH_REFUSE, *REASONS}
    assert OUTCOMES.keys() == MAKES.keys()
    assert all(rows.keys() == ROWS.keys() for rows in OUTCOMES.values())
    assert f"Of {len(letters):,} rows and pairs of rows" in page
    assert f"{letters.count(EQUAL)} are equal" in page
    assert all(f"| {letters.count(letter)} | {reason} |" in page for letter, reason in REASONS.items())
