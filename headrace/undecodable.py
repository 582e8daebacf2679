"""Says which field makes a message undecodable, where the protobuf library only says that one does.

A `string` field and a `bytes` field look the same on the wire. So a message whose text is not UTF-8 can be read once
more by a twin of its type in which every string is bytes, and the bad text be found and named.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence
from functools import cache

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from headrace.errors import InvalidRequest
from headrace.v1 import inference_pb2 as pb

_Field = descriptor_pb2.FieldDescriptorProto
_NAMES_FOR_CLIENTS = {"text": "prompt"}
"""Where the interface's field and the one that errors speak of differ; sampling parameters go by their bare names."""


def undecodable(kind: type[Message], raw: bytes) -> InvalidRequest:
    """The error for bytes that `kind` refused to parse, naming the field whose text is not UTF-8 where that is why."""
    name = kind.DESCRIPTOR.full_name
    twin = _bytes_twin(name)()
    try:
        twin.ParseFromString(raw)
    except DecodeError:
        return InvalidRequest(f"the message is not a valid {name}")
    for path, value in _texts(twin, ""):
        try:
            value.decode("utf-8")
        except UnicodeDecodeError as fault:
            field = path.removeprefix("sampling.")
            field = _NAMES_FOR_CLIENTS.get(field, field)
            return InvalidRequest(f"{field} is not valid UTF-8 at byte {fault.start}", field=field)
    return InvalidRequest(f"the message is not a valid {name}")


@cache
def _bytes_twin(name: str) -> type[Message]:
    """The message type of this name, from a private pool in which every string field is a bytes field."""
    file = descriptor_pb2.FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
    for message in file.message_type:
        for field in message.field:
            if field.type == _Field.TYPE_STRING:
                field.type = _Field.TYPE_BYTES
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def _texts(message: Message, prefix: str) -> Iterator[tuple[str, bytes]]:
    """(path, raw text) of every field that is set, in field order, list items with their index."""
    for field, value in message.ListFields():
        items = [(field.name, value)]
        if isinstance(value, MutableSequence):
            items = [(f"{field.name}[{i}]", item) for i, item in enumerate(value)]
        for path, item in items:
            if isinstance(item, bytes):
                yield prefix + path, item
            elif isinstance(item, Message):
                yield from _texts(item, f"{prefix}{path}.")
