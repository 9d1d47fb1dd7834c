"""Scores of a model: bits for each byte of held-out text, and answers to read."""

import math
from collections.abc import Sequence

import torch

from phalanx.data.borders import bare_encoder
from phalanx.data.chat import ChatMessage
from phalanx.serve import SamplingRule, TextModel

_ROWS = 8
_ANSWER = SamplingRule(max_new_tokens=60, temperature=0.0, repetition_penalty=1.2)
END_OF_TEXT = "<|endoftext|>"


def count_bits(model: TextModel, texts: Sequence[str]) -> tuple[float, float]:
    """Return bits for each byte of texts, and perplexity for each token.

    Texts follow each other with the end of text between, in windows that overlap by one token: every token but the
    first is predicted once, from at most the window's length before it. The bits of the ends count, their bytes do not.
    """
    encoder = bare_encoder(model.tokenizer.backend_tokenizer, special_is_text=True)
    end_id = model.tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    ids = [end_id]
    for text in texts:
        ids += [*encoder.encode(text, add_special_tokens=False).ids, end_id]
    window = model.context_length
    rows = [ids[start : start + window + 1] for start in range(0, len(ids) - 1, window)]
    nats = 0.0
    with torch.no_grad():
        for first in range(0, len(rows), _ROWS):
            batch = rows[first : first + _ROWS]
            width = max(map(len, batch))
            padded = torch.tensor([row + [end_id] * (width - len(row)) for row in batch])
            # padding stands behind what is scored, where causal attention does not look
            log_probs = model.module(input_ids=padded[:, :-1]).logits.float().log_softmax(dim=-1)
            chosen = log_probs.gather(2, padded[:, 1:, None])[:, :, 0]
            nats -= sum(float(scores[: len(row) - 1].sum()) for scores, row in zip(chosen, batch, strict=True))
    num_bytes = sum(len(text.encode()) for text in texts)
    return nats / math.log(2) / num_bytes, math.exp(nats / (len(ids) - 1))


def write_answers(model: TextModel, questions: Sequence[str]) -> list[dict[str, str]]:
    """Answer each question in a chat of its own, with the likeliest tokens."""
    answers = []
    for question in questions:
        prompt = model.chat_prompt([ChatMessage(role="user", content=question)])
        answers.append({"question": question, "answer": model.complete_prompt(prompt, _ANSWER).text})
    return answers
