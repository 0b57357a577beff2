"""A result store keeps all of a result or nothing of it, and tells full, forbidden and unreachable from impossible."""

import errno
import hashlib
import http.client
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from moto.server import ThreadedMotoServer

from semel import App
from semel.errors import Fatal, InvalidRequest, MissingExtra, ResultStoreError
from semel.runs.results import FileResults, ResultStore, open_results, place, publish
from semel.runs.strict_json import read_exact
from semel.runs.types import Artifact, Attempt
from support.programs import Program, outcome

RUN = "0198c0de-0000-7000-8000-000000000001"


def job(fence: int = 1) -> Attempt:
    return Attempt(run_id=RUN, model="m", parameters="{}", payload_hash="", fence=fence, attempt=1)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_url(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder in a bucket of its own, with its server and secrets in the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    bucket = f"bucket-{uuid.uuid4().hex}"
    asking = http.client.HTTPConnection(s3_server.removeprefix("http://"), timeout=60)
    asking.request("PUT", f"/{bucket}")
    assert asking.getresponse().status == 200
    asking.close()
    return f"s3://{bucket}/results/here"


@pytest.fixture(params=["files", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ResultStore:
    if request.param == "files":
        return open_results(tmp_path / "artifacts")
    return open_results(request.getfixturevalue("s3_url"))


def whole(store: ResultStore, ref: str) -> bytes:
    return b"".join(store.open(ref))


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


# -- what every store does -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"\x00\xff", os.urandom(6 << 20)], ids=["empty", "small", "large"])
def test_what_was_put_comes_back_whole_and_in_chunks(store: ResultStore, data: bytes) -> None:
    ref = place(RUN, 1, "result.json")
    store.put(ref, data)
    assert store.get(ref) == data
    assert whole(store, ref) == data
    assert store.size(ref) == len(data)
    chunks = list(store.open(ref))
    assert all(type(chunk) is bytes and 0 < len(chunk) < 4 << 20 for chunk in chunks)


@pytest.mark.parametrize("data", [b"", os.urandom(6 << 20)], ids=["empty", "large"])
def test_a_file_is_kept_and_stays_where_it_was(store: ResultStore, tmp_path: Path, data: bytes) -> None:
    source = tmp_path / "model.bin"
    source.write_bytes(data)
    ref = place(RUN, 1, "artifacts/deep/folder/model.bin")
    store.put_file(ref, source)
    assert store.get(ref) == data == source.read_bytes()


def test_a_second_put_replaces_the_first(store: ResultStore) -> None:
    ref = place(RUN, 1, "result.json")
    store.put(ref, b"first, and longer")
    store.put(ref, b"second")
    assert store.get(ref) == b"second"


@pytest.mark.parametrize("name", ["with space", "größe-漢字.json", "a?b#c%2e%2F&d=e", "x" * 190, "...", "-", ".hidden"])
def test_names_are_kept_as_they_are(store: ResultStore, name: str) -> None:
    ref, other = place(RUN, 1, name), place(RUN, 1, f"{name}2")
    store.put(ref, b"one")
    store.put(other, b"two")
    assert (store.get(ref), store.get(other)) == (b"one", b"two")


def test_removing_an_attempt_leaves_its_neighbours(store: ResultStore) -> None:
    kept = [place(RUN, 10, "a"), place(RUN, 2, "a"), place(f"{RUN}0", 1, "a")]
    gone = [place(RUN, 1, "a"), place(RUN, 1, "artifacts/b/c"), place(RUN, 1, "artifacts/b/d")]
    for ref in kept + gone:
        store.put(ref, b"x")
    store.remove(f"{RUN}/1")
    for ref in gone:
        with pytest.raises(ResultStoreError, match=f"cannot read {ref}"):
            store.get(ref)
    assert [store.get(ref) for ref in kept] == [b"x"] * 3
    store.remove(RUN)
    with pytest.raises(ResultStoreError):
        store.get(kept[0])
    assert store.get(kept[2]) == b"x"


def test_removing_what_is_not_there_is_no_error(store: ResultStore) -> None:
    store.remove(RUN)
    store.put(place(RUN, 1, "a"), b"x")
    store.remove(f"{RUN}/2")
    assert store.get(place(RUN, 1, "a")) == b"x"


def test_what_is_not_there_is_told_by_every_verb_that_reads(store: ResultStore) -> None:
    for read in (store.get, store.size, lambda ref: list(store.open(ref))):
        with pytest.raises(ResultStoreError, match=r"cannot read .*/1/nothing"):
            read(place(RUN, 1, "nothing"))


def test_a_missing_source_is_the_callers_trouble(store: ResultStore, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        store.put_file(place(RUN, 1, "a"), tmp_path / "nothing")


@pytest.mark.parametrize("ref", ["", "/", "..", "a/..", "../a", "/etc/passwd", "a//b", "a/./b", "a\\b", "a\0b", "a/"])
def test_a_ref_that_leads_elsewhere_is_refused_by_every_verb(store: ResultStore, tmp_path: Path, ref: str) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x")
    calls = [
        lambda: store.put(ref, b"x"),
        lambda: store.put_file(ref, source),
        lambda: store.get(ref),
        lambda: list(store.open(ref)),
        lambda: store.size(ref),
        lambda: store.remove(ref),
    ]
    for call in calls:
        with pytest.raises(InvalidRequest):
            call()


def test_the_same_store_is_opened_from_its_url_in_another_process(store: ResultStore) -> None:
    ref = place(RUN, 1, "result.json")
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    said = outcome(
        """
        import os
        os.environ.update(environment)
        os.chdir("/")
        from semel.runs.results import open_results
        store = open_results(url)
        store.put(ref, b"from there")
        tell(store.url)
        """,
        environment=environment,
        url=store.url,
        ref=ref,
    )
    assert said == store.url
    assert store.get(ref) == b"from there"
    assert open_results(store) is store


# -- names -----------------------------------------------------------------------------------------------------------


def test_a_place_has_run_fence_and_name() -> None:
    assert place(RUN, 7, "artifacts/plots/fit.png") == f"{RUN}/7/artifacts/plots/fit.png"


@pytest.mark.parametrize(
    "name",
    ["", "/a", "a/", "a//b", "..", "../a", "a/../b", "a/..", ".", "./a", "a\\b", "..\\a", "a\0", "a\nb", "a\x7f",
     "\x85", "\ud800", "x" * 201, "漢" * 100, None, 7, b"a", Path("a")],
)  # fmt: skip
def test_a_name_that_could_lead_elsewhere_is_refused(name: Any) -> None:
    with pytest.raises(InvalidRequest):
        place(RUN, 1, name)


@given(st.text(max_size=12) | st.text("./\\a~ \0", max_size=8))
def test_whatever_name_is_accepted_lies_within_its_attempt(name: str) -> None:
    root = Path("/results")
    try:
        ref = place(RUN, 1, name)
    except InvalidRequest:
        return
    lies = Path(os.path.normpath(root / ref))
    assert lies.is_relative_to(root / RUN / "1")
    assert lies != root / RUN / "1"
    assert lies == root / ref


def test_targets_that_are_no_store_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for target in (tmp_path / "file", "ftp://host/x", "postgresql://host/x", "file://host/x", "file://", 7, None, "s3://",
                   "s3://bucket?no_such_option=1", "s3://bucket?timeout=soon"):  # fmt: skip
        with pytest.raises(InvalidRequest):
            open_results(target)  # type: ignore[arg-type]


def test_a_folder_is_meant_by_a_path_by_text_and_by_a_file_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "ärt ifacts%20"
    monkeypatch.chdir(tmp_path)
    stores = [open_results(folder), open_results("./ärt ifacts%20"), open_results(folder.as_uri())]
    monkeypatch.chdir("/")
    stores[0].put("a/1/b", b"x")
    assert [store.get("a/1/b") for store in stores] == [b"x"] * 3
    assert {store.url for store in stores} == {folder.as_uri()}


# -- files and faults ------------------------------------------------------------------------------------------------


def test_an_app_refuses_a_file_url_that_names_no_folder() -> None:
    for url in ("file://./results", "file://host/results", "file://"):
        with pytest.raises(InvalidRequest, match="three slashes"):
            App("sqlite:///semel.db", artifacts=url)


def test_a_full_disk_is_told_and_leaves_nothing_and_room_cures_it(tmp_path: Path) -> None:
    """The disk has room for 100 KB in a file, and then for more."""
    large = tmp_path / "large"
    large.write_bytes(b"z" * 300_000)
    with Program(
        """
        import resource
        from pathlib import Path
        from semel.errors import ResultStoreError
        from semel.runs.results import FileResults

        store = FileResults(folder)
        store.put("run/1/result.json", b"old")
        limit, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        small.write_bytes(b"y" * 100_000)
        for put, name, content in [(store.put, "result.json", b"x" * 300_000), (store.put_file, "big", large)]:
            try:
                put(f"run/1/{name}", content)
                tell("written")
            except ResultStoreError as error:
                tell((str(error), error.__cause__.errno))
        store.put_file("run/1/small", small)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        tell()
        hear()
        store.put("run/1/result.json", b"x" * 300_000)
        tell()
        """,
        folder=tmp_path / "artifacts",
        small=tmp_path / "small",
        large=large,
    ) as program:
        assert program.hear() == ("cannot write run/1/result.json: File too large", errno.EFBIG)
        assert program.hear() == ("cannot write run/1/big: File too large", errno.EFBIG)
        program.hear()
        attempt = tmp_path / "artifacts/run/1"
        assert [path.name for path in files_in(attempt)] == ["result.json", "small"]
        assert (attempt / "result.json").read_bytes() == b"old"
        program.tell()
        program.hear()
        assert (attempt / "result.json").stat().st_size == 300_000


def test_a_folder_that_may_not_be_written_is_told(tmp_path: Path) -> None:
    said = outcome(
        """
        import os, tempfile
        from pathlib import Path
        from semel.errors import ResultStoreError
        from semel.runs.results import FileResults

        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o555)
            if os.geteuid() == 0:
                os.seteuid(65534)  # nothing is forbidden to root
            try:
                FileResults(Path(folder)).put("run/1/a", b"x")
                said = "written"
            except ResultStoreError as error:
                said = str(error)
            if os.getuid() == 0:
                os.seteuid(0)
            os.chmod(folder, 0o755)
        tell(said)
        """
    )
    assert said == "cannot write run/1/a: Permission denied"


def test_a_file_where_a_folder_should_be_is_told(tmp_path: Path) -> None:
    store = open_results(tmp_path)
    store.put("run/1/a", b"x")
    with pytest.raises(ResultStoreError, match="cannot write run/1/a/b: Not a directory"):
        store.put("run/1/a/b", b"x")
    with pytest.raises(ResultStoreError, match="cannot read run/1: Is a directory"):
        store.get("run/1")


def test_a_writer_killed_in_the_middle_of_a_put_leaves_no_half_file(tmp_path: Path) -> None:
    """Killed once it has begun to write: it copies from a pipe that is never closed, which holds it there."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    store = open_results(tmp_path / "artifacts")
    store.put("run/1/old", b"old")
    code = (
        "import sys; from pathlib import Path; from semel.runs.results import open_results;"
        f"open_results({str(tmp_path / 'artifacts')!r}).put_file(sys.argv[1], Path({str(pipe)!r}))"
    )
    for ref in ("run/1/new", "run/1/old"):
        writer = subprocess.Popen([sys.executable, "-c", code, ref])
        try:
            with pipe.open("wb") as source:
                source.write(b"half" * (1 << 20))
                source.flush()
                deadline = time.monotonic() + 60
                while not any(path.stat().st_size > 1 << 20 for path in files_in(tmp_path / "artifacts")):
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                writer.send_signal(signal.SIGKILL)
                writer.wait(60)
        finally:
            writer.kill()
            writer.wait()
        with pytest.raises(ResultStoreError):
            store.get("run/1/new")
        assert store.get("run/1/old") == b"old"
        for path in (tmp_path / "artifacts").rglob("*.part"):
            path.unlink()


def test_a_put_is_on_the_disk_before_it_has_its_name(tmp_path: Path) -> None:
    """What the system is asked for, in order: new folders, the data, then the name, then the folder of the name."""
    said = outcome(
        """
        import os
        from semel.runs.results import FileResults

        calls, sync, replace = [], os.fsync, os.replace
        def watched_sync(handle):
            calls.append(os.fstat(handle).st_ino)
            sync(handle)
        def watched_replace(old, new):
            calls.append("named")
            replace(old, new)
        os.fsync, os.replace = watched_sync, watched_replace
        FileResults(folder).put("run/1/a", b"x")
        tell(calls)
        """,
        folder=tmp_path / "artifacts",
    )
    at = {path: (tmp_path / path).stat().st_ino for path in (".", "artifacts", "artifacts/run", "artifacts/run/1")}
    data = (tmp_path / "artifacts/run/1/a").stat().st_ino
    assert said == [at["."], at["artifacts"], at["artifacts/run"], data, "named", at["artifacts/run/1"]]


# -- S3 and faults ---------------------------------------------------------------------------------------------------


def test_options_of_the_url_are_for_the_store_and_its_client(s3_url: str, s3_server: str, monkeypatch: Any) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    secret = "access_key_id=someone&secret_access_key=hidden"
    store = open_results(f"{s3_url}?endpoint={s3_server}&region=us-east-1&{secret}&allow_http=true&timeout=20s")
    store.put("run/1/a", b"x")
    assert store.get("run/1/a") == b"x"
    assert "hidden" not in repr(store)
    assert "hidden" in store.url


def test_an_option_of_the_client_leaves_the_environment_in_force(s3_url: str) -> None:
    store = open_results(f"{s3_url}?timeout=20s")
    store.put("run/1/a", b"x")
    assert store.get("run/1/a") == b"x"


def test_a_bucket_that_does_not_exist_is_told_in_a_sentence(s3_url: str) -> None:
    with pytest.raises(ResultStoreError, match=r"cannot write run/1/a in .*NoSuchBucket") as told:
        open_results("s3://no-such-bucket/x").put("run/1/a", b"x")
    assert "\n" not in str(told.value)
    assert "Debug source" not in str(told.value)


def test_an_unreachable_store_is_told_within_seconds(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:  # bound, so that nobody else takes the port, and not listening
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
        store = open_results(s3_url)
        began = time.monotonic()
        with pytest.raises(ResultStoreError, match="cannot write run/1/a"):
            store.put("run/1/a", b"x")
        assert time.monotonic() - began < 15


def test_a_store_that_never_answers_is_given_up(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        store = open_results(f"{s3_url}?timeout=200ms")
        began = time.monotonic()
        with pytest.raises(ResultStoreError, match="cannot read run/1/a"):
            store.get("run/1/a")
        assert time.monotonic() - began < 30


def test_a_child_forked_after_the_parent_used_the_store_is_told_instead_of_hanging(s3_url: str) -> None:
    """In a process of its own, since forking one with threads is a danger to what it holds."""
    with Program(
        """
        import os, signal
        os.environ.update(environment)
        from semel.errors import ResultStoreError
        from semel.runs.results import open_results

        store = open_results(url)
        store.put("run/1/a", b"x")
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            try:
                tell(store.get("run/1/a"))
            except ResultStoreError as error:
                tell(str(error))
            os._exit(0)
        os.waitpid(child, 0)
        tell(store.get("run/1/a"))
        """,
        environment={name: value for name, value in os.environ.items() if name.startswith("AWS_")},
        url=s3_url,
    ) as program:
        assert "forked after its parent had used the object store" in program.hear()
        assert program.hear() == b"x"


def test_without_its_extra_an_object_store_names_what_to_install() -> None:
    said = outcome(
        """
        import sys
        from semel.errors import MissingExtra
        from semel.runs.results import open_results

        sys.modules["obstore"] = None  # as if it were not installed
        try:
            open_results("s3://bucket")
        except MissingExtra as error:
            tell(str(error))
        """
    )
    assert issubclass(MissingExtra, ImportError)
    assert "pip install 'semel[s3]'" in said


# -- publishing what an attempt came to ------------------------------------------------------------------------------


@dataclass
class Fit:
    objective: float
    at: datetime


class Array:
    """What numpy and its kin look like."""

    def tolist(self) -> list[float]:
        return [1.0, 2.0]


class Opaque:
    pass


def test_a_small_result_stays_in_the_row(tmp_path: Path) -> None:
    published = publish(open_results(tmp_path / "artifacts"), job(), {"objective": 0.83, "note": "größer"}, {})
    assert published.result == '{"objective":0.83,"note":"größer"}'
    assert published.result_ref is None
    assert published.result_digest == hashlib.sha256(published.result.encode()).hexdigest()
    assert published.result_size == len(published.result.encode())
    assert published.artifacts == []
    assert not (tmp_path / "artifacts").exists()


def test_a_large_result_goes_to_the_store_at_the_limit_and_not_before(store: ResultStore) -> None:
    fits = publish(store, job(), "x" * 98, {}, inline_bytes=100)
    assert (fits.result, fits.result_ref) == (f'"{"x" * 98}"', None)
    large = publish(store, job(), "x" * 99, {}, inline_bytes=100)
    assert (large.result, large.result_ref, large.result_size) == (None, f"{RUN}/1/result.json", 101)
    kept = store.get(f"{RUN}/1/result.json")
    assert kept == f'"{"x" * 99}"'.encode()
    assert large.result_digest == hashlib.sha256(kept).hexdigest()


def test_results_over_16_kib_leave_the_row_by_default(tmp_path: Path) -> None:
    store = open_results(tmp_path)
    assert publish(store, job(), "x" * (16384 - 2), {}).result_ref is None
    assert publish(store, job(), "x" * (16384 - 1), {}).result_ref is not None


def test_a_result_with_a_nul_goes_to_the_store_since_jsonb_cannot_keep_it(tmp_path: Path) -> None:
    store = open_results(tmp_path)
    published = publish(store, job(), ["a\0b"], {})
    assert published.result is None
    assert json.loads(store.get(f"{RUN}/1/result.json")) == ["a\0b"]
    assert publish(store, job(), ["a\\u0000b"], {}).result == '["a\\\\u0000b"]'


def test_two_attempts_never_write_over_each_other(store: ResultStore, tmp_path: Path) -> None:
    """The zombie of fence 1 publishes after its successor: what the successor published stays."""
    for fence in (2, 1):
        (tmp_path / "plot").write_text(f"plot of {fence}")
        publish(store, job(fence), f"result of {fence}", {"plot": tmp_path / "plot"}, inline_bytes=0)
    assert store.get(f"{RUN}/2/result.json") == b'"result of 2"'
    assert store.get(f"{RUN}/2/artifacts/plot") == b"plot of 2"


def test_artifacts_are_kept_with_size_and_digest(store: ResultStore, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "b").write_bytes(b"content")
    published = publish(store, job(3), None, {"empty": tmp_path / "a", "plots/fit.png": tmp_path / "b"})
    assert published.artifacts == [
        Artifact("empty", f"{RUN}/3/artifacts/empty", 0, hashlib.sha256(b"").hexdigest()),
        Artifact("plots/fit.png", f"{RUN}/3/artifacts/plots/fit.png", 7, hashlib.sha256(b"content").hexdigest()),
    ]
    assert [store.get(artifact.ref) for artifact in published.artifacts] == [b"", b"content"]
    assert published.result == "null"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("value", "exact", "places"),
    [
        (math.nan, "NaN", ["$ is nan"]),
        (
            {"a": None, "b": [math.inf, -math.inf]},
            '{"a":null,"b":[Infinity,-Infinity]}',
            ["$.b[0] is inf", "$.b[1] is"],
        ),
        (
            Fit(math.nan, datetime(2026, 1, 2, tzinfo=UTC)),
            '{"objective":NaN,"at":"2026-01-02T00:00:00Z"}',
            ["$.objective is nan"],
        ),
        (
            [math.nan] * 30,
            f"[{','.join(['NaN'] * 30)}]",
            [*(f"$[{place}] is nan" for place in range(10)), "20 more numbers of the result"],
        ),
    ],
    ids=["alone", "beside null", "in an object", "many"],
)
@pytest.mark.parametrize("inline", [1000, 0])
def test_numbers_that_are_not_finite_are_kept_and_named(
    tmp_path: Path, value: Any, exact: str, places: list[str], inline: int
) -> None:
    store = open_results(tmp_path)
    published = publish(store, job(), value, {}, inline_bytes=inline)
    data, kept = published.result, published.result_exact
    if not inline:
        assert (data, published.result_ref, kept) == (None, f"{RUN}/1/result.json", f"{RUN}/1/result.exact.json")
        data, kept = (store.get(f"{RUN}/1/{name}").decode() for name in ("result.json", "result.exact.json"))
    assert kept == exact
    assert data == exact.replace("-Infinity", "null").replace("Infinity", "null").replace("NaN", "null")
    assert repr(read_exact(kept.encode())) == repr(json.loads(kept))
    assert all(told.startswith(place) for told, place in zip(published.warnings, places, strict=True))


@given(values)
def test_every_json_value_is_published_as_itself(value: Any) -> None:
    kept: dict[str, bytes] = {}

    class Shelf(FileResults):
        def put(self, ref: str, data: bytes) -> None:
            kept[ref] = data

    published = publish(Shelf(Path("/nowhere")), job(), value, {})
    written = published.result.encode() if published.result is not None else kept[f"{RUN}/1/result.json"]
    assert json.loads(written) == value
    assert published.result_digest == hashlib.sha256(written).hexdigest()


def test_data_in_objects_is_published_as_json(tmp_path: Path) -> None:
    value = {
        "fit": Fit(0.5, datetime(2026, 1, 2, tzinfo=UTC)),
        "array": Array(),
        "mapping": UserDict(a=1),
        "price": Decimal("1.10"),
        "pair": (1, 2),
        "table": {1: "x"},
        "none": None,
    }
    published = publish(open_results(tmp_path), job(), value, {})
    assert published.result == (
        '{"fit":{"objective":0.5,"at":"2026-01-02T00:00:00Z"},"array":[1.0,2.0],"mapping":{"a":1},"price":"1.10",'
        '"pair":[1,2],"table":{"1":"x"},"none":null}'
    )


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (Opaque(), "type Opaque cannot be stored as JSON"),
        ({"model": [Opaque()]}, r"\$.model\[0\]: type Opaque has no JSON form"),
        ({"a": math.nan, "b": Opaque()}, r"cannot be stored as JSON: .*type Opaque|Opaque"),
        ([math.nan, "\ud800"], "cannot be stored as JSON"),
        ("\ud800", "half of a surrogate pair"),
        (open, "type builtin_function_or_method cannot be stored"),
        ((n for n in [1]), "type generator cannot be stored"),
        ([10**5000], "Exceeds the limit"),
    ],
)
def test_a_result_without_a_json_form_is_fatal_and_named(tmp_path: Path, value: Any, told: str) -> None:
    with pytest.raises(Fatal, match=told):
        publish(open_results(tmp_path / "artifacts"), job(), value, {})
    assert not (tmp_path / "artifacts").exists()


def test_a_result_that_contains_itself_is_fatal(tmp_path: Path) -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(Fatal, match="contains itself"):
        publish(open_results(tmp_path), job(), circle, {})


def test_a_result_over_the_limit_is_fatal_with_its_size(tmp_path: Path) -> None:
    with pytest.raises(Fatal, match="1,002 bytes of JSON, and 1,001 are allowed"):
        publish(open_results(tmp_path), job(), "x" * 1000, {}, max_bytes=1001)
    assert publish(open_results(tmp_path), job(), "x" * 1000, {}, max_bytes=1002).result_size == 1002


@pytest.mark.parametrize("name", ["../escape", "/etc/passwd", "", "a\\b", "x" * 200])
def test_an_artifact_with_a_bad_name_is_fatal(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(Fatal):
        publish(open_results(tmp_path / "artifacts"), job(), None, {name: tmp_path / "file"})
    assert not (tmp_path / "artifacts").exists()


def test_an_artifact_inside_another_is_fatal(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    files = dict.fromkeys(["plots/a", "plots/a/b"], tmp_path / "file")
    with pytest.raises(Fatal, match="'plots/a/b' would lie inside the artifact 'plots/a'"):
        publish(open_results(tmp_path / "artifacts"), job(), None, files)


def test_an_artifact_that_was_never_written_is_fatal(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(Fatal, match="the artifact 'plot' was requested"):
            publish(open_results(tmp_path / "artifacts"), job(), None, {"plot": path})


def test_trouble_with_the_store_is_worth_another_attempt(tmp_path: Path, s3_url: str) -> None:
    (tmp_path / "file").write_bytes(b"x")
    missing = open_results("s3://no-such-bucket")
    with pytest.raises(ResultStoreError):
        publish(missing, job(), "large", {}, inline_bytes=1)
    with pytest.raises(ResultStoreError):
        publish(missing, job(), None, {"plot": tmp_path / "file"})
