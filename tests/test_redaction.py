"""No log and no message tells a secret, obeys what others wrote, or shows one message as two."""

import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from semel.redaction import TextFormatter, one_line, without_secret_values, without_secrets
from semel.service.telemetry.logs import formatter
from support.warm_python import WarmPython

PASSWORD = "hunter2-of-the-database"
URL = f"postgresql://semel:{PASSWORD}@127.0.0.1:1/nothing"
TOKEN = "semel_0123456789abcdef_" + "x" * 43
FORGED = "fine\n2030-01-01 00:00:00,000 INFO semel.worker all is well\x1b[2J\x9b1m\r\u2028"

LEAKY = f"""
import logging, os
import semel

app = semel.App({URL!r})
logging.getLogger("mine").warning("at import: {TOKEN}")


def say():
    logging.getLogger("mine").warning("connecting to %s with %s", {URL!r}, {TOKEN!r})
    logging.getLogger("mine").warning("the user typed %s", {FORGED!r})
    try:
        raise ValueError({URL!r} + {FORGED!r})
    except ValueError:
        logging.getLogger("mine").exception("it failed")


class Speaking(semel.App):
    def place(self, **where):
        import threading

        threading.Timer(0.3, say).start()
        return super().place(**where)


app.__class__ = Speaking
"""

FORMATS = {
    "worker": TextFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"),
    "pretty": formatter("pretty"),
    "json": formatter("json"),
}


def raised(text: str) -> ValueError:
    with pytest.raises(ValueError, match="invalid literal") as caught:
        int(text)
    return caught.value


def logged(form: str, *, fail: bool = False, **extra: object) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(FORMATS[form])
    logger = logging.Logger("mine")  # noqa: LOG001 -- one that no other handler hears
    logger.addHandler(handler)
    if fail:
        logger.error("it failed with %s", URL, exc_info=raised(f"{URL} {FORGED}"))
    else:
        logger.warning("with %s and %s: %s", URL, TOKEN, FORGED, extra=extra)
    return stream.getvalue()


@pytest.mark.parametrize("form", FORMATS)
def test_a_line_is_one_line_without_secrets_and_control_characters(form: str) -> None:
    text = logged(form, where=URL, more={"url": [URL], FORGED: FORGED}, error=ValueError(URL))
    assert PASSWORD not in text
    assert TOKEN not in text
    assert text.count("\n") == 1
    assert "all is well" in text
    assert not [each for each in text[:-1] if not each.isprintable()]
    if form == "json":
        assert "\x1b" not in json.loads(text)["event"]


@pytest.mark.parametrize("form", FORMATS)
def test_no_line_of_a_traceback_looks_like_a_message_of_its_own(form: str) -> None:
    text = logged(form, fail=True)
    assert PASSWORD not in text
    assert "Traceback" in text
    assert "\x1b" not in text
    lines = text.rstrip("\n").split("\n")
    assert all(line.startswith("  ") for line in lines[1:]), text


@pytest.mark.parametrize(
    "secret", ["password=hunter2", "password='hunter2'", "sslpassword=hunter2", 'api_key="hunter2"', "a_token=hunter2"]
)
def test_what_is_named_as_a_secret_is_hidden_also_in_quotes(secret: str) -> None:
    assert "hunter2" not in without_secrets(f"host=x {secret} user=y")
    assert without_secrets(f"host=x {secret} user=y").endswith(" user=y")


@pytest.mark.parametrize("password", ["hunter2", "hun/ter2", "/hunter2/", "hun:ter@2", "2/hunter"])
def test_the_password_of_a_url_is_hidden_whatever_is_in_it(password: str) -> None:
    """SQLAlchemy takes a slash in a password as it is."""
    assert (
        without_secrets(f"cannot reach postgresql://u:{password}@h/db now")
        == "cannot reach postgresql://u:***@h/db now"
    )


def test_what_people_write_stays_as_it_is() -> None:
    for text in (
        "Grüße an alle: 東京",
        "a\tb",
        "https://example.org/path?x=1",
        "http://127.0.0.1:8001/runs of a@b",
        "token is not valid",
    ):
        assert one_line(without_secrets(text)) == text


@pytest.mark.parametrize("form", ["pretty", "json", "its own"])
def test_a_worker_that_cannot_reach_its_database_tells_no_password(tmp_path: Path, form: str) -> None:
    own = "\nlogging.basicConfig(format='MINE %(message)s')\n" if form == "its own" else ""
    (tmp_path / "leaky.py").write_text(LEAKY + own)
    worker = [sys.executable, "-m", "semel.cli", "worker", "leaky:app", "--processes", "0"]
    worker += [] if own else ["--log-format", form]
    process = WarmPython(worker, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert process.stdout is not None
        said = b""
        while b"it failed" not in said and (line := process.stdout.readline()):
            said += line
    finally:
        process.kill()
        rest = process.communicate()[0]
    text = (said + rest).decode()
    assert "connecting to" in text
    assert "it failed" in text
    assert ("MINE it failed" in text) == bool(own)
    assert PASSWORD not in text
    assert "at import" in text
    assert TOKEN not in text
    assert "\x1b[2J" not in text


@pytest.mark.parametrize("command", [["migrate"], ["doctor", "--db"], ["keys", "stats"]])
def test_a_command_that_fails_tells_no_password(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    from semel.cli import main

    url = f"nonsense://semel:{PASSWORD}@127.0.0.1:1/\x1b[2J"
    try:
        assert main([*command, url]) != 0
    except SystemExit as ended:
        assert ended.code != 0  # noqa: PT017 -- a mistake in its use
    out, err = capfd.readouterr()
    assert PASSWORD not in out + err
    assert "\x1b[2J" not in out + err


def test_values_under_the_name_of_a_secret_and_texts_that_look_like_one_are_hidden() -> None:
    value = {
        "api_key": "hunter2",
        "Password": {"deep": "hunter2"},
        "nothing_secret": None,
        "url": "https://sam:hunter2@example.com/",
        "list": ["whsec_hunter2", {"authToken": ["hunter2"]}, 7, True, None],
        "github": "ghp_hunter2hunter2hunter2",
        "model": "add",
    }
    cleaned = without_secret_values(value)
    assert "hunter2" not in str(cleaned)
    assert cleaned["model"] == "add"
    assert cleaned["nothing_secret"] is None
    assert cleaned["url"] == "https://sam:***@example.com/"
    assert cleaned["list"] == ["whsec_***", {"authToken": "***"}, 7, True, None]
