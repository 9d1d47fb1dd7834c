"""Conversations to text by a chat template that need not be trusted: it runs in a process of its own, bounded."""

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from phalanx.child import AskedProcess
from phalanx.closing import Closeable
from phalanx.data.chat.conversation import ChatMessage, Conversation
from phalanx.data.chat.template import ChatTemplate
from phalanx.errors import DataError, ModelError

ANY_DAY = date(2024, 7, 26)
"""Date for templates where texts must be the same tomorrow: the default of Llama's own template."""

_MODULE = "phalanx.data.chat.sandbox_process"
_ENDED = "it takes more time or memory than a template may"
_OF_THE_TEMPLATE = {
    "forbidden": "does what no template may",
    "memory": "takes more memory than a template may",
    "too_much": "writes more than a template may",
}


@dataclass(frozen=True)
class TurnSpan:
    """Characters that the assistant writes.

    Attributes:
        stop: The one behind the last.
        message: Number of the message that they are of; None where a template marks other parts than messages.
    """

    start: int
    stop: int
    message: int | None


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as text."""

    text: str
    turns: tuple[TurnSpan, ...]


class ChatRenderer(Closeable):
    """A chat template at work: the one place where conversations become text, for training and for answers.

    Args:
        seconds: Processor seconds for one conversation.

    Guarantees:
        The template reaches no file, module or attribute, has its seconds of a processor for one conversation and 512
        MiB beside what Python takes, and writes at most 8 Mi characters; beyond that it is refused by name.
    """

    def __init__(self, template: ChatTemplate, today: date = ANY_DAY, seconds: int = 10) -> None:
        self.template = template
        self._today, self._seconds = today, seconds
        self._process: AskedProcess | None = None
        self._turn = threading.Lock()

    def render_prompt(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]] = ()) -> str:
        """Render messages up to where the assistant begins."""
        return self._request_rendering(messages, tools, asks=True, wanted=()).text

    def render_conversation(self, conversation: Conversation, learned_from: int = 0) -> RenderedChat:
        """Render a whole conversation, with the parts that the assistant writes and that may be learned.

        Args:
            learned_from: Nothing is learned of messages before this one, nor of those without weight: a template may
                write them otherwise than when the assistant wrote them.

        Raises:
            DataError: The template does not render these messages, or cannot tell the assistant's text.
        """
        turn_numbers = [
            number
            for number, message in enumerate(conversation.messages)
            if message.role == "assistant" and message.weight > 0 and number >= learned_from
        ]
        return self._request_rendering(conversation.messages, conversation.tools, asks=False, wanted=turn_numbers)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _request_rendering(
        self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], *, asks: bool, wanted: Sequence[int]
    ) -> RenderedChat:
        plain = [message.for_template() for message in messages]
        order = {"messages": plain, "tools": list(tools), "asks": asks, "wanted": list(wanted)}
        with self._turn:
            answer = self._exchange_lines(self._ensure_process(), order)
        fault, says = answer.get("fault"), answer.get("says", "")
        if fault in _OF_THE_TEMPLATE:
            raise ModelError(f"{self._template_name}: {_OF_THE_TEMPLATE[fault]} ({says})")
        if fault == "unstable":
            raise DataError(
                f"{self._template_name}: the assistant's text cannot be located: {says}; mark it with "
                f"{{% generation %}} ... "
                "{% endgeneration %} in your own template, or use another one"
            )
        if fault is not None:
            raise DataError(f"{self._template_name}: does not render these messages ({says})")
        return RenderedChat(answer["text"], tuple(TurnSpan(*span) for span in answer["spans"]))

    @property
    def _template_name(self) -> str:
        return f"chat template {self.template.name}"

    def _ensure_process(self) -> AskedProcess:
        if self._process is None:
            process = AskedProcess([_MODULE])
            # it also ends by itself, where the pipe to it is closed
            weakref.finalize(self, process.close)
            template = {"template": self.template.source, "variables": dict(self.template.tokens)}
            answer = self._exchange_lines(
                process, {**template, "today": self._today.isoformat(), "seconds": self._seconds}
            )
            if "fault" in answer:
                process.close()
                raise ModelError(f"{self._template_name}: is not a usable template ({answer['says']}); correct it")
            self._process = process
        return self._process

    def _exchange_lines(self, process: AskedProcess, order: dict[str, Any]) -> dict[str, Any]:
        try:
            answer, _ = process.ask(order)
        except EOFError as exc:
            self._process = None
            process.close()
            raise ModelError(f"{self._template_name}: {_ENDED}; its process ended with {exc}") from exc
        return answer
