"""Grammars before any model: bounds that need no compile, what the library makes of each kind, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InvalidRequest
from headrace.grammar import (
    MAX_CHOICES,
    MAX_NESTING,
    GrammarCompiler,
    GrammarFault,
    check_bounds,
    deepest_nesting,
    digest_of,
)
from headrace.sampling import Grammar, GrammarKind
from headrace.tokenizer import Tokenizer

NASTY = ('a"b\\c\n/d', "😀é\x7f", "x", "xy", "}|{%json", "\u2028", "<|im_end|>", "start: /a/", "[0-9]+", " ")


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer.load(model_path)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


def schema(value: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def takes(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    """Whether the grammar lets the whole text through and may end after it."""
    matcher = compiler.compile(grammar).deep_copy()
    ids = tokenizer.encode(text, add_special=False) if "<|" not in text else spelled(tokenizer, text)
    return all(matcher.consume_token(i) for i in ids) and bool(matcher.is_accepting())


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """Letter by letter, so that the name of a special token stays text."""
    return [i for letter in text for i in tokenizer.encode(letter, add_special=False)]


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar(GrammarKind.JSON_SCHEMA, "{"), "not valid JSON"),
        (Grammar(GrammarKind.JSON_SCHEMA, "3"), "must be a JSON schema"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"minimum": NaN}'), "NaN is not a JSON value"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"not":' * 100 + "{}" + "}" * 100), "deep"),
        (Grammar(GrammarKind.JSON_SCHEMA, "[" * 30_000), "deep"),
        (Grammar(GrammarKind.REGEX, "(" * 65 + ")" * 65), "deep"),
        (Grammar(GrammarKind.REGEX, "  "), "is empty"),
        (Grammar(GrammarKind.REGEX, "a\0b"), "NUL"),
        (Grammar(GrammarKind.EBNF, ""), "is empty"),
        (Grammar(GrammarKind.CHOICE, "[]"), f"from 1 to {MAX_CHOICES}"),
        (Grammar(GrammarKind.CHOICE, '["a", 1]'), "a list of strings"),
        (Grammar(GrammarKind.CHOICE, "[" * 30_000), "a list of strings"),
        (Grammar(GrammarKind.CHOICE, json.dumps(["a"] * (MAX_CHOICES + 1))), f"from 1 to {MAX_CHOICES}"),
    ],
)
def test_bounds_are_checked_without_the_library_and_name_the_field(grammar: Grammar, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refusal:
        check_bounds(grammar, "guided_json")
    assert refusal.value.field == "guided_json"


def test_nesting_counts_the_deepest_place() -> None:
    assert deepest_nesting('{"a": [[{}]], "b": {}}') == 4
    assert deepest_nesting("))((") == 2
    check_bounds(Grammar(GrammarKind.REGEX, "(" * MAX_NESTING + "a" + ")" * MAX_NESTING))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"type": "strnig"}, "strnig"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"enum": []}, "[Uu]nsatisfiable"),
        (False, "[Uu]nsatisfiable"),
        ({"$ref": "#"}, "no text at all"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"x-guidance": {"lenient": True}, "contains": {}}, "contains"),
        ({"x-guidance": {"coerce_one_of": True}, "oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
        ({"type": "string", "format": "no-such"}, "no-such"),
    ],
)
def test_a_schema_that_cannot_be_carried_out_is_refused_with_the_reason(
    compiler: GrammarCompiler, value: object, reason: str
) -> None:
    with pytest.raises(GrammarFault, match=reason) as refusal:
        compiler.compile(schema(value))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.REGEX, "("),
        (GrammarKind.EBNF, "start: missing"),
        (GrammarKind.EBNF, "neither Lark nor GBNF"),
        (GrammarKind.EBNF, "start: /(/"),
    ],
)
def test_rules_that_are_none_are_refused(compiler: GrammarCompiler, kind: GrammarKind, text: str) -> None:
    with pytest.raises(GrammarFault):
        compiler.compile(Grammar(kind, text))


@pytest.mark.parametrize(
    ("grammar", "inside", "outside"),
    [
        (schema({"type": "object"}), ('{"a": [1, null]}', "{}"), ("[]", '{"a"', '{"a": 1} x')),
        (schema(True), ("1", '"x"', "[[]]"), ("x", "[1")),
        (schema({"enum": ["😀", 'é"x']}), ('"😀"', '"é\\"x"'), ('"😀😀"', '"é"')),
        (schema({"type": "array", "items": {"maxLength": 4, "type": "string"}, "minItems": 2, "maxItems": 2}),
         ('["ab","abcd"]',), ('["ab"]', '["a","b","c"]', '["abcde","a"]')),
        (Grammar(GrammarKind.REGEX, r"[0-9]{3}-é+"), ("123-é", "000-ééé"), ("12-é", "123-")),
        (Grammar(GrammarKind.EBNF, 'start: "(" start ")" | "x"'), ("((x))", "x"), ("((x)", "()")),
        (Grammar(GrammarKind.EBNF, 'root ::= "a" digits\ndigits ::= [0-9]+'), ("a7", "a123"), ("a", "7")),
    ],
)  # fmt: skip
def test_each_kind_lets_its_language_through_and_nothing_else(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    grammar: Grammar,
    inside: tuple[str, ...],
    outside: tuple[str, ...],
) -> None:
    assert [text for text in inside if not takes(compiler, tokenizer, grammar, text)] == []
    assert [text for text in outside if takes(compiler, tokenizer, grammar, text)] == []


def test_choices_are_taken_exactly_whatever_they_contain(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = Grammar(GrammarKind.CHOICE, json.dumps(NASTY))
    assert [text for text in NASTY if not takes(compiler, tokenizer, grammar, text)] == []
    assert not any(takes(compiler, tokenizer, grammar, text) for text in ("", "a", "xyx", "7", "a\\nb", "😀"))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Z")), max_size=8), min_size=1))
def test_any_choices_are_taken_exactly(compiler: GrammarCompiler, tokenizer: Tokenizer, choices: list[str]) -> None:
    grammar = Grammar(GrammarKind.CHOICE, json.dumps(choices))
    for text in choices:
        assert takes(compiler, tokenizer, grammar, text)
        for other in (text + "x", text[1:], text[::-1], text.lower()):
            assert takes(compiler, tokenizer, grammar, other) == (other in choices)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(GrammarKind.CHOICE, json.dumps([f"choice {i} of many" for i in range(3_000)])),
        schema({"type": "object", "properties": {f"key{i}": {"pattern": f"{i}$"} for i in range(900)}}),
    ],
)
def test_thousands_of_alternatives_are_no_trouble_at_run_time(
    compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar
) -> None:
    text = "choice 2999 of many" if grammar.kind is GrammarKind.CHOICE else '{"key7":"a7","key899":"899"}'
    assert takes(compiler, tokenizer, grammar, text)


def test_special_tokens_are_never_text(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """`<|im_end|>` as a choice means its letters; the control token of that name stays shut out but where it ends."""
    matcher = compiler.compile(Grammar(GrammarKind.REGEX, r"(.|\n)*x"))
    mask = matcher.compute_bitmask()
    assert [i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i) and mask[i // 8] >> i % 8 & 1] == []


def test_equal_texts_of_different_kinds_have_different_keys() -> None:
    keys = {digest_of(Grammar(kind, '["a"]')) for kind in GrammarKind}
    assert len(keys) == len(GrammarKind)
