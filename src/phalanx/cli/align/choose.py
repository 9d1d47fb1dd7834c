"""``phalanx align choose``: pairs of a model's own answers, of which a judge chose the better one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.align.options import (
    Batch,
    Best,
    JudgePath,
    MaxNewTokens,
    Out,
    OwnCode,
    Prompts,
    Seed,
    Temperature,
    Where,
    open_asked_judge,
    open_writer,
    print_found_figures,
)
from phalanx.cli.answers.answer import Answer

if TYPE_CHECKING:
    from phalanx.align.choice import Chooser
    from phalanx.serve import ChatWriter


@contextmanager
def rewards_chooser(file: Path, out: Path) -> Iterator[tuple["Chooser", dict[str, Any]]]:
    """Open the rewards of a judge's file."""
    from phalanx.align import JudgeFile
    from phalanx.align.choice import by_worth
    from phalanx.align.judges import RewardsJudgeConfig
    from phalanx.align.prompts import AskedPrompt
    from phalanx.config import digest_config, load_config, pin_own_code
    from phalanx.errors import ConfigError
    from phalanx.rewards import RewardScorer, ScoredText

    judge_config: Any = load_config(file, JudgeFile, prepare=pin_own_code).judge
    if not isinstance(judge_config, RewardsJudgeConfig):
        raise ConfigError(f'{file}: a judge of kind = "{judge_config.kind}" needs principles; give --principles')
    with RewardScorer(
        judge_config.rewards_config, file.resolve().parent, out.with_name(f"{out.name}.rewards.log")
    ) as scorer:

        def worth(prompt: AskedPrompt, text: str) -> float:
            return scorer.total_reward(
                scorer.score_texts([ScoredText(prompt.where, prompt.readable_text, text, prompt.record)])[0]
            )

        yield by_worth(worth), {"judge": {"kind": judge_config.kind, "rewards": digest_config(judge_config)}}


OnlyOne = Annotated[str | None, typer.Option("--principle", metavar="NAME", help="Choose by this principle only.")]
Ranked = Annotated[bool, typer.Option("--ranked", help="Ask the principles in order, until one decides.")]
Shown = Annotated[
    bool, typer.Option("--demonstrations", help="A line's \"demonstration\" replaces the model's answer.")
]


def choose(
    where: Where,
    *,
    prompts: Prompts,
    out: Out,
    principles: Annotated[Path | None, typer.Option("--principles", metavar="FILE", help="File of principles.")] = None,
    principle: OnlyOne = None,
    ranked: Ranked = False,
    judge: JudgePath = None,
    demonstrations: Shown = False,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    batch: Batch = 8,
    best: Best = False,
    own_code: OwnCode = False,
) -> Answer:
    """Let a model answer each prompt twice and a judge choose, in both orders; write preference pairs."""
    from phalanx.align import PairChoice, ResumableRows, read_prompts
    from phalanx.align.choice import chosen_figures
    from phalanx.telemetry import row_bar

    asked = read_prompts(prompts)
    ways = (principles, principle, judge, demonstrations, ranked)
    writer = open_writer(where, max_new_tokens, temperature, best=best, own_code=own_code)
    with _open_chooser(writer, ways, seed, out) as (chooser, told_of):
        loop = PairChoice(writer, chooser, asked, seed, told_of)
        file = ResumableRows(out, loop.pair_lineage, batch)
        figures = file.read_lineage()
        if figures is None:
            with row_bar("prompts") as print_progress:
                rows = file.make_all(len(asked), loop.make_rows, print_progress)
            figures = file.finish_file(*chosen_figures(rows))
    print_found_figures(out, figures)
    return Answer({"file": out, **figures})


@contextmanager
def _open_chooser(
    writer: "ChatWriter", ways: Any, seed: int, out: Path
) -> Iterator[tuple["Chooser | None", dict[str, Any]]]:
    from phalanx.align import load_constitution
    from phalanx.align.choice import by_principles
    from phalanx.errors import ConfigError

    principles, principle, judge, demonstrations, ranked = ways
    if demonstrations:
        if principles or principle or judge or ranked:
            raise ConfigError("--demonstrations already name the chosen answers; remove --principles and --judge")
        yield None, {"demonstrations": True}
        return
    if principles is None:
        if judge is None or principle or ranked:
            raise ConfigError("the judge is missing: give --principles, a --judge of rewards, or --demonstrations")
        with rewards_chooser(judge, out) as scorer:
            yield scorer
        return
    constitution, asked = load_constitution(principles).with_principle(principle), open_asked_judge(judge, writer)
    provenance = {"principles": constitution.constitution_digest, "ranked": ranked, "judge": asked.judge_lineage}
    yield by_principles(asked, constitution, seed, ranked=ranked), provenance
