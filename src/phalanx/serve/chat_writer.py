"""Answers in chats, many at once, for the loops of ``align``."""

from collections.abc import Sequence

from phalanx.data.chat import ChatMessage
from phalanx.errors import DataError
from phalanx.serve.sampling import SamplingRule
from phalanx.serve.text_model import TextModel


class ChatWriter:
    """A model that answers chats.

    Args:
        sampling: Its seed is replaced by that of each batch.
    """

    def __init__(self, model: TextModel, sampling: SamplingRule) -> None:
        self._model, self._sampling = model, sampling

    @property
    def writer_digest(self) -> str:
        """SHA-256 in hex over the model's weights, config, tokenizer, ends of texts and template."""
        return self._model.model_digest

    @property
    def sampling_settings(self) -> dict[str, object]:
        """How tokens are drawn, the seed apart."""
        return self._sampling.model_dump(exclude={"seed"})

    def check_chat(self, chat: Sequence[ChatMessage]) -> None:
        """Return where a chat can be answered.

        Raises:
            DataError: It is too long, or the template makes nothing of it.
        """
        self._model.chat_prompt(chat)

    def write_answers(self, chats: Sequence[Sequence[ChatMessage]], seed: int) -> list[str]:
        """Answer each chat; the same chats in the same order, model and seed give the same answers.

        Returns:
            The answers without white space around them; empty where the model writes nothing, or where a chat with text
            of a model cannot be answered: it leaves no room in the window, or holds a special token.
        """
        prompts: dict[int, list[int]] = {}
        for number, chat in enumerate(chats):
            try:
                prompts[number] = self._model.chat_prompt(chat)
            except DataError:
                continue
        texts = [""] * len(chats)
        if prompts:
            sampling = self._sampling.model_copy(update={"seed": seed})
            for number, completion in zip(
                prompts, self._model.complete_batch(list(prompts.values()), sampling), strict=True
            ):
                texts[number] = completion.text.strip()
        return texts

    def log_probs(self, chat: Sequence[ChatMessage], answers: Sequence[str]) -> list[float]:
        """Return the log-probability of each of some short answers to a chat."""
        return self._model.chat_log_probs(chat, answers)
