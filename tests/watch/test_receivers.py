"""Alerts arrive at real servers; one that hangs, is gone or refuses delays no other and ends nothing."""

import asyncio
import json
import logging
import sys
from email import message_from_string

import pytest
from alert_servers import hanging_server, http_receiver, mail_receiver
from pydantic import ValidationError

from phalanx.errors import CertificateError
from phalanx.watch.config import RunAlertRules, RunWatchConfig, load_run_watch
from phalanx.watch.receivers import AlertReceivers
from phalanx.watch.training_alerts import make_training_alert

ALERT = make_training_alert("verdict", "worker-1", 1, 0)
NO_NUMBER = make_training_alert("non_finite", "loss", float("nan"), 0)


def tell(rules, *alerts, is_over=False, run="first"):
    async def send():
        async with AlertReceivers(rules) as receivers:
            for alert in alerts:
                receivers.tell_receivers(alert, run, is_over=is_over)
        return receivers.num_dropped

    return asyncio.run(send())


def write_secret(path, text):
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_a_webhook_gets_the_alert_with_its_secret_and_what_to_do(tmp_path):
    secret = write_secret(tmp_path / "hook.key", "s3cret\n")
    with http_receiver() as (url, posts):
        tell(RunAlertRules(webhook=f"{url}/hook", webhook_secret_file=secret), ALERT, NO_NUMBER)
        (path, headers, body), (_, _, second) = posts.get(timeout=30), posts.get(timeout=30)

    alert = json.loads(body)
    assert (path, headers["authorization"]) == ("/hook", "Bearer s3cret")
    assert (alert["rule"], alert["subject"], alert["run"], alert["state"]) == ("verdict", "worker-1", "first", "begun")
    assert "phalanx audit explain" in alert["action"]
    assert json.loads(second)["value"] is None


def test_a_command_gets_the_alert_on_its_input_and_nothing_on_its_command_line(tmp_path):
    out, program = tmp_path / "out.json", tmp_path / "program.py"
    program.write_text(f"import sys, json; json.dump([sys.argv[1:], json.load(sys.stdin)], open({str(out)!r}, 'w'))")

    tell(RunAlertRules(command=(sys.executable, str(program), "fixed"), timeout_s=60), ALERT, is_over=True)

    arguments, alert = json.loads(out.read_text())
    assert arguments == ["fixed"]
    assert (alert["subject"], alert["state"]) == ("worker-1", "over")


@pytest.mark.parametrize(
    "name",
    [
        "=?utf-8?q?x=0ABcc:_eve=40example.org?=",
        "x =?utf-8?b?DQpCY2M6IGV2ZUBleGFtcGxlLm9yZw==?= y",
        "=\n?utf-8?q?x=0ABcc:_e?=",
    ],
)
@pytest.mark.parametrize("is_run", [True, False])
def test_no_encoded_word_in_a_name_becomes_a_header(name, is_run):
    """The attacker names a party, or the directory of a run that somebody watches."""
    with mail_receiver() as (port, mails):
        email = {"host": "127.0.0.1", "port": port, "starttls": False}
        email |= {"sender": "phalanx@example.org", "recipients": ("ops@example.org",)}
        alert = make_training_alert("verdict", "worker-1" if is_run else name, 1, 0)
        tell(RunAlertRules(email=email), alert, run=name if is_run else "first")
        mail = message_from_string(mails.get(timeout=30))

    assert mail["Bcc"] is None
    assert "eve" not in mail["To"]
    assert mail["Subject"].lstrip().startswith("[phalanx] ")


def test_a_mail_arrives_and_no_name_becomes_a_header():
    hostile = make_training_alert("verdict", "worker-1\r\nBcc: eve@example.org\r\n\r\nx", 1, 0)
    with mail_receiver() as (port, mails):
        email = {"host": "127.0.0.1", "port": port, "starttls": False}
        email |= {"sender": "phalanx@example.org", "recipients": ("ops@example.org",)}
        tell(RunAlertRules(email=email), hostile)
        mail = message_from_string(mails.get(timeout=30))

    assert mail["To"] == "ops@example.org"
    assert mail["Bcc"] is None
    assert "[phalanx] first: verdict of worker-1??Bcc: eve" in mail["Subject"]
    assert "phalanx audit explain" in mail.get_payload(decode=True).decode()


