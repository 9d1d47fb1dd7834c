"""What a passport is made of: no statement hides another, and nothing half is left of one that was not made."""

import json
import struct
from pathlib import Path

import pytest

from phalanx.errors import ConfigError
from phalanx.governance import passport as maker
from phalanx.governance.passport import PassportChoice, make_passport
from phalanx.verifier import passport as form
from phalanx.verifier.forms import RefusedError
from phalanx.verifier.statement import digest_weights


class _Members(maker._PassportMaker):
    def __init__(self) -> None:
        self._members = {}


@pytest.mark.parametrize("folder", [form.TESTS, form.EXPORTS])
def test_a_second_statement_of_a_name_hides_no_first(folder: str) -> None:
    # the attacker: an owner who would have a passing test replace one that failed
    members = _Members()
    members._add_member(f"{folder}redteam", b"failed")

    with pytest.raises(ConfigError, match="two statements would have the name"):
        members._add_member(f"{folder}redteam", b"passed")


class _PastRun:
    path = Path("runs/first")

    class owner:  # noqa: N801 - stands for an attribute
        public_key = bytes(32)


class _Maker:
    def __init__(self, past: object, choice: object) -> None:
        self.signer = self

    def collect_members(self, scratch: Path) -> tuple[dict[str, bytes], dict[str, object]]:
        return {"readme.txt": b"text"}, {}

    def seal_members(self, digests: object, facts: object) -> bytes:
        return b"{}"


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), OSError(28, "No space left on device"), RefusedError("no")])
def test_a_passport_that_was_not_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupt: BaseException
) -> None:
    def check(path: Path, owner: str) -> None:
        assert path.is_file()
        raise interrupt

    monkeypatch.setattr(maker, "_PassportMaker", _Maker)
    monkeypatch.setattr(maker, "verify_passport", check)

    with pytest.raises((Exception, KeyboardInterrupt)):
        make_passport(_PastRun(), tmp_path / "one.passport", PassportChoice())

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]}}).encode(),
        b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
    ],
    ids=["deep", "fractions", "twice"],
)
def test_a_malformed_header_of_weights_is_refused(tmp_path: Path, header: bytes) -> None:
    # the attacker: whoever hands over a model with its passport
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))

    with pytest.raises(RefusedError, match="no safetensors file"):
        digest_weights(tmp_path)
