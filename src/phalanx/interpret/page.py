"""Token losses, layers and documents in the colours of a terminal, and as pages that open offline."""

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from phalanx.config import escape_controls
from phalanx.interpret.documents import NearDocument
from phalanx.interpret.tokens import LayerGuess, TokenLoss
from phalanx.report.shell import make_section, page_shell, write_page
from phalanx.report.svg import Markup, make_element
from phalanx.report.tables import make_table

_FULL_NATS = 8.0
"""A loss that has the full colour."""
_SHADES = ("", "on grey19", "on orange4", "on dark_orange3", "on red3")
"""Backgrounds of a terminal, from a loss near 0 to the full colour."""
_MAX_CELLS = 64


def colour_losses(rows: Sequence[TokenLoss]) -> Text:
    """Return a text for the terminal, each token the redder the less it was expected."""
    shown = Text()
    for row in rows:
        style = "" if row.loss is None else _SHADES[round(_share(row.loss) * (len(_SHADES) - 1))]
        shown.append(escape_controls(row.text), style)
    return shown


def write_losses(rows: Sequence[TokenLoss], title: str, out: Path) -> Path:
    """Write a text as a page; a token shows its loss, rank and the likeliest other one under the pointer."""
    losses = [row.loss for row in rows if row.loss is not None]
    mean = f"{len(rows)} tokens, mean loss {sum(losses) / len(losses):.3f} nats. Red: not expected."
    content = make_element("pre", {"style": "white-space:pre-wrap"}, *map(_loss_span, rows))
    return write_page(out, page_shell("Loss by token", [_head(title), make_section("Loss by token", mean, content)]))


def write_layers(prompt: Sequence[str], guesses: Sequence[LayerGuess], title: str, out: Path) -> Path:
    """Write the guesses of all layers, and where the last token looks in each."""
    shown, first = list(prompt[-_MAX_CELLS:]), max(0, len(prompt) - _MAX_CELLS)
    looks = [
        [str(guess.layer), *(_weight_cell(weight) for weight in guess.attention[first:])]
        for guess in guesses
        if guess.attention
    ]
    says = [
        [
            str(guess.layer),
            f"{guess.divergence:.3f}",
            ", ".join(f"{token!r} {share:.2f}" for token, share in guess.tokens),
        ]
        for guess in guesses
    ]
    lens = make_table(["Layer", "Divergence", "Guesses"], says)
    sections = [
        _head(title),
        make_section("What each layer would say next", _LENS, lens),
        make_section("Where the last token looks", "Attention, mean over heads.", make_table(["Layer", *shown], looks)),
    ]
    return write_page(out, page_shell("Layers", sections))


def write_documents(documents: Sequence[NearDocument], title: str, out: Path) -> Path:
    """Write the nearest documents with their sources and licences."""
    heads = ["Gradient", "Similarity", "Document", "Source", "Licence", "Consent", "Begins with"]
    rows = [
        [
            "" if row.gradient is None else f"{row.gradient:.3f}",
            f"{row.similarity:.3f}",
            f"{row.name} ({row.digest:.12})",
            row.source,
            row.licence or "not known",
            row.consent or "not known",
            row.beginning[:200],
        ]
        for row in documents
    ]
    return write_page(
        out,
        page_shell(
            "Nearest documents", [_head(title), make_section("Nearest documents", _NEAR, make_table(heads, rows))]
        ),
    )


_LENS = (
    "The final norm and the head, applied to each layer's hidden state of the last token. Divergence in nats from what "
    "the model itself says; 0 at the last layer."
)
_NEAR = (
    "Ordered by the cosine of gradients in the last block, among the documents nearest by hidden states. A similarity "
    "is no proof that a document taught the text."
)


def list_guesses(guesses: Sequence[LayerGuess]) -> list[dict[str, str | float]]:
    """Return the guesses as rows of a terminal's table."""
    return [
        {
            "layer": str(guess.layer),
            "divergence": guess.divergence,
            **{str(number + 1): f"{token!r} {share:.2f}" for number, (token, share) in enumerate(guess.tokens)},
        }
        for guess in guesses
    ]


def _head(title: str) -> Markup:
    return make_element("header", {}, make_element("h1", {}, title))


def _share(loss: float) -> float:
    return min(1.0, loss / _FULL_NATS)


def _loss_span(row: TokenLoss) -> Markup:
    if row.loss is None:
        return make_element("span", {"title": "the first token: nothing predicts it"}, row.text)
    title = f"{row.loss:.3f} nats, rank {row.rank}; likeliest: {row.likeliest!r}"
    return make_element("span", {"style": _background(_share(row.loss)), "title": title}, row.text)


def _weight_cell(weight: float) -> Markup:
    return make_element("span", {"style": _background(weight), "title": f"{weight:.4f}"}, f"{weight:.2f}")


def _background(share: float) -> str:
    return f"background:rgba(214,69,65,{0.6 * share:.2f})"
