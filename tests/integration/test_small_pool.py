"""A pool far smaller than the context: what can never fit is refused, the rest waits, is preempted, and ends."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.conftest import RunningCluster, start_cluster
from tests.integration.idle import assert_idle, cluster_status

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(400)]

MODEL = "SmolLM2-135M-Instruct"
THE = 260


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """One worker with 64 blocks of 16 tokens: 1,024 tokens of KV under a context of 8,192."""
    folder: Path = tmp_path_factory.mktemp("small")
    yield from start_cluster(folder, "--workers", "1", "--dtype", "float32", "--kv-blocks", "64")


def complete(cluster: RunningCluster, **body: object) -> httpx.Response:
    return httpx.post(f"{cluster.base_url}/v1/completions", json={"model": MODEL, **body}, timeout=240)


def test_what_can_never_fit_is_refused_and_harms_nobody(small: RunningCluster) -> None:
    with ThreadPoolExecutor(6) as pool:
        hopeless = pool.submit(complete, small, prompt=[THE] * 2000, max_tokens=4)
        others = [pool.submit(complete, small, prompt="Hello", max_tokens=8) for _ in range(5)]
        assert hopeless.result().status_code == 400
        assert "1024" in hopeless.result().json()["error"]["message"]
        assert [o.result().status_code for o in others] == [200] * 5
    total = complete(small, prompt=[THE] * 900, max_tokens=2000, ignore_eos=True)
    assert total.status_code == 400, "the prompt fits, prompt and output together do not"
    assert_idle(small)


def test_more_than_the_pool_holds_is_preempted_and_still_right(small: RunningCluster) -> None:
    """Short answers teach worker and router that outputs are short; then eight that outgrow the pool together.

    A stop id that never comes leaves the length open, so that it has to be guessed.
    """
    prompts = [f"Write down the number {n} and then a long story about it." for n in range(8)]

    def text(prompt: str, max_tokens: int) -> tuple[str, int]:
        reply = complete(
            small, prompt=prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True, stop_token_ids=[0]
        )
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["text"], reply.json()["usage"]["completion_tokens"]

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda i: text(prompts[i % 8], 1), range(48)))
        together = list(pool.map(lambda p: text(p, 200), prompts))
    assert [count for _, count in together] == [200] * 8
    assert together[3] == text(prompts[3], 200)
    assert together[7] == text(prompts[7], 200)
    assert_idle(small)
    worker = cluster_status(small)["workers"][0]
    assert worker["preemptions_total"] > 0, worker
