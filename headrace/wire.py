"""Protobuf messages of `headrace.v1` to and from plain values, and errors to and from gRPC statuses.

Needs grpcio and protobuf; where googleapis-common-protos is installed (on servers), statuses also carry the standard
`google.rpc` details.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from headrace import errors
from headrace.chat_template import check_messages
from headrace.errors import HeadraceError, InvalidRequest
from headrace.events import Accepted, Delta, Event, Finished, PromptLogprobs
from headrace.frame import FinishReason
from headrace.logprobs import UNTOLD, TokenLogprob
from headrace.sampling import SamplingParams
from headrace.unicode import require_unicode
from headrace.v1 import inference_pb2 as pb
from headrace.wire_grammar import grammar_from_proto, grammar_to_proto

ERROR_KEY = "headrace-error"
FIELD_KEY = "headrace-field"
RETRY_KEY = "headrace-retry-after-ms"
DETAILS_KEY = "grpc-status-details-bin"
MAX_MESSAGE_CHARS = 1_000
"""A status is one short line: proxies and clients limit trailers to a few KB."""
MAX_MESSAGE_BYTES = 16 << 20
"""The largest gRPC message that server and clients accept, unless told otherwise."""

Metadata = tuple[tuple[str, str | bytes], ...]

_SAMPLING_NAMES = tuple(f.name for f in pb.SamplingParams.DESCRIPTOR.fields)
_LISTS = ("stop", "stop_token_ids")
_SCALARS = tuple(name for name in _SAMPLING_NAMES if name not in (*_LISTS, "logit_bias", "grammar"))
_REASONS = {reason: f"FINISH_REASON_{reason.name}" for reason in FinishReason}
_REASON_OF = {pb.FinishReason.Value(name): reason for reason, name in _REASONS.items()}


@dataclass(frozen=True)
class GenerateCall:
    """What a client asks of Generate; `model` "" is the only model. `sampling` is validated, the numbers after it are
    the server's to judge.
    """

    model: str
    prompt: str | tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    best_of: int | None = None
    priority: int = 0


@dataclass(frozen=True)
class ChatCall:
    """What a client asks of Chat. Messages are as OpenAI's; a role or content that is not set is left out."""

    model: str
    messages: tuple[Mapping[str, object], ...]
    sampling: SamplingParams
    n: int = 1
    best_of: int | None = None
    priority: int = 0


@dataclass(frozen=True)
class ModelInfo:
    id: str
    max_context_tokens: int


def generate_request_from_proto(message: pb.GenerateRequest) -> GenerateCall:
    """Raises InvalidRequest naming the field at fault."""
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("prompt is missing: set text or token_ids", field="prompt")
    prompt = message.text if kind == "text" else tuple(message.token_ids.ids)
    return GenerateCall(message.model, prompt, sampling_from_proto(message.sampling), **_numbers(message))


def chat_request_from_proto(message: pb.ChatRequest) -> ChatCall:
    """Raises InvalidRequest naming the field at fault in `sampling`; messages are checked where they are rendered."""
    messages = tuple({f.name: value for f, value in turn.ListFields()} for turn in message.messages)
    return ChatCall(message.model, messages, sampling_from_proto(message.sampling), **_numbers(message))


def _numbers(message: pb.GenerateRequest | pb.ChatRequest) -> dict[str, int]:
    return {name: getattr(message, name) for name in ("n", "best_of", "priority") if message.HasField(name)}


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Fields that are not set keep SamplingParams' defaults. Raises InvalidRequest naming the first out of bounds."""
    known = {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}
    return SamplingParams(
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=tuple(sorted(message.logit_bias.items())),
        grammar=grammar_from_proto(message.grammar) if message.HasField("grammar") else None,
        **known,
    ).validated()


def generate_request_to_proto(
    prompt: str | Sequence[int],
    model: str = "",
    sampling: Mapping[str, object] | None = None,
    **numbers: int | None,
) -> pb.GenerateRequest:
    """`numbers` are `n`, `best_of` and `priority`. Only what is given, and not None, is sent.

    Raises InvalidRequest for what no message can hold.
    """
    request = pb.GenerateRequest(model=model, sampling=sampling_to_proto(sampling or {}))
    _set_numbers(request, numbers)
    try:
        if isinstance(prompt, str):
            require_unicode(prompt, "prompt")
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
            request.token_ids.SetInParent()
    except (TypeError, ValueError) as fault:
        raise InvalidRequest("prompt must be a string or a sequence of token ids", field="prompt") from fault
    return request


