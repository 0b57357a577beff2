"""Runs one server as long as the process that started it is alive.

A separate process, so that nothing is left behind however its parent ends, SIGKILL included: it creates the server's
private directory, is the server's parent, and removes both when its standard input is closed or its own parent is gone.
Requests and replies are JSON lines: `run` a command, `start` and `stop` the server, and whether it is `alive`.
"""

import json
import os
import pwd
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PATIENCE = 20  # seconds for a server to end before it is killed


class ServerRunner:
    def __init__(self, directory: Path, account: pwd.struct_passwd | None) -> None:
        log = (directory / "log").open("ab")
        self.popen_options: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": log,
            "stderr": log,
            "cwd": directory,
            "umask": 0o077,
        }
        if account is not None:
            self.popen_options |= {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        self.server: subprocess.Popen[bytes] | None = None

    def run(self, argv: list[str]) -> None:
        subprocess.run(argv, check=True, **self.popen_options)

    def start(self, argv: list[str]) -> None:
        self.server = subprocess.Popen(argv, **self.popen_options)

    def stop(self, number: int) -> None:
        if self.server is None:
            return
        self.server.send_signal(number)
        try:
            self.server.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.server.kill()
            self.server.wait()
        self.server = None

    def alive(self) -> bool:
        return self.server is not None and self.server.poll() is None


def account_for(wants_plain_user: bool) -> pwd.struct_passwd | None:
    """The account for a server that refuses to run as root; None for the current user."""
    if not wants_plain_user or os.geteuid() != 0:
        return None
    plain = [entry for entry in pwd.getpwall() if entry.pw_uid != 0]
    return next((entry for entry in plain if entry.pw_name == "nobody"), plain[0])


def private_directory(account: pwd.struct_passwd | None) -> Path:
    """A new directory that the account can reach, with a path short enough for a Unix socket."""
    fitting = (place for place in (tempfile.gettempdir(), "/tmp", "/var/tmp") if _fits(Path(place), account))
    directory = Path(tempfile.mkdtemp(prefix="semel-", dir=next(fitting, None)))
    if account is not None:
        os.chown(directory, account.pw_uid, account.pw_gid)
    return directory


def _fits(place: Path, account: pwd.struct_passwd | None) -> bool:
    place = place.resolve()
    reachable = account is None or all(part.stat().st_mode & 0o001 for part in (place, *place.parents))
    return reachable and len(str(place)) < 60 and os.access(place, os.W_OK)


def serve(runner: ServerRunner, parent: int) -> None:
    """Handle requests until the pipe is closed or the parent is gone: a forked sibling may hold the pipe open."""
    while os.getppid() == parent:
        if not select.select([sys.stdin], [], [], 0.5)[0]:
            continue
        line = sys.stdin.readline()
        if not line:
            return
        verb, *arguments = json.loads(line)
        try:
            say({"answer": getattr(runner, verb)(*arguments)})
        except (OSError, subprocess.SubprocessError) as error:
            say({"error": str(error)})


def say(reply: dict[str, Any]) -> None:
    try:
        print(json.dumps(reply), flush=True)  # noqa: T201
    except BrokenPipeError:
        sys.exit()


def remove(directory: Path) -> None:
    for _ in range(50):  # a server's last child may still be writing
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.1)


def main(parent: int, last_signal: int, wants_plain_user: bool) -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    account = account_for(wants_plain_user)
    directory = private_directory(account)
    runner = ServerRunner(directory, account)
    try:
        say({"answer": [str(directory), account.pw_uid if account else None]})
        serve(runner, parent)
    finally:
        runner.stop(last_signal)
        remove(directory)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "plain-user")
