"""``phalanx data where`` names exactly the steps that were given a document, and what proves it."""

import hashlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from phalanx.cli.outcome import run_command as command
from phalanx.config import canonical_json
from phalanx.data import BatchLoader, BpeConfig, prepare_corpus
from phalanx.data.shards import (
    DatasetFacts,
    DatasetWriter,
    DocumentEntry,
    RecipeRecord,
    SourceFacts,
    TokenizerRecord,
    document_digest,
    fingerprint_of,
    open_dataset,
)
from phalanx.data.shards.proof import check_proof, prove_document
from phalanx.data.tokenizers.training import train_bpe
from phalanx.errors import DataError
from phalanx.security.crypto import Identity
from phalanx.train import load_run
from phalanx.train.loop import run_loop
from phalanx.train.records.lineage import trace_document
from phalanx.train.records.past_run import PastRun
from phalanx.train.sessions import session
from tiny_run_file import tiny_run_file

SIGNER = Identity.without_certificate("signer")
TEXTS = [f"the hoplite number {number} holds {number * number} shields and {number + 7} spears" for number in range(60)]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("dataset") / "hoplites"
    tokenizer = train_bpe(iter(TEXTS), BpeConfig(vocab_size=300))
    content = tokenizer.to_json()
    digest = hashlib.sha256(content).hexdigest()
    with DatasetWriter(home, "<u2", 500, 256) as writer:
        for number, text in enumerate(TEXTS):
            (ids,) = tokenizer.encode_texts([text])
            group, split = ("odd" if number % 2 else "even"), ("validation" if number % 5 == 4 else "train")
            entry = DocumentEntry(document_digest(text), 0, f"hoplite/{number}")
            writer.part_writer(group, split).add_document(np.array([*ids, tokenizer.eos_id]), entry)
        record = TokenizerRecord(kind="bpe", vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id, digest=digest)
        facts = DatasetFacts(
            sources=(SourceFacts(name="made", kind="text", fingerprint="1" * 64),),
            tokenizer=record,
            recipe=RecipeRecord.from_content("made\n"),
        )
        writer.finish_dataset(facts, SIGNER)
    (home / "tokenizer.json").write_bytes(content)
    return home


