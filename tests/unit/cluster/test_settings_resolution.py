"""Flags over environment over defaults; every value bounded, every field explained."""

from __future__ import annotations

from typing import get_args

import pytest

from cluster.environment import cache_folder, state_folder
from cluster.errors import OperatorError
from cluster.settings import Settings, describe
from workers.scheduler.capacity import capacity_names


def test_flags_win_over_the_environment_and_unset_flags_do_not() -> None:
    environment = {"HEADRACE_WORKERS": "3", "HEADRACE_BLOCK_SIZE": "32", "HEADRACE_MODEL": "owner/name", "PATH": "/bin"}
    settings = Settings.resolve({"workers": 2, "block_size": None}, environment)
    assert (settings.workers, settings.block_size, settings.model) == (2, 32, "owner/name")
    assert settings.chunk_tokens == 512


def test_an_empty_variable_counts_as_unset() -> None:
    assert Settings.resolve({}, {"HEADRACE_REDIS": ""}).redis is None


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"kv_blocks": 0}, "--kv-blocks"),
        ({"workers": 0}, "--workers"),
        ({"dtype": "float16"}, "--dtype"),
        ({"policy": "magic"}, "--policy"),
        ({"capacity": "boundless"}, "--capacity"),
        ({"itl_ms": 0}, "--itl-ms"),
        ({"grpc_port": 70_000}, "--grpc-port"),
        ({"http_port": 0}, "--http-port"),
        ({"gpu_memory": 0.0}, "--gpu-memory"),
        ({"gpu_memory": float("nan")}, "--gpu-memory"),
        ({"name": "Upper Case"}, "--name"),
        ({"name": "../escape"}, "--name"),
        ({"model": ""}, "--model"),
        ({"redis": "http://host"}, "--redis"),
        ({"grpc_port": 9_000, "http_port": 9_000}, "must differ"),
    ],
)
def test_a_value_out_of_bounds_is_told_by_its_flag_in_one_line(flags: dict[str, object], told: str) -> None:
    with pytest.raises(OperatorError) as caught:
        Settings.resolve(flags, {})
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bad_variable_is_told_by_its_name() -> None:
    with pytest.raises(OperatorError, match="HEADRACE_WORKERS"):
        Settings.resolve({}, {"HEADRACE_WORKERS": "many"})


def test_a_misspelt_variable_is_refused_and_not_ignored() -> None:
    with pytest.raises(OperatorError, match="HEADRACE_WORKER is not a setting"):
        Settings.resolve({}, {"HEADRACE_WORKER": "2"})


def test_a_redis_password_is_never_repeated() -> None:
    with pytest.raises(OperatorError) as caught:
        Settings.resolve({"redis": "http://user:secret@host"}, {})
    assert "secret" not in str(caught.value)


def test_every_field_has_a_sentence() -> None:
    for name in Settings.model_fields:
        assert describe(name).endswith("."), name


def test_capacity_and_pace_reach_the_workers() -> None:
    assert list(get_args(Settings.model_fields["capacity"].annotation)) == list(capacity_names())
    engine = Settings.resolve({"capacity": "no-evict", "itl_ms": 40}, {}).engine_config("/m", "tiny", threads=1)
    assert (engine.capacity, engine.itl_target_s) == ("no-evict", 0.04)
    assert Settings.resolve({}, {}).engine_config("/m", "tiny", threads=1).itl_target_s is None


def test_a_folder_for_step_logs_reaches_the_workers() -> None:
    logged = Settings.resolve({}, {"HEADRACE_STEP_LOG": "/var/log/steps"})
    assert logged.engine_config("/m", "tiny", threads=1).step_log == "/var/log/steps"


def test_what_workers_and_routers_are_told() -> None:
    settings = Settings.resolve({"kv_mib": 64, "kv_blocks": 100, "result_ttl_s": 5, "host": "0.0.0.0"}, {})
    engine = settings.engine_config("/m", "tiny", threads=3)
    assert (engine.kv_bytes, engine.num_blocks, engine.threads, engine.model_name) == (64 << 20, 100, 3, "tiny")
    router = settings.router_config("/m", "tiny", cluster_id="c", redis_url="unix:///r")
    assert (router.result_ttl_ms, router.host, router.cluster_id, router.redis_url) == (
        5_000,
        "0.0.0.0",
        "c",
        "unix:///r",
    )


def test_folders_follow_own_variable_then_xdg_then_home() -> None:
    assert str(cache_folder({"HEADRACE_CACHE": "/a", "XDG_CACHE_HOME": "/b"})) == "/a"
    assert str(cache_folder({"XDG_CACHE_HOME": "/b"})) == "/b/headrace"
    assert cache_folder({}).parts[-2:] == (".cache", "headrace")
    assert str(state_folder({"HEADRACE_STATE": "/s"})) == "/s"
    assert state_folder({}).parts[-3:] == (".local", "state", "headrace")
