"""One choice while it is generated: its tokens, and the rules that say when it ends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headrace.frame import FinishReason, Part
from headrace.logprobs import NO_LOGPROB, TokenLogprob
from headrace.ranking import measured_logprobs
from headrace.request import BoundRequest
from headrace.text_stream import TextStream
from workers.model.interface import ModelShape, SampleSpec, ScoreSpec, SequenceSlice
from workers.sampling.grammar import GrammarPosition
from workers.scheduler.sequence import Sequence, SequenceKey, turn_of
from workers.scheduler.state import Work

if TYPE_CHECKING:
    from headrace.tokenizer import Tokenizer


@dataclass(frozen=True)
class Bounds:
    """What every choice on this worker shares."""

    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def bounds_of(shape: ModelShape, max_context: int | None) -> Bounds:
    """The model's own bounds, its context cut to the configured one."""
    context = min(shape.max_context, max_context or shape.max_context)
    return Bounds(context, shape.vocab_size, shape.eos_token_ids)


class Generation:
    """Tokens that an earlier holder has journaled are known tokens: their KV is computed again, they are not emitted
    again, and everything that decides the end (counts, stop tokens, stop strings) has seen them.
    """

    def __init__(
        self,
        bound: BoundRequest,
        choice: int,
        rank: int,
        bounds: Bounds,
        tokenizer: Tokenizer | None,
        now: float,
        grammar: GrammarPosition | None = None,
    ) -> None:
        request = bound.request
        params = replace(request.sampling, logprobs=measured_logprobs(request))
        journal = bound.journal[choice] if choice < len(bound.journal) else ()
        self.bound = bound
        self.choice = choice
        self.params = params
        self.tokens = list(request.prompt_token_ids)
        self._sample_key = object()
        self._seed = params.seed if params.seed is not None else 0
        self._eos = () if params.ignore_eos else bounds.eos_token_ids
        self._stop_ids = frozenset(params.stop_token_ids) | frozenset(self._eos)
        self._grammar = grammar
        self._banned_always = bounds.eos_token_ids if grammar is not None and params.ignore_eos else ()
        """Elsewhere an EOS that ends nothing is a token like any other; in a grammar it could only be the end."""
        self._banned_early = tuple(sorted({*self._stop_ids, *self._banned_always})) if params.min_tokens else ()
        self._text = TextStream(tokenizer, params) if params.stop and tokenizer is not None else None
        self._max_context = bounds.max_context
        self._logprobs: list[TokenLogprob] = []
        """Of the output tokens not yet emitted, where asked for."""
        self._scores: list[TokenLogprob] | None = None
        """Of the prompt tokens so far; None where they are not asked for or an earlier holder has told them."""
        if params.prompt_logprobs is not None and choice == 0 and not bound.prompt_is_scored:
            self._scores = [TokenLogprob(NO_LOGPROB, 0)]
        self.emitted = len(journal)
        self.sequence = Sequence(
            key=SequenceKey(request.id, choice),
            rank=rank,
            band=request.band,
            prompt_tokens=len(self.tokens),
            max_tokens=self._most_output_tokens(),
            runs_to_the_end=not self._stop_ids and not params.stop and grammar is None,
            known=len(self.tokens),
            turn_s=turn_of(now, request.band),
            advanced_s=now,
        )
        self.finish: FinishReason | None = None
        self._fresh_from = 0
        """Positions from here on have never been computed here."""
        for token_id in journal:
            if self.finish is None:
                self.accept(token_id)

    def _most_output_tokens(self) -> int:
        """At least 1: a prompt that fills the context still gives the token after it."""
        room = max(1, self._max_context - len(self.tokens))
        return room if self.params.max_tokens is None else min(self.params.max_tokens, room)

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.sequence.prompt_tokens

    def accept(self, token_id: int, logprob: TokenLogprob | None = None) -> None:
        """Takes the next output token and sets `finish` if it ends the choice. A stop comes before a limit reached by
        the same token.
        """
        armed = self.output_tokens >= self.params.min_tokens
        self.tokens.append(token_id)
        if logprob is not None:
            self._logprobs.append(logprob)
        self.sequence.known += 1
        self.sequence.preempted_in_a_row = 0
        if self._text is not None:
            self._text.push((token_id,))
        if self._grammar is not None:
            self._grammar.accept(token_id)
        if (armed and token_id in self._stop_ids) or (self._text is not None and self._text.stopped):
            self.finish = FinishReason.STOP
        elif self._grammar is not None and self._grammar.complete:
            self.finish = FinishReason.STOP  # also below `min_tokens`: nothing could follow
        elif self.output_tokens >= self.sequence.max_tokens:
            self.finish = FinishReason.LENGTH

    @property
    def grammar_fault(self) -> str:
        """Why its grammar lets nothing through any more; "" while it does, or there is none."""
        return "" if self._grammar is None else self._grammar.fault

    @property
    def scores_prompt(self) -> bool:
        """Every row of the prompt has to be computed here: its logits are asked for."""
        return self._scores is not None

    def take_scores(self, start: int, scores: tuple[TokenLogprob, ...]) -> None:
        """Log probabilities of the prompt tokens from position start + 1 on; what is known already is not taken twice
        (a preempted prompt is computed again).
        """
        if self._scores is not None and scores:
            self._scores.extend(scores[len(self._scores) - start - 1 :])

    def found_computed(self, position: int) -> None:
        """The KV up to `position` is there already: nothing of it is computed here."""
        self.sequence.computed = position
        self._fresh_from = max(self._fresh_from, min(position, self.sequence.prompt_tokens))

    def computed_to(self, position: int, now: float) -> int:
        """KV is written up to `position`. Returns how many prompt tokens that computed for the first time."""
        self.sequence.computed = position
        self.sequence.advanced_s = now
        fresh = min(position, self.sequence.prompt_tokens) - self._fresh_from
        self._fresh_from = max(self._fresh_from, self._fresh_from + fresh)
        return max(0, fresh)

    def slice_for(self, work: Work, block_ids: tuple[int, ...]) -> SequenceSlice:
        """The rows of one planned piece of work; a sample is asked for only where they reach the end of the known
        tokens.
        """
        end = work.start + work.count
        sample = self._sample_spec() if end == len(self.tokens) else None
        return SequenceSlice(
            tuple(self.tokens[work.start : end]), work.start, block_ids, sample, self._score_spec(work.start, end)
        )

    def _score_spec(self, start: int, end: int) -> ScoreSpec | None:
        if self._scores is None or start + 1 >= self.sequence.prompt_tokens or self.params.prompt_logprobs is None:
            return None
        targets = self.tokens[start + 1 : min(end + 1, self.sequence.prompt_tokens)]
        return ScoreSpec(tuple(targets), self.params.prompt_logprobs)

    def _sample_spec(self) -> SampleSpec:
        index = self.output_tokens
        banned = self._banned_early if index < self.params.min_tokens else self._banned_always
        return SampleSpec(
            self.params,
            self._seed,
            self.choice,
            index,
            banned,
            self._grammar,
            key=self._sample_key,
            tokens=self.tokens,
            prompt_tokens=self.sequence.prompt_tokens,
        )

    def part(self, finish: FinishReason | None = None, detail: str = "") -> Part:
        """Everything not yet emitted, as a part; after it, it is."""
        first = self.emitted
        fresh = tuple(self.tokens[self.sequence.prompt_tokens + first :])
        self.emitted += len(fresh)
        logprobs, self._logprobs = tuple(self._logprobs), []
        scores: tuple[TokenLogprob, ...] = ()
        if fresh and self._scores is not None:
            scores, self._scores = tuple(self._scores), None
        return Part(
            self.bound.request.id,
            self.choice,
            self.bound.epoch,
            first,
            fresh,
            finish or self.finish,
            detail,
            logprobs,
            scores,
        )


def objection_to(bound: BoundRequest, bounds: Bounds, tokenizer: Tokenizer | None) -> str:
    """Why this worker cannot run the request at all, "" if it can. Admission has checked the same; this is the second
    line.
    """
    request = bound.request
    tokens = (*request.prompt_token_ids, *(token for journal in bound.journal for token in journal))
    if not request.prompt_token_ids:
        return "the prompt has no tokens"
    if len(request.prompt_token_ids) > bounds.max_context:
        return (
            f"the prompt has {len(request.prompt_token_ids)} tokens; the context of this worker is {bounds.max_context}"
        )
    if min(tokens) < 0 or max(tokens) >= bounds.vocab_size:
        return f"a token id lies outside the vocabulary of {bounds.vocab_size}"
    if request.sampling.grammar is not None and tokenizer is None:
        return "a grammar needs a tokenizer, and this worker has none"
    if request.sampling.stop and tokenizer is None:
        return "stop strings need a tokenizer, and this worker has none"
    return ""
