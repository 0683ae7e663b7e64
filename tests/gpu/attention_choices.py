"""On a machine with a GPU: print which attention kernel torch itself chooses (`attention_choices.json`).

`python tests/gpu/attention_choices.py`. One letter for each combination of lengths and heads, in their order:
c(uDNN), f(lash), e(fficient), m(ath).
"""

from __future__ import annotations

import json
from typing import Any, Final

import torch

LENGTHS: Final = ((128, 128), (1, 128), (5, 9), (1, 1))  # of queries and keys
HEADS: Final = ((8, 8), (8, 2), (8, 1))  # of queries and of keys
HEAD_SIZES: Final = (
    (64, 64), (128, 128), (20, 20), (36, 36), (72, 72), (192, 128), (192, 192), (256, 256), (264, 264),
    (512, 512),
)  # fmt: skip
LETTERS: Final = {0: "m", 1: "f", 2: "e", 3: "c"}


def choice(
    dtype: torch.dtype, sizes: tuple[int, int], mask: str, lengths: tuple[int, int], heads: tuple[int, int]
) -> str:
    """Return the letter of torch's choice for a batch of two."""
    (head, value_head), (queries, keys), (of_query, of_key) = sizes, lengths, heads

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device="cuda")

    masks = {"bool": torch.bool, "float": dtype}
    bias = tensor(2, 1, queries, keys, dtype=masks[mask]) if mask in masks else None
    found: Any = torch._fused_sdp_choice(
        tensor(2, of_query, queries, head),
        tensor(2, of_key, keys, head),
        tensor(2, of_key, keys, value_head),
        attn_mask=bias,
        is_causal=mask == "causal",
        enable_gqa=of_query != of_key,
    )
    return LETTERS[int(found)]


def main() -> None:
    """Print the whole table."""
    choices = {
        f"{str(dtype).removeprefix('torch.')} {sizes[0]} {sizes[1]} {mask}": "".join(
            choice(dtype, sizes, mask, lengths, heads) for lengths in LENGTHS for heads in HEADS
        )
        for dtype in (torch.bfloat16, torch.float32)
        for sizes in HEAD_SIZES
        for mask in ("none", "causal", "bool", "float")
    }
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # as torch has it
    source = f"torch {torch.__version__}, cuDNN {cudnn}, {torch.cuda.get_device_name()}"
    print(json.dumps({"source": source, "lengths": LENGTHS, "heads": HEADS, "choices": choices}, indent=1))


if __name__ == "__main__":
    main()
