"""Whatever the fast path loses, a fenced router, a store that goes away: every token still comes once and in order."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from headrace.errors import HeadraceError, Moved, Overloaded, RequestFailed, Unavailable
from headrace.events import Delta, Event, Finished
from headrace.frame import FinishReason
from headrace.sampling import SamplingParams
from headrace.store.interface import DeliveryEntry
from router.admission.call import Call, TextPrompt

PROMPT = "abcdefghijklmnopqrstuvwxyz"


def _call(max_tokens: int = 60, deadline_ms: int | None = None, text: str = PROMPT) -> Call:
    return Call("", TextPrompt(text), SamplingParams(max_tokens=max_tokens, temperature=0.0), deadline_ms=deadline_ms)


async def _read(stream: Any) -> list[Event]:
    return [event async for event in stream]


def _assert_whole(events: list[Event], max_tokens: int) -> None:
    index = 0
    for event in events:
        if isinstance(event, Delta):
            assert event.first_index == index
            index += len(event.token_ids)
    assert index == max_tokens
    assert "".join(e.text for e in events if isinstance(e, Delta)) == (PROMPT * 9)[:max_tokens]
    assert isinstance(events[-1], Finished)


@pytest.mark.parametrize("lost", ["every third entry", "every entry", "the end"])
async def test_entries_lost_from_the_delivery_stream_are_read_from_the_journal(
    rig: Any, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    deliveries, count = rig.store.deliveries, 0

    async def leaky(router: str, after_id: str, block_ms: int) -> tuple[DeliveryEntry, ...]:
        nonlocal count
        kept = []
        for entry in await deliveries(router, after_id, block_ms):
            count += 1
            ends = any(part.finish for part in entry.parts)
            drop = {"every third entry": count % 3 == 0, "every entry": True, "the end": ends}[lost]
            # An emptied entry still moves the reader on, as a trimmed stream would.
            kept.append(DeliveryEntry(entry.id, entry.worker, entry.seq, ()) if drop else entry)
        return tuple(kept)

    monkeypatch.setattr(rig.store, "deliveries", leaky)
    async with await rig.service.submit(_call()) as stream:
        _assert_whole(await asyncio.wait_for(_read(stream), 10), 60)
    await rig.idle()


async def test_a_fenced_router_goes_on_as_a_new_incarnation(rig: Any) -> None:
    rig.reciter.hold()
    async with await rig.service.submit(_call()) as stream:
        membership = rig.service._delivery.membership
        before = membership.router
        await rig.store.leave(before)
        reading = asyncio.create_task(_read(stream))
        rig.reciter.go_on()
        _assert_whole(await asyncio.wait_for(reading, 10), 60)
        assert membership.router != before
    await rig.idle()
    async with await rig.service.submit(_call(5)) as stream:
        _assert_whole(await asyncio.wait_for(_read(stream), 10), 5)


async def test_a_router_that_cannot_rejoin_at_once_still_takes_its_streams_over(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears that it was fenced, and the store goes away before the new incarnation has made its first sweep."""
    sweep, membership = rig.store.sweep, rig.service._delivery.membership
    fenced, failed = membership.router, asyncio.Event()

    async def away_once(router: str) -> Any:
        if router != fenced and not failed.is_set():
            failed.set()
            raise Unavailable("connection reset")
        return await sweep(router)

    rig.reciter.hold()
    async with await rig.service.submit(_call()) as stream:
        monkeypatch.setattr(rig.store, "sweep", away_once)
        await rig.store.leave(fenced)
        await asyncio.wait_for(failed.wait(), 5)
        await rig.until(lambda: stream.owner_epoch > 1 or stream.error is not None)
        rig.reciter.go_on()
        _assert_whole(await asyncio.wait_for(_read(stream), 10), 60)
    await rig.idle()


