"""OpenAI's response bodies, whole and in chunks. Pure: events in, JSON text out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from headrace.events import Delta, Finished, PromptLogprobs
from router.ingress.openai_logprobs import (
    Block,
    Json,
    Scored,
    TextOffsets,
    TokenBytes,
    chat_content,
    completion_block,
    prompt_scores,
)


@dataclass(frozen=True)
class Shown:
    """What of an answer the client asked to see."""

    usage_in_stream: bool = False
    logprobs: int | None = None
    """Beside each token so many of the likeliest; None: no log probabilities."""
    prompt_logprobs: int | None = None
    """The same for the prompt, in a field of its own."""
    echo: str | None = None
    """The prompt's text, which a completion's text begins with (its log probabilities too); None: it does not."""
    output: bool = True
    """False: `max_tokens` was 0. One token is computed all the same, and neither shown nor counted."""

    @property
    def is_long(self) -> bool:
        """With log probabilities an answer of thousands of tokens takes a second to write."""
        return self.logprobs is not None or self.prompt_logprobs is not None


@dataclass
class Answer:
    """What has been delivered of a request so far."""

    prompt_tokens: int = 0
    prompt: tuple[Scored, ...] = ()
    """The prompt's tokens and how likely they were, where that was asked for and told."""
    texts: dict[int, list[str]] = field(default_factory=dict)
    scored: dict[int, list[Scored]] = field(default_factory=dict)
    ends: dict[int, Finished] = field(default_factory=dict)

    def take_prompt(self, event: PromptLogprobs) -> None:
        self.prompt = tuple(zip(event.token_ids, event.logprobs, strict=True))

    def take(self, delta: Delta) -> None:
        self.texts.setdefault(delta.choice, []).append(delta.text)
        self.scored.setdefault(delta.choice, []).extend(_scored(delta))

    def text(self, choice: int) -> str:
        return "".join(self.texts.get(choice, ()))


def _scored(delta: Delta) -> list[Scored]:
    return list(zip(delta.token_ids, delta.logprobs, strict=True)) if delta.logprobs else []


