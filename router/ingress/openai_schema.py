"""OpenAI's request bodies, parsed strictly, and turned into the router's own call.

Three kinds of field: those that do something here (declared below), those that change nothing about the answer and are
accepted (`HARMLESS`), and those that would change it but do not exist yet (`UNSUPPORTED`), accepted only at the value
that means "off". Anything else is refused by name: an option that is silently dropped is a wrong answer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.errors import InvalidRequest
from headrace.sampling import MAX_TOP_LOGPROBS, SamplingParams
from router.admission.call import Call, ChatPrompt, Prompt
from router.ingress.openai_grammar import GRAMMAR_FIELDS, grammar_of
from router.ingress.openai_render import Shown
from router.ingress.openai_unread import refusal_of_unread
from router.ingress.openai_values import biases_of, prompt_of, stops_of, token_ids_of

HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "verbosity",
    }
)

UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "prompt_embeds": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "bad_words": ([],),
}
"""Field → values that mean "off"; null always does."""

MAX_MESSAGES = 4096
MAX_REASON_CHARS = 200

_Value = TypeVar("_Value")
_Parsed = TypeVar("_Parsed", bound="_Body")


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted and without effect: nothing is padded here."""


class _Body(BaseModel):
    """What both endpoints share. Names are OpenAI's, then vLLM's."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: Any = None
    """A string or a list of strings. Fields of several shapes are checked by hand: the message then names one place."""
    top_k: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Any] | None = None
    include_stop_str_in_output: bool | None = None
    n: int | None = None
    best_of: int | None = None
    priority: int | None = None
    """Band of the queue, 0 the most urgent; vLLM's field, with bounds."""
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Any = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    """vLLM's: the log probabilities of the prompt's tokens, in a field of their own."""

    response_format: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None

    def _sampling(self, max_tokens: int | None) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=_or(self.min_tokens, 0),
            temperature=_or(self.temperature, 1.0),
            top_p=_or(self.top_p, 1.0),
            # vLLM writes "no limit" as -1, we as 0; both are taken.
            top_k=0 if self.top_k in (None, -1) else _or(self.top_k, 0),
            seed=self.seed,
            stop=stops_of(self.stop),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            stop_token_ids=token_ids_of(self.stop_token_ids or [], "stop_token_ids"),
            ignore_eos=bool(self.ignore_eos),
            min_p=_or(self.min_p, 0.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            logit_bias=biases_of(self.logit_bias),
            logprobs=self.wanted_logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )

    @property
    @abstractmethod
    def wanted_logprobs(self) -> int | None:
        """Beside each output token so many of the likeliest; None: no log probabilities."""

    def _shared_call(self, prompt: Prompt, max_tokens: int | None, tenant: str, client_request_id: str) -> Call:
        grammar, grammar_field = grammar_of({name: getattr(self, name) for name in GRAMMAR_FIELDS}) or (None, "grammar")
        return Call(
            model=_named(self.model),
            prompt=prompt,
            sampling=replace(self._sampling(max_tokens), grammar=grammar).validated(),
            grammar_field=grammar_field,
            tenant=tenant,
            client_request_id=client_request_id,
            n=_or(self.n, 1),
            best_of=self.best_of,
            priority=_or(self.priority, 0),
        )

    @property
    def wants_usage_in_stream(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check_options(self) -> None:
        """Raises InvalidRequest naming the first field that is unknown, or set and not supported."""
        for name, value in (self.model_extra or {}).items():
            if name in HARMLESS or value is None:
                continue
            if name not in UNSUPPORTED:
                raise InvalidRequest(f"unknown field {name[:64]!r}", field=name[:64])
            if not any(type(value) is type(off) and value == off for off in UNSUPPORTED[name]):
                raise InvalidRequest(f"{name} is not supported yet", field=name)
        if self.prompt_logprobs is not None and self.stream:
            # As vLLM: no chunk has a place for them. `echo` has, and gRPC too.
            raise InvalidRequest("prompt_logprobs cannot be streamed", field="prompt_logprobs")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", field="stream_options")


class ChatBody(_Body):
    messages: Annotated[list[Any], Field(max_length=MAX_MESSAGES)]
    """Their shape is checked where they are rendered, by one code for every protocol."""
    max_completion_tokens: int | None = None
    logprobs: bool | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        return _or(self.top_logprobs, 0) if self.logprobs else None

    @property
    def echoes(self) -> bool:
        return False

    def shown(self, _: str | None) -> Shown:
        return Shown(self.wants_usage_in_stream, self.wanted_logprobs, self.prompt_logprobs)

    def call(self, tenant: str, client_request_id: str) -> Call:
        """Raises InvalidRequest."""
        self.check_options()
        modern = self.max_completion_tokens
        if modern is not None and self.max_tokens not in (None, modern):
            raise InvalidRequest(
                "max_tokens and max_completion_tokens say different things; send one", field="max_completion_tokens"
            )
        if self.best_of not in (None, 1):
            raise InvalidRequest("best_of is an option of completions, not of chat", field="best_of")
        self._check_top_logprobs()
        max_tokens = self.max_tokens if modern is None else modern
        call = self._shared_call(ChatPrompt(tuple(self.messages)), max_tokens, tenant, client_request_id)
        max_tokens_field = "max_tokens" if modern is None else "max_completion_tokens"
        return replace(call, prompt_field="messages", max_tokens_field=max_tokens_field)

    def _check_top_logprobs(self) -> None:
        if self.top_logprobs is None:
            return
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
        if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise InvalidRequest(f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}", field="top_logprobs")


class CompletionBody(_Body):
    prompt: Any
    """A string, a list of token ids, or a list of one of these."""
    logprobs: int | None = None
    echo: bool | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def only_scores(self) -> bool:
        """The prompt is to be echoed and nothing to be written, as OpenAI's clients ask for a text's likelihood."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    def shown(self, prompt_text: str | None) -> Shown:
        """`prompt_text` is to be echoed; None: nothing is."""
        return Shown(
            self.wants_usage_in_stream,
            self.logprobs,
            self.prompt_logprobs,
            echo=prompt_text,
            output=not self.only_scores,
        )

    def _sampling(self, max_tokens: int | None) -> SamplingParams:
        """An echo shows the prompt's log probabilities with the output's. An engine always computes a token: where none
        is wanted, one is, and the rendering leaves it out.
        """
        sampling = super()._sampling(1 if self.only_scores else max_tokens)
        if not self.echo or self.logprobs is None:
            return sampling
        return replace(sampling, prompt_logprobs=max(self.logprobs, _or(self.prompt_logprobs, 0)))

    def call(self, tenant: str, client_request_id: str) -> Call:
        """Raises InvalidRequest."""
        self.check_options()
        if self.top_logprobs:
            raise InvalidRequest(
                "top_logprobs is an option of chat; completions take a number as logprobs", field="top_logprobs"
            )
        if self.stream and self.best_of is not None and self.best_of != _or(self.n, 1):
            # As OpenAI: which choices are the likeliest is known only when all have ended.
            raise InvalidRequest("best_of above n cannot be streamed", field="best_of")
        return self._shared_call(prompt_of(self.prompt), self.max_tokens, tenant, client_request_id)


def parse_body(kind: type[_Parsed], raw: bytes) -> _Parsed:
    """Raises InvalidRequest for anything but a JSON object of this shape; the message never repeats the input."""
    if not raw.strip():
        raise InvalidRequest("the body is empty: send a JSON object")
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            raise refusal_of_unread(raw) from None
        field = _path(first["loc"])
        if not field:
            raise InvalidRequest("the body must be a JSON object") from None
        what = "is required" if first["type"] == "missing" else first["msg"][:MAX_REASON_CHARS].lower()
        raise InvalidRequest(f"{field}: {what}", field=field) from None


def _path(location: tuple[int | str, ...]) -> str:
    """`("stream_options", "x", 2)` → `stream_options.x[2]`."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            path += f".{step[:64]}" if path else step[:64]
    return path


def _named(model: str) -> str:
    if not model:
        raise InvalidRequest("model must not be empty", field="model")
    return model


def _or(value: _Value | None, default: _Value) -> _Value:
    return default if value is None else value
