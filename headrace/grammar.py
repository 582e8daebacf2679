"""Grammars that constrain an output: checked against bounds, put into the library's terms, compiled.

The library is llguidance (docs/adr/0006-grammar-library.md says why). It knows tokens by the very bytes that
`Tokenizer.token_bytes` gives, so router and worker, who compile the same text with the same tokenizer, agree. How much
work a grammar may cause is bounded by counts and not by clocks (`_LIMITS`), so that they agree about that too.

Compiling may take long or end the process where the library has a fault: routers do it in a process they can kill
(`router.grammars`), and workers compile only what passed there.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any

from headrace.errors import InvalidRequest
from headrace.sampling import Grammar, GrammarKind
from headrace.unicode import require_unicode

if TYPE_CHECKING:
    import llguidance

    from headrace.tokenizer import Tokenizer

MAX_NESTING = 64
"""Brackets inside brackets, of a schema or of rules: libraries recurse over them."""
MAX_CHOICES = 4096
MAX_REASON_CHARS = 300

_LIMITS: Any = {
    "max_items_in_row": 10_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
"""The library's own defaults, but a fifth of its lexer states (about 20 MB a request) and five times the items of a
row, so that objects of a thousand properties pass. About 20 ms of work for a mask at most, by its own figures."""


class GrammarFault(Exception):
    """The library cannot go on with one grammar; the message is a sentence for its client."""


def check_bounds(grammar: Grammar, field: str = "grammar") -> None:
    """What can be refused without compiling anything, in time linear in the text. Raises InvalidRequest naming `field`
    (the text's own length is checked with the other sampling parameters).
    """
    require_unicode(grammar.text, field)
    if "\0" in grammar.text:
        raise InvalidRequest(f"{field} contains a NUL character", field=field)
    if grammar.kind is GrammarKind.CHOICE:
        choices_of(grammar.text, field)
        return
    if deepest_nesting(grammar.text) > MAX_NESTING:
        raise InvalidRequest(f"{field} nests brackets more than {MAX_NESTING} deep", field=field)
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        _check_schema_text(grammar.text, field)
    elif not grammar.text.strip():
        raise InvalidRequest(f"{field} is empty", field=field)


def deepest_nesting(text: str) -> int:
    """How deep brackets stand in brackets, counting those in strings too: never less than a parser would find."""
    deepest = depth = 0
    for letter in text:
        if letter in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif letter in ")]}" and depth:
            depth -= 1
    return deepest


def _check_schema_text(text: str, field: str) -> None:
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except ValueError as fault:
        raise InvalidRequest(f"{field} is not valid JSON: {fault}", field=field) from None
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"{field} must be a JSON schema: an object, true or false", field=field)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON value")


def choices_of(text: str, field: str = "grammar") -> tuple[str, ...]:
    """The strings of a choice list. Raises InvalidRequest naming `field`."""
    try:
        choices = json.loads(text)
    except (ValueError, RecursionError):
        choices = None
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise InvalidRequest(f"{field} must be a list of strings", field=field)
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequest(f"{field} must have from 1 to {MAX_CHOICES} strings, not {len(choices)}", field=field)
    return tuple(choices)


def digest_of(grammar: Grammar) -> bytes:
    """The key under which verdicts and compiled grammars are kept."""
    return hashlib.sha256(f"{grammar.kind}\0{grammar.text}".encode("utf-8", "surrogatepass")).digest()


def library_tokenizer(tokenizer: Tokenizer) -> llguidance.LLTokenizer:
    """The library's view of a tokenizer: the same bytes, specials that no text can produce, the same EOS ids."""
    import llguidance

    ids = range(tokenizer.vocab_size)
    wrapped = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, [tokenizer.token_bytes(i) for i in ids]))
    return llguidance.LLTokenizer(wrapped, tokenizer.vocab_size, list(tokenizer.eos_token_ids) or None)


class _Vocabulary:
    """What llguidance's TokenizerWrapper reads."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes]) -> None:
        self.tokens = tokens
        self.special_token_ids = [i for i in range(len(tokens)) if tokenizer.is_special(i)]
        self.eos_token_id = tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else 0
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False)


class GrammarCompiler:
    """Grammars to matchers, for one tokenizer. Any thread may call it; the library drops the interpreter lock."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _vocabulary(self) -> llguidance.LLTokenizer:
        return library_tokenizer(self._tokenizer)

    def prepare(self) -> None:
        """Makes the library's tables for the tokenizer, about 0.2 s for 50,000 ids, so that no compile pays for it."""
        _ = self._vocabulary

    def compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        """A matcher at the grammar's start, to be copied for each choice of one request. Raises GrammarFault with the
        library's reason where the text is no grammar, uses what the library does not know, allows nothing,
        or exceeds its limits.
        """
        import llguidance

        try:
            check_bounds(grammar)
            limits = llguidance.LLParserLimits(**_LIMITS)
            matcher = llguidance.LLMatcher(self._vocabulary, _library_text(grammar), log_level=0, limits=limits)
            if not matcher.is_error():
                # The first mask builds what is built lazily, and shows whether anything can be written at all.
                matcher.compute_bitmask()
            reason = matcher.get_error() if matcher.is_error() else ""
        except GrammarFault:
            raise
        except InvalidRequest as fault:
            raise GrammarFault(fault.message) from None
        except BaseException as fault:  # a panic of the library is not an Exception
            if isinstance(fault, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            reason = f"{fault}" or type(fault).__name__
        if reason:
            raise GrammarFault(one_line(reason))
        return matcher


_EMPTY = ("NoExtension", "NoExtensionBias")
"""The library's words where nothing can be written, not even the end."""


def one_line(reason: str) -> str:
    """The library's reason, cut to a sentence for a client."""
    cleaned = " ".join(reason.replace("<non-verbose/>", "").split())
    return "no text at all satisfies it" if cleaned in _EMPTY else cleaned[:MAX_REASON_CHARS]


def _library_text(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            text = _BOOLEAN_SCHEMAS.get(grammar.text.strip(), grammar.text)
            return LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.EBNF:
            return LLMatcher.grammar_from_lark(_lark_of(grammar.text))
        case GrammarKind.CHOICE:
            # One expression, not a rule for each: thousands of rules at one place exceed the library's limits.
            return LLMatcher.grammar_from_regex("|".join(map(_literal, choices_of(grammar.text))))


WHITESPACE = r"(?: |\r?\n[ \t]{0,40})?"
"""Between the parts of JSON: nothing, a space, or a new line with its indentation. Any amount would let a model that
knows no better fill its whole output with it.
"""
_JSON_OPTIONS: Any = {"lenient": False, "coerce_one_of": False, "whitespace_pattern": WHITESPACE}
"""A keyword the library cannot carry out is refused, never ignored; `x-guidance` in a schema changes nothing."""
_BOOLEAN_SCHEMAS = {"true": "{}", "false": '{"enum": []}'}
"""Options need an object to stand in."""


def _literal(text: str) -> str:
    """A regular expression that matches just this text."""
    return _SPECIAL.sub(r"\\\g<0>", text)


_SPECIAL = re.compile(r"[][\\.+*?(){}|^$#&~/-]")


def _lark_of(text: str) -> str:
    """GBNF (rules written `name ::= …`) becomes the library's Lark; Lark stays as it is."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    except Exception as fault:
        raise GrammarFault(one_line(f"not a grammar in GBNF: {fault}")) from None