async def test_a_part_that_cannot_be_delivered_ends_its_own_stream_only(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.reciter.hold()
    async with await rig.service.submit(_call(400)) as broken, await rig.service.submit(_call()) as whole:

        def fail(*_: object) -> None:
            raise ValueError("a text nobody can make")

        monkeypatch.setattr(broken.choices[0], "take", fail)
        rig.reciter.go_on()
        with pytest.raises(HeadraceError, match="could not deliver"):
            await asyncio.wait_for(_read(broken), 10)
        _assert_whole(await asyncio.wait_for(_read(whole), 10), 60)
    assert rig.service.alive
    await rig.idle()


async def test_while_the_store_is_away_new_calls_are_refused_and_running_ones_resume(rig: Any) -> None:
    rig.reciter.hold()
    async with await rig.service.submit(_call()) as stream:
        await anext(stream)
        rig.store.away = True
        with pytest.raises(Unavailable) as caught:
            await rig.service.submit(_call())
        assert caught.value.retry_after_s is not None
        response = await rig.post("/v1/completions", prompt="x", max_tokens=2, stream=True)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert (await rig.http.get("/readyz")).status_code == 503
        assert (await rig.http.get("/healthz")).status_code == 200
        assert "headrace:open_streams" in (await rig.http.get("/metrics")).text
        rig.store.away = False
        rig.reciter.go_on()
        _assert_whole(await asyncio.wait_for(_read(stream), 10), 60)
    await rig.idle()
    await rig.until(lambda: rig.service._delivery.membership.store_away_since_s is None)
    assert (await rig.http.get("/readyz")).status_code == 200


async def test_a_probe_is_answered_while_the_store_hangs(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    never = asyncio.Event()
    monkeypatch.setattr(rig.store, "board", never.wait)
    rig.service._board._read_at_s = -1.0  # or the last reading would be young enough to answer with
    page = await asyncio.wait_for(rig.http.get("/readyz"), 5)
    assert (page.status_code, page.json()) == (503, {"ready": False, "store": False, "workers": 0})
    monkeypatch.undo()
    assert (await rig.http.get("/readyz")).status_code == 200


async def test_leaving_the_stream_cancels_and_an_end_does_not(rig: Any) -> None:
    async with await rig.service.submit(_call(3)) as stream:
        await _read(stream)
    rig.reciter.hold(after=3)
    async with await rig.service.submit(_call(400)) as stream:
        await anext(stream)
    await rig.idle()
    assert list(rig.reciter.cancelled_at) == [stream.request_id]
    status = await rig.store.status(stream.request_id)
    assert status.finishes == (FinishReason.CANCELLED.value,)


async def test_a_call_cancelled_while_it_is_admitted_leaves_nothing(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    admit, asked = rig.store.admit, asyncio.Event()

    async def slow(call: Any) -> Any:
        reply = await admit(call)
        asked.set()
        await asyncio.Event().wait()
        return reply

    monkeypatch.setattr(rig.store, "admit", slow)
    submitting = asyncio.create_task(rig.service.submit(_call(400)))
    await asyncio.wait_for(asked.wait(), 5)
    submitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    await rig.idle()


async def test_a_call_that_is_being_admitted_takes_one_place_not_two(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    admit, asked, answer = rig.store.admit, asyncio.Semaphore(0), asyncio.Event()

    async def slow(call: Any) -> Any:
        asked.release()
        await answer.wait()
        return await admit(call)

    monkeypatch.setattr(rig.store, "admit", slow)
    monkeypatch.setattr(rig.service, "config", replace(rig.service.config, max_open_streams=2))
    submitting = [asyncio.create_task(rig.service.submit(_call(3))) for _ in range(2)]
    for _ in submitting:
        await asyncio.wait_for(asked.acquire(), 5)
    with pytest.raises(Overloaded, match="already delivers 2"):
        await rig.service.submit(_call(3))
    answer.set()
    for stream in await asyncio.gather(*submitting):
        async with stream:
            _assert_whole(await asyncio.wait_for(_read(stream), 10), 3)
    await rig.idle()


async def test_an_admit_whose_reply_is_lost_is_the_same_request_when_asked_again(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit, asked = rig.store.admit, 0

    async def forgetful(call: Any) -> Any:
        nonlocal asked
        asked += 1
        reply = await admit(call)
        if asked == 1:
            raise Unavailable("connection reset")
        return reply

    monkeypatch.setattr(rig.store, "admit", forgetful)
    async with await rig.service.submit(_call(20)) as stream:
        _assert_whole(await asyncio.wait_for(_read(stream), 10), 20)
    assert rig.reciter.seen == [stream.request_id]
    await rig.idle()


async def test_what_the_store_calls_ours_and_nobody_reads_is_cancelled(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.reciter.hold(after=3)
    stream = await rig.service.submit(_call(400))
    rig.service._delivery.forget(stream.request_id)
    await rig.idle()
    assert (await rig.store.status(stream.request_id)).finishes == ("cancelled",)


async def test_a_deadline_ends_a_request_that_runs(rig: Any) -> None:
    rig.reciter.hold()
    async with await rig.service.submit(_call(deadline_ms=100)) as stream:
        events = await asyncio.wait_for(_read(stream), 10)
    assert events[-1].reason is FinishReason.DEADLINE


async def test_an_explicit_cancel_is_told_to_the_reader(rig: Any) -> None:
    rig.reciter.hold()
    async with await rig.service.submit(_call()) as stream:
        assert await rig.service.cancel(stream.request_id) is True
        rig.reciter.go_on()
        events = await asyncio.wait_for(_read(stream), 10)
    assert events[-1].reason is FinishReason.CANCELLED
    assert await rig.service.cancel(stream.request_id) is True, "asking again changes nothing"
    assert await rig.service.cancel("elsewhere-1") is None
    assert await rig.service.cancel(f"{rig.service._slot_tag}-unknown") is None


async def test_a_request_taken_over_by_another_router_ends_as_moved(rig: Any) -> None:
    rig.reciter.hold()
    async with await rig.service.submit(_call()) as stream:
        await anext(stream)
        await rig.store.sweep("other~1")
        assert await rig.store.attach(stream.request_id, "other~1", "default") is not None
        with pytest.raises(Moved):
            await asyncio.wait_for(_read(stream), 10)
    status = await rig.store.status(stream.request_id)
    assert status.state == "bound"
    await rig.store.cancel(stream.request_id)


async def test_a_record_that_is_gone_ends_the_stream_with_an_error(rig: Any) -> None:
    rig.reciter.hold()
    async with await rig.service.submit(_call()) as stream:
        await anext(stream)
        with rig.twin.changed:
            rig.twin.keyspace.delete(rig.twin.keys.request(stream.request_id))
        with pytest.raises(RequestFailed, match="no longer in the store"):
            await asyncio.wait_for(_read(stream), 10)


async def test_stopping_tells_open_streams_where_to_go_and_refuses_new_calls(rig: Any) -> None:
    rig.reciter.hold()
    async with await rig.service.submit(_call()) as stream:
        await rig.service.drain()
        with pytest.raises(Unavailable, match="shutting down"):
            await rig.service.submit(_call())
        await rig.service.stop()
        with pytest.raises(Moved):
            await _read(stream)
    rig.reciter.go_on()
