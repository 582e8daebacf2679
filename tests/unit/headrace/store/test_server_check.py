"""What INFO says about a server, judged; what redis raises, in one sentence."""

from __future__ import annotations

import pytest

from headrace.errors import Unavailable
from headrace.store.server_check import judge, why_away, why_unavailable

GOOD = {"redis_version": "7.2.4", "maxmemory_policy": "noeviction", "aof_enabled": 1, "aof_last_write_status": "ok"}


def test_a_good_server_has_no_warnings() -> None:
    assert judge(GOOD).warnings == ()
    assert judge(GOOD).version == "redis 7.2.4"
    assert judge({**GOOD, "valkey_version": "9.1.2"}).version == "valkey 9.1.2"


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("maxmemory_policy", "allkeys-lru", "noeviction"),
        ("aof_enabled", 0, "appendonly"),
        ("aof_last_write_status", "err", "disk"),
    ],
)
def test_each_danger_is_one_warning(field: str, value: object, word: str) -> None:
    warnings = judge({**GOOD, field: value}).warnings
    assert len(warnings) == 1
    assert word in warnings[0]


@pytest.mark.parametrize("version", ["6.2.14", "", "unstable"])
def test_a_server_without_functions_is_refused(version: str) -> None:
    with pytest.raises(Unavailable, match="too old"):
        judge({**GOOD, "redis_version": version})


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ("NOAUTH Authentication required.", "Redis asks for a password and the URL has none"),
        ("WRONGPASS invalid username-password pair or user is disabled.", "Redis refused the user name or password"),
        ("LOADING Redis is loading the dataset in memory", "Redis is still loading its data"),
        ("NOPERM User app has no permissions", "the Redis user may not do this: NOPERM User app has no permissions"),
        ("Timeout reading from /run/headrace/redis.sock", "Redis did not answer in time"),
        ("boom", "Redis cannot be reached or refuses: boom"),
        ("", "Redis cannot be reached or refuses: Exception"),
    ],
)
def test_a_fault_is_told_in_one_sentence(told: str, sentence: str) -> None:
    assert why_unavailable(Exception(told)) == sentence


def test_a_time_out_is_told_as_one() -> None:
    assert why_unavailable(TimeoutError()) == "Redis did not answer in time"


def test_clients_do_not_learn_where_the_store_is() -> None:
    for fault in (
        ConnectionError("Error 111 connecting to 10.0.0.7:6379"),
        OSError("SSL: bad certificate of redis.internal"),
    ):
        assert why_away(fault) == "the request store cannot be reached"
    assert why_away(ConnectionError("LOADING")) == "Redis is still loading its data"