class Rendering:
    """One request's JSON. `chat` chooses between the two endpoints' shapes."""

    def __init__(
        self, tokenizer: TokenBytes, shown: Shown, *, chat: bool, request_id: str, created: int, model: str
    ) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._chat = chat
        kind = "chat.completion" if chat else "text_completion"
        self._whole: Json = {"id": request_id, "object": kind, "created": created, "model": model}
        self._chunk: Json = {**self._whole, "object": "chat.completion.chunk" if chat else kind}
        self._begun: set[int] = set()
        self._offsets: dict[int, TextOffsets] = {}

    def whole(self, answer: Answer, computed_tokens: int) -> bytes:
        """Safe to call on another thread, which it lets others run beside."""
        choices = ",".join(self._choice(index, answer, end) for index, end in sorted(answer.ends.items()))
        body = {**self._whole, "usage": self._usage(answer, computed_tokens)}
        parts = {"choices": f"[{choices}]"}
        if self._chat and self._shown.prompt_logprobs is not None:
            parts["prompt_logprobs"] = self._prompt_scores(answer)
        return _spliced(body, parts).encode()

    def opens(self, choice: int) -> bool:
        """Whether the prompt is still to be echoed to this choice, by `opening`."""
        return self._shown.echo is not None and choice not in self._begun

    def opening(self, choice: int, answer: Answer) -> str:
        """The chunk that a choice begins with where the prompt is echoed; long with log probabilities: see `whole`."""
        self._begun.add(choice)
        logprobs = None
        if self._shown.logprobs is not None:
            logprobs = self._block(answer.prompt, self._prompt_offsets())
        return self._stream_chunk(choice, self._shown.echo or "", logprobs, None)

    def delta(self, delta: Delta) -> str:
        """A chunk with new text; the first of a chat choice also carries the role. "" where there is nothing to show:
        half a character, or what may become a stop string, has no text yet.
        """
        if not self._shown.output or not (delta.text or delta.logprobs):
            return ""
        return self._stream_chunk(delta.choice, delta.text, self._logprobs(delta.choice, _scored(delta)), None)

    def end(self, end: Finished) -> str:
        return self._stream_chunk(end.choice, "", None, self._reason(end))

    def usage(self, answer: Answer, computed_tokens: int) -> str:
        """The chunk that `stream_options.include_usage` asks for: no choices, then the counts."""
        return _dump({**self._chunk, "choices": [], "usage": self._usage(answer, computed_tokens)})

    def _usage(self, answer: Answer, computed_tokens: int) -> dict[str, int]:
        """The prompt counts once, the output of every choice, also of those that only competed to be shown."""
        completion = computed_tokens if self._shown.output else 0
        return {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": answer.prompt_tokens + completion,
        }

    def _choice(self, index: int, answer: Answer, end: Finished) -> str:
        text = answer.text(index) if self._shown.output else ""
        scored = answer.scored.get(index, []) if self._shown.output else []
        choice: Json = {"index": index, "finish_reason": self._reason(end)}
        logprobs = self._logprobs(index, scored)
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text}
            return _spliced(choice, {"logprobs": _in_pieces(logprobs)})
        choice["text"] = (self._shown.echo or "") + text
        if self._shown.echo is not None and self._shown.logprobs is not None:
            logprobs = _joined(
                self._block(answer.prompt, self._prompt_offsets()), self._block(scored, self._output_offsets())
            )
        parts = {"logprobs": _in_pieces(logprobs)}
        if self._shown.prompt_logprobs is not None:
            parts["prompt_logprobs"] = self._prompt_scores(answer)
        return _spliced(choice, parts)

    def _reason(self, end: Finished) -> str:
        return end.reason.value if self._shown.output else "length"

    def _logprobs(self, choice: int, scored: list[Scored]) -> Json | Block | None:
        if self._shown.logprobs is None:
            return None
        if self._chat:
            content: Json = {"content": chat_content(self._tokenizer, scored), "refusal": None}
            return content
        if choice not in self._offsets:
            self._offsets[choice] = self._output_offsets()
        return self._block(scored, self._offsets[choice])

    def _block(self, scored: tuple[Scored, ...] | list[Scored], offsets: TextOffsets) -> Block:
        return completion_block(self._tokenizer, scored, offsets, self._shown.logprobs or 0)

    def _prompt_offsets(self) -> TextOffsets:
        return TextOffsets(self._tokenizer, text=self._shown.echo)

    def _output_offsets(self) -> TextOffsets:
        return TextOffsets(self._tokenizer, start=len(self._shown.echo or ""))

    def _prompt_scores(self, answer: Answer) -> str:
        return _list_in_pieces(prompt_scores(self._tokenizer, answer.prompt, self._shown.prompt_logprobs or 0))

    def _stream_chunk(self, index: int, text: str, logprobs: Json | Block | None, reason: str | None) -> str:
        choice: Json = {"index": index, "finish_reason": reason}
        if self._chat:
            choice["delta"] = self._delta_message(index, text)
        else:
            choice["text"] = text
        parts = {"choices": f"[{_spliced(choice, {'logprobs': _in_pieces(logprobs)})}]"}
        if self._shown.usage_in_stream:
            parts["usage"] = "null"
        return _spliced(self._chunk, parts)

    def _delta_message(self, index: int, text: str) -> dict[str, str]:
        if index not in self._begun:
            self._begun.add(index)
            return {"role": "assistant", "content": text}
        return {"content": text} if text else {}


def _joined(before: Block, after: Block) -> Block:
    """Two blocks of a completion's log probabilities, the prompt's and the output's."""
    return {name: None if values is None else values + (after[name] or []) for name, values in before.items()}


def _spliced(body: Json, parts: Mapping[str, str]) -> str:
    """`body` with further fields whose values are JSON already."""
    return _dump(body)[:-1] + "".join(f',"{name}":{text}' for name, text in parts.items()) + "}"


def _in_pieces(value: Json | Block | None) -> str:
    """As `_dump`, list item by list item: the encoder holds the interpreter lock as long as it is at one value, half a
    second for 8,000 tokens with 20 likeliest each.
    """
    if value is None:
        return "null"
    fields = (
        f'"{name}":{_list_in_pieces(items) if isinstance(items, list) else _dump(items)}'
        for name, items in value.items()
    )
    return "{" + ",".join(fields) + "}"


def _list_in_pieces(items: Iterable[object]) -> str:
    return "[" + ",".join(map(_dump, items)) + "]"


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
