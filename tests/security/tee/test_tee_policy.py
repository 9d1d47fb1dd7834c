"""The policy file: strict, and nothing in it can make appraisal vacuous."""

import json
import re
from pathlib import Path

import pytest
from amd import Amd
from refusals import refusal

from phalanx.errors import ConfigError
from phalanx.security.tee import BACKENDS, Reference, load_policy, packaged_roots, policy_files
from phalanx.security.tee.intel.dcap import DcapReference
from phalanx.security.tee.policy import PolicyConfig

GOOD = """
[expect]
nonce = "{nonce}"
tls_key = "{key}"
run = "{run}"

[snp]
measurements.launch = ["{launch}"]
min_tcb = {{ bootloader = 4, tee = 1, snp = 22, microcode = 213 }}
roots = ["ark.pem"]
"""


SNP = {"measurements": {"launch": ["00" * 48]}, "min_tcb": {"bootloader": 4, "tee": 0, "snp": 22, "microcode": 213}}
GPU = {"measurements": {"1": ["00" * 48]}}


def write(folder, text=GOOD, **changes):
    values = {"nonce": "0a" * 32, "key": "0b" * 32, "run": "0c" * 32, "launch": bytes(range(48)).hex(), **changes}
    path = folder / "policy.toml"
    path.write_text(text.format(**values))
    return path


def test_a_policy_file_accepts_what_it_describes(tmp_path, binding):
    amd = Amd()
    (tmp_path / "ark.pem").write_bytes(amd.ark.pem)
    policy, config = load_policy(write(tmp_path))

    case = amd.case(binding).with_policy(references=policy.references, roots=policy.roots)

    assert config.expect.build_expected() == binding
    assert case.appraise()
    assert refusal(amd.case(binding).with_policy(references={}).appraise) == "no_reference"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bootloader = 4, ", "", "min_tcb"),
        ("bootloader = 4", "bootloader = 256", "min_tcb"),
        ("bootloader = 4", "boot = 4", "min_tcb"),
        ('measurements.launch = ["{launch}"]', "measurements = {{}}", "measurements"),
        ('["{launch}"]', "[]", "no accepted value"),
        ('["{launch}"]', '["XY"]', "lowercase hex"),
        ("min_tcb", "max_tcb", "max_tcb"),
        ("ark.pem", "absent.pem", "absent.pem"),
    ],
)
def test_a_mistake_is_named(tmp_path, old, new, message):
    (tmp_path / "ark.pem").write_bytes(Amd().ark.pem)
    assert old in GOOD

    with pytest.raises(ConfigError, match=message):
        load_policy(write(tmp_path, GOOD.replace(old, new)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('run = "{run}"', ""),
        ('nonce = "{nonce}"', 'nonce = "0a"'),
        ('nonce = "{nonce}"', 'nonce = "zz"'),
        ('run = "{run}"', 'run = "{run}"\nreport_data = "00"'),
    ],
)
def test_an_expectation_that_is_not_one_is_refused(tmp_path, old, new):
    (tmp_path / "ark.pem").write_bytes(Amd().ark.pem)
    _, config = load_policy(write(tmp_path, GOOD.replace(old, new)))

    with pytest.raises(ConfigError, match="expect"):
        config.expect.build_expected()


def test_a_root_that_is_no_certificate_is_named(tmp_path):
    (tmp_path / "ark.pem").write_bytes(b"nothing")

    with pytest.raises(ConfigError, match="expected the vendor"):
        load_policy(write(tmp_path))


def test_every_kind_has_a_section_of_its_own_class():
    fields = PolicyConfig.model_fields

    for kind, backend in BACKENDS.items():
        assert backend.reference.__name__ in str(fields[kind.replace("-", "_")].annotation)


def test_every_key_of_a_policy_is_on_the_page_with_its_default():
    page = (Path(__file__).resolve().parents[3] / "docs" / "attestation.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| `(\w+)` \| ([^|]+) \|", page, re.MULTILINE)

    documented = {(section.strip(), key): default.strip("` ") for section, key, default in rows}

    assert documented == {(section, key): shown(field) for section, key, field in keys()}


def keys():
    """Section as the page calls it, key and field."""
    common = set(Reference.model_fields)
    yield from (("every kind", name, field) for name, field in Reference.model_fields.items())
    kinds = {kind.replace("-", "_") for kind in BACKENDS}
    yield from (("top", name, field) for name, field in PolicyConfig.model_fields.items() if name not in kinds)
    intel = DcapReference.model_fields
    yield from (("`tdx`, `sgx`", name, field) for name, field in intel.items() if name not in common)
    for kind, backend in BACKENDS.items():
        known = common | (set(intel) if issubclass(backend.reference, DcapReference) else set())
        for name, field in backend.reference.model_fields.items():
            if name not in known:
                yield f"`{kind.replace('-', '_')}`", name, field


def shown(field):
    if field.is_required():
        return "required"
    return "left out" if field.default is None else json.dumps(field.default)


def test_the_packaged_roots_are_those_that_the_vendors_publish():
    fingerprints = {kind: [root.sha256_hex[:16] for root in packaged_roots(kind)] for kind in BACKENDS}

    assert fingerprints == {
        "snp": ["69d063b45344d26a"],
        "az-snp-vtpm": ["69d063b45344d26a"],
        "tdx": ["44a0196b2b99f889"],
        "sgx": ["44a0196b2b99f889"],
        "nitro": ["641a0321a3e244ef"],
        "tpm": [],
        "nv-gpu": ["102bf659d5419614"],
        "sim": [],
    }


def test_roots_may_stand_in_the_policy_itself_and_need_no_file_then(tmp_path, binding):
    amd = Amd()
    pem = amd.ark.pem.decode()
    path = write(tmp_path, GOOD.replace('["ark.pem"]', '["""\n' + pem + '"""]'))

    policy, config = load_policy(path)

    assert policy_files(config) == ()
    assert config.evidence_kinds == ("snp",)
    assert amd.case(binding).with_policy(references=policy.references, roots=policy.roots).appraise()
    with pytest.raises(ConfigError, match="expected the vendor's root certificates"):
        load_policy(write(tmp_path, path.read_text().replace("{", "{{").replace("}", "}}").replace(pem[30:60], "")))


def test_the_files_that_a_policy_needs_are_named():
    given = {"snp": SNP | {"roots": ["ark.pem"], "crls": ["a.crl"]}, "nv_gpu": GPU | {"manifest_roots": ["m.pem"]}}

    config = PolicyConfig.model_validate_json(json.dumps(given))

    assert policy_files(config) == ("ark.pem", "a.crl", "m.pem")
