"""OpenAI's response bodies, whole and in chunks. Pure: events in, JSON text out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.events import Finished


@dataclass
class Answer:
    """What has been delivered of a request so far."""

    prompt_tokens: int
    texts: dict[int, list[str]] = field(default_factory=dict)
    ends: dict[int, Finished] = field(default_factory=dict)

    def usage(self) -> dict[str, int]:
        completion = sum(end.completion_tokens for end in self.ends.values())
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
        }

    def text(self, choice: int) -> str:
        return "".join(self.texts.get(choice, ()))


class Rendering:
    """One request's JSON. `chat` chooses between the two endpoints' shapes."""

    def __init__(self, *, chat: bool, request_id: str, created: int, model: str, usage_in_stream: bool) -> None:
        self._chat = chat
        kind = "chat.completion" if chat else "text_completion"
        self._whole = {"id": request_id, "object": kind, "created": created, "model": model}
        self._chunk = {**self._whole, "object": "chat.completion.chunk" if chat else kind}
        self._usage_in_stream = usage_in_stream
        self._begun: set[int] = set()

    def whole(self, answer: Answer) -> bytes:
        choices = [self._choice(index, answer.text(index), end) for index, end in sorted(answer.ends.items())]
        return _dump({**self._whole, "choices": choices, "usage": answer.usage()}).encode()

    def delta(self, choice: int, text: str) -> str:
        """A chunk with new text; the first of a chat choice also carries the role."""
        return self._stream_chunk(choice, text, None)

    def end(self, end: Finished) -> str:
        return self._stream_chunk(end.choice, "", end.reason.value)

    def usage(self, answer: Answer) -> str:
        """The chunk that `stream_options.include_usage` asks for: no choices, then the counts."""
        return _dump({**self._chunk, "choices": [], "usage": answer.usage()})

    def _choice(self, index: int, text: str, end: Finished) -> dict[str, object]:
        reason = end.reason.value
        if self._chat:
            message = {"role": "assistant", "content": text}
            return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

    def _stream_chunk(self, index: int, text: str, reason: str | None) -> str:
        choice: dict[str, object] = {"index": index, "logprobs": None, "finish_reason": reason}
        if self._chat:
            choice["delta"] = self._delta_message(index, text)
        else:
            choice["text"] = text
        chunk: dict[str, object] = {**self._chunk, "choices": [choice]}
        if self._usage_in_stream:
            chunk["usage"] = None
        return _dump(chunk)

    def _delta_message(self, index: int, text: str) -> dict[str, str]:
        if index not in self._begun:
            self._begun.add(index)
            return {"role": "assistant", "content": text}
        return {"content": text} if text else {}


def _dump(value: Mapping[str, object]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
