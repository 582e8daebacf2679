"""Renders a conversation with the model's own chat template, in a sandbox, after checking the messages' shape.

Needs jinja2. The environment (trimmed blocks, `raise_exception`, `tojson`, `strftime_now`, `{% generation %}`)
follows `transformers.apply_chat_template`, which templates are written against. Roles the template does not know, and
system messages that come late, are the template's to judge: they are rendered as it says, never dropped here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from headrace.errors import HeadraceError, InvalidRequest
from headrace.tokenizer import token_text
from headrace.unicode import require_unicode

if TYPE_CHECKING:
    from jinja2 import Template

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
MAX_ERROR_CHARS = 200


class ChatTemplate:
    """Immutable after `load`; safe to call from several threads at once."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        """`source` None: the model has no template and every conversation is refused."""
        self._template = None if source is None else _compile(source)
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, model_path: str | Path) -> ChatTemplate:
        """Reads chat_template.jinja, else tokenizer_config.json.

        Raises HeadraceError for a template that does not parse.
        """
        folder = Path(model_path)
        config_path, file_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        config: dict[str, Any] = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
        source = file_path.read_text(encoding="utf-8") if file_path.is_file() else _template_in(config)
        return cls(source, {name: token_text(config[name]) for name in _SPECIAL_TOKENS if config.get(name)})

    def render(self, messages: Sequence[Mapping[str, object]]) -> str:
        """The prompt, ending where the assistant's turn begins. Tokenise it without adding special tokens.

        Raises InvalidRequest naming the part at fault, such as `messages[2].content`.
        """
        from jinja2 import TemplateError

        checked = check_messages(messages)
        if self._template is None:
            raise InvalidRequest("this model has no chat template; send a plain prompt instead", field="messages")
        try:
            return self._template.render(messages=checked, add_generation_prompt=True, **self._special_tokens)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as fault:
            reason = str(fault)[:MAX_ERROR_CHARS]
            raise InvalidRequest(f"the chat template refused these messages: {reason}", field="messages") from fault


def check_messages(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The messages with every content as one string. Raises InvalidRequest naming the first part that is wrong."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise InvalidRequest("messages must be a list", field="messages")
    if not messages:
        raise InvalidRequest("messages must have at least one message", field="messages")
    return [_checked_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked_message(message: object, field: str) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{field} must be an object with role and content", field=field)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{field}.role must be a string such as 'user'", field=f"{field}.role")
    require_unicode(role, f"{field}.role")
    content = message.get("content")
    if content is None and role == "assistant" and "tool_calls" in message:
        content = ""
    return {**message, "content": _content_text(content, f"{field}.content")}


def _content_text(content: object, field: str) -> str:
    """Parts are joined as they are, with nothing between, so that ["Hello ", "there"] is the string "Hello there"."""
    if isinstance(content, str):
        require_unicode(content, field)
        return content
    if isinstance(content, Sequence) and not isinstance(content, bytes) and content:
        return "".join(_part_text(part, f"{field}[{j}]") for j, part in enumerate(content))
    raise InvalidRequest(f"{field} must be a string or a list of text parts", field=field)


def _part_text(part: object, field: str) -> str:
    if not isinstance(part, Mapping):
        raise InvalidRequest(f"{field} must be an object with type and text", field=field)
    if part.get("type") != "text":
        raise InvalidRequest(f"{field}.type must be 'text': this model reads text only", field=f"{field}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{field}.text must be a string", field=f"{field}.text")
    require_unicode(text, f"{field}.text")
    return text


def _template_in(config: Mapping[str, Any]) -> str | None:
    """The template in tokenizer_config.json: a string, or a list of named ones of which `default` is for plain chat."""
    entry = config.get("chat_template")
    if isinstance(entry, list):
        entry = {named["name"]: named["template"] for named in entry}.get("default")
    return entry if isinstance(entry, str) else None


def _compile(source: str) -> Template:
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Scope
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """`{% generation %}` marks the assistant's tokens for training; here its body is plain text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(source)
    except TemplateError as fault:
        raise HeadraceError(f"the model's chat template does not parse: {fault}") from fault


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Jinja's own filter escapes HTML, which would put `\\u003c` into prompts."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
