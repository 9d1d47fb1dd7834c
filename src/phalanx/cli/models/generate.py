"""``phalanx generate``: write texts with a model."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.answers.answer import Answer, for_programs
from phalanx.cli.options import BestStep, Device, ModelStep, OwnCode, OwnerCertificate

if TYPE_CHECKING:
    from phalanx.serve import Completion, SamplingRule, TextModel


def print_completion(model: "TextModel", ids: list[int], sampling: "SamplingRule") -> "Completion":
    """Print what follows a prompt while it is written, without what steers a terminal; for programs, print nothing."""
    from phalanx.config import escape_controls

    with model.stream_text(ids, sampling) as stream:
        for piece in stream:
            if not for_programs():
                typer.echo(escape_controls(piece), nl=False)
                sys.stdout.flush()
    if not for_programs():
        typer.echo()
    return stream.completion


def chat_by_lines(model: "TextModel", sampling: "SamplingRule") -> Answer:
    """Answer each line of stdin as a turn of one chat, to the end of the input."""
    from phalanx.data.chat import ChatMessage

    messages: list[Any] = []
    while True:
        if sys.stdin.isatty():
            typer.echo("> ", nl=False)
        text = sys.stdin.readline()
        if not text:
            return Answer({"messages": [message.model_dump(exclude_defaults=True) for message in messages]})
        if not text.strip():
            continue
        messages.append(ChatMessage(role="user", content=text.rstrip("\n")))
        completion = print_completion(model, model.chat_prompt(messages), sampling)
        messages.append(ChatMessage(role="assistant", content=completion.text))


def generate(
    where: Annotated[Path, typer.Argument(metavar="RUN_DIR|DIR", help="A run, a checkpoint of a run, or a model.")],
    *,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Text to continue; default: stdin.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Chat, with the model's chat template; one line is one turn.")
    ] = False,
    lines: Annotated[
        Path | None, typer.Option("--input", metavar="FILE.jsonl", help="File of prompts or chats.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE.jsonl", help="Output file of the texts.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, help="Maximum length of a text, in tokens.")
    ] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0 always takes the most likely token.")
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option("--top-k", min=0, help="Draw from this many most likely tokens; 0: from all.")
    ] = 0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Draw from the most likely tokens with this total probability.")
    ] = 0.95,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="Above 1, tokens repeat less.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the draws.")] = 0,
    step: ModelStep = None,
    best: BestStep = False,
    certificate: OwnerCertificate = None,
    own_code: OwnCode = False,
    device: Device = "cpu",
    stages: Annotated[int, typer.Option("--stages", min=1, help="Processes to divide the layers among.")] = 1,
) -> Answer:
    """Continue a text, chat, or complete a file of prompts with a trained model; a run's checkpoint is verified."""
    from pydantic import ValidationError

    from phalanx.config import escape_controls
    from phalanx.errors import ConfigError
    from phalanx.serve.place import check_place

    # a mistake is said before torch is imported
    check_place(where)
    if (lines is None) != (out is None):
        raise ConfigError("--input and --out belong together; give both or neither")
    if sum([prompt is not None, chat, lines is not None]) > 1:
        raise ConfigError("--prompt, --chat and --input exclude each other; choose one")
    from phalanx.serve import SamplingRule, open_text_model

    try:
        sampling = SamplingRule(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
        )
    except ValidationError as exc:
        first = exc.errors()[0]
        raise ConfigError(f"--{str(first['loc'][0]).replace('_', '-')}: {first['msg']}, got {first['input']}") from exc
    model = open_text_model(
        where, step=step, best=best, certificate=certificate, own_code=own_code, device=device, stages=stages
    )
    if lines is not None and out is not None:
        return _complete_file(model, lines, out, sampling)
    if chat:
        return chat_by_lines(model, sampling)
    text = sys.stdin.read() if prompt is None else prompt
    if not for_programs():
        typer.echo(escape_controls(text), nl=False)
    completion = print_completion(model, model.encode_prompt(text), sampling)
    return Answer({"prompt": text, **completion.model_dump()})


def _complete_file(model: "TextModel", lines: Path, out: Path, sampling: "SamplingRule") -> Answer:
    from phalanx.serve import complete_file
    from phalanx.telemetry import row_bar

    with row_bar("texts") as print_progress:
        done = complete_file(model, lines, out, sampling, print_progress)
    if not for_programs():
        typer.echo(f"{out}: {done} texts")
    return Answer({"file": out, "completed": done})
