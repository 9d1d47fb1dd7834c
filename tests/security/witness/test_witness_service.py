"""Logs, witnesses and readers in one process: what each of them refuses, and what two readers prove."""

import pytest

from phalanx.cli.parties.witness_log import mirror_log
from phalanx.errors import AuditLogError, SignatureError
from phalanx.security.audit import AuditLog
from phalanx.security.crypto import Identity, digest_hex
from phalanx.security.witness import (
    CheckpointSigner,
    ForkProof,
    HistoryCopy,
    LineProof,
    NoteKey,
    SignedCheckpoint,
    Witness,
    WitnessPolicy,
    add_log,
    compare_histories,
    load_witness,
    make_witness,
    mirror_history,
    publish_head,
    read_checkpoint,
    read_history,
)
from phalanx.security.witness import client as witness_client
from phalanx.security.witness.notes import LogCheckpoint, encode_hash
from phalanx.security.witness.published import tile_path, tile_paths
from phalanx.security.witness.tree import TreeHead

ORIGIN = "phalanx/0123"


def make_log(tmp_path, lines, name="events.jsonl"):
    identity = Identity.without_certificate("owner")
    with AuditLog(tmp_path / name, identity, "0123") as log:
        for line in lines:
            log.append_event("note", {"line": line})
    return identity


def make_signer(identity):
    from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PrivateKey

    return CheckpointSigner(ORIGIN, identity.signing_key, MLDSA44PrivateKey.generate(), is_log=True)


def history_of(*lines):
    return HistoryCopy(bytes.fromhex(digest_hex(line.encode())) for line in lines)


def signed_head(signer, history, time=1_000):
    checkpoint = LogCheckpoint(signer.name, history.tree.head_at(len(history.tree)))
    return SignedCheckpoint(checkpoint, tuple(signer.sign_checkpoint(checkpoint, time)))


def request_of(signed, history, old):
    path = history.tree.prove_consistency(old, signed.checkpoint.head.size)
    return "\n".join([f"old {old}", *map(encode_hash, path), "", ""]).encode() + signed.to_bytes()


@pytest.fixture
def owner():
    return make_signer(Identity.without_certificate("owner"))


@pytest.fixture
def home(tmp_path, owner):
    make_witness(tmp_path / "w", "example.org/w")
    add_log(tmp_path / "w", owner.keys)
    return tmp_path / "w"


def ask(witness, signed, history, old):
    return witness.answer_request("POST", "/add-checkpoint", request_of(signed, history, old))


def cosigned(signed, answer):
    from phalanx.security.witness.notes import NoteSignature

    return signed.with_signatures(NoteSignature.from_line(line) for line in answer.body.decode().splitlines())


def test_a_witness_cosigns_by_both_algorithms_what_continues_its_last_head(owner, home):
    with Witness(home, unix_time=lambda: 50.0) as witness:
        first, second = history_of("a", "b", "c"), history_of("a", "b", "c", "d", "e")

        answers = [ask(witness, signed_head(owner, h), h, old) for h, old in ((first, 0), (second, 3))]

        assert [answer.status for answer in answers] == [200, 200]
        times = cosigned(signed_head(owner, second), answers[1]).check_signatures(witness.signer.keys)
        assert set(times.values()) == {50}
        assert len(times) == 2
        newest = witness.answer_request("GET", f"/{next((home / 'heads').iterdir()).name}/checkpoint", b"")
        assert SignedCheckpoint.from_bytes(newest.body).checkpoint.head.size == 5


@pytest.mark.parametrize(
    ("old", "lines", "status"),
    [(0, "abcd", 409), (3, "abx", 422), (3, "ab", 400), (3, "axcd", 422), (2, "abcd", 409)],
    ids=["forgotten", "same size", "shorter", "fork", "old size"],
)
def test_a_witness_refuses_what_does_not_continue_its_last_head(owner, home, old, lines, status):
    with Witness(home) as witness:
        first, other = history_of(*"abc"), history_of(*lines)
        ask(witness, signed_head(owner, first), first, 0)

        answer = witness.answer_request(
            "POST",
            "/add-checkpoint",
            request_of(signed_head(owner, other), other, min(old, len(lines))).replace(
                f"old {min(old, len(lines))}".encode(), f"old {old}".encode()
            ),
        )

        assert answer.status == status
        if status == 409:
            assert (answer.body, answer.content_type) == (b"3\n", "text/x.tlog.size")
        assert len(list(home.glob("conflicts/*"))) == (lines == "abx")


