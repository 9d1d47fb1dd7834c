"""Mutants of a split's parties: what is switched off, where, and the test that must notice it."""

_APPRAISAL = "test_client_appraisal.py::test_evidence_that_is_not_this_clients_for_this_nonce_here_is_refused"

SPLIT_PARTIES = tuple(
    (f"split: {what}", file, old, new, "tests/split/" + test)
    for what, file, old, new, test in (
        (
            "a client's evidence before its tensors",
            "split/roles/server.py",
            "        self._handshakes.check_client(sender)\n",
            "        hash(sender)\n",
            "test_client_evidence.py::test_a_client_that_does_not_bring_new_evidence_in_time_is_refused",
        ),
        (
            "a client's evidence in the handshake",
            "split/handshake/meeting.py",
            "self._appraiser.appraise_client(client, evidence)",
            "hash(evidence)",
            "test_client_appraisal.py::"
            "test_a_client_without_evidence_is_refused_and_taken_where_the_run_has_no_policy_for_it",
        ),
        (
            "the session in a client's evidence",
            "split/handshake/terms.py",
            'self.config_digest + self.keys + self.run.encode("utf-8")',
            "self.config_digest + self.keys",
            f"{_APPRAISAL}[of_another_session]",
        ),
        (
            "the enclave in a client's evidence",
            "split/handshake/terms.py",
            'self.config_digest + self.keys + self.run.encode("utf-8")',
            'self.config_digest + self.run.encode("utf-8")',
            f"{_APPRAISAL}[given_to_another_enclave]",
        ),
        (
            "the role in a client's evidence",
            "split/handshake/terms.py",
            'ROLE, CLIENT_ROLE = "enclave", "client"',
            'ROLE, CLIENT_ROLE = "enclave", "enclave"',
            f"{_APPRAISAL}[of_another_role]",
        ),
        (
            "a client's evidence in the keys",
            "split/handshake/terms.py",
            "        if evidence:\n",
            "        if evidence and not token:\n",
            "test_client_appraisal.py::test_both_sides_rest_on_the_same_evidence_or_have_no_keys",
        ),
        (
            "no turn for a revoked party",
            "train/sessions/split_parties.py",
            "                self._barred.add(name)\n",
            "                hash(name)\n",
            "test_party_certificates.py::test_nothing_of_a_client_is_trained_once_its_certificate_is_revoked",
        ),
    )
)
