"""The closed table of what a graph may call: names only; `kernels/fx_targets.py` turns them into callables.

Made from `torch.overrides.get_overridable_functions()` of torch 2.13, less what reads or writes files, global
state, devices, storage or raw memory. A function known to Python under several names has one name here. A
name that some torch does not have is refused there by the worker. Names are added by hand and never removed:
stored graphs use them.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple


class Target(NamedTuple):
    """Where a function lives. `kind` is "function", or "context" if it switches state for later calls."""

    kind: str
    module: str
    attribute: str


_FUNCTIONS: Final = {
    "torch": """
        Size _assert _assert_async _check_is_size _foreach_add _grouped_mm _int_mm _log_softmax _scaled_mm
        _shape_as_tensor _softmax _sym_sqrt _weight_int4pack_mm _weight_int8pack_mm abs abs_ absolute acos
        acos_ acosh acosh_ adaptive_avg_pool1d adaptive_max_pool1d add addbmm addcdiv addcmul addmm addmv
        addmv_ addr adjoint affine_grid_generator alias_copy all allclose alpha_dropout alpha_dropout_ amax
        amin aminmax angle any arange arccos arccos_ arccosh arccosh_ arcsin arcsin_ arcsinh arcsinh_ arctan
        arctan2 arctan_ arctanh arctanh_ argmax argmin argsort argwhere as_strided as_strided_
        as_strided_copy as_strided_scatter as_tensor asarray asin asin_ asinh asinh_ atan atan2 atan_ atanh
        atanh_ atleast_1d atleast_2d atleast_3d avg_pool1d baddbmm bartlett_window batch_norm bernoulli
        bilinear binary_cross_entropy_with_logits bincount binomial bitwise_and bitwise_left_shift
        bitwise_not bitwise_or bitwise_right_shift bitwise_xor blackman_window block_diag bmm
        broadcast_tensors broadcast_to bucketize can_cast cartesian_prod cat cdist ceil ceil_ celu celu_
        chain_matmul channel_shuffle cholesky cholesky_inverse cholesky_solve chunk clamp clamp_ clamp_max
        clamp_max_ clamp_min clamp_min_ clip clip_ clone column_stack combinations complex concat
        concatenate conj conj_physical conj_physical_ constant_pad_nd conv1d conv2d conv3d conv_tbc
        conv_transpose1d conv_transpose2d conv_transpose3d convolution copysign corrcoef cos cos_ cosh cosh_
        cosine_embedding_loss cosine_similarity count_nonzero cov cross ctc_loss cummax cummin cumprod
        cumsum cumulative_trapezoid deg2rad deg2rad_ dequantize det detach detach_ detach_copy diag
        diag_embed diagflat diagonal diagonal_copy diagonal_scatter diff digamma dist div divide dot dropout
        dropout_ dsplit dstack einsum embedding embedding_bag embedding_renorm_ empty empty_like
        empty_permuted empty_strided eq equal erf erf_ erfc erfc_ erfinv exp exp2 exp2_ exp_ expand_copy
        expm1 expm1_ eye fake_quantize_per_channel_affine fake_quantize_per_tensor_affine
        feature_alpha_dropout feature_alpha_dropout_ feature_dropout feature_dropout_ fill fill_ fix fix_
        flatten flip fliplr flipud float_power floor floor_ floor_divide fmax fmin fmod frac frac_ frexp
        frobenius_norm full full_like gather gcd gcd_ ge geqrf ger gradient greater greater_equal
        grid_sampler grid_sampler_2d grid_sampler_3d group_norm gru gru_cell gt hamming_window hann_window
        hardshrink hash_tensor heaviside hinge_embedding_loss histc histogram histogramdd hsplit hstack
        hypot i0 i0_ igamma igammac imag index_add index_copy index_fill index_put index_put_ index_reduce
        index_select inner instance_norm inverse is_complex is_conj is_distributed is_floating_point
        is_inference is_neg is_nonzero is_same_size is_signed isclose isfinite isin isinf isnan isneginf
        isposinf isreal istft kaiser_window kl_div kron kthvalue layer_norm lcm lcm_ ldexp ldexp_ le lerp
        less less_equal lgamma linspace log log10 log10_ log1p log1p_ log2 log2_ log_ log_softmax logaddexp
        logaddexp2 logcumsumexp logdet logical_and logical_not logical_or logical_xor logit logit_ logspace
        logsumexp lstm lstm_cell lt lu lu_solve lu_unpack margin_ranking_loss masked_fill masked_scatter
        masked_select matmul matrix_exp matrix_power max max_pool1d max_pool1d_with_indices max_pool2d
        max_pool3d maximum mean median meshgrid min minimum mm mode moveaxis movedim msort mul multinomial
        multiply mv mvlgamma nan_to_num nan_to_num_ nanmean nanmedian nanquantile nansum narrow narrow_copy
        native_batch_norm native_channel_shuffle native_dropout native_group_norm native_layer_norm
        native_norm ne neg neg_ negative negative_ nextafter nonzero nonzero_static norm norm_except_dim
        normal not_equal nuclear_norm numel ones ones_like orgqr ormqr outer pairwise_distance pdist permute
        permute_copy pinverse pixel_shuffle pixel_unshuffle poisson poisson_nll_loss polar polygamma
        positive pow prelu prod promote_types put qr quantile rad2deg rad2deg_ rand rand_like randint
        randint_like randn randn_like randperm range ravel real reciprocal reciprocal_ relu relu_ remainder
        renorm repeat_interleave reshape resize_as_ resolve_conj resolve_neg result_type rms_norm rnn_relu
        rnn_relu_cell rnn_tanh rnn_tanh_cell roll rot90 round round_ row_stack rrelu rrelu_ rsqrt rsqrt_
        rsub scalar_tensor scatter scatter_add scatter_reduce searchsorted segment_reduce select select_copy
        select_scatter selu selu_ sgn sigmoid sigmoid_ sign signbit sin sin_ sinc sinc_ sinh sinh_
        slice_copy slice_inverse slice_scatter slogdet softmax sort split split_copy split_with_sizes
        split_with_sizes_copy spmm sqrt sqrt_ square square_ squeeze squeeze_copy stack std std_mean stft
        sub subtract sum svd swapaxes swapdims sym_constrain_range sym_constrain_range_for_size sym_float
        sym_int sym_ite sym_max sym_min sym_not sym_sum t t_copy take take_along_dim tan tan_ tanh tanh_
        tensor tensor_split tensordot threshold threshold_ tile topk trace transpose transpose_copy
        trapezoid trapz triangular_solve tril tril_indices triplet_margin_loss triu triu_indices true_divide
        trunc trunc_ unbind unbind_copy unflatten unfold_copy unique unique_consecutive unsafe_chunk
        unsafe_split unsafe_split_with_sizes unsqueeze unsqueeze_copy vander var var_mean vdot
        view_as_complex view_as_complex_copy view_as_real view_as_real_copy view_copy vsplit vstack where
        xlogy xlogy_ zero_ zeros zeros_like
    """,
    "torch._C._nn": """
        adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d avg_pool2d
        avg_pool3d binary_cross_entropy col2im cross_entropy_loss elu elu_ flatten_dense_tensors
        fractional_max_pool2d fractional_max_pool3d gelu gelu_ glu hardsigmoid hardsigmoid_ hardswish
        hardswish_ hardtanh hardtanh_ huber_loss im2col l1_loss leaky_relu leaky_relu_ linear log_sigmoid
        max_pool2d_with_indices max_pool3d_with_indices max_unpool2d max_unpool3d mish mish_ mse_loss
        multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d nll_loss_nd one_hot pad pad_sequence
        reflection_pad1d reflection_pad2d reflection_pad3d relu6 relu6_ replication_pad1d replication_pad2d
        replication_pad3d rrelu_with_noise rrelu_with_noise_ scaled_dot_product_attention silu silu_
        slow_conv3d slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose2d slow_conv_transpose3d
        smooth_l1_loss soft_margin_loss softplus softshrink thnn_conv2d unflatten_dense_tensors
        upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
        upsample_nearest3d upsample_trilinear3d
    """,
    "torch.nn.functional": """
        adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool1d_with_indices
        adaptive_max_pool2d adaptive_max_pool2d_with_indices adaptive_max_pool3d
        adaptive_max_pool3d_with_indices affine_grid alpha_dropout batch_norm binary_cross_entropy
        binary_cross_entropy_with_logits celu cosine_embedding_loss cross_entropy ctc_loss dropout dropout1d
        dropout2d dropout3d elu embedding embedding_bag feature_alpha_dropout fold fractional_max_pool2d
        fractional_max_pool2d_with_indices fractional_max_pool3d fractional_max_pool3d_with_indices
        gaussian_nll_loss glu grid_sample group_norm grouped_mm gumbel_softmax hardsigmoid hardswish
        hardtanh hinge_embedding_loss huber_loss instance_norm interpolate kl_div l1_loss layer_norm
        leaky_relu linear_cross_entropy local_response_norm log_softmax lp_pool1d lp_pool2d lp_pool3d
        margin_ranking_loss max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d
        max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d mish mse_loss
        multi_head_attention_forward multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss
        nll_loss normalize pad poisson_nll_loss relu relu6 rms_norm rrelu scaled_grouped_mm scaled_mm selu
        sigmoid silu smooth_l1_loss soft_margin_loss softmax softmin softsign tanh tanhshrink threshold
        triplet_margin_loss triplet_margin_with_distance_loss unfold upsample upsample_bilinear
        upsample_nearest
    """,
    "torch.linalg": """
        cholesky cholesky_ex cond cross det diagonal eig eigh eigvals eigvalsh householder_product inv
        inv_ex ldl_factor ldl_factor_ex ldl_solve lstsq lu lu_factor lu_factor_ex lu_solve matmul matrix_exp
        matrix_norm matrix_power matrix_rank multi_dot norm pinv qr slogdet solve solve_ex solve_triangular
        svd svdvals tensorinv tensorsolve vander vecdot vector_norm
    """,
    "torch.fft": """
        fft fft2 fftfreq fftn fftshift hfft hfft2 hfftn ifft ifft2 ifftn ifftshift ihfft ihfft2 ihfftn irfft
        irfft2 irfftn rfft rfft2 rfftfreq rfftn
    """,
    "torch.special": """
        airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 chebyshev_polynomial_t chebyshev_polynomial_u
        chebyshev_polynomial_v chebyshev_polynomial_w digamma entr erf erfc erfcx erfinv exp2 expit expm1
        gammainc gammaincc gammaln hermite_polynomial_h hermite_polynomial_he i0 i0e i1 i1e
        laguerre_polynomial_l legendre_polynomial_p log1p log_ndtr log_softmax logit logsumexp
        modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 multigammaln ndtr ndtri
        polygamma psi round scaled_modified_bessel_k0 scaled_modified_bessel_k1
        shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
        shifted_chebyshev_polynomial_w sinc softmax spherical_bessel_j0 xlog1py xlogy zeta
    """,
    "operator": """
        abs add and_ contains eq floordiv ge getitem gt iadd iand ifloordiv ilshift imatmul imod imul index
        inv invert ior ipow irshift isub itruediv ixor le lshift lt matmul mod mul ne neg not_ or_ pos pow
        rshift setitem sub truediv truth xor
    """,
    "math": """
        acos acosh asin asinh atan atan2 atanh ceil cos cosh exp floor log log2 pow sin sinh sqrt tan tanh
        trunc
    """,
    "builtins": "abs bool divmod float getattr int max min pow round sum",
    "torch._refs": "tensor",
    "torch.distributed._functional_collectives": """
        all_gather_single_autograd all_gather_tensor all_gather_tensor_autograd all_reduce all_to_all_single
        all_to_all_single_autograd broadcast permute_tensor reduce_scatter_tensor
        reduce_scatter_tensor_autograd wait_tensor
    """,
}

_METHODS: Final = """
    abs abs_ absolute absolute_ acos acos_ acosh acosh_ add add_ addbmm addbmm_ addcdiv addcdiv_ addcmul
    addcmul_ addmm addmm_ addmv addmv_ addr addr_ adjoint all allclose amax amin aminmax angle any arccos
    arccos_ arccosh arccosh_ arcsin arcsin_ arcsinh arcsinh_ arctan arctan2 arctan2_ arctan_ arctanh
    arctanh_ argmax argmin argsort argwhere as_strided as_strided_ as_strided_scatter asin asin_ asinh
    asinh_ atan atan2 atan2_ atan_ atanh atanh_ baddbmm baddbmm_ bernoulli bernoulli_ bfloat16 bincount
    bitwise_and bitwise_and_ bitwise_left_shift bitwise_left_shift_ bitwise_not bitwise_not_ bitwise_or
    bitwise_or_ bitwise_right_shift bitwise_right_shift_ bitwise_xor bitwise_xor_ bmm bool broadcast_to byte
    cauchy_ cdouble ceil ceil_ cfloat chalf char cholesky cholesky_inverse cholesky_solve chunk clamp clamp_
    clamp_max clamp_max_ clamp_min clamp_min_ clip clip_ clone conj conj_physical conj_physical_ contiguous
    copy_ copysign copysign_ corrcoef cos cos_ cosh cosh_ count_nonzero cov cpu cross cuda cummax cummin
    cumprod cumprod_ cumsum cumsum_ deg2rad deg2rad_ dequantize det detach detach_ diag diag_embed diagflat
    diagonal diagonal_scatter diff digamma digamma_ dim dist div div_ divide divide_ dot double dsplit
    element_size eq eq_ equal erf erf_ erfc erfc_ erfinv erfinv_ exp exp2 exp2_ exp_ expand expand_as expm1
    expm1_ exponential_ fill_ fill_diagonal_ fix fix_ flatten flip fliplr flipud float float_power
    float_power_ floor floor_ floor_divide floor_divide_ fmax fmin fmod fmod_ frac frac_ frexp gather gcd
    gcd_ ge ge_ geometric_ geqrf ger greater greater_ greater_equal greater_equal_ gt gt_ half hardshrink
    hash_tensor heaviside heaviside_ histc histogram hsplit hypot hypot_ i0 i0_ igamma igamma_ igammac
    igammac_ index index_add index_add_ index_copy index_copy_ index_fill index_fill_ index_put index_put_
    index_reduce index_reduce_ index_select inner int inverse is_complex is_contiguous is_floating_point
    isclose isfinite isinf isnan isneginf isposinf isreal istft item kron kthvalue lcm lcm_ ldexp ldexp_ le
    le_ lerp lerp_ less less_ less_equal less_equal_ lgamma lgamma_ log log10 log10_ log1p log1p_ log2 log2_
    log_ log_normal_ log_softmax logaddexp logaddexp2 logcumsumexp logdet logical_and logical_and_
    logical_not logical_not_ logical_or logical_or_ logical_xor logical_xor_ logit logit_ logsumexp long lt
    lt_ lu lu_solve masked_fill masked_fill_ masked_scatter masked_scatter_ masked_select matmul matrix_exp
    matrix_power max maximum mean median min minimum mm mode moveaxis movedim msort mul mul_ multinomial
    multiply multiply_ mv mvlgamma mvlgamma_ nan_to_num nan_to_num_ nanmean nanmedian nanquantile nansum
    narrow narrow_copy ne ne_ neg neg_ negative negative_ nelement new_empty new_empty_strided new_full
    new_ones new_tensor new_zeros nextafter nextafter_ nonzero nonzero_static norm normal_ not_equal
    not_equal_ numel orgqr ormqr outer permute pinverse polygamma polygamma_ positive pow pow_ prelu prod
    put put_ qr quantile rad2deg rad2deg_ random_ ravel reciprocal reciprocal_ relu relu_ remainder
    remainder_ renorm renorm_ repeat repeat_interleave requires_grad_ reshape reshape_as resize resize_
    resize_as resize_as_ resolve_conj resolve_neg roll rot90 round round_ rsqrt rsqrt_ scatter scatter_
    scatter_add scatter_add_ scatter_reduce scatter_reduce_ select select_scatter sgn sgn_ short sigmoid
    sigmoid_ sign sign_ signbit sin sin_ sinc sinc_ sinh sinh_ size slice_inverse slice_scatter slogdet
    softmax sort split split_with_sizes sqrt sqrt_ square square_ squeeze squeeze_ std stft storage_offset
    stride sub sub_ subtract subtract_ sum sum_to_size svd swapaxes swapaxes_ swapdims swapdims_ t t_ take
    take_along_dim tan tan_ tanh tanh_ tensor_split tile to to_dense topk trace transpose transpose_
    triangular_solve tril tril_ triu triu_ true_divide true_divide_ trunc trunc_ type type_as unbind
    unflatten unfold uniform_ unique unique_consecutive unsafe_chunk unsafe_split unsafe_split_with_sizes
    unsqueeze unsqueeze_ var vdot view view_as vsplit where xlogy xlogy_ zero_
