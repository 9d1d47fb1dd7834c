"""Rows by transformers' own template and tokenizer, cut as TRL cuts them: the reader that Phalanx is compared with."""

import hashlib
import json

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

OBJECTIVES = ("sft", "dpo", "kto", "reward", "grpo")
REFUSED = "refused"


class HandReader:
    """A tokenizer directory as transformers reads it.

    Args:
        directory: In the hub's layout.
        marked_template: Its chat template with what the assistant writes marked.
    """

    def __init__(self, directory, marked_template):
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._marked = marked_template

    def rows(self, objective, row):
        """The rows of an objective, each as (ids, flags of what is learned); `REFUSED` where the template refuses."""
        try:
            return getattr(self, f"_{objective}")(row)
        except (TemplateError, TypeError, ValueError):
            return REFUSED

    def is_blank(self, ids):
        """Whether tokens are white space alone."""
        return not self._tokenizer.decode(ids).strip(" \n\u2581")

    def _chat(self, messages, row, **more):
        return self._tokenizer.apply_chat_template(messages, tools=row.get("tools"), return_dict=True, **more)

    def _sft(self, row):
        messages = messages_of(row)
        found = self._chat(messages, row, chat_template=self._marked, return_assistant_tokens_mask=True)
        # as TRL: a row of which nothing is learned
        return [(found["input_ids"], found["assistant_masks"])] if 1 in found["assistant_masks"] else REFUSED

    def _answers(self, row, sides):
        if isinstance(row["prompt"], str):
            end = self._tokenizer.eos_token
            prompt = self._tokenizer(row["prompt"])["input_ids"]
            wholes = [self._tokenizer(row["prompt"] + with_end(row[side], end))["input_ids"] for side in sides]
        else:
            prompt = self._chat(row["prompt"], row, add_generation_prompt=True)["input_ids"]
            wholes = [self._chat([*row["prompt"], *row[side]], row)["input_ids"] for side in sides]
        border = min(_shared(prompt, whole) for whole in wholes)
        return [(whole, [0] * border + [1] * (len(whole) - border)) for whole in wholes]

    def _dpo(self, row):
        return self._answers(row, ("chosen", "rejected"))

    def _kto(self, row):
        return [*self._answers(row, ("chosen",)), *self._answers(row, ("rejected",))]

    def _reward(self, row):
        if isinstance(row["prompt"], str):
            wholes = [ids for ids, _ in self._answers(row, ("chosen", "rejected"))]
        else:
            sides = ("chosen", "rejected")
            wholes = [self._chat([*row["prompt"], *row[side]], row)["input_ids"] for side in sides]
        return [(ids, [1] * len(ids)) for ids in wholes]

    def _grpo(self, row):
        if isinstance(row["prompt"], str):
            ids = self._tokenizer(row["prompt"])["input_ids"]
        else:
            ids = self._chat(row["prompt"], row, add_generation_prompt=True)["input_ids"]
        return [(ids, [0] * len(ids))]


def messages_of(row):
    """A row as a conversation with its chosen answer."""
    if isinstance(row["prompt"], str):
        return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["chosen"]}]
    return [*row["prompt"], *row["chosen"]]


def with_end(text, end):
    """An answer with the end of text behind it, once."""
    return text if text.endswith(end) else text + end


def digest_of(rows):
    """Sixteen hex digits over the ids and flags of rows."""
    if rows == REFUSED:
        return REFUSED
    plain = [[list(map(int, ids)), list(map(int, flags))] for ids, flags in rows]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]


def _shared(some, others):
    """How many first tokens two lists share."""
    return next(
        (at for at, (one, other) in enumerate(zip(some, others, strict=False)) if one != other),
        min(len(some), len(others)),
    )
