"""Many prompts from a file to a file, one JSON object a line; lines from before an interruption are kept."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from phalanx.config import canonical_json
from phalanx.data.chat import parse_conversation
from phalanx.data.chat.conversation import Conversation
from phalanx.data.sources.jsonl import parse_object
from phalanx.errors import DataError
from phalanx.serve.sampling import Completion, SamplingRule
from phalanx.serve.text_model import TextModel
from phalanx.telemetry import RowsTold


@dataclass(frozen=True)
class PromptRow:
    """A line of the input: a prompt or a chat.

    Attributes:
        chat: Its messages with their tools, read as every conversation is; None where it has a prompt.
    """

    record: Mapping[str, Any]
    chat: Conversation | None


def complete_file(model: TextModel, source: Path, target: Path, sampling: SamplingRule, told: RowsTold) -> int:
    """Complete every line of a file; lines that `target` has already are not done again.

    Every line is read and counted in tokens before the first one is completed: a mistake in the last line costs no
    waiting. Line n is drawn with ``sampling.seed + n``, so that an interrupted file goes on as it would have.

    Args:
        source: JSON lines with ``prompt`` or ``messages``.
        target: Gets the same lines with ``text``, ``prompt_tokens``, ``tokens`` and ``finish``.
        told: Called for each line that is done.

    Returns:
        Lines that were completed by this call.

    Raises:
        DataError: Names file and line: no JSON, neither prompt nor messages, or a prompt that does not fit; or
            `target` holds completions of other lines.
    """
    lines = list(_read_prompts(source))
    prompts = [_prompt_ids(model, entry, f"{source}, line {number}") for number, entry in enumerate(lines, start=1)]
    done = count_finished_rows(target, [line.record for line in lines])
    told(done, len(lines))
    try:
        with target.open("a", encoding="utf-8") as stream:
            for number in range(done, len(lines)):
                row_sampling = sampling.model_copy(update={"seed": (sampling.seed + number) % (1 << 63)})
                completion = model.complete_prompt(prompts[number], row_sampling)
                written = {**lines[number].record, **completion.model_dump()}
                stream.write(json.dumps(written, ensure_ascii=False) + "\n")
                stream.flush()
                told(number + 1, len(lines))
    except OSError as exc:
        raise DataError(f"{target}: cannot be written ({exc.strerror})") from exc
    return len(lines) - done


def read_rows(source: Path, result: type[BaseModel]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the object of each line of a file, with the line's name in messages.

    Args:
        result: What is added to each line; a line that has one of its fields would lose it, and never be continued.

    Raises:
        DataError: Names the line: it is no JSON object, has a field of the result, or cannot be written again.
    """
    try:
        content = source.read_bytes()
    except OSError as exc:
        raise DataError(f"{source}: cannot be read ({exc.strerror}); give a file of JSON lines") from exc
    for number, row in enumerate(content.splitlines(), start=1):
        place = f"{source}, line {number}"
        record = parse_object(row, place)
        if taken := sorted(record.keys() & result.model_fields.keys()):
            raise DataError(f"{place}: has {', '.join(taken)}, which the result would replace; rename it")
        try:
            canonical_json(record)
        except ValueError as exc:
            why = "holds a number that is not finite, or half of a surrogate pair"
            raise DataError(f"{place}: cannot be written again: {why}; correct it") from exc
        yield place, record


def _read_prompts(source: Path) -> Iterator[PromptRow]:
    for place, record in read_rows(source, Completion):
        has_prompt, has_messages = isinstance(record.get("prompt"), str), isinstance(record.get("messages"), list)
        if has_prompt == has_messages:
            raise DataError(f"{place}: expected either prompt or messages: a text, or a list")
        try:
            yield PromptRow(record, parse_conversation(record, "messages") if has_messages else None)
        except DataError as exc:
            raise DataError(f"{place}: {exc}") from exc


def _prompt_ids(model: TextModel, line: PromptRow, where: str) -> list[int]:
    try:
        if line.chat is not None:
            return model.chat_prompt(line.chat.messages, line.chat.tools)
        return model.encode_prompt(line.record["prompt"])
    except DataError as exc:
        raise DataError(f"{where}: {exc}") from exc


def count_finished_rows(target: Path, inputs: Sequence[Mapping[str, Any]]) -> int:
    """Count the lines of a target that are whole; a torn last one is cut off.

    Args:
        inputs: Lines of the input; each is a part of its line in the target.
    """
    if not target.exists():
        return 0
    if not target.is_file():
        # a device may be read without end
        raise DataError(f"{target}: is no regular file; give the name of one, or of a new one")
    try:
        content = target.read_bytes()
        complete_rows = content[: content.rfind(b"\n") + 1]
        if len(complete_rows) < len(content):
            with target.open("r+b") as stream:
                stream.truncate(len(complete_rows))
        records = [json.loads(row) for row in complete_rows.splitlines()]
    except (OSError, ValueError, RecursionError) as exc:
        raise DataError(f"{target}: is there already and holds no results ({exc}); give another name") from exc
    for number, record in enumerate(records, start=1):
        if number > len(inputs) or not isinstance(record, dict) or not inputs[number - 1].items() <= record.items():
            raise DataError(f"{target}, line {number}: is of another input; give another name")
    return len(records)
