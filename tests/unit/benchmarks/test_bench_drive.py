"""When calls are sent and what is recorded of them, over a transport that follows a script."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable

import pytest

from benchmarks.drive import Drive
from benchmarks.errors import CallFailed
from benchmarks.record import CallRecord
from benchmarks.transports import TokenDelta
from benchmarks.workload import Call, Workload

Script = Callable[[Call], AsyncGenerator[TokenDelta, None]]


class Scripted:
    """A transport whose streams are the script's; counts how many are open."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.sent: list[int] = []
        self.open_now = 0
        self.most_open = 0

    async def open(self, model: str) -> str:
        return model

    async def stream(self, call: Call) -> AsyncGenerator[TokenDelta, None]:
        self.sent.append(call.index)
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        try:
            async for delta in self._script(call):
                yield delta
        finally:
            self.open_now -= 1

    async def close(self) -> None:
        assert self.open_now == 0


def calls(*at_s: float, output_tokens: int = 2) -> tuple[Call, ...]:
    return tuple(Call(i, at, array("I", [1, 2, 3]), output_tokens) for i, at in enumerate(at_s))


async def drive(
    script: Script, load: tuple[Call, ...], users: int | None, watcher, timeout_s: float = 30.0
) -> tuple[Scripted, dict[int, CallRecord]]:
    transport = Scripted(script)
    records = await Drive(transport, watcher, timeout_s).run(Workload(load, load[0], users))
    assert sorted(r.index for r in records) == [call.index for call in load]
    assert sorted(r.index for r in watcher.records) == [call.index for call in load]
    await transport.close()
    return transport, {record.index: record for record in records}


async def two_tokens(call: Call) -> AsyncGenerator[TokenDelta, None]:
    yield TokenDelta(1, 0)
    await asyncio.sleep(0)
    yield TokenDelta(1, 1)


async def test_a_closed_loop_keeps_its_users_busy_and_no_more(watcher) -> None:
    transport, records = await drive(two_tokens, calls(*[0.0] * 20), 3, watcher)
    assert transport.most_open == 3
    assert all(record.ok for record in records.values())
    ends = sorted(record.end_s for record in records.values())
    starts = sorted(record.scheduled_s for record in records.values())
    assert all(start >= end for start, end in zip(starts[3:], ends, strict=False))  # each next waits for one end


async def test_an_open_loop_sends_whether_or_not_the_last_is_answered(watcher) -> None:
    last_arrived = asyncio.Event()

    async def script(call: Call) -> AsyncGenerator[TokenDelta, None]:
        if call.index == 2:
            last_arrived.set()
        await last_arrived.wait()  # nobody is answered before all three are there
        yield TokenDelta(2, 0)

    transport, records = await drive(script, calls(0.0, 0.001, 0.002), None, watcher)
    assert transport.most_open == 3
    assert [records[i].scheduled_s for i in range(3)] == [0.0, 0.001, 0.002]
    assert all((record.ttft_s or 0) >= 0.002 - record.scheduled_s for record in records.values())
    assert all(record.itl_s == (0.0,) for record in records.values())  # two tokens of one delta share their time
    assert [record.deltas for record in records.values()] == [1, 1, 1]


async def test_a_generator_that_fell_behind_counts_as_waiting(watcher) -> None:
    loop = asyncio.get_running_loop()

    async def script(call: Call) -> AsyncGenerator[TokenDelta, None]:
        busy_until_s = loop.time() + 0.06
        while call.index == 0 and loop.time() < busy_until_s:
            pass  # the whole program is held up, so call 1 is sent long after it should have been
        yield TokenDelta(2, 0)

    _, records = await drive(script, calls(0.0, 0.01), None, watcher)
    late = records[1]
    assert late.scheduled_s == 0.01
    assert late.send_lag_s is not None
    assert late.send_lag_s >= 0.04
    assert late.ttft_s is not None
    assert late.ttft_s >= late.send_lag_s


async def test_the_runs_time_ends_what_hangs_and_sends_no_more(watcher) -> None:
    async def script(call: Call) -> AsyncGenerator[TokenDelta, None]:
        yield TokenDelta(1, 0)
        await asyncio.Event().wait()

    transport, records = await drive(script, calls(0.0, 0.0, 0.0, 500.0), None, watcher, timeout_s=0.3)
    assert [records[i].error for i in range(4)] == ["timeout"] * 3 + ["not_sent"]
    assert records[0].output_tokens == 1
    assert records[3].send_lag_s is None
    assert transport.sent == [0, 1, 2]
    assert transport.open_now == 0

    watcher.records.clear()
    transport, records = await drive(script, calls(0.0, 0.0), 1, watcher, timeout_s=0.3)
    assert [records[i].error for i in range(2)] == ["timeout", "not_sent"]


async def broken(call: Call) -> AsyncGenerator[TokenDelta, None]:
    yield TokenDelta(1, 0)
    if call.index == 0:
        raise CallFailed("http_500", "it broke")
    if call.index == 1:
        yield TokenDelta(1, 2)  # token 1 is missing
    if call.index == 2:
        yield TokenDelta(1, 0)  # token 0 came again
    if call.index == 3:
        return  # one short
    yield TokenDelta(1, 1)
    if call.index == 4:
        yield TokenDelta(1, 2)  # one too many


async def test_an_answer_that_is_not_the_whole_answer_is_an_error(watcher) -> None:
    _, records = await drive(broken, calls(*[0.0] * 6), 6, watcher)
    expected = ["http_500", "token_order", "token_order", "token_count", "token_count", ""]
    assert [records[i].error for i in range(6)] == expected
    assert records[0].detail == "it broke"
    assert records[1].detail == "token 2 arrived where 1 was next"


async def test_a_fault_of_the_transport_is_not_hidden_in_the_figures(watcher) -> None:
    async def script(call: Call) -> AsyncGenerator[TokenDelta, None]:
        raise RuntimeError("a bug")
        yield TokenDelta(1)

    with pytest.raises(ExceptionGroup) as found:
        await drive(script, calls(0.0), 1, watcher)
    assert found.group_contains(RuntimeError, match="a bug")