def chat_request_to_proto(
    messages: Sequence[Mapping[str, object]],
    model: str = "",
    sampling: Mapping[str, object] | None = None,
    **numbers: int | None,
) -> pb.ChatRequest:
    """As `generate_request_to_proto`. Raises InvalidRequest for a wrong shape or a key no field exists for."""
    request = pb.ChatRequest(model=model, sampling=sampling_to_proto(sampling or {}))
    _set_numbers(request, numbers)
    for i, message in enumerate(check_messages(messages)):
        for name, value in message.items():
            if name not in ("role", "content") and value:
                field = f"messages[{i}].{name}"
                raise InvalidRequest(f"{field} cannot be sent over gRPC", field=field)
        request.messages.add(role=message["role"], content=message["content"])
    return request


def _set_numbers(request: pb.GenerateRequest | pb.ChatRequest, numbers: Mapping[str, int | None]) -> None:
    for name, value in numbers.items():
        if value is not None:
            _set(request, name, value)


def _set(message: Message, name: str, value: object) -> None:
    """Raises InvalidRequest naming the field for a value that it cannot hold."""
    try:
        if isinstance(value, bool) and message.DESCRIPTOR.fields_by_name[name].type != FieldDescriptor.TYPE_BOOL:
            raise TypeError(name)  # protobuf itself takes True for 1
        setattr(message, name, value)
    except (TypeError, ValueError) as fault:
        raise InvalidRequest(f"{name} cannot be {value!r:.80}", field=name) from fault


def sampling_to_proto(sampling: Mapping[str, object]) -> pb.SamplingParams:
    """None means not given. `stop` may be one string, `logit_bias` a mapping or pairs, `grammar` a mapping of its
    kind to what it is. Raises TypeError for an unknown name, InvalidRequest for a value that no message can hold.
    """
    message = pb.SamplingParams()
    for name, value in sampling.items():
        if name not in _SAMPLING_NAMES:
            raise TypeError(f"unknown sampling parameter {name!r}; known are {', '.join(_SAMPLING_NAMES)}")
        if value is None:
            continue
        try:
            if name in _LISTS:
                getattr(message, name).extend((value,) if isinstance(value, str | int) else value)
            elif name == "logit_bias":
                message.logit_bias.update(dict(value))  # type: ignore[call-overload]
            elif name == "grammar":
                message.grammar.CopyFrom(grammar_to_proto(value))
            else:
                _set(message, name, value)
        except (TypeError, ValueError) as fault:
            raise InvalidRequest(f"{name} cannot be {value!r:.80}", field=name) from fault
    return message


def event_to_proto(event: Event) -> pb.GenerateEvent:
    if isinstance(event, Delta):
        return pb.GenerateEvent(
            delta=pb.Delta(
                choice=event.choice,
                first_index=event.first_index,
                token_ids=event.token_ids,
                text=event.text,
                logprobs=map(_logprob_to_proto, event.logprobs),
            )
        )
    if isinstance(event, PromptLogprobs):
        told = map(_logprob_to_proto, event.logprobs)
        return pb.GenerateEvent(prompt_logprobs=pb.PromptLogprobs(token_ids=event.token_ids, logprobs=told))
    if isinstance(event, Accepted):
        return pb.GenerateEvent(accepted=pb.Accepted(request_id=event.request_id, prompt_tokens=event.prompt_tokens))
    return pb.GenerateEvent(
        finished=pb.Finished(
            choice=event.choice,
            reason=_REASONS[event.reason],
            prompt_tokens=event.prompt_tokens,
            completion_tokens=event.completion_tokens,
            detail=event.detail,
        )
    )


def event_from_proto(message: pb.GenerateEvent) -> Event | None:
    """None for an event of a newer server. A reason of a newer server reads as `failed`, its number in the detail."""
    kind = message.WhichOneof("event")
    if kind == "delta":
        delta = message.delta
        logprobs = tuple(map(_logprob_from_proto, delta.logprobs))
        return Delta(delta.choice, delta.first_index, tuple(delta.token_ids), delta.text, logprobs)
    if kind == "prompt_logprobs":
        prompt = message.prompt_logprobs
        return PromptLogprobs(tuple(prompt.token_ids), tuple(map(_logprob_from_proto, prompt.logprobs)))
    if kind == "accepted":
        return Accepted(message.accepted.request_id, message.accepted.prompt_tokens)
    if kind != "finished":
        return None
    end = message.finished
    reason = _REASON_OF.get(end.reason)
    detail = end.detail if reason else end.detail or f"ended for a reason this client does not know ({end.reason})"
    return Finished(end.choice, reason or FinishReason.FAILED, end.prompt_tokens, end.completion_tokens, detail)


