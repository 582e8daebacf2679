"""Keys: one slot per model, nothing of one model or tenant reachable as another's."""

from __future__ import annotations

from headrace.store.keys import Keys, incarnation, model_tag, name_of


def test_every_key_of_a_model_has_its_tag() -> None:
    keys = Keys("cluster", "model")
    named = [value for name, value in vars(keys).items() if name not in ("tag", "prefix")]
    families = [keys.request("q"), keys.journal("q", 1), keys.held("w"), keys.inbox("w"), keys.own("r"), keys.out("r")]
    families += [keys.wait(0, "t"), keys.fair(0), keys.account("t"), keys.idempotency("t", "k")]
    every = named + families
    assert all(key.startswith(f"hr1:{{{keys.tag}}}:") for key in every)
    assert len(set(every)) == len(every)


def test_tags_differ_by_cluster_and_model() -> None:
    tags = {model_tag(cluster, model) for cluster in ("a", "ab") for model in ("b", "bb", "")}
    assert len(tags) == 6


def test_idempotency_keys_of_two_tenants_never_meet() -> None:
    keys = Keys("cluster", "model")
    assert keys.idempotency("a:b", "c") != keys.idempotency("a", "b:c")


def test_incarnations_are_lives_of_a_name() -> None:
    one, two = incarnation("node~1/worker"), incarnation("node~1/worker")
    assert one != two
    assert name_of(one) == name_of(two) == "node~1/worker"
