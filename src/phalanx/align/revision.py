"""Constitutional revision: a model answers, criticises its answer by a principle, and writes it again."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.align.principles import Constitution
from phalanx.align.prompts import AskedPrompt, prompts_digest
from phalanx.align.writer import Writer, assistant_message, drawn_seed, user_message
from phalanx.errors import DataError


class Revision:
    """The loop that makes conversations for supervised fine-tuning.

    Source: Bai et al. 2022, section 3.
    """

    def __init__(
        self, writer: Writer, constitution: Constitution, prompts: Sequence[AskedPrompt], *, rounds: int, seed: int
    ) -> None:
        self._writer, self._constitution = writer, constitution.with_texts("critique", "revise")
        self._prompts, self._rounds, self._seed = prompts, rounds, seed
        check_prompts(writer, prompts)

    @property
    def revision_lineage(self) -> dict[str, Any]:
        """All that decides the rows."""
        return {
            "made_by": "revise",
            "model": self._writer.writer_digest,
            "sampling": self._writer.sampling_settings,
            "principles": self._constitution.constitution_digest,
            "prompts": prompts_digest(self._prompts),
            "rounds": self._rounds,
            "seed": self._seed,
        }

    def make_rows(self, numbers: range) -> list[dict[str, Any]]:
        """Make the rows of a batch of prompts: ``messages``, and how they came about."""
        prompts = [self._prompts[number] for number in numbers]
        answers = self._writer.write_answers(
            [prompt.chat for prompt in prompts], drawn_seed(self._seed, "answer", numbers.start)
        )
        texts = list(answers)
        revisions: list[list[dict[str, str]]] = [[] for _ in prompts]
        for round_ in range(self._rounds):
            self._revise_texts(prompts, texts, revisions, numbers, round_)
        return [
            {
                "messages": [*prompt.json_messages, {"role": "assistant", "content": text}],
                "answer": answer,
                "revisions": steps,
            }
            for prompt, text, answer, steps in zip(prompts, texts, answers, revisions, strict=True)
        ]

    def _revise_texts(
        self,
        prompts: Sequence[AskedPrompt],
        texts: list[str],
        conversations: Sequence[list[dict[str, str]]],
        numbers: range,
        round_: int,
    ) -> None:
        """Take every text through one round, in place; where the model says nothing, the text stays as it is."""
        drawn = [self._constitution.draw_principle(self._seed, number, round_) for number in numbers]
        chats = [
            [*prompt.chat, assistant_message(text), user_message(principle.critique or "")]
            for prompt, text, principle in zip(prompts, texts, drawn, strict=True)
        ]
        seeds = [drawn_seed(self._seed, what, numbers.start, round_) for what in ("critique", "revision")]
        critiques = self._writer.write_answers(chats, seeds[0])
        chats = [
            [*chat, assistant_message(critique), user_message(principle.revise or "")]
            for chat, critique, principle in zip(chats, critiques, drawn, strict=True)
        ]
        revised = self._writer.write_answers(chats, seeds[1])
        for index, (principle, critique, text) in enumerate(zip(drawn, critiques, revised, strict=True)):
            conversations[index].append({"principle": principle.name, "critique": critique, "revision": text})
            texts[index] = text or texts[index]


def revised_figures(
    rows: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
    """Return the rows that say something, and what became of all of them."""
    answered = [row for row in rows if row["messages"][-1]["content"].strip()]
    changed = sum(row["messages"][-1]["content"] != row["answer"] for row in answered)
    principles = Counter(step["principle"] for row in rows for step in row["revisions"])
    return answered, {
        "prompts": len(rows),
        "silent": len(rows) - len(answered),
        "changed": changed,
        "drawn": dict(principles),
    }


def check_prompts(writer: Writer, prompts: Sequence[AskedPrompt]) -> None:
    """Return where every prompt can be answered."""
    for prompt in prompts:
        try:
            writer.check_chat(prompt.chat)
        except DataError as exc:
            raise DataError(f"{prompt.where}: {exc}") from exc
