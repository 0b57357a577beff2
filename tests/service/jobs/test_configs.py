"""Named configs: from files, from rows and from the demo, and who may write them."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from semel import App
from semel.service.jobs import configs as config_files
from semel.service.jobs.configs import BrokenConfig
from support.jobs import add_models, job_in, submit, write_config
from support.service import TestServer, issue_token, make_app, serve

TOML = """\
model = "add"
cost = 0.5

[parameters]
a = 5
"""


@pytest.fixture(params=["sqlite", "postgres"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    app = make_app(request.getfixturevalue(f"migrated_{request.param}_url"), tmp_path)
    add_models(app)
    yield app
    app.close()


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    folder = tmp_path / "configs"
    write_config(folder, "adding", model="add", parameters={"a": 1})
    (folder / "other.toml").write_text(TOML)
    (folder / "notes.txt").write_text("not a config")
    return folder


def test_files_are_configs_and_a_row_wins_over_a_file(client: httpx.Client, app: App) -> None:
    listed = {each["name"]: each["source"] for each in client.get("/api/cloud/configs").json()}
    assert listed == {"adding": "file", "other": "file"}
    assert client.get("/api/cloud/configs/other").json()["parameters"] == {"a": 5}
    put = client.put("/api/cloud/configs/adding", json={"model": "add", "parameters": {"a": 40}, "priority": 3})
    assert put.status_code == 200, put.text
    written = {"source": "row", "parameters": {"a": 40}, "priority": 3, "updated_by": "local", "has_data": False}
    assert written.items() <= put.json().items()
    with app.working(processes=0):
        done = job_in(client, submit(client, "adding")["job_id"], "completed")
        assert client.get(done["result"]).json() == 42
        assert client.delete("/api/cloud/configs/adding").status_code == 204
        done = job_in(client, submit(client, "adding")["job_id"], "completed")
        assert client.get(done["result"]).json() == 3
    assert client.delete("/api/cloud/configs/adding").status_code == 409
    assert client.delete("/api/cloud/configs/nothing").status_code == 404


def test_a_broken_file_names_its_line_and_spoils_no_other(client: httpx.Client, configs: Path) -> None:
    (configs / "broken.json").write_text('{\n  "model": "add",\n  oops\n}')
    said = submit(client, "broken")
    assert said["success"] is False
    assert said["error"].startswith("broken.json, line 3: ")
    answer = client.get("/api/cloud/configs/broken")
    assert (answer.status_code, answer.json()["error_code"]) == (422, "CONFIG_BROKEN")
    listed = {each["name"]: each["error"] for each in client.get("/api/cloud/configs").json()}
    assert listed == {"adding": None, "broken": said["error"], "other": None}
    assert str(configs) not in said["error"]
    assert submit(client, "adding")["success"]
    assert client.put("/api/cloud/configs/broken", json={"model": "add"}).status_code == 200
    assert submit(client, "broken")["success"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", '{\n "model": "add",\n\n "priority": "high"}', "a.json, line 4: Expected `int | null`"),
        ("a.json", '{"model": "add",\n "colour": "red"}', "a.json, line 2: Object contains unknown field `colour`"),
        ("a.json", "[1]", "a.json, line 1: Expected `object`"),
        ("a.json", '{"parameters": {"x": NaN}}', "a.json, line 1: "),
        ("a.toml", 'model = "add"\ncost = \n', "a.toml, line 2: "),
        ("a.toml", 'model = "add"\n[parameters', "a.toml, line 2: "),
        ("a.toml", 'model = "add"\n\n[providers]\nreplicate = 5', "a.toml, line 3: Expected `object`"),
        ("a.toml", 'model = "add"\n\ncost = -1', "a.toml, line 3: Expected `float` >= 0"),
        ("a.json", "[" * 100_000, "a.json, line 1: "),
        ("a.json", '{"parameters": ' + '{"x":' * 200 + "1" + "}" * 201, "a.json, line 1: it is nested"),
        ("a.json", '{"parameters": {"x": "\\u0000"}}', "a.json, line 1: a text in it contains"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(BrokenConfig) as caught:
        config_files.read_file(tmp_path, "a")
    assert str(caught.value).startswith(said)


def test_a_file_of_strange_bytes_or_of_any_size_is_no_config(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'{\n"model": "\xff"}')
    with pytest.raises(BrokenConfig, match=r"a\.json, line 2: it is not UTF-8"):
        config_files.read_file(tmp_path, "a")
    (tmp_path / "a.json").write_bytes(b" " * (config_files.MAX_BYTES + 1))
    with pytest.raises(BrokenConfig, match="which is no config"):
        config_files.read_file(tmp_path, "a")
    (tmp_path / "a.toml").write_text("")
    with pytest.raises(BrokenConfig, match=r"there twice: as a\.json and as a\.toml"):
        config_files.read_file(tmp_path, "a")


TRICKS = [
    "..",
    "../secret",
    "a/../secret",
    "..%2Fsecret",
    ".hidden",
    "a\\b",
    "a\0",
    "a\n",
    "",
    "x" * 101,
    "C:secret",
    "ñ",
]


def test_a_name_leads_nowhere_else(client: httpx.Client, tmp_path: Path) -> None:
    write_config(tmp_path, "secret", model="add")
    for name in TRICKS:
        said = submit(client, name)
        assert said == {"success": False, "error": f"Unknown config: {name}"}
    for path in ("..%2Fsecret", "%2e%2e%2fsecret", ".hidden", "a%00b", "a%5Cb"):
        assert client.get(f"/api/cloud/configs/{path}").status_code == 404, path
        assert client.put(f"/api/cloud/configs/{path}", json={"model": "add"}).status_code in (400, 404, 405), path
        assert client.delete(f"/api/cloud/configs/{path}").status_code == 404, path
    assert len(client.get("/api/cloud/configs").json()) == 2


def test_operators_write_configs_and_only_admins_name_data(service: TestServer, app: App, configs: Path) -> None:
    (configs / "data").mkdir()
    body = {"model": "add", "providers": {"replicate": {"version": "abc"}}}
    with (
        service.client(issue_token(app, "ann")) as submitter,
        service.client(issue_token(app, "op", "operator")) as operator,
        service.client(issue_token(app, "root", "admin")) as admin,
        service.client(issue_token(app, "root", "admin", "other")) as stranger,
    ):
        assert submitter.put("/api/cloud/configs/new", json=body).status_code == 403
        assert submitter.delete("/api/cloud/configs/new").status_code == 403
        assert operator.put("/api/cloud/configs/new", json=body).status_code == 200
        assert operator.put("/api/cloud/configs/new", json={**body, "data": "data"}).status_code == 403
        assert admin.put("/api/cloud/configs/new", json={**body, "data": "data"}).json()["has_data"]
        seen = submitter.get("/api/cloud/configs/new").json()
        assert (seen["has_data"], seen["data"], seen["providers"]) == (True, None, None)
        assert operator.get("/api/cloud/configs/new").json()["providers"] == body["providers"]
        assert stranger.get("/api/cloud/configs/new").status_code == 404
        assert "new" not in {each["name"] for each in stranger.get("/api/cloud/configs").json()}
        assert stranger.put("/api/cloud/configs/new", json={"model": "add"}).status_code == 200
        assert stranger.delete("/api/cloud/configs/new").status_code == 204
        assert operator.get("/api/cloud/configs/new").status_code == 200


def test_a_rows_data_stays_inside_the_folder_of_configs(client: httpx.Client, configs: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "password").write_text("hush")
    (configs / "way-out").symlink_to(secret)
    for data in ("..", "../secret", str(secret), "/", ".", "way-out", "a\0b", "x/../../secret"):
        answer = client.put("/api/cloud/configs/sly", json={"model": "read", "data": data})
        assert answer.status_code == 400, data
        assert str(tmp_path) not in answer.text or data.startswith(str(tmp_path))
    (configs / "data").mkdir()
    assert client.put("/api/cloud/configs/sly", json={"model": "read", "data": "data"}).status_code == 200
    (configs / "data").rmdir()
    (configs / "data").symlink_to(secret)
    said = submit(client, "sly")
    assert said["success"] is False
    assert "inside of the folder of configs" in said["error"]


def test_rows_without_a_folder_of_configs_have_no_data(app: App) -> None:
    with serve(app) as service, service.client() as client:
        assert client.get("/api/cloud/configs").json() == []
        assert client.put("/api/cloud/configs/new", json={"model": "add"}).status_code == 200
        refused = client.put("/api/cloud/configs/new", json={"model": "add", "data": "/etc"})
        assert refused.status_code == 400
        assert "--configs" in refused.json()["detail"]
        assert [each["name"] for each in client.get("/api/cloud/configs").json()] == ["new"]
