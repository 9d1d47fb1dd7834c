"""Mutants of attestation: what is switched off, where, and the test that must notice it."""

_TEE = "security/tee/"
_TESTS = "tests/security/tee/"

ATTESTATION = tuple(
    (f"attestation: {what}", _TEE + file, old, new, _TESTS + test)
    for what, file, old, new, test in (
        (
            "state that a key is sealed to",
            "tpm/wire.py",
            "_SEAL_ATTRIBUTES = 0x00000412",
            "_SEAL_ATTRIBUTES = 0x00000452",
            "test_tee_tpm_sealing.py::test_a_secret_opens_by_its_policy_alone",
        ),
        (
            "steps of a TPM's counter",
            "tpm/counter.py",
            "if (after := self.read_count()) != before + 1:",
            "if (after := self.read_count()) < before:",
            "test_tee_tpm_counter.py::test_somebody_else_who_raises_it_at_the_same_time_is_found",
        ),
        (
            "one release for each nonce",
            "key_release.py",
            "if token.binding.nonce in self._used:",
            "if token.binding.nonce in ():",
            "test_tee_tpm_path.py::test_a_nonce_gets_the_key_once",
        ),
        (
            "digest of NVIDIA's manifests",
            "formats/xml_signature.py",
            "if not hmac.compare_digest(hashlib.sha384(canonical_xml(root, without=signature)).digest(), digest):",
            "if not digest:",
            "test_tee_manifests.py::test_a_published_manifest_cannot_be_altered",
        ),
        (
            "measurements of NVIDIA's manifests",
            "nvidia/manifest.py",
            "if value not in accepted:",
            "if value in (accepted, None):",
            "test_tee_manifests.py::test_a_measurement_that_is_absent_is_refused_and_an_inactive_one_is_not_looked_at",
        ),
        (
            "somebody else's request in configfs",
            "tsm.py",
            '.strip()) != "1":',
            '.strip()) == "0":',
            "test_tee_readers.py::test_a_report_about_somebody_elses_data_is_refused",
        ),
        (
            "binding",
            "appraisal.py",
            "check_report_data(claims.report_data, expected)",
            "hash(claims.report_data)",
            "test_tee_binding.py::test_a_lie_about_what_was_bound_does_not_pass",
        ),
        (
            "measurements",
            "appraisal.py",
            "check_measurements(claims.measurements, reference, policy.revoked_measurements)",
            "hash(reference)",
            "test_tee_published.py::test_another_measurement_is_refused",
        ),
        (
            "end of certificates",
            "formats/chain.py",
            "if now > certificate.not_after:",
            "if now < certificate.not_before:",
            "test_tee_published.py::test_after_its_time_a_sample_is_refused",
        ),
        (
            "revocation lists",
            "formats/chain.py",
            "if certificate.serial in crl.serials:",
            "if certificate.serial in ():",
            "test_tee_snp.py::test_a_revoked_ask_is_refused_and_a_clean_list_passes",
        ),
        (
            "usage of authorities",
            "formats/chain.py",
            "if not is_authority or (usage is not None and not usage & _SIGNS_CERTIFICATES):",
            "if not is_authority:",
            "test_tee_parsers.py::test_an_authority_that_may_not_be_one_breaks_the_chain",
        ),
        (
            "TCB in AMD's certificate",
            "amd/snp.py",
            "if certified != reported:",
            "if certified < 0:",
            "test_tee_snp.py::test_a_report_with_other_versions_than_its_key_was_made_for_is_refused",
        ),
        (
            "debug of SNP guests",
            "amd/snp.py",
            "if report.policy & _DEBUG:",
            "if report.policy & _DEBUG == 1:",
            "test_tee_snp.py::test_what_is_signed_and_must_not_be_is_refused",
        ),
        (
            "zeros in AMD's signature",
            "amd/snp_report.py",
            'reader.skip_zeros(24, "the rest of r")',
            "reader.take(24)",
            "test_tee_snp.py::test_the_reserved_bytes_of_the_signature_must_be_zero",
        ),
        (
            "key of Intel's quoting enclave",
            "intel/dcap.py",
            "if quote.qe.report_data != bound:",
            'if quote.qe.report_data == b"":',
            "test_tee_dcap.py::test_an_attestation_key_that_the_quoting_enclave_did_not_make_is_refused",
        ),
        (
            "signature of Intel's tables",
            "intel/dcap_collateral.py",
            "check_raw_ecdsa(certificates[0].public_key, ec.SECP256R1, signature, signed, name)",
            "hash(name)",
            "test_tee_dcap.py::test_tables_signed_by_anybody_else_are_refused",
        ),
        (
            "debug of Nitro enclaves",
            "aws/nitro.py",
            'if not pcrs.get("pcr0", "").strip("0"):',
            "if not pcrs:",
            "test_tee_published.py::test_an_enclave_in_debug_mode_is_refused",
        ),
        (
            "attributes of a TPM's key",
            "tpm/key.py",
            "if ak.attributes & _AK_MUST != _AK_MUST or ak.attributes & structures.DECRYPT:",
            "if ak.attributes & structures.DECRYPT:",
            "test_tee_tpm.py::test_a_key_that_could_sign_anything_or_leave_its_tpm_is_refused",
        ),
        (
            "firmware of a GPU",
            "nvidia/gpu.py",
            "if not any(report.firmware_id) or report.firmware_id not in _firmware_ids(value, place):",
            "if not any(report.firmware_id):",
            "test_tee_nv_gpu.py::test_a_key_that_was_made_for_other_firmware_is_refused",
        ),
        (
            "nonces are good once",
            "roles.py",
            "self._open.pop(binding.nonce, None)",
            "self._open.get(binding.nonce)",
            "test_tee_roles.py::test_evidence_for_a_drawn_nonce_passes_once",
        ),
        (
            "end of tokens",
            "eat.py",
            "if moment >= claims[_EXPIRES]:",
            "if moment < 0:",
            "test_tee_token.py::test_a_token_is_refused_before_and_after_its_time",
        ),
    )
)
