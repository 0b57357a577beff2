"""How the command reads spans and times, and how it prints tables."""

import io
import sys
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from semel import _validation
from semel.cli import _options, _output


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("1.5m", 90),
        ("2min", 120),
        ("12h", 43200),
        ("30d", 2592000),
        ("2 W", 1209600),
        ("0", 0),
    ],
)
def test_a_span_is_read(text: str, seconds: float) -> None:
    assert _validation.span_in(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "-1d", "1y", "1d2h", "soon", "1e3", "nan", "inf"])
def test_what_is_no_span_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="span of time"):
        _validation.span_in(text)


def test_a_time_is_read_with_a_zone() -> None:
    assert _options.time_of("2030-01-31T12:00:00Z") == datetime(2030, 1, 31, 12, tzinfo=UTC)
    assert _options.time_of("2030-01-31").tzinfo is not None
    before = datetime.now(UTC)
    assert before <= _options.time_of("2h") + timedelta(hours=2) <= datetime.now(UTC)
    with pytest.raises(ValueError, match="not a time"):
        _options.time_of("yesterday")
    for number in ("1777900000", "90", "1.5", "20300131"):
        with pytest.raises(ValueError, match="is not a time"):
            _options.time_of(number)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.04, "0.0 s"),
        (1.25, "1.2 s"),
        (59, "59 s"),
        (60, "1 min"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_a_span_is_said_in_the_units_that_matter(seconds: float, said: str) -> None:
    assert _output.format_span(seconds) == said


def test_a_time_is_local_with_a_hint() -> None:
    moment = datetime.now(UTC) - timedelta(minutes=3, seconds=0.2)
    assert _output.format_time(moment) == f"{moment.astimezone():%Y-%m-%d %H:%M:%S} (3 min ago)"
    assert _output.format_time(moment.isoformat()) == _output.format_time(moment)
    assert "(in 2 h" in _output.format_time(datetime.now(UTC) + timedelta(hours=2, seconds=30))
    assert _output.format_time(None, never="never") == "never"


class Terminal(io.StringIO):
    """An output that somebody looks at."""

    def isatty(self) -> bool:
        return True


texts = st.text(st.characters(codec="utf-8"), max_size=80)


@settings(deadline=None)  # the first table imports Rich
@given(rows=st.lists(st.tuples(texts, texts, st.integers()), min_size=1, max_size=5), width=st.integers(40, 120))
def test_a_table_fits_its_terminal_whatever_is_in_it(rows: list[tuple[str, str, int]], width: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        terminal = Terminal()
        patch.setattr(sys, "stdout", terminal)
        patch.setenv("COLUMNS", str(width))
        patch.setenv("TERM", "dumb")
        _output.print_table(["one", "two words", "three"], rows, empty="")
    lines = terminal.getvalue().splitlines()
    assert len(lines) == len(rows) + 1
    assert max(map(cell_len, lines)) <= width
    assert all(line.isprintable() for line in lines)


def test_in_a_pipe_nothing_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    _output.print_table(["name", "text"], [["a", "x" * 500], ["漢字", None]], empty="")
    assert capsys.readouterr().out == f"NAME  TEXT\na     {'x' * 500}\n漢字  -\n"


def test_a_terminal_is_told_nothing_that_it_would_obey(capsys: pytest.CaptureFixture[str]) -> None:
    _output.print_fields({"error": "\x1b[2J\x07gone\nand \u202eback", "none": None})
    assert capsys.readouterr().out == "error  \\x1b[2J\\x07gone\n       and \\u202eback\n"


def test_times_of_rows_become_times_for_readers() -> None:
    row = {"created_us": 1_000_000, "expires_us": None, "value": {"at_us": 5}}
    assert _output.with_iso_times(row) == {
        "created_at": "1970-01-01T00:00:01Z",
        "expires_at": None,
        "value": {"at_us": 5},
    }
