"""What the verbs of ``phalanx align`` share: the options of the model that answers, and its judge."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from phalanx.align.judges import Judge
    from phalanx.serve import ChatWriter

Where = Annotated[Path, typer.Argument(metavar="RUN_DIR|DIR", help="A run, a checkpoint of a run, or a model.")]
Prompts = Annotated[Path, typer.Option("--prompts", metavar="FILE.jsonl", help="A prompt or messages on each line.")]
Principles = Annotated[Path, typer.Option("--principles", metavar="FILE", help="Principles: .toml or .jsonl.")]
Out = Annotated[
    Path, typer.Option("--out", metavar="FILE.jsonl", help="Output file; an interrupted file is continued.")
]
JudgePath = Annotated[
    Path | None, typer.Option("--judge", metavar="FILE.toml", help="A judge; default: the model itself.")
]
Rounds = Annotated[int, typer.Option("--rounds", min=1, max=100, help="Rounds of critique and revision.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of every draw.")]
Batch = Annotated[int, typer.Option("--batch", min=1, max=1024, help="Prompts that are answered at the same time.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Maximum length of an answer, in tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 always takes the most likely token.")]
Best = Annotated[bool, typer.Option("--best", help="Take the run's checkpoint with the best validation.")]
OwnCode = Annotated[bool, typer.Option("--own-code", help="Run the code in RUN_DIR/code; read it first.")]


def open_writer(where: Path, max_new_tokens: int, temperature: float, *, best: bool, own_code: bool) -> "ChatWriter":
    """Open the model that answers."""
    from phalanx.serve import ChatWriter, SamplingRule, open_text_model

    sampling = SamplingRule(max_new_tokens=max_new_tokens, temperature=temperature)
    return ChatWriter(open_text_model(where, best=best, own_code=own_code), sampling)


def open_asked_judge(file: Path | None, writer: "ChatWriter") -> "Judge":
    """Open the judge that a file names, which answers questions; without one, the model judges itself."""
    from phalanx.align import JudgeFile, ModelJudge, ServerJudge
    from phalanx.align.judges import ModelJudgeConfig, ServerJudgeConfig
    from phalanx.config import load_config
    from phalanx.errors import ConfigError
    from phalanx.serve import ChatWriter, SamplingRule, open_text_model

    if file is None:
        return ModelJudge(writer)
    judge_config: Any = load_config(file, JudgeFile).judge
    if isinstance(judge_config, ServerJudgeConfig):
        return ServerJudge(judge_config)
    if isinstance(judge_config, ModelJudgeConfig):
        return ModelJudge(ChatWriter(open_text_model(judge_config.path), SamplingRule()))
    raise ConfigError(
        f'{file}: kind = "{judge_config.kind}" gives numbers and cannot answer questions; use kind = "server" '
        'or "model", or remove --judge'
    )


def print_found_figures(out: Path | None, figures: Mapping[str, Any]) -> None:
    """Print the figures of a loop, a share with its interval; provenance is in the lineage and in the JSON."""
    from phalanx.cli.console import print_figures

    def told(value: Any) -> Any:
        if not isinstance(value, dict) or "low" not in value:
            return value
        if value["share"] is None:
            return None
        return f"{value['share']:.1%} ({value['low']:.1%} to {value['high']:.1%}), {value['count']} of {value['of']}"

    print_figures({"file": out, **{name: told(value) for name, value in figures.items() if name != "made_of"}})
