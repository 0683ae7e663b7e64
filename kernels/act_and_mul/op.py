"""`fuse_cache::act_and_mul`: the IR node that every gated activation is raised to."""

from __future__ import annotations

from fuse_cache.kernels.act_and_mul.reference import act_and_mul
from fuse_cache.kernels.library import Family, define

FAMILY = Family(
    name="act_and_mul",
    tensors="Tensor gate, Tensor? up",
    attributes="str activation, ScalarType? sigmoid_dtype, ScalarType? act_dtype, ScalarType? out_dtype",
    results=1,
    reference=act_and_mul,
)
ACT_AND_MUL = define(FAMILY)
