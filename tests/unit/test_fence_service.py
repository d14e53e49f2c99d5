"""The fence RPCs' service without a wire: repeated requests, cancelled ones, and the bounds on what is asked for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any

import pytest

from refitd.agent import fence_service
from refitd.agent.fence_service import MAX_TTL, MIN_TTL, FenceService
from refitd.agent.fences import FenceTable, FenceUse
from refitd.domain.errors import FenceHeld, Invalid, Limit, StaleFence
from refitd.domain.fence import FenceToken

TTL = timedelta(seconds=60)
NOW = timedelta(0)


@pytest.fixture
def table() -> FenceTable:
    return FenceTable()


@pytest.fixture
def service(table: FenceTable) -> FenceService:
    return FenceService(lambda domain: domain in ("d", "e"), table=table)


def asking(
    service: FenceService, request_id: str = "r", *, ttl: timedelta = TTL, seconds: float = 60.0, domain: str = "d"
) -> Coroutine[Any, Any, tuple[FenceToken, timedelta]]:
    return service.acquire(
        domain, FenceUse.READ, owner="reader", ttl=ttl, request_id=request_id, deadline=time.monotonic() + seconds
    )


def test_a_request_sent_again_gets_the_same_grant(service: FenceService, table: FenceTable) -> None:
    async def scenario() -> None:
        first, _ = await asking(service)
        assert (await asking(service))[0] == first
        assert (await asking(service, "other"))[0] != first
        assert len(table.holders("d")) == 2
        service.release(first)
        with pytest.raises(StaleFence):
            await asking(service)

    asyncio.run(scenario())


def test_a_request_sent_again_while_it_waits_takes_one_place(service: FenceService, table: FenceTable) -> None:
    async def scenario() -> None:
        step = table.acquire("d", FenceUse.REWRITE, owner="step", timeout=NOW)
        both = [asyncio.ensure_future(asking(service)) for _ in range(2)]
        await asyncio.sleep(0.01)
        assert len(table.snapshot().waits) == 1
        both[0].cancel()
        await asyncio.sleep(0.01)
        assert len(table.snapshot().waits) == 1
        step.release()
        token, _ = await both[1]
        assert [holder.token for holder in table.holders("d")] == [token]

    asyncio.run(scenario())


def test_a_cancelled_request_leaves_nothing_behind(service: FenceService, table: FenceTable) -> None:
    async def scenario() -> None:
        step = table.acquire("d", FenceUse.REWRITE, owner="step", timeout=NOW)
        waiting = asyncio.ensure_future(asking(service))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert table.snapshot().waits == ()
        with pytest.raises(FenceHeld, match="'step'"):
            await asking(service, "late", seconds=0.02)
        assert table.snapshot().waits == ()
        step.release()

    asyncio.run(scenario())


def test_a_ttl_is_kept_within_bounds(service: FenceService, table: FenceTable) -> None:
    async def scenario() -> None:
        _, short = await asking(service, "short", ttl=NOW)
        token, long = await asking(service, "long", ttl=timedelta(days=9))
        assert (short, long) == (MIN_TTL, MAX_TTL)
        assert service.renew(token, timedelta(days=9)) == MAX_TTL

    asyncio.run(scenario())


def test_a_request_goes_on_when_the_holder_in_its_way_expires(service: FenceService, table: FenceTable) -> None:
    async def scenario() -> None:
        table.acquire("d", FenceUse.READ, owner="dead", timeout=NOW, ttl=timedelta(milliseconds=50))
        ahead = table.request("d", FenceUse.REWRITE, owner="step")
        waiting = asyncio.ensure_future(asking(service))
        while (step := ahead.poll()) is None:
            await asyncio.sleep(0.005)
        step.release()
        assert (await waiting)[0].domain == "d"

    asyncio.run(scenario())


def test_a_caller_ends_or_renews_no_fence_of_the_process_itself(service: FenceService, table: FenceTable) -> None:
    step = table.acquire("d", FenceUse.REWRITE, owner="step", timeout=NOW)
    save = table.acquire("e", FenceUse.READ, owner="save", timeout=NOW)
    for own in (step, save):
        service.release(own.token)
        own.check()
    left = table.holders("e")[0].expires_in_seconds
    assert left is not None
    with pytest.raises(Invalid):
        service.renew(save.token, MIN_TTL)
    assert (table.holders("e")[0].expires_in_seconds or 0.0) > left - 60


def test_a_closed_service_leaves_no_reader_that_a_step_would_wait_for(service: FenceService, table: FenceTable) -> None:
    async def scenario() -> None:
        for number in range(3):
            await asking(service, f"request {number}")
        service.close()
        service.close()
        table.acquire("d", FenceUse.REWRITE, owner="step", timeout=NOW)

    asyncio.run(scenario())


def test_too_many_waiting_requests_and_foreign_domains_are_refused(
    service: FenceService, table: FenceTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence_service, "MAX_WAITING", 1)

    async def scenario() -> None:
        with table.acquire("d", FenceUse.REWRITE, owner="step", timeout=NOW):
            first = asyncio.ensure_future(asking(service))
            await asyncio.sleep(0.01)
            with pytest.raises(Limit):
                await asking(service, "second")
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        for domain, request_id in (("foreign", "r"), ("d", ""), ("d", "x" * 300)):
            with pytest.raises(Invalid):
                await asking(service, request_id, domain=domain)

    asyncio.run(scenario())
    assert table._domains == {}
