"""A session's watch: what ends it for good, and what it outlives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from refitd.agent import session as sessions
from refitd.agent.connection import Connection
from refitd.agent.session import Session
from refitd.agent.subscribe import Feed
from refitd.domain.errors import Deadline, Limit, RefitError, RevisionCompacted, StaleRun, Unauthenticated, Unavailable
from refitd.domain.events import Event, VersionRetired

EVENT = Event(7, "policy", VersionRetired(1))
WAIT = 30.0


class Backoff:
    """Does not wait."""

    def __init__(self, **options: float) -> None:
        pass

    def next(self) -> float:
        return 0.0

    def reset(self) -> None:
        pass


@pytest.fixture
def connection() -> Iterator[Connection]:
    made = Connection("127.0.0.1:1")
    yield made
    made.close()


@pytest.fixture
def feed(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> Feed:
    monkeypatch.setattr("refitd.agent.subscribe.Backoff", Backoff)
    monkeypatch.setattr(sessions, "Backoff", Backoff)
    return Feed(connection, "policy", 1, progress_interval=sessions.TTL)


def streams(feed: Feed, *outcomes: RefitError | Event) -> Callable[[], Iterator[Event]]:
    """One stream per outcome: it breaks with the error, or brings the event and ends the feed."""
    left = list(outcomes)

    def one_stream() -> Iterator[Event]:
        outcome = left.pop(0)
        if isinstance(outcome, RefitError):
            raise outcome
        yield outcome
        feed.close()

    return one_stream


@pytest.mark.parametrize("refusal", [Unauthenticated("the token is being rotated"), Limit("too many watches")])
def test_a_watch_that_is_refused_for_a_while_is_tried_again(
    connection: Connection, feed: Feed, refusal: RefitError, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Event] = []
    session = Session(connection, "policy")
    session.add_listener(heard.append)
    monkeypatch.setattr(feed, "_one_stream", streams(feed, refusal, refusal, EVENT))
    watching = threading.Thread(target=session._watch, args=(feed,), daemon=True)
    watching.start()
    watching.join(WAIT)
    assert heard == [EVENT]


def test_a_watch_ends_for_a_rank_of_an_older_run(
    connection: Connection, feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Event] = []
    session = Session(connection, "policy")
    session.add_listener(heard.append)
    monkeypatch.setattr(feed, "_one_stream", streams(feed, StaleRun("superseded"), EVENT))
    session._watch(feed)
    assert heard == []


@pytest.mark.parametrize("failure", [Unavailable("the daemon is being restarted"), Deadline("it is slow")])
def test_a_feed_outlives_a_daemon_that_goes_away_while_it_catches_up(
    feed: Feed, failure: RefitError, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = [failure, None]

    def resync() -> Event | None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer
        return None

    monkeypatch.setattr(feed, "_one_stream", streams(feed, RevisionCompacted("gone"), EVENT))
    monkeypatch.setattr(feed, "_resync", resync)
    assert list(feed.events()) == [EVENT]
    assert answers == []
