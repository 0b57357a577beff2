"""Every scenario in its short form: about a second for each phase. `./dev chaos` plays them for longer."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from chaos.__main__ import line, main, say
from chaos.scenarios import SCENARIOS, Theatre

SEED = 1


@pytest.fixture(scope="module")
def theatre(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Theatre]:
    with ExitStack() as stack:
        yield Theatre(tmp_path_factory.mktemp("chaos"), stack)


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_is_lost_doubled_or_stuck(name: str, theatre: Theatre) -> None:
    account = theatre.run(SCENARIOS[name], seconds=1.0, seed=SEED)
    say(line(account))
    assert account.faults == [], f"repeat it with: ./dev chaos {name} --seed {SEED}"
    assert account.acknowledged > 0
    assert account.finished >= account.acknowledged


def test_the_command_lists_its_scenarios_and_refuses_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert "postgres-restart" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["earthquake"])
    assert "there is no scenario 'earthquake'" in capsys.readouterr().err
