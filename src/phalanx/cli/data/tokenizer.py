"""``phalanx tokenizer``: train a vocabulary, look at one, compare several on the same texts."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures, print_rows
from phalanx.cli.data.tokenizer_options import Field, Texts
from phalanx.cli.options import Sets, Unsets, overrides_of

if TYPE_CHECKING:
    from phalanx.data.tokenizers.recipe import TokenizerRecipe


EXAMPLES = (
    "Example: phalanx tokenizer train vocabularies/first --text my_texts --vocab-size 8000\n\n"
    "Example: phalanx tokenizer train vocabularies/mine --recipe tokenizer.toml --set tokenizer.vocab_size=16000\n\n"
    "Example: phalanx tokenizer train vocabularies/pieces --text notes.jsonl --kind sentencepiece_unigram "
    "--vocab-size 8000 --set tokenizer.split_digits=true"
)


class Kind(StrEnum):
    """Kinds of vocabularies, as the table of trainers has them."""

    BPE = "bpe"
    WORD_PIECE = "wordpiece"
    SENTENCE_PIECE_BPE = "sentencepiece_bpe"
    SENTENCE_PIECE_UNIGRAM = "sentencepiece_unigram"


def train(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New directory.")],
    *,
    recipe: Annotated[
        Path | None, typer.Option("--recipe", metavar="FILE", help="TOML with [[sources]] and [tokenizer].")
    ] = None,
    text: Texts = None,
    field: Field = "text",
    kind: Annotated[Kind, typer.Option("--kind", help="With --text: kind of vocabulary.")] = Kind.BPE,
    vocab_size: Annotated[
        int, typer.Option("--vocab-size", metavar="N", min=2, help="With --text: number of tokens.")
    ] = 4096,
    sets: Sets = None,
    unsets: Unsets = None,
) -> Answer:
    """Train a vocabulary from a recipe or from command-line options; the same texts give the same bytes."""
    from phalanx.data.tokenizers.recipe import make_tokenizer

    tokenizer_recipe = _load_recipe(
        recipe, _recipe_of_options(text or [], field, kind, vocab_size), overrides_of(sets, unsets)
    )
    record = make_tokenizer(tokenizer_recipe, out)
    print_figures({name: value for name, value in record.items() if name != "sources"})
    end_token = tokenizer_recipe.tokenizer.end_of_text
    typer.echo(
        f'{out}: in the run file: data.tokenizer = {{ kind = "file", path = "{out}/tokenizer.json", '
        f'eos_token = "{end_token}" }}'
    )
    return Answer({"directory": out, **record})


def _recipe_of_options(texts: list[Path], field: str, kind: Kind, vocab_size: int) -> dict[str, Any]:
    from phalanx.data.tokenizers.texts import sources_of

    return {
        "sources": [source.model_dump(mode="json", exclude_none=True) for source in sources_of(texts, field)],
        "tokenizer": {"kind": kind.value, "vocab_size": vocab_size},
    }


def _load_recipe(path: Path | None, settings: dict[str, Any], overrides: list[str]) -> "TokenizerRecipe":
    from phalanx.config import config_of, load_config
    from phalanx.data.tokenizers.recipe import TokenizerRecipe
    from phalanx.errors import ConfigError

    if (path is None) == (not settings["sources"]):
        raise ConfigError("give either --recipe or --text").with_facts(code="PHX-C001", expected="--recipe or --text")
    if path is not None:
        return load_config(path, TokenizerRecipe, overrides)
    return config_of(settings, Path("command line"), TokenizerRecipe, overrides)


tokenizer_app = typer.Typer(no_args_is_help=True, help="Train, check and compare vocabularies.")
tokenizer_app.command(epilog=EXAMPLES)(train)


class TextGroup(StrEnum):
    """What `compare` counts texts by."""

    FILE = "file"
    LANGUAGE = "language"


@tokenizer_app.command(
    epilog="Example: phalanx tokenizer check vocabularies/first --text my_texts\n\n"
    "Example: phalanx tokenizer check models/Qwen3-0.6B --json"
)
def check(
    place: Annotated[Path, typer.Argument(metavar="DIR|FILE", help="A model's directory, or a tokenizer.json.")],
    text: Texts = None,
    field: Field = "text",
    eos_token: Annotated[
        str | None, typer.Option("--eos-token", metavar="TOKEN", help="End-of-document token, where no file names it.")
    ] = None,
) -> Answer:
    """Check a vocabulary, also on texts: round trips, unknown tokens, and reasons why a run would refuse it.

    The exit code is 3 if a run would refuse the vocabulary or use it wrongly.
    """
    from phalanx.data.tokenizers.check import check_tokenizer
    from phalanx.data.tokenizers.texts import texts_of
    from phalanx.errors import DataError

    outcome = check_tokenizer(place, texts_of(text, field) if text else (), eos_token)
    print_figures(outcome.facts | {"refused": "; ".join(outcome.refused) or "none: a run can use it"})
    error = DataError(f"{place}: {outcome.refused[0]}").with_facts(file=str(place)) if outcome.refused else None
    return Answer({**outcome.facts, "refused": outcome.refused}, error=error)


@tokenizer_app.command(
    epilog="Example: phalanx tokenizer compare vocabularies/first models/Qwen3-0.6B --text my_texts\n\n"
    "Example: phalanx tokenizer compare vocabularies/first vocabularies/pieces --text pages.jsonl --by language "
    "--out fertility.svg"
)
def compare(
    places: Annotated[
        list[Path], typer.Argument(metavar="DIR|FILE", help="Two or more: model directories, or tokenizer.json files.")
    ],
    *,
    text: Annotated[list[Path], typer.Option("--text", metavar="PATH", help="Texts, as for check; may be repeated.")],
    field: Field = "text",
    by: Annotated[TextGroup, typer.Option("--by", help="Count per file, or per detected language.")] = (TextGroup.FILE),
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write a chart to this SVG file.")] = None,
) -> Answer:
    """Compare vocabularies on the same texts: tokens per byte and per word (fertility), unknown tokens, losses."""
    from phalanx.data.tokenizers.check import open_vocabulary
    from phalanx.data.tokenizers.measure import measure_texts
    from phalanx.data.tokenizers.texts import language_detector, texts_of
    from phalanx.report import write_fertility_svg

    vocabularies = {str(place): open_vocabulary(place) for place in dict.fromkeys(places)}
    texts = texts_of(text, field)
    if by is TextGroup.LANGUAGE:
        tell = language_detector()
        texts = ((tell(text), text) for _, text in texts)
    figures_of = measure_texts(vocabularies, texts)
    rows: list[dict[str, Any]] = [
        {by.value: group, "vocabulary": name, **figures.to_json()}
        for (group, name), figures in sorted(figures_of.items())
    ]
    print_rows(rows)
    answer: dict[str, Any] = {"rows": rows}
    if out is not None:
        bars = [(f"{row[by.value]}, {row['vocabulary']}", 100 * row["tokens_per_byte"]) for row in rows]
        answer["picture"] = write_fertility_svg(bars, out)
        typer.echo(f"picture: {out}")
    return Answer(answer)
