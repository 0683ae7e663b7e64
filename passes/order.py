"""Where each pass lives and at which hook of Inductor it runs. Torch-free: the daemon reads it too.

Names and order are PIPELINE's (`proto/pass_tables.py`); a test holds that every pass that is built there has
its place here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Stage(enum.Enum):
    """The hook. The value is the name of Inductor's option."""

    # Before anything of Inductor's own: on torch 2.11 a later joint pass deletes fp32 -> bf16 -> fp32, the
    # graph's own rounding.
    JOINT = "joint_custom_pre_pass"
    # Before Inductor's pattern matcher has turned mm + add into addmm and the like.
    FUSE = "post_grad_custom_pre_pass"
    # After it, and before re-inplacing: what is lowered here is seen by code generation alone.
    LOWER = "post_grad_custom_post_pass"


@dataclass(frozen=True, slots=True)
class Place:
    """The module that holds a pass (as `PASS`) and its hook."""

    module: str
    stage: Stage


PLACES: dict[str, Place] = {
    "raise_ir": Place("fuse_cache.passes.raise_ir", Stage.JOINT),
    "eliminate_noops": Place("fuse_cache.passes.noop", Stage.FUSE),
    "norm_reshape": Place("fuse_cache.passes.norm_reshape", Stage.FUSE),
    "norm_quant": Place("fuse_cache.passes.norm_quant", Stage.FUSE),
    "act_quant": Place("fuse_cache.passes.act_quant", Stage.FUSE),
    "split_tidy": Place("fuse_cache.passes.split_tidy", Stage.FUSE),
    "cleanup": Place("fuse_cache.passes.cleanup", Stage.FUSE),
    "lower_ir": Place("fuse_cache.passes.lower_ir", Stage.LOWER),
    "clone_elimination": Place("fuse_cache.passes.clone_elimination", Stage.LOWER),
    "cleanup_lowered": Place("fuse_cache.passes.cleanup", Stage.LOWER),
    "functionalization": Place("fuse_cache.passes.functionalization", Stage.LOWER),
}
