"""A model that says what a function says, and a judge with a bias: what the loops are tried with."""

import hashlib

from phalanx.errors import DataError


class FakeWriter:
    """Answers by ``say(messages, seed)``; ends like a killed process after so many calls."""

    def __init__(self, say, *, dies_after=None, digest="d" * 64):
        self.say, self.dies_after, self.writer_digest = say, dies_after, digest
        self.sampling_settings = {"temperature": 1.0}
        self.calls = 0

    def check_chat(self, chat):
        if len(chat[-1].content) > 1000:
            raise DataError("prompt: has 1001 tokens, the model's window is 100; shorten it to 99")

    def write_answers(self, chats, seed):
        self.calls += 1
        if self.dies_after is not None and self.calls > self.dies_after:
            raise KeyboardInterrupt
        return [self.say(chat, seed) for chat in chats]

    def log_probs(self, chat, answers):
        raise NotImplementedError


class BiasedJudge:
    """Sure of what `likes` says, plus a liking for whatever is called A."""

    def __init__(self, likes, bias=0.0):
        self.likes, self.bias, self.asked = likes, bias, []
        self.judge_lineage = {"kind": "fake"}

    def first_probability(self, question):
        self.asked.append(question)
        return min(1.0, max(0.0, self.likes(question) + self.bias))


def noise(*parts):
    """A word that is another one for every other place."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:6]
