"""What a worker says is checked."""

from __future__ import annotations

import pytest

from fuse_cache.server.worker.checked import ProtocolError
from fuse_cache.server.worker.protocol import MAX_EVENT_BYTES, decode_event, encode_event


@pytest.mark.parametrize("line", [b"", b"[1]", b'["a", 2]', b"{", b"[" * MAX_EVENT_BYTES, b"[" * 100_000])
def test_what_is_no_progress_is_refused(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_event(line)


def test_progress_comes_back_as_written() -> None:
    assert decode_event(encode_event("passes", "norm_quant")) == ("passes", "norm_quant")