def test_a_witness_refuses_strangers_false_signatures_and_nonsense(owner, home):
    history = history_of("a")
    stranger = make_signer(Identity.without_certificate("other"))
    with Witness(home, demand_both=True) as witness:
        assert ask(witness, signed_head(stranger, history), history, 0).status == 403
        foreign = CheckpointSigner("phalanx/9", owner.ed25519_key, owner.ml_dsa_key, is_log=True)
        assert ask(witness, signed_head(foreign, history), history, 0).status == 404
        classical = CheckpointSigner(ORIGIN, owner.ed25519_key, None, is_log=True)
        assert ask(witness, signed_head(classical, history), history, 0).status == 403
        for body in (b"", b"old x\n\n", b"old 0\n\nx\n", b"old 00\n\n", b"\xff"):
            assert witness.answer_request("POST", "/add-checkpoint", body).status == 400
        assert witness.answer_request("GET", "/../name/checkpoint", b"").status == 404
        assert not list(home.glob("heads/*"))


def test_a_witness_without_its_memory_signs_nothing(owner, home):
    history = history_of("a")
    with Witness(home) as witness:
        ask(witness, signed_head(owner, history), history, 0)
        next((home / "heads").iterdir()).write_bytes(b"")

        assert ask(witness, signed_head(owner, history), history, 1).status == 500


def test_one_process_is_a_witness(home):
    with Witness(home), pytest.raises(AuditLogError, match="another process"):
        Witness(home)


def test_the_reader_of_a_log_gets_its_lines_proved_offline(tmp_path):
    identity = make_log(tmp_path, ["one", "two", "three"])
    signer = make_signer(identity)
    policy = WitnessPolicy("".join(f"log {key.to_text()}\n" for key in signer.keys) + "quorum none\n")
    history = HistoryCopy.from_events(tmp_path / "events.jsonl", identity.public, "0123")
    publish_head(tmp_path / "public", history, signer, policy, lambda: 7.0)
    lines = (tmp_path / "events.jsonl").read_bytes().splitlines()
    signed = read_checkpoint(str(tmp_path / "public"))

    proof = LineProof.from_history(read_history(str(tmp_path / "public"), signed), signed, 1, lines[1])
    again = LineProof.from_bytes(proof.to_bytes())
    again.check_place()

    assert again == proof
    assert policy.demand_quorum(again.signed, both_kinds=True).has_quorum
    raw = bytearray(proof.to_bytes())
    for place in range(len("c2sp.org/tlog-proof@v1\nextra "), len(raw), 53):
        raw[place] ^= 4
        with pytest.raises((AuditLogError, SignatureError)):
            wrong = LineProof.from_bytes(bytes(raw))
            wrong.check_place()
            policy.demand_quorum(wrong.signed, both_kinds=True)
        raw[place] ^= 4


def test_a_line_that_is_being_written_is_left_for_the_next_head(tmp_path):
    identity = make_log(tmp_path, ["one", "two"])
    path = tmp_path / "events.jsonl"
    path.write_bytes(path.read_bytes() + b'{"body":{')

    assert len(HistoryCopy.from_events(path, identity.public, "0123").entries) == 2
    path.write_bytes(path.read_bytes().replace(b'"one"', b'"0ne"'))
    with pytest.raises(AuditLogError, match="line 1 is broken"):
        HistoryCopy.from_events(path, identity.public, "0123")


def test_the_owner_cannot_publish_another_history_where_it_published_one(tmp_path, owner):
    policy = WitnessPolicy(f"log {owner.keys[0].to_text()}\nquorum none\n")
    publish_head(tmp_path / "p", history_of(*"abcd"), owner, policy)

    for lines in ("abxd", "abc", "abxdefg"):
        with pytest.raises(AuditLogError, match=r"none is signed|cannot be taken back"):
            publish_head(tmp_path / "p", history_of(*lines), owner, policy)
    assert publish_head(tmp_path / "p", history_of(*"abcdef"), owner, policy).has_quorum


