"""The tables in the two interfaces' pages name every field there is, and none that is not."""

from __future__ import annotations

import re
from pathlib import Path

from headrace.v1 import inference_pb2 as pb
from router.ingress.openai_schema import HARMLESS, UNSUPPORTED, ChatBody, CompletionBody

DOCS = Path(__file__).parents[3] / "docs"


def rows_of(page: str) -> list[list[str]]:
    """The cells of the table under "Every field", its head left out."""
    section = (DOCS / page).read_text(encoding="utf-8").split("## Every field")[1].split("\n## ")[0]
    lines = [line for line in section.split("\n") if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([a-z_]+)`", cell)


def test_http_fields() -> None:
    told = [(name, row[1], row[2]) for row in rows_of("openai-api.md") for name in names_in(row[0])]
    chat, completions = set(ChatBody.model_fields), set(CompletionBody.model_fields)
    assert sorted(name for name, _, _ in told) == sorted(chat | completions | HARMLESS | set(UNSUPPORTED))
    for name, in_chat, in_completions in told:
        if name in HARMLESS:
            assert (in_chat, in_completions) == ("taken", "taken"), name
        elif name not in chat | completions:
            assert (in_chat, in_completions) == ("refused", "refused"), name
        else:
            assert "served" in (in_chat, in_completions), name
            assert in_chat != "served" or name in chat, name
            assert in_completions != "served" or name in completions, name


def test_grpc_fields() -> None:
    told = sorted(name for row in rows_of("grpc-api.md") for name in names_in(row[0]))
    messages = (pb.GenerateRequest, pb.ChatRequest, pb.SamplingParams)
    fields = {field.name for message in messages for field in message.DESCRIPTOR.fields} - {"sampling"}
    assert told == sorted(fields)