def test_receivers_that_hang_delay_no_other_and_are_named(caplog):
    with hanging_server() as port, http_receiver() as (url, posts):
        email = {"host": "127.0.0.1", "port": port, "starttls": False, "sender": "a@b.org", "recipients": ("c@d.org",)}
        rules = RunAlertRules(webhook=f"{url}/x", email=email, timeout_s=0.2)
        with caplog.at_level(logging.ERROR):
            tell(rules, ALERT)
        assert json.loads(posts.get(timeout=30)[2])["rule"] == "verdict"

    assert any("e-mail did not take an alert" in record.message for record in caplog.records)


@pytest.mark.parametrize(
    "change",
    [
        {"webhook": "http://127.0.0.1:9/x"},
        {"command": ("/no/such/program",)},
        {"command": (sys.executable, "-c", "import sys; sys.exit(3)")},
        {"email": {"host": "127.0.0.1", "port": 9, "starttls": False, "sender": "a@b.c", "recipients": ("c@d.e",)}},
    ],
)
def test_a_receiver_that_is_gone_or_refuses_is_named_in_the_log(caplog, change):
    with caplog.at_level(logging.ERROR):
        tell(RunAlertRules.model_validate(change), ALERT)

    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 2


def test_a_program_that_hangs_is_ended(caplog):
    with caplog.at_level(logging.ERROR):
        tell(RunAlertRules(command=(sys.executable, "-c", "import time; time.sleep(1000)"), timeout_s=0.2), ALERT)

    assert "command did not take an alert" in caplog.text


def test_a_queue_is_bounded_and_says_what_it_dropped():
    with hanging_server() as port:
        rules = RunAlertRules(webhook=f"http://127.0.0.1:{port}/x", timeout_s=0.1)
        dropped = tell(rules, *[ALERT] * 150)

    assert dropped["webhook"] >= 49


def test_control_characters_of_names_do_not_reach_the_log(caplog):
    with caplog.at_level(logging.ERROR):
        tell(RunAlertRules(), make_training_alert("verdict", "\x1b[2Jworker", 1, 0))

    assert "\x1b" not in caplog.text


@pytest.mark.parametrize(
    "alerts",
    [
        {"webhook": "http://example.org/x"},
        {"webhook": "ftp://127.0.0.1/x"},
        {"email": {"host": "mail.example.org", "sender": "a@b.c", "recipients": ["c@d.e"], "starttls": False}},
        {"email": {"host": "mail.example.org", "sender": "a@b.c", "recipients": ["c@d.e"], "user": "me"}},
        {"email": {"host": "mail.example.org", "sender": "a@b.c\nBcc: e@f.g", "recipients": ["c@d.e"]}},
        {"email": {"host": "mail.example.org", "sender": "a@b.c", "recipients": []}},
        {"unknown": 1},
    ],
)
def test_a_file_with_a_receiver_that_others_could_read_is_refused(alerts):
    with pytest.raises(ValidationError):
        RunWatchConfig.model_validate_json(json.dumps({"alerts": alerts}))


def test_paths_are_of_the_folder_of_the_file_and_a_secret_that_others_can_read_is_refused(tmp_path):
    (tmp_path / "hook.key").write_text("secret")
    (tmp_path / "hook.key").chmod(0o644)
    file = tmp_path / "watch.toml"
    file.write_text('[alerts]\nwebhook = "https://hooks.example.org/x"\nwebhook_secret_file = "hook.key"\n')

    rules = load_run_watch(file).alerts

    assert rules.webhook_secret_file == tmp_path / "hook.key"
    with pytest.raises(CertificateError):
        AlertReceivers(rules)
