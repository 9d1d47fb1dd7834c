"""``phalanx tokenizer``: train a vocabulary, look at one, compare several on the same texts."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import say_figures, say_rows
from phalanx.cli.options import Sets, Unsets, overrides_of

if TYPE_CHECKING:
    from phalanx.data.tokenizers.recipe import TokenizerRecipe

tokenizer_app = typer.Typer(no_args_is_help=True, help="Train vocabularies, check one, compare several.")

Texts = Annotated[
    list[Path] | None,
    typer.Option("--text", metavar="PATH", help="*.txt, *.md or *.jsonl, a file or a directory; may be repeated."),
]
Field = Annotated[str, typer.Option("--field", metavar="NAME", help="Of a JSON line, that has its text.")]


class Kind(StrEnum):
    """Kinds of vocabularies, as the table of trainers has them."""

    BPE = "bpe"
    WORD_PIECE = "wordpiece"
    SENTENCE_PIECE_BPE = "sentencepiece_bpe"
    SENTENCE_PIECE_UNIGRAM = "sentencepiece_unigram"


class Grouping(StrEnum):
    """What `compare` counts texts by."""

    FILE = "file"
    LANGUAGE = "language"


@tokenizer_app.command(
    epilog="Example: phalanx tokenizer train vocabularies/first --text my_texts --vocab-size 8000\n\n"
    "Example: phalanx tokenizer train vocabularies/mine --recipe tokenizer.toml --set tokenizer.vocab_size=16000\n\n"
    "Example: phalanx tokenizer train vocabularies/pieces --text notes.jsonl --kind sentencepiece_unigram "
    "--vocab-size 8000 --set tokenizer.split_digits=true"
)
def train(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New directory.")],
    *,
    recipe: Annotated[
        Path | None, typer.Option("--recipe", metavar="FILE", help="TOML with [[sources]] and [tokenizer].")
    ] = None,
    text: Texts = None,
    field: Field = "text",
    kind: Annotated[Kind, typer.Option("--kind", help="With --text: what to train.")] = Kind.BPE,
    vocab_size: Annotated[
        int, typer.Option("--vocab-size", metavar="N", min=2, help="With --text: how many tokens.")
    ] = 4096,
    sets: Sets = None,
    unsets: Unsets = None,
) -> Answer:
    """Train a vocabulary on texts, by a recipe or by what the command line says; the same texts give the same bytes."""
    from phalanx.data.tokenizers.recipe import make_tokenizer

    wanted = _recipe(recipe, _said(text or [], field, kind, vocab_size), overrides_of(sets, unsets))
    record = make_tokenizer(wanted, out)
    say_figures({name: value for name, value in record.items() if name != "sources"})
    end = wanted.tokenizer.end_of_text
    typer.echo(
        f'{out}: in the run file: data.tokenizer = {{ kind = "file", path = "{out}/tokenizer.json", '
        f'eos_token = "{end}" }}'
    )
    return Answer({"directory": out, **record})


@tokenizer_app.command(
    epilog="Example: phalanx tokenizer check vocabularies/first --text my_texts\n\n"
    "Example: phalanx tokenizer check models/Qwen3-0.6B --json"
)
def check(
    place: Annotated[Path, typer.Argument(metavar="DIR|FILE", help="A model's directory, or a tokenizer.json.")],
    text: Texts = None,
    field: Field = "text",
    eos_token: Annotated[
        str | None, typer.Option("--eos-token", metavar="TOKEN", help="Ends a document, where no file names it.")
    ] = None,
) -> Answer:
    """Look at a vocabulary, and at what it makes of texts: what comes back, what is unknown, what a run would refuse.

    The exit code is 3 where a run would refuse it, or do something wrong with it.
    """
    from phalanx.data.tokenizers.check import check_tokenizer
    from phalanx.data.tokenizers.texts import texts_of
    from phalanx.errors import DataError

    found = check_tokenizer(place, texts_of(text, field) if text else (), eos_token)
    say_figures(found.facts | {"refused": "; ".join(found.refused) or "nothing: a run can use it"})
    error = DataError(f"{place}: {found.refused[0]}").about(file=str(place)) if found.refused else None
    return Answer({**found.facts, "refused": found.refused}, error=error)


@tokenizer_app.command(
    epilog="Example: phalanx tokenizer compare vocabularies/first models/Qwen3-0.6B --text my_texts\n\n"
    "Example: phalanx tokenizer compare vocabularies/first vocabularies/pieces --text pages.jsonl --by language "
    "--out fertility.svg"
)
def compare(
    places: Annotated[list[Path], typer.Argument(metavar="A B...", help="Directories, or tokenizer.json files.")],
    *,
    text: Annotated[list[Path], typer.Option("--text", metavar="PATH", help="As of check; may be repeated.")],
    field: Field = "text",
    by: Annotated[Grouping, typer.Option("--by", help="What is counted apart; languages are told by a model.")] = (
        Grouping.FILE
    ),
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Draw a picture there (SVG).")] = None,
) -> Answer:
    """Compare vocabularies on the same texts: tokens for a byte and for a word (fertility), unknown tokens, losses."""
    from phalanx.data.tokenizers.check import open_vocabulary
    from phalanx.data.tokenizers.measure import measure
    from phalanx.data.tokenizers.texts import language_teller, texts_of
    from phalanx.report import write_fertility_svg

    vocabularies = {str(place): open_vocabulary(place) for place in dict.fromkeys(places)}
    texts = texts_of(text, field)
    if by is Grouping.LANGUAGE:
        tell = language_teller()
        texts = ((tell(one), one) for _, one in texts)
    found = measure(vocabularies, texts)
    rows: list[dict[str, Any]] = [
        {by.value: group, "vocabulary": name, **figures.to_json()} for (group, name), figures in sorted(found.items())
    ]
    say_rows(rows)
    answer: dict[str, Any] = {"rows": rows}
    if out is not None:
        bars = [(f"{row[by.value]}, {row['vocabulary']}", 100 * row["tokens_per_byte"]) for row in rows]
        answer["picture"] = write_fertility_svg(bars, out)
        typer.echo(f"picture: {out}")
    return Answer(answer)


def _said(texts: list[Path], field: str, kind: Kind, vocab_size: int) -> dict[str, Any]:
    """Return what the command line says as a recipe has it."""
    from phalanx.data.tokenizers.texts import sources_of

    return {
        "sources": [source.model_dump(mode="json", exclude_none=True) for source in sources_of(texts, field)],
        "tokenizer": {"kind": kind.value, "vocab_size": vocab_size},
    }


def _recipe(path: Path | None, said: dict[str, Any], overrides: list[str]) -> "TokenizerRecipe":
    from phalanx.config import config_of, load_config
    from phalanx.data.tokenizers.recipe import TokenizerRecipe
    from phalanx.errors import ConfigError

    if (path is None) == (not said["sources"]):
        raise ConfigError("give either --recipe or --text").about(code="PHX-C001", expected="--recipe or --text")
    if path is not None:
        return load_config(path, TokenizerRecipe, overrides)
    return config_of(said, Path("command line"), TokenizerRecipe, overrides)
