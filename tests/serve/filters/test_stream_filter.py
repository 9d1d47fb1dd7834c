"""A stream's verdict is that of the whole text, wherever it is cut, and nothing that is refused has gone out before."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import DataError
from phalanx.serve.filters import FiltersConfig, OutputFilters, TextFilters, TextRefused, VerbatimIndex
from phalanx.serve.filters.stream import AHEAD, BLOCK

SECRETS = (
    "AKIAIOSFODNN7EXAMPL2",
    "ghp_" + "a1B2" * 9,
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA7b\n-----END RSA PRIVATE KEY-----",
    "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0." + "aB3_" * 170,
    'api_key = "aZ09bY18cX27dW36eV45"',
    "https://user:hunter2x@db.example.org/",
)
PERSONAL = (
    "write to ann.lee@example.org now",
    "call +49 30 1234 5678 90",
    "DE89 3704 0044 0532 0130 00",
    "4111 1111 1111 1111",
    "2001:4860:4860::8888",
    "an jörg.müller@münchen.de",
    "a@例子.中国",
    "+33\u202f6\u202f12\u202f34\u202f56\u202f78",
    "+49–30–1234–5678",
    "卡号４１１１　１１１１　１１１１　１１１１是",
    "call tel:+49 30 1234 5678 90",
    "an iban:DE89 3704 0044 0532 0130 00",
)
OTHERS = (
    "\x1b[2J",
    "a\U000e0041\U000e0042",
    "![x](https://evil.example/?q=1)",
    "<script>alert(1)</script>",
    "<a onclick=x>",
    "Project Blue Heron",
    "the canary sings 4711",
    "see http://evil.example/a for more",
    "under a black moon they sail, and only then the orchid blooms",
)
PLAIN = (
    "The owner of a run ",
    "in 1998 there were 17 of 4,000 ",
    "x < y and [a](b) ",
    "\n\n",
    "Größe 漢字です。",
    "e\u0301 ",
    "black moon ",
    "A" * 700,
)
ALL = FiltersConfig(output=OutputFilters(personal_data="refuse", links="refuse", images="refuse", markup="refuse"))


@pytest.fixture(scope="module")
def filters(tmp_path_factory):
    home = tmp_path_factory.mktemp("lists")
    (home / "topics.txt").write_text("project blue heron\nheron\n", encoding="utf-8")
    (home / "canaries.txt").write_text("the canary sings 4711\n", encoding="utf-8")
    (home / "weights.tsv").write_text("0.6\tblack moon\n0.6\torchid\n", encoding="utf-8")
    VerbatimIndex.write(home / "index.npy", [TRAINED])
    output = ALL.output.model_copy(
        update={
            "topic_files": (home / "topics.txt",),
            "canary_files": (home / "canaries.txt",),
            "topic_weights": home / "weights.tsv",
            "verbatim_index": home / "index.npy",
        }
    )
    refusing = TextFilters(FiltersConfig(output=output))
    noting = {name: "note" for name, value in output.model_dump().items() if value == "refuse"}
    return refusing, TextFilters(FiltersConfig(output=output.model_copy(update=noting)))


TRAINED = " ".join(f"word{number * 7919 % 1000} and" for number in range(60))

texts = st.lists(
    st.one_of(
        st.sampled_from((*SECRETS, *PERSONAL, *OTHERS, TRAINED)),
        st.sampled_from(PLAIN),
        st.text(max_size=20),
        st.text(alphabet="0123456789 -+().@abABä例\u00a0–＠１:/<![]\u00ad\u200b\ufe0f", max_size=60),
    ),
    max_size=12,
).map("".join)


def verdict_of(filters, pieces):
    """Return what came out, the refusal, and the notes."""
    stream, out = filters.open_stream(), []
    try:
        for piece in pieces:
            out.append(stream.feed(piece))
        out.append(stream.close())
    except TextRefused as exc:
        return "".join(out), (exc.filter_name, exc.reason), stream.notes
    return "".join(out), None, stream.notes


def cut(text, data):
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=40)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


@given(texts, st.data())
def test_any_cut_of_a_text_has_the_verdict_of_the_whole(filters, text, data):
    for some in filters:
        whole = verdict_of(some, [text])
        pieces = verdict_of(some, cut(text, data) if data.draw(st.booleans()) else list(text))

        assert pieces[1:] == whole[1:]
        assert text.startswith(pieces[0])
        if whole[1] is None:
            assert pieces[0] == whole[0] == text


@pytest.mark.parametrize("bad", [*SECRETS, *PERSONAL, *OTHERS])
@pytest.mark.parametrize(
    "before",
    [
        "",
        pytest.param("The answer is ", marks=pytest.mark.slow),
        pytest.param("x" * 1000 + " ", marks=pytest.mark.slow),
        "A long story. " * 70,
    ],
    ids=["nothing", "few words", "one long word", "many words"],
)
def test_no_character_of_what_is_refused_goes_out(filters, bad, before):
    text = before + bad + " and so on, " * 100

    out, refusal, _ = verdict_of(filters[0], list(text))

    assert refusal is not None
    place = int(refusal[1].rpartition(" ")[2])
    assert place >= len(before)
    assert len(out) <= place


@pytest.mark.parametrize("bad", [*SECRETS, *PERSONAL, *OTHERS])
def test_what_stands_before_a_block_counts_in_it(filters, bad):
    """A key in the middle of a word is none, and a border between two blocks does not make it one."""
    end = " and so on, " * 100
    in_one_block = verdict_of(filters[0], ["x" * 10 + bad + end])[1]

    assert in_one_block or verdict_of(filters[0], ["x" * BLOCK + bad + end])[1] is None


def test_of_training_text_less_than_a_span_goes_out(filters):
    out, refusal, _ = verdict_of(filters[0], list("It says: " + TRAINED))

    assert refusal[0] == "verbatim"
    assert len(out) < len("It says: ") + 223


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_what_a_model_learned_is_found_whatever_form_its_files_have(tmp_path, form, line_end):
    """A run learns texts in NFC with line feeds, and so a model recites them."""
    lines = [f"line {number} über die Lehre, kurz" for number in range(12)]
    VerbatimIndex.write(tmp_path / "new" / "a.npy", [unicodedata.normalize(form, line_end.join(lines))])
    filters = TextFilters(FiltersConfig(output=OutputFilters(verbatim_index=tmp_path / "new" / "a.npy")))

    assert verdict_of(filters, ["\n".join(lines)])[1][0] == "verbatim"


def test_an_index_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(DataError, match=r"a\.npy: cannot be written"):
        VerbatimIndex.write(tmp_path / "file" / "a.npy", ["text"])


@pytest.mark.parametrize("size", [1, 3, 7])
def test_plain_prose_goes_out_at_the_end_of_its_word(filters, size):
    text = "The owner judges what workers send, and nothing is believed that was not computed again. " * 20
    stream = filters[0].open_stream()
    sent = 0
    for start in range(0, len(text), size):
        sent += len(stream.feed(text[start : start + size]))
        assert start + size - sent <= 12 + size


@given(st.text(alphabet="AKIA0123 @<[!\x00e", max_size=4000))
def test_what_is_held_back_is_bounded(text):
    stream = TextFilters(ALL).open_stream()
    held = 0
    try:
        for piece in text:
            held += 1 - len(stream.feed(piece))
            assert held <= BLOCK + AHEAD + 1
    except TextRefused:
        pass


def test_a_stream_that_was_refused_or_closed_goes_no_further():
    refused, closed = TextFilters().open_stream(), TextFilters().open_stream()
    with pytest.raises(TextRefused):
        refused.feed("\x1b[2J" + "x" * 2000)
    closed.close()

    for stream in (refused, closed):
        with pytest.raises(DataError, match="is over"):
            stream.feed("more")
