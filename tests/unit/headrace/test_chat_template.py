"""Message shapes are judged before the template sees them; the sandbox holds; rendering follows transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.chat_template import ChatTemplate, check_messages
from headrace.errors import HeadraceError, InvalidRequest
from headrace.tokenizer import Tokenizer

SIMPLE = (
    "{% for m in messages %}[{{ m.role }}:{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def render(source: str, *messages: dict[str, object]) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages)


def user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (7, "messages"),
        ([1], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([user(None)], "messages[0].content"),
        ([user(5)], "messages[0].content"),
        ([user({"x": 1})], "messages[0].content"),
        ([user([])], "messages[0].content"),
        ([user(b"hi")], "messages[0].content"),
        ([user("a"), {"content": "hi"}], "messages[1].role"),
        ([{"role": 1, "content": "hi"}], "messages[0].role"),
        ([{"role": "", "content": "hi"}], "messages[0].role"),
        ([user([{"type": "text", "text": "What is this?"}, IMAGE])], "messages[0].content[1].type"),
        ([user([{"type": "surprise"}])], "messages[0].content[0].type"),
        ([user(["plain"])], "messages[0].content[0]"),
        ([user([{"type": "text"}])], "messages[0].content[0].text"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([user("a\udfff")], "messages[0].content"),
        ([user([{"type": "text", "text": "\ud800"}])], "messages[0].content[0].text"),
        ([{"role": "us\ud800er", "content": "a"}], "messages[0].role"),
    ],
)
def test_a_wrong_shape_names_its_place(messages: object, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_messages(messages)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert len(caught.value.message) < 300


def test_text_parts_are_joined_without_a_gap() -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    assert render(SIMPLE, user(parts)) == render(SIMPLE, user("Hello there")) == "[user:Hello there]>"


def test_an_assistant_turn_of_tool_calls_may_lack_text() -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": []}
    assert render(SIMPLE, turn, user("hi")) == "[assistant:][user:hi]>"
    assert turn["content"] is None


def test_late_system_messages_and_unknown_roles_are_rendered() -> None:
    late = render(SIMPLE, user("a"), {"role": "system", "content": "b"}, {"role": "martian", "content": "c"})
    assert late == "[user:a][system:b][martian:c]>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content }}",
        "{{ 'a' + 1 }}",
        "{{ 1 // 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ range(10**9) | list }}",
    ],
)
def test_what_the_template_refuses_is_the_callers_error(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template refused") as caught:
        render(source, user("hi"))
    assert caught.value.field == "messages"


def test_the_refusal_carries_the_templates_reason() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", user("hi"))


def test_environment_is_that_of_transformers() -> None:
    blocks = (
        "{% for m in messages %}\n    {% if loop.index0 == 1 %}{% break %}{% endif %}\n{{ m.content }}\n{% endfor %}"
    )
    assert render(blocks, user("a"), user("b")) == "a\n"
    assert render("{{ messages[0] | tojson }}", user("<é>")) == '{"role": "user", "content": "<é>"}'
    assert render("{{ bos_token }}{% generation %}x{% endgeneration %}", user("a")) == "<s>x"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}", user("a"))) == 10


def test_template_is_found_where_models_keep_it(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ eos_token }}"}]
    config = {"chat_template": named, "eos_token": {"content": "</s>"}, "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert ChatTemplate.load(tmp_path).render([user("a")]) == "</s>"
    (tmp_path / "chat_template.jinja").write_text("from a file", encoding="utf-8")
    assert ChatTemplate.load(tmp_path).render([user("a")]) == "from a file"


def test_a_model_without_template_refuses_chat(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        ChatTemplate.load(tmp_path).render([user("a")])
    assert caught.value.field == "messages"


def test_a_broken_template_is_a_fault_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% for %}", encoding="utf-8")
    with pytest.raises(HeadraceError, match="does not parse"):
        ChatTemplate.load(tmp_path)


def test_prompt_lengths_of_the_embedded_model(model_path: Path) -> None:
    template, tokenizer = ChatTemplate.load(model_path), Tokenizer.load(model_path)

    def length(*messages: dict[str, object]) -> int:
        return len(tokenizer.encode(template.render(messages), add_special=False))

    assert [length(user(t)) for t in ("What is the capital of France?", "Hello there", "")] == [37, 32, 30]
    assert length(user("a"), {"role": "system", "content": "b"}) > length(user("a"))
    assert length({"role": "martian", "content": "hi"}) > 30
