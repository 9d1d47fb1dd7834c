"""``phalanx tokenizer train``: train a vocabulary by a recipe or by command-line options."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures
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
    """Return the command-line options as a recipe."""
    from phalanx.data.tokenizers.texts import sources_of

    return {
        "sources": [source.model_dump(mode="json", exclude_none=True) for source in sources_of(texts, field)],
        "tokenizer": {"kind": kind.value, "vocab_size": vocab_size},
    }


def _load_recipe(path: Path | None, said: dict[str, Any], overrides: list[str]) -> "TokenizerRecipe":
    from phalanx.config import config_of, load_config
    from phalanx.data.tokenizers.recipe import TokenizerRecipe
    from phalanx.errors import ConfigError

    if (path is None) == (not said["sources"]):
        raise ConfigError("give either --recipe or --text").with_facts(code="PHX-C001", expected="--recipe or --text")
    if path is not None:
        return load_config(path, TokenizerRecipe, overrides)
    return config_of(said, Path("command line"), TokenizerRecipe, overrides)
