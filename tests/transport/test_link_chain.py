import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import FrameError, OrderError
from phalanx.security.crypto import Identity, digest_hex
from phalanx.transport import HeaderFields, TransportConfig, sign_header
from phalanx.transport.frame import genesis_digest, sign_receipt
from phalanx.transport.link import ReceivingChain, SendingChain

OWNER, WORKER = Identity.without_certificate("owner"), Identity.without_certificate("worker")
LIMITS = TransportConfig()


def sealed(number, run="run-1"):
    chain = SendingChain(WORKER, run, "owner", LIMITS)
    return [chain.seal_header("activation", {"n": n}, 0, digest_hex()) for n in range(number)]


def receiving(headers=()):
    chain = ReceivingChain("run-1", "worker", "owner")
    for header in headers:
        assert chain.check_order(header)
        chain.accept_header(header, sign_receipt(OWNER, header.header_digest))
    return chain


def test_headers_in_order_are_accepted_and_chained():
    headers = sealed(5)

    receiving(headers)

    assert [header.fields.sequence for header in headers] == list(range(5))
    assert headers[0].fields.previous == genesis_digest("run-1", "worker", "owner")
    assert headers[3].fields.previous == headers[2].header_digest


def test_every_direction_and_run_has_a_start_of_its_own():
    starts = {
        genesis_digest("run-1", "worker", "owner"),
        genesis_digest("run-1", "owner", "worker"),
        genesis_digest("run-2", "worker", "owner"),
        genesis_digest("run-1", "worker-owner", "x"),
        genesis_digest("run-1", "worker", "owner-x"),
    }

    assert len(starts) == 5


@given(st.permutations(range(4)))
def test_any_other_order_is_refused_at_the_first_wrong_place(order):
    headers, chain = sealed(4), receiving()
    for place, number in enumerate(order):
        if number != place:
            with pytest.raises(OrderError):
                chain.check_order(headers[number])
            return
        chain.accept_header(headers[number], sign_receipt(OWNER, headers[number].header_digest))


def test_the_last_header_again_gets_the_receipt_that_it_had():
    headers = sealed(2)
    chain = receiving(headers)

    is_new = chain.check_order(headers[1])

    assert not is_new
    assert chain.last_receipt is not None
    assert chain.last_receipt.header_digest == headers[1].header_digest


def test_an_earlier_header_again_is_a_replay():
    headers = sealed(3)

    with pytest.raises(OrderError, match="replayed"):
        receiving(headers).check_order(headers[1])


def test_a_second_header_of_the_same_number_is_refused():
    honest, other = sealed(1), SendingChain(WORKER, "run-1", "owner", LIMITS)
    chain = receiving(honest)

    with pytest.raises(OrderError, match="sealed twice"):
        chain.check_order(other.seal_header("gradient", {}, 0, digest_hex()))


def test_a_skipped_header_is_refused():
    with pytest.raises(OrderError, match="expected 0 first"):
        receiving().check_order(sealed(2)[1])


def test_a_header_of_the_right_number_after_another_predecessor_is_refused():
    chain = receiving(sealed(1))
    values = {
        **{name: getattr(sealed(2)[1].fields, name) for name in HeaderFields.__slots__},
        "previous": "0" * 64,
    }

    with pytest.raises(OrderError, match="another predecessor"):
        chain.check_order(sign_header(WORKER, HeaderFields(**values)))


def test_a_chain_goes_on_as_if_nothing_had_been_when_a_header_cannot_be_sealed():
    chain = SendingChain(WORKER, "run-1", "owner", TransportConfig(max_frame_bytes=4096))

    with pytest.raises(FrameError, match="max_frame_bytes"):
        chain.seal_header("activation", {}, 4096, digest_hex(bytes(4096)))
    with pytest.raises(FrameError):
        chain.seal_header("activation", {"x": float("nan")}, 0, digest_hex())

    assert chain.seal_header("activation", {}, 0, digest_hex()).fields.sequence == 0
