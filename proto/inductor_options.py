"""The Inductor options that a request may carry, with their types. Anything else is refused by name, on
both sides.

Options that benchmark (max_autotune), burn the builder's machine in (freezing), write files or run hooks
are not here.
"""

from __future__ import annotations

from collections.abc import Mapping

from fuse_cache.proto.request import Scalar

ALLOWED: Mapping[str, type[bool] | type[int] | type[str]] = {
    "aggressive_fusion": bool,
    "comprehensive_padding": bool,
    "cpp.enable_floating_point_contract_flag": str,
    "cpp.enable_unsafe_math_opt_flag": bool,
    "cpp.max_horizontal_fusion_size": int,
    "cpp.min_chunk_size": int,
    "emulate_precision_casts": bool,
    "epilogue_fusion": bool,
    "fallback_random": bool,
    "loop_ordering_after_fusion": bool,
    "max_fusion_size": int,
    "max_pointwise_cat_inputs": int,
    "pattern_matcher": bool,
    "permute_fusion": bool,
    "realize_opcount_threshold": int,
    "realize_reads_threshold": int,
    "shape_padding": bool,
    "split_reductions": bool,
    "unroll_reductions_threshold": int,
}
_CHOICES: Mapping[str, tuple[str, ...]] = {"cpp.enable_floating_point_contract_flag": ("fast", "off", "on")}


def check_options(options: Mapping[str, object]) -> tuple[tuple[str, Scalar], ...]:
    """Return `options` as a request carries them: sorted, each of its type.

    Raises:
        ValueError: an option is not allowed or has a value of another type; the message lists what is.
    """
    checked: list[tuple[str, Scalar]] = []
    for name, value in sorted(options.items()):
        wanted = ALLOWED.get(name)
        if wanted is None:
            raise ValueError(f"Inductor option {name!r} is not allowed: use one of {', '.join(ALLOWED)}")
        if isinstance(value, bool) != (wanted is bool) or not isinstance(value, wanted):
            raise ValueError(f"Inductor option {name} must be of type {wanted.__name__}, not {value!r}")
        if name in _CHOICES and value not in _CHOICES[name]:
            raise ValueError(
                f"Inductor option {name} must be one of {', '.join(_CHOICES[name])}, not {value!r}"
            )
        checked.append((name, value))
    return tuple(checked)
