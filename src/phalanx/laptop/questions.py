"""Chats and preferences made by rule out of the user's own texts, where the user has none.

Questions are asked about headings and sentences that stand in the texts, and answered with what stands there. A model
learns from them the form of a chat, and to answer with what belongs to a question; it learns no fact from them that the
texts do not have, and no reasoning. The rejected side of a preference is the answer to another question, or one that
repeats itself.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from phalanx.laptop.texts import BLOCKS

MAX_CHATS = 4000
_MAX_HEADING, _MAX_WORDS = 60, 8
_MIN_ANSWER, _MAX_ANSWER = 40, 240
_MARKED_HEADING = re.compile(r"^(?:#{1,6}\s+|(?:=\s?)+)(.+?)(?:\s?=)*\s*#*$")
_SENTENCE_ENDS = re.compile(r"(?<=[.!?])\s+")
_ABOUT = ("What do you know about {}?", "Tell me about {}.", "What is said of {}?", "{}?")
_CONTINUE = ("Go on: {}", "How does this go on? {}", "Continue the sentence: {}")
_NAME = "What is this about? {}"
MANNERS: tuple[tuple[str, str], ...] = (
    ("Hello!", "Hello! Ask me about the texts that I was trained on."),
    ("Hi", "Hello! What would you like to read about?"),
    ("Good morning", "Good morning! Which part of the texts interests you?"),
    ("Who are you?", "I am a small language model. I was trained on this machine, on the texts of its owner."),
    ("Are you a human?", "No. I am a program that continues texts."),
    ("What can you do?", "I can write texts like those that I was trained on. What I write may be wrong."),
    ("Can I trust you?", "Not without checking. I am small, and I make things up."),
    ("Who made you?", "You did, with your own texts and on your own machine."),
    ("Do you use the internet?", "No. I was trained without it, and I run without it."),
    ("Thank you!", "You are welcome."),
    ("Thanks", "You are welcome."),
    ("Goodbye", "Goodbye!"),
)
"""What a chat begins and ends with; written for this purpose, and under the licence of the project."""
_MANNERS_EVERY = 5
"""One chat in so many begins with one of them."""


def make_chats(documents: Iterable[str]) -> list[dict[str, Any]]:
    """Return conversations with at most `MAX_CHATS` questions about documents, the same for the same documents."""
    pairs = {question: answer for document in documents for question, answer in ask_about(document)}
    chosen = sorted(pairs.items(), key=lambda pair: _rank(pair[0]))[:MAX_CHATS]
    chats = [_chat(pair) for pair in MANNERS]
    for index, pair in enumerate(chosen):
        manner = MANNERS[index // _MANNERS_EVERY % len(MANNERS)]
        chats.append(_chat(pair) if index % _MANNERS_EVERY else _chat(manner, pair))
    return chats


def make_preferences(chats: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a pair for each chat: its answer is better than another chat's, or than its own beginning said again."""
    answers = [chat["messages"][-1]["content"] for chat in chats]
    pairs = []
    for index, chat in enumerate(chats):
        other = answers[(index + len(answers) // 2) % len(answers)]
        tokens = answers[index].split()
        again = " ".join(tokens[: max(1, len(tokens) // 3)] * 3)
        rejected = other if index % 2 else again
        if rejected != answers[index]:
            *prompt, answer = chat["messages"]
            pairs.append({"prompt": prompt, "chosen": [answer], "rejected": [{**answer, "content": rejected}]})
    return pairs


def ask_about(document: str) -> Iterator[tuple[str, str]]:
    """Yield questions with answers that stand in a document."""
    for heading, passage in find_sections(document):
        yield _ABOUT[_rank(heading) % len(_ABOUT)].format(heading), passage
        yield _NAME.format(_clip(passage, 120)), heading
    for block in BLOCKS.split(document):
        for sentence in _SENTENCE_ENDS.split(" ".join(block.split())):
            tokens = sentence.split()
            if _MIN_ANSWER <= len(sentence) <= _MAX_ANSWER and len(tokens) >= _MAX_WORDS and _is_free(sentence):
                half = len(tokens) // 2
                form = _CONTINUE[_rank(sentence) % len(_CONTINUE)]
                yield form.format(" ".join(tokens[:half])), " ".join(tokens[half:])


def find_sections(document: str) -> Iterator[tuple[str, str]]:
    """Yield headings with the beginning of the paragraph below them.

    A heading is a line of its own: marked as in Markdown or a wiki, or short and without an end of a sentence.
    """
    heading: str | None = None
    for block in BLOCKS.split(document):
        title = _heading_of(block)
        if title is not None:
            heading = title
        elif heading is not None:
            passage = _clip(" ".join(block.split()), _MAX_ANSWER)
            if len(passage) >= _MIN_ANSWER and _is_free(heading + passage):
                yield heading, passage
            heading = None


def _heading_of(block: str) -> str | None:
    lines = [row.strip() for row in block.strip().splitlines()]
    is_underlined = len(lines) == 2 and len(lines[1]) > 2 and set(lines[1]) <= set("=-~*")
    if not lines or len(lines) > 1 + is_underlined:
        return None
    marked = _MARKED_HEADING.match(lines[0])
    text = " ".join((marked.group(1) if marked else lines[0]).split())
    if not any(character.isalpha() for character in text) or len(text) > _MAX_HEADING:
        return None
    is_short = len(text.split()) <= _MAX_WORDS and text[-1] not in ".!?:;,"
    return text if marked or is_underlined or is_short else None


def _clip(text: str, limit: int) -> str:
    """Return the first sentences that fit, or the first words where the first sentence does not."""
    clipped = ""
    for sentence in _SENTENCE_ENDS.split(text):
        if len(clipped) + len(sentence) + 1 > limit:
            break
        clipped = f"{clipped} {sentence}".strip()
    return clipped or text[:limit].rpartition(" ")[0]


def _is_free(text: str) -> bool:
    """Whether a text holds nothing that a turn of a chat is marked by."""
    return "<|" not in text and "[INST]" not in text


def _rank(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def _chat(*pairs: tuple[str, str]) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {
        "messages": [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)]
    }
