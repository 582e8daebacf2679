"""Prompts to token ids, off the event loop.

Rendering and tokenising a long prompt takes tens of milliseconds, which would hold up every stream. A few threads
suffice, since `tokenizers` releases the interpreter lock. Their queue is bounded by the router's cap on open streams.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from headrace.chat_template import ChatTemplate
from headrace.errors import TooLong
from headrace.tokenizer import Tokenizer
from router.admission.call import Call, ChatPrompt, TextPrompt, TokenPrompt

INLINE_CHARS = 512
"""Shorter prompts are tokenised in place: it takes less time than the two thread switches."""
SHRINK_FACTOR = 4
"""A normaliser may shorten text before it is cut into tokens; none in use does so by more than this."""


class PromptEncoder:
    """Owns the threads; `close` ends them."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, threads: int) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._threads = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="tokenise")
        longest_token = max((len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)), default=1)
        self._hopeless_bytes = tokenizer.max_context * max(longest_token, 1) * SHRINK_FACTOR

    async def token_ids(self, call: Call) -> tuple[int, ...]:
        """Raises InvalidRequest naming the part of the prompt at fault, TooLong where no tokenising can make it fit."""
        prompt = call.prompt
        if isinstance(prompt, TokenPrompt):
            return prompt.token_ids
        if isinstance(prompt, TextPrompt) and len(prompt.text) <= INLINE_CHARS:
            return self._encode(call)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._encode, call)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _encode(self, call: Call) -> tuple[int, ...]:
        if isinstance(call.prompt, ChatPrompt):
            text, add_special = self._template.render(call.prompt.messages), False
        else:
            assert isinstance(call.prompt, TextPrompt)
            text, add_special = call.prompt.text, True
        self._refuse_hopeless(text, call.prompt_field)
        return tuple(self._tokenizer.encode(text, add_special=add_special, field=call.prompt_field))

    def _refuse_hopeless(self, text: str, field: str) -> None:
        """Were every token as long as the longest, it would still not fit: not worth the seconds of tokenising."""
        if len(text) > self._hopeless_bytes:
            raise TooLong(
                f"{field} has {len(text)} characters, more than a context of {self._tokenizer.max_context} tokens "
                "could ever hold",
                field=field,
            )
