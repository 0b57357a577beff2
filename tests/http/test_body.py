"""A request's body on a disk that is full, and one that is closed while a thread still works on it."""

import errno
import io
import threading
from typing import Any

import pytest

from semel.http import body as http_body
from semel.http.body import SpooledBody


class FullDisk(io.BytesIO):
    """A file that takes ten bytes."""

    opened: "list[FullDisk]"

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.opened.append(self)

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> type[FullDisk]:
    FullDisk.opened = []
    monkeypatch.setattr(http_body, "TemporaryFile", FullDisk)
    return FullDisk


def test_a_body_that_finds_no_room_is_read_to_its_end_and_then_refused(full_disk: type[FullDisk]) -> None:
    body = SpooledBody(4)
    body.add(b"1234")
    assert not body.on_disk
    body.add(b"5678")
    body.require_room()
    assert (body.on_disk, body.whole(), full_disk.opened[0].tell()) == (True, b"12345678", 8)
    for _ in range(2):
        body.add(b"9abc")
        with pytest.raises(OSError, match="No space left"):
            body.require_room()
    assert (body.size, body.on_disk, full_disk.opened[0].closed, len(full_disk.opened)) == (16, False, True, 1)
    body.close()


def test_a_body_of_which_the_first_byte_finds_no_room_keeps_none_in_memory(full_disk: type[FullDisk]) -> None:
    body = SpooledBody(12)
    body.add(b"123456789")
    body.add(b"abcdef")
    with pytest.raises(OSError, match="No space left"):
        body.require_room()
    assert body.whole() == b""


def test_a_full_disk_is_noticed_though_the_file_has_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.RawIOBase):
        def readable(self) -> bool:
            return True

        writable = seekable = readable

        def seek(self, offset: int, whence: int = 0) -> int:
            return offset

        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(http_body, "TemporaryFile", lambda **_: io.BufferedRandom(Full()))
    body = SpooledBody(0)
    body.add(b"tea")
    with pytest.raises(OSError, match="No space left"):
        body.require_room()


def test_a_closed_body_opens_no_file_and_closes_the_one_it_had(full_disk: type[FullDisk]) -> None:
    closed = SpooledBody(0)
    closed.close()
    closed.add(b"late")
    assert full_disk.opened == []
    open_ = SpooledBody(0)
    open_.add(b"a")
    assert open_.file() is full_disk.opened[0]
    assert open_.file().read() == open_.file().read() == b"a"
    open_.close()
    assert full_disk.opened[0].closed


@pytest.mark.parametrize("work", ["add", "read"])
def test_a_body_that_is_closed_meanwhile_is_closed_by_the_thread_that_works_on_it(
    monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    """The event loop does not wait for the disk."""
    began, go_on = threading.Event(), threading.Event()
    waits = False
    opened: list[io.BytesIO] = []

    class Slow(io.BytesIO):
        def __init__(self, **_: Any) -> None:
            super().__init__()
            opened.append(self)

        def write(self, data: Any) -> int:
            self._wait()
            return super().write(data)

        def read(self, size: int | None = -1) -> bytes:
            self._wait()
            return super().read(size)

        def _wait(self) -> None:
            if waits:
                began.set()
                assert go_on.wait(30)

    monkeypatch.setattr(http_body, "TemporaryFile", Slow)
    body = SpooledBody(0)
    body.add(b"first")
    waits = True
    thread = threading.Thread(target=lambda: body.add(b"more") if work == "add" else body.whole())
    thread.start()
    assert began.wait(30)
    body.close()
    assert not opened[0].closed
    go_on.set()
    thread.join(30)
    assert opened[0].closed