@pytest.fixture(scope="module", params=["concatenate", "best_fit"])
def trained(request, dataset: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory):
    """A run of one shift over the dataset, and the rows that its model was given, by step."""
    from phalanx.train import train

    home = tmp_path_factory.mktemp("traced")
    text = tiny_run_file("[pipeline]\nstages = 2\n\n[checkpoint]\nevery = 2\n")
    sources = 'sources = [{ kind = "python_manual" }]\ntokenizer = { kind = "bpe", vocab_size = 300 }\n'
    packing = f'dataset = {{ path = "{dataset}", signer = "{fingerprint_of(SIGNER)}" }}\npacking = "{request.param}"\n'
    assert sources in text
    text = text.replace(sources, packing).replace("validation_share = 0.2\nmax_documents = 12\n", "")
    (home / "tiny.toml").write_text(text)
    seen = {}

    def watched(engine, loader, steps, config, rate, hooks):
        drawn = hooks.note_batch

        def note(step, batch):
            seen[step] = batch.input_ids.clone()
            drawn(step, batch)

        hooks.note_batch = note
        run_loop(engine, loader, steps, config, rate, hooks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_CACHE", str(cache))
        patch.setattr(session, "run_loop", watched)
        train(load_run(home / "tiny.toml"), home / "run")
    return home / "run", seen


def places_of(dataset: Path, text: str):
    found = open_dataset(dataset)
    return check_proof(prove_document(found, document_digest(text)), "proof").places


def test_exactly_the_steps_that_were_given_a_document_are_named(trained, dataset: Path) -> None:
    home, seen = trained
    past, found = PastRun(home), open_dataset(dataset)

    for number in range(0, 60, 7):
        (place,) = places_of(dataset, TEXTS[number])
        ids = found.tokens(place.group, place.split).read_tokens(place.start, place.start + place.tokens).tolist()
        # four tokens in a row that no other document has
        own = {tuple(ids[at : at + 4]) for at in range(len(ids) - 4)} - _others(found, place)
        given = [
            step
            for step, rows in seen.items()
            if any(tuple(row[at : at + 4]) in own for row in rows.tolist() for at in range(len(row) - 3))
        ]

        lineage = trace_document(past, [place])

        named = {one.step for one in lineage.steps}
        assert set(given) <= named
        # a step that is named beyond these has only a few tokens of it, at the edge of a row
        for step in named - set(given):
            assert any(ids[0] in row or ids[-2] in row for row in seen[step].tolist())
        assert {one.committed_in for one in lineage.steps} <= {"log"}
        assert lineage.corpus_in_log
        # the run keeps its last two
        assert lineage.checkpoints == tuple(step for step in (4, 6) if named and step > min(named))


def _others(found, place) -> set[tuple[int, ...]]:
    windows: set[tuple[int, ...]] = set()
    for group, splits in found.groups.items():
        for split in splits:
            ids, starts = found.tokens(group, split)[:].tolist(), found.document_starts(group, split).tolist()
            for number, (start, stop) in enumerate(itertools.pairwise(starts)):
                if (group, split, number) != (place.group, place.split, place.document):
                    windows |= {tuple(ids[at : at + 4]) for at in range(start, stop - 4)}
    return windows


def test_a_document_that_was_held_out_was_seen_in_no_step(trained, dataset: Path) -> None:
    lineage = trace_document(PastRun(trained[0]), places_of(dataset, TEXTS[4]))

    assert (lineage.steps, lineage.checkpoints, lineage.steps_done) == ((), (), 6)


def test_lines_that_commit_to_other_samples_are_not_believed(trained, dataset: Path, tmp_path: Path) -> None:
    past = PastRun(trained[0])
    path = past.path / "metrics.jsonl"
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    changed = json.loads(lines[2]) | {"samples_digest": "0" * 64}
    path.write_text("".join([*lines[:2], canonical_json(changed).decode() + "\n", *lines[3:]]))

    try:
        with pytest.raises(DataError, match="step 2 metrics has other samples"):
            trace_document(past, places_of(dataset, TEXTS[0]))
    finally:
        path.write_text(whole)


def test_the_command_answers_by_name_text_and_digest_and_writes_a_proof(
    trained, dataset: Path, tmp_path: Path, capsys, cache: Path
) -> None:
    home, _ = trained
    # as an editor writes it; a source keeps nothing around a text
    (tmp_path / "text.txt").write_text(f"{TEXTS[3]}\n")
    names = ("hoplite/3", str(tmp_path / "text.txt"), document_digest(TEXTS[3]))
    answers = []
    for name in names:
        assert command(["data", "where", name, "--run", str(home), "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))

    assert [answer["named_by"] for answer in answers] == ["name", "text", "digest"]
    assert answers[0]["places"] == answers[1]["places"] == answers[2]["places"] != []
    assert answers[0]["run"] == answers[2]["run"]
    assert answers[0]["run"]["steps"][0].keys() == {"step", "sequences", "committed_in"}
    proof = tmp_path / "proof.json"
    assert command(["data", "where", "0" * 64, "--run", str(home), "--proof", str(proof)]) == 0
    assert "no (proven)" in capsys.readouterr().out
    assert command(["data", "verify", "--proof", str(proof), "--signer", fingerprint_of(SIGNER)]) == 0


def test_a_run_of_sources_tells_the_steps_of_a_document_by_the_shards_that_it_made(trained_once, cache, capsys) -> None:
    home = trained_once[1]
    run = PastRun(home).config
    corpus = prepare_corpus(run.data, cache / "data", run.train.seed)
    made, length = open_dataset(corpus.tokenizer_path.parent), run.data.sequence_length
    row = BatchLoader(corpus, run.train.batch_size, run.train.seed).next_sequences()[0]
    number = int(np.searchsorted(made.document_starts("text", "train"), row * length, side="right")) - 1
    name = made.document_entry("text", "train", number).name

    assert command(["data", "where", name, "--run", str(home), "--json"]) == 0

    answer = json.loads(capsys.readouterr().out)
    assert answer["run"]["corpus"] == corpus.digest
    assert (answer["run"]["steps"][0]["step"], answer["run"]["steps"][0]["committed_in"]) == (0, "log")
    assert row in answer["run"]["steps"][0]["sequences"]


def test_what_cannot_be_answered_is_said(trained, dataset: Path, trained_once, capsys) -> None:
    home, _ = trained
    for arguments, code, message in (
        (["hoplite/99", "--dataset", str(dataset)], 3, "is neither a file nor"),
        (["hoplite/3", "--run", str(trained_once[1])], 3, "is neither a file nor"),
        (["0" * 64, "--run", str(home), "--signer", "0" * 64], 3, "signed with key"),
        (["0" * 64], 2, "expected --run RUN_DIR or --dataset DIR"),
    ):
        assert command(["data", "where", *arguments]) == code
        assert message in capsys.readouterr().err


def test_a_run_of_another_dataset_is_told_apart(trained, dataset: Path, tmp_path: Path) -> None:
    home, _ = trained
    with DatasetWriter(tmp_path / "other", "<u2", 500, 256) as writer:
        found = open_dataset(dataset)
        for group, splits in found.groups.items():
            for split in splits:
                for number, entry in enumerate(found.document_entries(group, split)):
                    start, stop = found.document_starts(group, split)[number : number + 2].tolist()
                    writer.part_writer(group, split).add_document(
                        found.tokens(group, split).read_tokens(start, stop)[::-1].copy(), entry
                    )
        facts = found.manifest
        writer.finish_dataset(
            DatasetFacts(
                sources=(SourceFacts(name="made", kind="text", fingerprint="1" * 64),),
                tokenizer=facts.tokenizer,
                recipe=facts.recipe,
            ),
            SIGNER,
        )
    (tmp_path / "other" / "tokenizer.json").write_bytes((dataset / "tokenizer.json").read_bytes())

    with pytest.raises(DataError, match="its log names the corpus"):
        trace_document(PastRun(home), places_of(dataset, TEXTS[0]), tmp_path / "other")


def test_the_corpus_in_the_log_is_that_of_the_dataset(trained, dataset: Path, cache: Path) -> None:
    home, _ = trained
    config = PastRun(home).config
    opening = json.loads((home / "events.jsonl").read_text().splitlines()[0])

    assert opening["body"]["corpus"] == prepare_corpus(config.data, cache, config.train.seed).digest
