"""Tells the daemon what this process's fence table holds, and hears from it which fences were broken.

One background thread looks at the table once per interval and sends a report if something worth one has changed; a step
never waits for it, nor for the daemon. While the daemon is away what ended is kept, bounded, and sent later. Made by
`refitd.agent.client` for a trainer's session.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from refitd.agent.connection import Connection
from refitd.agent.countdown import Countdown
from refitd.agent.fence_history import FenceHistory
from refitd.agent.fences import FenceSnapshot, FenceTable
from refitd.domain.errors import IllegalTransition, Invalid, LeaseExpired, Limit, RefitError, StaleRun
from refitd.domain.events import Event, FenceBroken
from refitd.domain.fence import FenceToken
from refitd.rpc.convert import token_from_proto
from refitd.rpc.convert_fences import end_to_proto, holder_to_proto, wait_to_proto, waited_to_proto
from refitd.v1 import fences_pb2 as pb

log = logging.getLogger(__name__)

INTERVAL = timedelta(seconds=1)
CALL = timedelta(seconds=5)
# While something is held it is told again so often: what the daemon shows is then no older, and a break whose event was
# lost is heard.
REFRESH_SECONDS = 30.0
LAST_CALL = timedelta(seconds=1)
JOIN_SECONDS = 2.0
# What is younger is over before anybody could look at it: a step's fences come and go within one interval.
YOUNG_SECONDS = 0.25
# Of each list in one report; far below what the daemon takes.
MAX_LISTED = 256


_Telling = tuple[tuple[object, ...], tuple[object, ...]]
_NOTHING: _Telling = ((), ())


class FenceReporter:
    """`start` starts its thread, `close` ends it. Nobody is called before there is something to tell.

    Args:
        agent_id: The session's: registers if need be, and then blocks up to the countdown.
        forget: The session's: called with the id that the daemon does not know any more.
        prefix: Of the domains that this agent owns; a process may have several agents and one table.
    """

    def __init__(
        self,
        connection: Connection,
        table: FenceTable,
        agent_id: Callable[[Countdown], str],
        forget: Callable[[str], None],
        *,
        prefix: str = "",
        interval: timedelta = INTERVAL,
    ) -> None:
        self._connection = connection
        self._table = table
        self._agent_id = agent_id
        self._forget = forget
        self._prefix = prefix
        self._interval = interval.total_seconds()
        self._kept = FenceHistory()
        self._sequence = 0
        self._told: _Telling | None = _NOTHING  # None: not known
        self._told_at = 0.0
        self._telling = _NOTHING
        self._unanswered: pb.ReportFencesRequest | None = None
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """To be called before the first fence is taken. Does not wait. Harmless if repeated, and after `close`."""
        if self._thread is not None:
            return
        with self._starting:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="refitd-fences", daemon=True)
                self._thread.start()

    def hear(self, event: Event) -> None:
        """A listener of the session: breaks the fence that an operator broke. Does not block."""
        if isinstance(event.change, FenceBroken):
            self._break(event.change.token, event.change.reason, event.change.by)

    def registered(self) -> None:
        """A registration listener of the session: the daemon may have forgotten what it was told."""
        self._told = None if self._sequence else _NOTHING
        self._wake.set()

    def close(self) -> None:
        """Ends the thread, which first tries once to send what is left. Blocks up to JOIN_SECONDS. Harmless if
        repeated.
        """
        with self._starting:
            self._closed.set()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        closed = False
        while not closed:
            self._wake.wait(self._interval)
            closed = self._closed.is_set()
            self._wake.clear()
            try:
                self._report(LAST_CALL if closed else CALL)
            except StaleRun as error:
                log.warning("the fences of this process are reported no more: %s", error)
                return
            except RefitError as error:  # the daemon is away: training must not notice
                log.debug("the fences of this process were not reported: %s", error)
            except Exception:  # a defect of ours: said in the log, and training goes on
                log.exception("the fences of this process could not be reported")
                self._give_up_report()

    def _report(self, timeout: timedelta) -> None:
        self._kept = self._kept.then(self._table.drain(self._prefix))
        snapshot = _worth_telling(self._table.snapshot(self._prefix))
        again = self._unanswered is not None
        if self._unanswered is None and self._news(snapshot):
            self._unanswered = self._next_report()
        if self._unanswered is None:
            return
        self._telling, self._told_at = _identity(snapshot), time.monotonic()
        request = self._unanswered
        del request.holders[:], request.waits[:]
        request.holders.extend(holder_to_proto(holder) for holder in snapshot.holders)
        request.waits.extend(wait_to_proto(wait) for wait in snapshot.waits)
        countdown = Countdown(timeout)
        request.agent_id = self._agent_id(countdown)
        try:
            reply = self._connection.call(
                self._connection.fences.ReportFences, request, "ReportFences", countdown, retry=False
            )
        except LeaseExpired:
            self._forget(request.agent_id)
            raise
        except (Invalid, Limit) as error:  # it would be refused for ever, and whatever comes after it kept back
            log.warning("a report of fences is refused, and not sent again: %s", error)
            self._give_up_report()
            return
        self._unanswered = None
        self._told = None if again else self._telling  # its first sending may have been taken, and this one not
        for broken in reply.broken:
            self._break(token_from_proto(broken.token), broken.reason, broken.by)
        if self._kept:
            self._wake.set()

    def _give_up_report(self) -> None:
        """The same would fail again: the next one goes out when something changed, or it is time to refresh."""
        self._unanswered, self._told = None, self._telling

    def _news(self, snapshot: FenceSnapshot) -> bool:
        telling = _identity(snapshot)
        due = any(telling) and time.monotonic() >= self._told_at + REFRESH_SECONDS
        return bool(self._kept) or telling != self._told or due

    def _next_report(self) -> pb.ReportFencesRequest:
        """What ended. Without an answer it is sent again as it is, under its number, so that nothing is counted twice;
        who holds and waits is filled in each time, or after an absence of the daemon ages would be those from before.
        """
        kept = self._kept
        ended, waited = kept.ended[:MAX_LISTED], kept.waited[:MAX_LISTED]
        self._kept = FenceHistory(kept.ended[len(ended) :], kept.waited[len(waited) :])
        self._sequence += 1
        return pb.ReportFencesRequest(
            incarnation=self._table.incarnation, sequence=self._sequence,
            ended=[end_to_proto(end) for end in ended], waited=[waited_to_proto(wait) for wait in waited],
            rejections=kept.rejections, dropped=kept.dropped,
        )  # fmt: skip

    def _break(self, token: FenceToken, reason: str, by: str) -> None:
        by = by or "an operator"
        try:
            holder = self._table.break_fence(token, reason=reason, by=by)
        except IllegalTransition as error:
            log.warning("a fence was not broken: %s", error)
            return
        if holder is not None:
            log.warning("%s broke the %s fence of %r on %r: %s", by, holder.use, holder.owner, token.domain, reason)
            self._wake.set()


def _worth_telling(snapshot: FenceSnapshot) -> FenceSnapshot:
    return FenceSnapshot(
        tuple(h for h in snapshot.holders if h.age_seconds >= YOUNG_SECONDS)[:MAX_LISTED],
        tuple(w for w in snapshot.waits if w.age_seconds >= YOUNG_SECONDS)[:MAX_LISTED],
    )


def _identity(snapshot: FenceSnapshot) -> _Telling:
    """What must differ for a new report: not the ages, which the daemon counts on by itself."""
    return (
        tuple((holder.token, holder.use) for holder in snapshot.holders),
        tuple((wait.domain, wait.use, wait.owner) for wait in snapshot.waits),
    )
