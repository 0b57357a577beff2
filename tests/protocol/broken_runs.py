"""Rules of runs with one rule broken each; the first line of each says which."""

from __future__ import annotations

from protocol.run_rules import CANCELLED, FAILED, PENDING, RUNNING, SUCCEEDED, Rules, Run


class FinishesWithoutFence(Rules):
    """Whoever writes an end is believed while the run is running."""

    def finish(self, run: Run, fence: int, end: str) -> Run | None:
        return super().finish(run, run.fence, end)


class RenewsWithoutFence(Rules):
    """Whoever renews a lease is believed."""

    def renew(self, run: Run, fence: int) -> Run | None:
        return super().renew(run, run.fence)


class FinishesAfterSweep(Rules):
    """The end of an attempt that was swept is accepted while nobody else has the run."""

    def finish(self, run: Run, fence: int, end: str) -> Run | None:
        return super().finish(run._replace(status=RUNNING) if run.status == PENDING else run, fence, end)


class LeaseKeepsFence(Rules):
    """The lease of a run that was swept has the fence of the lost one."""

    def lease(self, run: Run) -> Run | None:
        leased = super().lease(run)
        return leased and leased._replace(fence=leased.fence - bool(run.losts))


class SweepsEarly(Rules):
    """The sweeper takes a run back at the last tick of its lease."""

    def sweep(self, run: Run) -> Run | None:
        return super().sweep(run._replace(lease=run.lease - 1))


class NeverSweeps(Rules):
    """Nobody takes back the runs of dead workers."""

    def sweep(self, run: Run) -> Run | None:
        return None


class SweepDrops(Rules):
    """The sweeper removes a run whose worker was lost."""

    def sweep(self, run: Run) -> Run | None:
        return super().sweep(run) and Run()


class SuccessBeatsCancel(Rules):
    """A late success overwrites a cancellation."""

    def finish(self, run: Run, fence: int, end: str) -> Run | None:
        beats = run.status == CANCELLED and end == "succeeded"
        return super().finish(run._replace(status=RUNNING) if beats else run, fence, end)


class SweepForgetsCancel(Rules):
    """A run whose worker was lost begins again although it is to be cancelled."""

    def status_after(self, run: Run, end: str) -> str:
        return super().status_after(run._replace(cancel=run.cancel and end != "lost"), end)


class LeasesCancelled(Rules):
    """A cancelled run can still be leased."""

    def lease(self, run: Run) -> Run | None:
        return super().lease(run._replace(status=PENDING) if run.status == CANCELLED else run)


class TriesForEver(Rules):
    """Lost workers are counted, but no number of them is too many."""

    def status_after(self, run: Run, end: str) -> str:
        after = super().status_after(run, end)
        return PENDING if after == FAILED and end == "lost" else after


class SubmitsTwice(Rules):
    """A submission that is repeated after a lost reply makes another run."""

    def submit(self, run: Run) -> Run:
        return super().submit(run)._replace(rows=run.rows + 1)


class ForgetsSuccess(Rules):
    """A success that is written again after a lost reply is refused."""

    def finished_before(self, run: Run, fence: int, end: str) -> bool:
        return False


class AnySuccessCounts(Rules):
    """A late success is accepted because the run has succeeded, whoever did it."""

    def finished_before(self, run: Run, fence: int, end: str) -> bool:
        return end == "succeeded" and run.status == SUCCEEDED
