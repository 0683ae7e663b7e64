"""The byte form of a graph, schema 1, as constants and checks that its writer and its reader share.

    "FCG" 0x01, then numbers (`varint.py`) and nothing else:
    level
    count, symbols:    zigzag(lower), 0 for no upper bound or zigzag(upper) + 1
    count, groups:     name, size                                    sorted by name
    count, op_schemas: name, schema, count, tags                     sorted by name
    count, inputs:     role, alias group, meta
    count, nodes:      target, count, arguments, count, (name, argument) sorted by name, meta
    count, outputs:    arguments
    count, guards:     code of a truth value, in the order of the codes

Strings, floats, expressions, metas and targets are defined where they are first used: 0 says that the
definition follows and takes the next number of its kind (once it is complete), n > 0 means definition n - 1.
So there is no order to choose, and nothing unused to hide; the reader refuses a second definition of an equal
thing.

    string:      count, UTF-8 bytes
    float:       its bits
    code:        count, zigzag of each number
    expression:  code
    target:      kind, string
    meta:        0 dtype layout device requires_grad rank sizes strides offset, or 1 dim, or 2 string, or
                 3 count metas
    dim:         value << 1 (zigzag(value) << 1 in a symbolic integer), or expression << 1 | 1
    argument:    payload << 4 | tag; the payload of REF is the distance back from the value that is being made
"""

from __future__ import annotations

import keyword
import re
from typing import Final

from fuse_cache.proto.errors import GraphError, GraphReason

MAGIC: Final = b"FCG"
SCHEMA: Final = 1
HEADER: Final = MAGIC + bytes([SCHEMA])
DIGEST_CONTEXT: Final = "fuse-cache graph v1"

# Tags of an argument. 14 and 15 are free.
SPECIAL: Final = 0
REF: Final = 1
INT: Final = 2
FLOAT: Final = 3
STR: Final = 4
DTYPE: Final = 5
DEVICE: Final = 6
MEMORY_FORMAT: Final = 7
LAYOUT: Final = 8
GROUP: Final = 9
TUPLE: Final = 10
LIST: Final = 11
DICT: Final = 12
SLICE: Final = 13

# Payloads of SPECIAL.
NONE: Final = 0
TRUE: Final = 1
FALSE: Final = 2
ELLIPSIS: Final = 3

META_TENSOR: Final = 0
META_SYM: Final = 1
META_OTHER: Final = 2
META_TUPLE: Final = 3

INT64_MIN: Final = -(1 << 63)
INT64_MAX: Final = (1 << 63) - 1

GETATTR: Final = "builtins.getattr"

_ARGUMENT_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)
_GROUP_NAME: Final = re.compile(r"[a-z][a-z0-9_.-]{0,63}", re.ASCII)
_TAG: Final = re.compile(r"[A-Za-z0-9_.]{1,64}", re.ASCII)


def malformed(message: str) -> GraphError:
    """Return the error for bytes or data that are not a canonical graph."""
    return GraphError(GraphReason.MALFORMED, message)


def too_large(what: str, found: int, limit: int) -> GraphError:
    """Return the error for a limit that is passed."""
    return GraphError(GraphReason.TOO_LARGE, f"{found} {what}; the limit is {limit}")


def is_argument_name(name: str) -> bool:
    """Say whether `name` may be the name of an argument in generated Python."""
    return _ARGUMENT_NAME.fullmatch(name) is not None and not keyword.iskeyword(name)


def is_group_name(name: str) -> bool:
    """Say whether `name` may be a logical process group."""
    return _GROUP_NAME.fullmatch(name) is not None


def is_tag(name: str) -> bool:
    """Say whether `name` may be a tag of an operator."""
    return _TAG.fullmatch(name) is not None


def schema_fits(name: str, schema: str) -> bool:
    """Say whether `schema` is the text of the operator `name`, "space::op.overload"."""
    qualified, _, overload = name.rpartition(".")
    head = qualified if overload == "default" else name
    return schema.startswith(f"{head}(") and ") -> " in schema
