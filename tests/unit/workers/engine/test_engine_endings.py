"""How a choice ends: stop tokens, stop strings, limits, and what a request brings from an earlier holder."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from headrace.frame import FinishReason, Part
from headrace.request import BoundRequest
from headrace.tokenizer import Tokenizer
from tests.fixtures.scripted_runner import EOS, ScriptedRunner, Ticks, bind, make_config, make_request, solo_output
from workers.engine import Engine
from workers.model.interface import Sampled, SequenceSlice

WORDS = ["<eos>", "the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", ".", "!"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A token is a word with a space before it; id 0 ends."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {word if word == "<eos>" else f"Ġ{word}": i for i, word in enumerate(WORDS)}
    vocab |= {character: len(vocab) + i for i, character in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, vocab_size=len(vocab), eos_token_ids=(EOS,), max_context=64)


def saying(*words: str) -> ScriptedRunner:
    """A model that says these words, whatever it is asked."""
    script = [WORDS.index(word) for word in words]

    def disturb(_pass: int, piece: SequenceSlice, _sampled: Sampled) -> Sampled:
        token = script[piece.sample.token_index]
        return Sampled(token) if token not in piece.sample.banned_token_ids else Sampled(WORDS.index("!"))

    return ScriptedRunner(64, 4, disturb=disturb, max_context=64)


def answer(
    runner: ScriptedRunner, bound: BoundRequest, tokenizer: Tokenizer | None = None, **config: object
) -> list[Part]:
    engine = Engine(runner, make_config(**config), tokenizer, Ticks())
    engine.add(bound)
    parts: list[Part] = []
    for _ in range(100):
        frame = engine.step()
        if frame is None:
            engine.check()
            return parts
        parts.extend(frame.parts)
    raise AssertionError("it never ended")


def words_of(parts: list[Part]) -> list[str]:
    return [WORDS[token] for part in parts for token in part.token_ids]


def test_the_stop_token_is_the_last_token_and_counts() -> None:
    parts = answer(saying("the", "fox", "<eos>"), bind(make_request("r", 3, 10)))
    assert words_of(parts) == ["the", "fox", "<eos>"]
    assert [part.first_index for part in parts] == [0, 1, 2]
    assert [part.finish for part in parts] == [None, None, FinishReason.STOP]


def test_stop_token_ids_end_it_too() -> None:
    parts = answer(saying("the", "fox", "jumps"), bind(make_request("r", 3, 10, stop_token_ids=(WORDS.index("fox"),))))
    assert words_of(parts) == ["the", "fox"]
    assert parts[-1].finish is FinishReason.STOP


def test_ignore_eos_goes_on_to_the_limit() -> None:
    parts = answer(saying("the", "<eos>", "fox", "<eos>"), bind(make_request("r", 3, 4, ignore_eos=True)))
    assert words_of(parts) == ["the", "<eos>", "fox", "<eos>"]
    assert parts[-1].finish is FinishReason.LENGTH


def test_a_stop_on_the_last_allowed_token_is_a_stop() -> None:
    parts = answer(saying("the", "<eos>"), bind(make_request("r", 3, 2)))
    assert parts[-1].finish is FinishReason.STOP


def test_below_min_tokens_the_sampler_is_told_which_ids_may_not_come() -> None:
    runner = saying("<eos>", "fox", "<eos>", "the")
    fox = WORDS.index("fox")
    parts = answer(runner, bind(make_request("r", 3, 10, min_tokens=2, stop_token_ids=(fox,))))
    assert words_of(parts) == ["!", "!", "<eos>"]
    specs = [each[0].sample for each in runner.passes]
    assert [spec.banned_token_ids for spec in specs] == [(EOS, fox), (EOS, fox), ()]
    assert [spec.token_index for spec in specs] == [0, 1, 2]


def test_below_min_tokens_an_ending_token_ends_nothing_even_from_a_sampler_that_ignores_the_ban() -> None:
    runner = ScriptedRunner(64, 4, disturb=lambda _pass, _piece, _sampled: Sampled(EOS))
    parts = answer(runner, bind(make_request("r", 3, 10, min_tokens=2)))
    assert words_of(parts) == ["<eos>"] * 3
    assert parts[-1].finish is FinishReason.STOP


def test_under_ignore_eos_eos_is_never_banned() -> None:
    runner = saying("<eos>", "fox")
    answer(runner, bind(make_request("r", 3, 2, min_tokens=1, ignore_eos=True)))
    assert runner.passes[0][0].sample.banned_token_ids == ()


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "expected_tokens"), [(63, 1, 1), (63, 5, 1), (60, 50, 4), (64, 3, 1)]
)
def test_the_end_of_the_context_ends_it_with_length(prompt_tokens: int, max_tokens: int, expected_tokens: int) -> None:
    runner = ScriptedRunner(64, 4, max_context=64)
    parts = answer(runner, bind(make_request("r", prompt_tokens, max_tokens, ignore_eos=True)))
    assert sum(len(part.token_ids) for part in parts) == expected_tokens
    assert parts[-1].finish is FinishReason.LENGTH


def test_a_smaller_configured_context_counts() -> None:
    parts = answer(ScriptedRunner(64, 4), bind(make_request("r", 6, 50, ignore_eos=True)), max_context=10)
    assert sum(len(part.token_ids) for part in parts) == 4


def test_a_stop_string_over_several_tokens_ends_it_where_it_completes(tokenizer: Tokenizer) -> None:
    parts = answer(
        saying("the", "quick", "brown", "fox", "jumps"),
        bind(make_request("r", 3, 10, stop=("quick brown",))),
        tokenizer,
    )
    assert words_of(parts) == ["the", "quick", "brown"]
    assert parts[-1].finish is FinishReason.STOP


def test_a_near_miss_of_a_stop_string_goes_on(tokenizer: Tokenizer) -> None:
    parts = answer(saying("the", "quick", "fox", "."), bind(make_request("r", 3, 4, stop=("quick brown",))), tokenizer)
    assert words_of(parts) == ["the", "quick", "fox", "."]
    assert parts[-1].finish is FinishReason.LENGTH


def test_a_stop_string_that_began_in_the_journal_completes_after_it(tokenizer: Tokenizer) -> None:
    journal = (tuple(WORDS.index(word) for word in ("the", "quick")),)
    bound = bind(make_request("r", 3, 10, stop=("quick brown",)), epoch=2, journal=journal)
    parts = answer(saying("the", "quick", "brown", "fox"), bound, tokenizer)
    assert words_of(parts) == ["brown"]
    assert (parts[0].first_index, parts[0].epoch, parts[0].finish) == (2, 2, FinishReason.STOP)


@pytest.mark.parametrize(
    ("journal", "fields", "finish"),
    [
        (("the", "<eos>"), {}, FinishReason.STOP),
        (("the", "fox"), {"stop": (" fox",)}, FinishReason.STOP),
        (("the", "fox", "jumps"), {}, FinishReason.LENGTH),
    ],
)
def test_a_journal_that_already_ended_only_gets_its_end(
    journal: tuple[str, ...], fields: dict[str, object], finish: FinishReason, tokenizer: Tokenizer
) -> None:
    runner = saying()
    ids = (tuple(WORDS.index(word) for word in journal),)
    parts = answer(runner, bind(make_request("r", 3, 3, **fields), journal=ids), tokenizer)
    assert [(part.first_index, part.token_ids, part.finish) for part in parts] == [(len(journal), (), finish)]
    assert runner.passes == []


def test_the_same_binding_again_changes_nothing_and_a_newer_one_replaces_it() -> None:
    runner = ScriptedRunner(64, 4)
    engine = Engine(runner, make_config(), None, Ticks())
    request = make_request("r", 4, 6)
    expected, _ = solo_output(request)
    engine.add(bind(request))
    engine.step()
    engine.add(bind(request))
    assert engine.step().parts[0].first_index == 1
    engine.add(bind(request, epoch=2, journal=(expected[:1],)))
    part = engine.step().parts[0]
    assert (part.epoch, part.first_index, part.token_ids) == (2, 1, expected[1:2])
    assert engine.load().running == 1
    engine.check()


def test_forget_drops_without_a_word_and_only_the_binding_it_names() -> None:
    runner = ScriptedRunner(64, 4)
    engine = Engine(runner, make_config(), None, Ticks())
    engine.add(bind(make_request("r", 4, 20, ignore_eos=True), epoch=2))
    engine.step()
    engine.forget("r", 1)
    assert len(engine.step().parts) == 1
    engine.forget("r")
    frame = engine.step()
    assert (frame.parts, frame.load.held_blocks, frame.load.running) == ((), 0, 0)


@pytest.mark.parametrize(
    ("bound", "sentence"),
    [
        (bind(make_request("r", 70, 1)), "the prompt has 70 tokens; the context of this worker is 64"),
        (bind(make_request("r", 3, 1, stop=("x",))), "stop strings need a tokenizer, and this worker has none"),
        (bind(make_request("r", 3, 1), journal=((10_000,),)), "a token id lies outside the vocabulary of 61"),
        (bind(make_request("r", 0, 1)), "the prompt has no tokens"),
    ],
)
def test_what_no_worker_should_have_been_sent_fails_with_a_sentence(bound: BoundRequest, sentence: str) -> None:
    runner = ScriptedRunner(64, 4, max_context=64)
    parts = answer(runner, bound)
    assert [(part.finish, part.detail) for part in parts] == [(FinishReason.FAILED, sentence)]
    assert runner.passes == []