@pytest.mark.parametrize("lines", ["axcd", "axcde", "ax"], ids=["same size", "longer", "shorter"])
def test_two_readers_prove_two_histories_by_a_lying_owner(tmp_path, owner, lines):
    policy = WitnessPolicy("".join(f"log {key.to_text()}\n" for key in owner.keys) + "quorum none\n")
    for name, text in (("one", "abcd"), ("two", lines)):
        publish_head(tmp_path / name, history_of(*text), owner, policy)
    copies = [
        (head := read_checkpoint(str(tmp_path / n)), read_history(str(tmp_path / n), head)) for n in ("one", "two")
    ]

    proof = compare_histories(*copies)
    guilty = ForkProof.from_bytes(proof.to_bytes()).judge_signers(owner.keys)

    assert [(one.key, one.kind) for one in guilty] == [(key, "two histories") for key in owner.keys]
    stranger = make_signer(Identity.without_certificate("other"))
    assert proof.judge_signers(stranger.keys) == []
    if len(lines) != 4:
        bare = proof.model_copy(update={"leaf": None})
        assert not [one for one in bare.judge_signers(owner.keys) if one.kind == "two histories"]
        forged = proof.model_copy(update={"leaf": proof.leaf.model_copy(update={"index": 0})})
        with pytest.raises(AuditLogError):
            forged.judge_signers(owner.keys)


def test_honest_readers_of_one_log_prove_nothing(tmp_path, owner):
    policy = WitnessPolicy(f"log {owner.keys[0].to_text()}\nquorum none\n")
    copies = []
    for lines, time in (("abc", 5), ("abcde", 9)):
        publish_head(tmp_path / "p", history_of(*lines), owner, policy, lambda time=time: time)
        copies.append((head := read_checkpoint(str(tmp_path / "p")), read_history(str(tmp_path / "p"), head)))

    assert compare_histories(*copies).judge_signers(owner.keys) == []
    assert compare_histories(*copies[::-1]).judge_signers(owner.keys) == []


def test_a_witness_that_was_put_back_and_led_astray_is_named_with_the_owner(tmp_path, owner, home):
    first, fork = history_of(*"abcd"), history_of(*"axcdef")
    with Witness(home, unix_time=lambda: 50.0) as witness:
        one = cosigned(signed_head(owner, first), ask(witness, signed_head(owner, first), first, 0))
    next((home / "heads").iterdir()).unlink()
    with Witness(home, unix_time=lambda: 60.0) as witness:
        two = cosigned(signed_head(owner, fork), ask(witness, signed_head(owner, fork), fork, 0))

    guilty = compare_histories((one, first), (two, fork)).judge_signers([*owner.keys, *witness.signer.keys])

    assert {contradiction.key.name for contradiction in guilty} == {ORIGIN, "example.org/w"}


def test_a_witness_that_calls_a_smaller_tree_the_largest_later_is_named_without_any_entry(owner, home):
    long, short = history_of(*"abcd"), history_of(*"ab")
    with Witness(home, unix_time=lambda: 50.0) as witness:
        one = cosigned(signed_head(owner, long), ask(witness, signed_head(owner, long), long, 0))
    next((home / "heads").iterdir()).unlink()
    with Witness(home, unix_time=lambda: 60.0) as witness:
        two = cosigned(signed_head(owner, short), ask(witness, signed_head(owner, short), short, 0))

    guilty = compare_histories((one, None), (two, None)).judge_signers(witness.signer.keys)

    assert {(one.key.name, one.kind) for one in guilty} == {("example.org/w", "rolled back")}


def test_a_mirror_takes_what_continues_its_copy_and_refuses_a_fork(tmp_path, owner):
    policy = WitnessPolicy(f"log {owner.keys[0].to_text()}\nquorum none\n")
    publish_head(tmp_path / "p", history_of(*"abc"), owner, policy)
    signed, history = mirror_history(str(tmp_path / "p"), tmp_path / "copy", owner.keys)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy/checkpoint").write_bytes(signed.to_bytes())
    publish_head(tmp_path / "q", history_of(*"axcd"), owner, policy)

    with pytest.raises(AuditLogError, match="does not continue"):
        mirror_history(str(tmp_path / "q"), tmp_path / "copy", owner.keys)
    with pytest.raises(AuditLogError, match="none of the log's keys"):
        mirror_history(str(tmp_path / "p"), tmp_path / "new", make_signer(Identity.without_certificate("x")).keys)
    (tmp_path / "p/tile/entries/000.p/3").write_bytes(bytes(102))
    with pytest.raises(AuditLogError):
        mirror_history(str(tmp_path / "p"), tmp_path / "copy", owner.keys)
    assert len(history.entries) == 3


