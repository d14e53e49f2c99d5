"""How ranks agree on a run, with a key-value store that is a dict."""

from __future__ import annotations

import threading
from collections import Counter
from datetime import timedelta

import pytest

from refitd.agent import client as client_module
from refitd.agent import rendezvous
from refitd.agent.client import RefitClient
from refitd.agent.rendezvous import agree_on_run
from refitd.domain.errors import Deadline, Invalid

NOW = timedelta(0)
SHORT = timedelta(milliseconds=1)


class Store:
    """What is used of torch's store."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.waits = 0

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.waits += 1
        if not self.check(keys):
            raise RuntimeError("timed out")


class Rank:
    """One process of several: its own count of what it agreed on."""

    def __init__(self, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number, self.made, self.monkeypatch = number, Counter[str](), monkeypatch

    def agree(self, timeout: timedelta = SHORT) -> str:
        self.monkeypatch.setattr(rendezvous, "_made", self.made)
        return agree_on_run("policy", self.number, 2, timeout)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    monkeypatch.setattr(rendezvous, "_store", lambda: store)
    return store


@pytest.mark.usefixtures("store")
def test_a_rank_that_came_too_early_agrees_later(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Rank(0, monkeypatch), Rank(1, monkeypatch)
    for _ in range(2):
        with pytest.raises(Deadline):
            second.agree()
    run = first.agree()
    assert second.agree() == run
    assert first.agree() == second.agree() != run


def test_without_time_a_rank_only_looks(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Rank(0, monkeypatch), Rank(1, monkeypatch)
    with pytest.raises(Deadline):
        second.agree(NOW)
    run = first.agree(NOW)
    assert second.agree(NOW) == run
    assert store.waits == 0


def test_several_ranks_without_a_process_group_must_be_told_their_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_store", lambda: None)
    with pytest.raises(Invalid, match="pass run="):
        agree_on_run("policy", 1, 2, NOW)


def test_a_publish_and_the_end_of_a_save_agree_on_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, go_on = threading.Event(), threading.Event()
    runs = iter(["one", "two"])

    def slow(model: str, rank: int, world_size: int, timeout: timedelta) -> str:
        asked.set()
        assert go_on.wait(30)
        return next(runs)

    monkeypatch.setattr(client_module, "agree_on_run", slow)
    got: list[str] = []
    with RefitClient("127.0.0.1:1", model="policy") as client:
        threads = [
            threading.Thread(target=lambda: got.append(client._agreed_run(timedelta(seconds=30)).id)) for _ in range(2)
        ]
        threads[0].start()
        assert asked.wait(30)
        with pytest.raises(Deadline):
            client._agreed_run(NOW)
        threads[1].start()
        go_on.set()
        for thread in threads:
            thread.join(30)
    assert got == ["one", "one"]