"""

_CONTEXTS: Final = {
    "torch._C": "_set_grad_enabled",
    "torch.amp.autocast_mode": "_enter_autocast _exit_autocast",
}

TARGETS: Final[dict[str, Target]] = {
    f"{module}.{attribute}": Target(kind, module, attribute)
    for kind, table in (("function", _FUNCTIONS), ("context", _CONTEXTS))
    for module, attributes in table.items()
    for attribute in attributes.split()
}
METHODS: Final = frozenset(_METHODS.split())

# What `builtins.getattr` may read of a tensor: views and nothing that is code or storage.
ATTRIBUTES: Final = frozenset({"H", "T", "data", "imag", "mH", "mT", "real"})

# Operators of torch itself, "aten::add.Tensor": any name of these spaces that is not refused below.
OP_NAMESPACES: Final = frozenset(
    {
        "_c10d_functional",
        "_c10d_functional_autograd",
        "aten",
        "inductor",
        "prims",
        "quantized_decomposed",
        "symm_mem",
    }
)
# They read files, start or wait for something outside the graph, or print.
_REFUSED_OPS: Final = frozenset(
    {
        "aten::from_file",
        "aten::save",
        "aten::warn",
        "aten::print",
        "aten::record_stream",
        "aten::_print",
        "aten::set_data",
    }
)
_OP: Final = re.compile(
    r"([A-Za-z_][A-Za-z0-9_]{0,63})::([A-Za-z_][A-Za-z0-9_]{0,127})\.([A-Za-z0-9_]{1,64})", re.ASCII
)


class OpName(NamedTuple):
    """The parts of "namespace::name.overload"."""

    namespace: str
    name: str
    overload: str


def parse_op(target: str) -> OpName | None:
    """Return the parts of an operator's name, or None when `target` does not look like one."""
    match = _OP.fullmatch(target)
    return OpName(*match.groups()) if match else None


def is_torch_op(target: str) -> bool:
    """Say whether `target` is an operator that torch brings, so that no schema need travel with it."""
    op = parse_op(target)
    return (
        op is not None and op.namespace in OP_NAMESPACES and f"{op.namespace}::{op.name}" not in _REFUSED_OPS
    )


def is_custom_op(target: str) -> bool:
    """Say whether `target` may be an operator of a library, which needs an `OpSchema` in the graph."""
    op = parse_op(target)
    return op is not None and op.namespace not in OP_NAMESPACES


_DTYPES: Final = """
    bfloat16 bool complex128 complex32 complex64 float16 float32 float4_e2m1fn_x2 float64 float8_e4m3fn
    float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu int16 int32 int64 int8 uint16 uint32 uint64
    uint8
"""
DTYPES: Final = frozenset(_DTYPES.split())
DEVICES: Final = frozenset({"cpu", "cuda", "meta", "mps", "xpu"})
LAYOUTS: Final = frozenset({"strided"})
MEMORY_FORMATS: Final = frozenset(
    {"channels_last", "channels_last_3d", "contiguous_format", "preserve_format"}
)
OTHER_METAS: Final = frozenset({"bool", "float", "int", "none", "str", "unknown"})