def test_a_mirror_with_the_keys_of_a_witness_signs_no_history_that_the_witness_would_not(tmp_path, owner, home):
    """The attacker: an owner who shows a witness one history, and a mirror with the same keys another."""
    policy, shown = WitnessPolicy(f"log {owner.keys[0].to_text()}\nquorum none\n"), history_of(*"abc")
    (tmp_path / "policy").write_text(f"log {owner.keys[0].to_text()}\nquorum none\n")
    with Witness(home, unix_time=lambda: 50.0) as witness:
        one = cosigned(signed_head(owner, shown), ask(witness, signed_head(owner, shown), shown, 0))
    publish_head(tmp_path / "lie", history_of(*"axcd"), owner, policy)

    with pytest.raises(AuditLogError, match="do not continue them; nothing is signed"):
        mirror_log(home, str(tmp_path / "lie"), tmp_path / "copy", policy=tmp_path / "policy")

    assert not (tmp_path / "copy").exists()
    # an honest mirror continues what was cosigned, and the witness what was mirrored
    publish_head(tmp_path / "p", history_of(*"abcd"), owner, policy)
    mirror_log(home, str(tmp_path / "p"), tmp_path / "copy", policy=tmp_path / "policy")
    signed = read_checkpoint(str(tmp_path / "copy"))
    with Witness(home, unix_time=lambda: 60.0) as witness:
        assert set(witness.signer.keys) <= set(signed.check_signatures(witness.signer.keys))
        assert ask(witness, signed_head(owner, shown), shown, 3).status == 409
    assert compare_histories((one, shown), (signed, history_of(*"abcd"))).judge_signers(witness.signer.keys) == []


def test_no_mirror_signs_beside_a_witness_that_answers(tmp_path, owner, home):
    policy = WitnessPolicy(f"log {owner.keys[0].to_text()}\nquorum none\n")
    (tmp_path / "policy").write_text(f"log {owner.keys[0].to_text()}\nquorum none\n")
    publish_head(tmp_path / "p", history_of(*"abc"), owner, policy)

    with Witness(home), pytest.raises(AuditLogError, match="another process is this witness"):
        mirror_log(home, str(tmp_path / "p"), tmp_path / "copy", policy=tmp_path / "policy")


def test_a_clock_that_was_put_back_accuses_neither_an_honest_witness_nor_an_honest_log(tmp_path, owner, home):
    policy = WitnessPolicy(f"log {owner.keys[0].to_text()}\nquorum none\n")
    heads, published = [], []
    for now, lines in ((5_000.0, "ab"), (100.0, "abcd")):
        history = history_of(*lines)
        published.append(publish_head(tmp_path / "p", history, owner, policy, lambda now=now: now).signed)
        with Witness(home, unix_time=lambda now=now: now) as witness:
            answer = ask(witness, signed_head(owner, history), history, len(lines) - 2)
            heads.append(cosigned(signed_head(owner, history), answer))

    for first, second in (heads, published):
        assert compare_histories((first, None), (second, None)).judge_signers(witness.signer.keys) == []
        assert compare_histories((first, None), (second, None)).judge_signers(owner.keys) == []


def test_a_log_that_lies_often_leaves_room_for_the_conflicts_of_others(home, owner):
    other = CheckpointSigner("phalanx/4567", owner.ed25519_key, None, is_log=True)
    add_log(home, other.keys)
    with Witness(home) as witness:
        for signer, count in ((owner, 20), (other, 1)):
            honest = history_of(*"ab")
            assert ask(witness, signed_head(signer, honest), honest, 0).status == 200
            for number in range(count):
                lie = history_of("a", f"x{number}")
                assert ask(witness, signed_head(signer, lie), lie, 2).status == 422

    assert len(list((home / "conflicts").iterdir())) == 16 + 1


def test_tiles_of_a_large_tree_are_named_as_the_specification_has_them():
    widths = [(level, width) for level, _, width in tile_paths(70_000) if width < 256]

    assert widths == [(0, 112), (1, 17), (2, 1)]
    assert sum(1 for level, _, width in tile_paths(70_000) if (level, width) == (0, 256)) == 273
    assert tile_path(0, 1234067, 256) == "tile/0/x001/x234/067"
    assert tile_path("entries", 0, 5) == "tile/entries/000.p/5"
    assert list(tile_paths(256)) == [(0, 0, 256), (1, 0, 1)]