def _logprob_to_proto(told: TokenLogprob) -> pb.TokenLogprob:
    if told.rank == 0:
        return pb.TokenLogprob()
    ids, logprobs = zip(*told.top, strict=True) if told.top else ((), ())
    return pb.TokenLogprob(logprob=told.logprob, rank=told.rank, top_token_ids=ids, top_logprobs=logprobs)


def _logprob_from_proto(message: pb.TokenLogprob) -> TokenLogprob:
    if not message.HasField("logprob"):
        return UNTOLD
    top = zip(message.top_token_ids, message.top_logprobs, strict=False)
    return TokenLogprob(message.logprob, message.rank, tuple(top))


@dataclass(frozen=True)
class WireStatus:
    """What `context.abort(code, message, trailing_metadata)` wants."""

    code: grpc.StatusCode
    message: str
    metadata: Metadata


def status_from_error(error: HeadraceError) -> WireStatus:
    """One short line and the metadata that rebuilds the error at the client; never a traceback or a path."""
    message = " ".join(error.message.split())[:MAX_MESSAGE_CHARS]
    code = grpc.StatusCode[error.status.grpc]
    metadata: list[tuple[str, str | bytes]] = [(ERROR_KEY, type(error).__name__)]
    if error.field is not None:
        # Metadata values are printable ASCII; a field named by a client need not be.
        metadata.append((FIELD_KEY, error.field.encode("unicode_escape").decode("ascii")[:200]))
    if error.retry_after_s is not None:
        metadata.append((RETRY_KEY, str(math.ceil(error.retry_after_s * 1000))))
    details = _standard_details(error, int(code.value[0]), message)
    if details is not None:
        metadata.append((DETAILS_KEY, details))
    return WireStatus(code, message, tuple(metadata))


def error_from_status(
    code: grpc.StatusCode, message: str, metadata: Iterable[tuple[str, str | bytes]]
) -> HeadraceError:
    """The error a server of ours meant, or the nearest one for a status from elsewhere (a proxy, the library)."""
    told = {key: value for key, value in metadata if isinstance(value, str)}
    by_name = {kind.__name__: kind for kind in errors.tree()}
    kind = by_name.get(told.get(ERROR_KEY, "")) or _BY_CODE.get(code, HeadraceError)
    retry = told.get(RETRY_KEY, "")
    return kind(message, field=told.get(FIELD_KEY), retry_after_s=int(retry) / 1000 if retry.isdecimal() else None)


_BY_CODE: dict[grpc.StatusCode, type[HeadraceError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: errors.TooLong,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.NOT_FOUND: errors.UnknownRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.ABORTED: errors.Moved,
}


def error_from_finish(event: Finished) -> HeadraceError | None:
    """The error that an ending means to a client; None for `stop` and `length`."""
    if event.reason is FinishReason.CANCELLED:
        return errors.Cancelled(event.detail or "the request was cancelled")
    if event.reason is FinishReason.DEADLINE:
        return errors.DeadlineExceeded(event.detail or "the request's deadline passed")
    if event.reason is FinishReason.FAILED:
        return errors.RequestFailed(event.detail or "the request failed")
    return None


_HAS_STANDARD_DETAILS = importlib.util.find_spec("google") is not None and (
    importlib.util.find_spec("google.rpc") is not None
)


def _standard_details(error: HeadraceError, code: int, message: str) -> bytes | None:
    """A serialised google.rpc.Status with BadRequest or RetryInfo; None where there is nothing to say."""
    if not _HAS_STANDARD_DETAILS or (error.field is None and error.retry_after_s is None):
        return None
    from google.rpc import error_details_pb2, status_pb2

    status = status_pb2.Status(code=code, message=message)
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field[:200], description=message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(math.ceil(error.retry_after_s * 1000))
        status.details.add().Pack(retry)
    packed: bytes = status.SerializeToString()
    return packed
