"""A scorer without a model: a text is likely by its letters, and answers are written by a table."""

from phalanx.evaluate.scorer import DocumentScore, Likelihood, ignore_progress


class FakeScorer:
    """Nats by character: `cost` of a letter, 1 where it has none."""

    def __init__(self, cost=None, answers=None, window=10_000, can_write=True, can_score=True):
        self.cost, self.answers, self.window = cost or {}, answers or {}, window
        self.can_write, self.can_score, self.has_template = can_write, can_score, False
        self.prompts = []

    def describe_model(self):
        return {"kind": "fake", "model_digest": "f" * 64, "template_digest": None, "window": self.window}

    def _nats(self, text):
        return sum(self.cost.get(letter, 1.0) for letter in text)

    def score_endings(self, pairs, show=ignore_progress, /):
        cut = [len(context) + len(ending) > self.window for context, ending in pairs]
        return [
            Likelihood(-self._nats(ending), len(ending), None, is_cut)
            for (_, ending), is_cut in zip(pairs, cut, strict=True)
        ]

    def score_documents(self, texts, show=ignore_progress, /):
        return [DocumentScore(self._nats(text), len(text), len(text.encode())) for text in texts]

    def write_texts(self, prompts, rule, show=ignore_progress, /, *, chat=False):
        self.prompts += prompts
        return [self.answers.get(prompt, "Certainly, here it is.") for prompt in prompts]