def test_a_policy_counts_groups_of_witnesses(tmp_path, owner):
    signers = {name: make_witness(tmp_path / name, name) for name in ("a", "b", "c")}
    lines = [f"log {key.to_text()}" for key in owner.keys]
    lines += [f"witness {n}{k.kind} {k.to_text()}" for n, s in signers.items() for k in s.keys]
    lines += [f"group {name} all {name}4 {name}6" for name in signers]
    policy = WitnessPolicy("\n".join([*lines, "# two of three", "group\t2of3 2 a b c", "quorum 2of3", ""]))
    signed = signed_head(owner, history_of("x"))

    def with_cosignatures(*names):
        return signed.with_signatures(line for n in names for line in signers[n].sign_checkpoint(signed.checkpoint, 9))

    assert not policy.judge_checkpoint(with_cosignatures("a")).has_quorum
    assert policy.judge_checkpoint(with_cosignatures("a", "c")).has_quorum
    with pytest.raises(AuditLogError, match="cosigned by a4, a6, which is not the quorum"):
        policy.demand_quorum(with_cosignatures("a"))
    half = signed.with_signatures(
        [*signers["a"].sign_checkpoint(signed.checkpoint, 9), signers["b"].sign_checkpoint(signed.checkpoint, 9)[0]]
    )
    assert not policy.judge_checkpoint(half).has_quorum
    for bad in ("quorum d", "quorum none\nquorum none", "group g 3 a4 b4\nquorum g", "group g any a4 a4\nquorum g", ""):
        with pytest.raises(AuditLogError):
            WitnessPolicy("\n".join(lines[:8]) + "\n" + bad)


def test_both_signatures_of_the_log_are_demanded_where_both_are(owner):
    policy = WitnessPolicy("".join(f"log {key.to_text()}\n" for key in owner.keys) + "quorum none\n")
    signed = signed_head(owner, history_of("x"))

    for line in signed.signatures:
        one = SignedCheckpoint(signed.checkpoint, (line,))
        assert policy.demand_quorum(one).has_quorum
        with pytest.raises(AuditLogError, match="by Ed25519 and by ML-DSA-44"):
            policy.demand_quorum(one, both_kinds=True)
    assert policy.demand_quorum(signed, both_kinds=True).has_quorum


def test_a_cosignature_is_for_one_name_one_head_and_one_time(owner):
    checkpoint = LogCheckpoint(ORIGIN, TreeHead(3, bytes(32)))
    signer = CheckpointSigner("w", owner.ed25519_key, owner.ml_dsa_key)
    lines = signer.sign_checkpoint(checkpoint, 9)
    others = [LogCheckpoint(ORIGIN, TreeHead(4, bytes(32))), LogCheckpoint("phalanx/4", checkpoint.head)]
    for key, line in zip(signer.keys, lines, strict=True):
        assert key.verify_checkpoint(checkpoint, line.signature) == 9
        for other in others:
            with pytest.raises(SignatureError):
                key.verify_checkpoint(other, line.signature)
        with pytest.raises(SignatureError):
            key.verify_checkpoint(checkpoint, bytes(7) + b"\x08" + line.signature[8:])
    renamed = NoteKey("v", signer.keys[1].kind, signer.keys[1].public_key)
    with pytest.raises(SignatureError):
        renamed.verify_checkpoint(checkpoint, lines[1].signature)


def test_a_witness_that_forgot_is_named_by_the_log_that_has_its_cosignature(tmp_path, owner, home, monkeypatch):
    history = history_of(*"abcd")
    policy = WitnessPolicy(
        f"log {owner.keys[0].to_text()}\n"
        + "".join(f"witness w{k.kind} {k.to_text()} http://127.0.0.1:1/w\n" for k in load_witness(home).keys)
        + "quorum w6\n"
    )

    def answer(method, url, body, max_bytes):
        with Witness(home) as witness:
            reply = witness.answer_request(method, "/" + url.rpartition("/")[2], body)
        return reply.status, reply.body

    monkeypatch.setattr(witness_client, "exchange_bytes", answer)
    assert publish_head(tmp_path / "p", history, owner, policy).has_quorum
    next((home / "heads").iterdir()).unlink()

    publication = publish_head(tmp_path / "p", history_of(*"abcde"), owner, policy)

    assert publication.has_quorum
    assert publication.reports[0].accusation == "w4/w6 remembers 0 entries, and had cosigned 4"
