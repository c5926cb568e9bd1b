"""The Triton kernel of `quantize_write_nvfp4` by the rule ``covariance``.

Every bit is that of `sdsa_quant.formats.covariance`, which has the algorithm and says why its sums
are exact. A key has 8 threads, in three roles:

- *A block each*: the bytes of the rule amax/6 and what a key loses by them; at last the stores.
- *A scale each*: of one block, the 16 codes under one of the 8 scales to try, one after another in
  registers, without a word between threads. Then the threads of a key agree on the least loss.
- *Tensor cores*: what the errors of earlier blocks add to the targets of the next one, products of
  integers in FP16 with exact sums. They need 16 keys, which is a program's share.

A tensor of `N` = 8 x `KEYS` elements has one element a thread, the 8 of a key side by side; 16
values of such a thread are a tuple of 16 tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import code_bytes, four, load_block, nearest_code, scale_value
from .quantize import divide_by_6, inverse_of_scale, round_to_e4m3

_PAGE_BITS = tl.constexpr(6)
_IN_PAGE = tl.constexpr(2**6 - 1)
_DIM = tl.constexpr(128)
_BLOCK = tl.constexpr(16)
_LANES = tl.constexpr(8)  # threads of a key: its blocks, and the scales that a block tries
_TRIANGLE = tl.constexpr(120)  # entries of the factor within a block
_FIRST_STEP = tl.constexpr(-2)  # of the scale's byte, tried by the first thread
_LAST_SCALE = tl.constexpr(0x7E)
_EXPONENT = tl.constexpr(0x7F800000)
_NVFP4_MAX = tl.constexpr(2688.0)
_LARGEST_MAGNITUDE = tl.constexpr(3584.0)
_LEAST_POWER = tl.constexpr(2.0**-60)
_WITHIN_BLOCK = tl.constexpr(1.5 * 2.0**14)
_INTEGERS = tl.constexpr(1.5 * 2.0**23)
_ZERO_SCALE = tl.constexpr(2.0**20)
_BLOCK_MARGIN = tl.constexpr(2.0**-8)
_MARGIN = tl.constexpr(2.0**-5)
_LIMB = tl.constexpr(2.0**10)
_LIMB_MAX = tl.constexpr(1023.0)
# Four codes in a float32's integer: digits of 5 bits, twice the code plus 12.
_DIGIT_BITS = tl.constexpr(5)
_ZERO_DIGITS = tl.constexpr(float(12 * (1 + 2**5 + 2**10 + 2**15)))


@triton.jit
def _columns(values):
    """The columns of [N, 16]."""
    rows: tl.constexpr = values.shape[0]
    even, odd = tl.split(tl.reshape(values, [rows, 2, 2, 2, 2]))
    a, b = tl.split(even)  # columns 0 and 2 modulo 4
    c, d = tl.split(odd)
    a = four(tl.reshape(a, [rows, 4]))
    b = four(tl.reshape(b, [rows, 4]))
    c = four(tl.reshape(c, [rows, 4]))
    d = four(tl.reshape(d, [rows, 4]))
    columns = ()
    for i in tl.static_range(4):
        columns = columns + (a[i], c[i], b[i], d[i])
    return columns


@triton.jit
def _from_columns(columns):
    """[N, 16] of 16 columns [N]."""
    a = tl.join(tl.join(columns[0], columns[8]), tl.join(columns[4], columns[12]))
    b = tl.join(tl.join(columns[1], columns[9]), tl.join(columns[5], columns[13]))
    c = tl.join(tl.join(columns[2], columns[10]), tl.join(columns[6], columns[14]))
    d = tl.join(tl.join(columns[3], columns[11]), tl.join(columns[7], columns[15]))
    rows: tl.constexpr = columns[0].shape[0]
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [rows, 16])


@triton.jit
def _by_key(values):
    return tl.reshape(values, [values.shape[0] // _LANES, _LANES])


@triton.jit
def _to_lanes(of_key):
    """[N] of one value for each key."""
    keys: tl.constexpr = of_key.shape[0]
    return tl.reshape(tl.broadcast_to(of_key[:, None], [keys, _LANES]), [keys * _LANES])


@triton.jit
def _of_lane(values, is_lane):
    """[KEYS]: the value of the one thread of each key where `is_lane` is true."""
    return tl.sum(_by_key(tl.where(is_lane, values, 0)), 1)


@triton.jit
def _limbs(errors, inverse_unit):
    """Errors in units as two FP16 integers, the second in units of 2^-10."""
    scaled = errors * inverse_unit
    upper = tl.minimum(tl.maximum(scaled, -_LIMB_MAX), _LIMB_MAX)
    upper = (upper + _INTEGERS) - _INTEGERS
    lower = tl.minimum(tl.maximum((scaled - upper) * _LIMB, -_LIMB_MAX), _LIMB_MAX)
    lower = (lower + _INTEGERS) - _INTEGERS
    return upper.to(tl.float16), lower.to(tl.float16)


@triton.jit
def _add_sums(values, upper, lower, factor, factor_unit):
    """``values + sums``, the sums what errors ``upper + lower`` add by `factor`."""
    sums = tl.dot(upper, factor) + tl.dot(lower, factor) * (1 / _LIMB)
    return values + sums * factor_unit


@triton.jit
def _plain_block(x):
    """The rule amax/6: bytes of scales, codes (E2M1 values) and errors of blocks ``x``."""
    amax = tl.abs(x[0])
    for j in tl.static_range(1, _BLOCK):
        amax = tl.maximum(amax, tl.abs(x[j]))
    scaled_amax = tl.minimum(tl.maximum(amax, 0.0), _NVFP4_MAX)
    scales = round_to_e4m3(divide_by_6(scaled_amax))
    inverse, scale = inverse_of_scale(scales), scale_value(scales)
    codes = ()
    errors = ()
    finite = x[0] == x[0]
    for j in tl.static_range(_BLOCK):
        code = nearest_code(x[j] * inverse)
        codes = codes + (code,)
        errors = errors + (code * scale - x[j],)
        finite = finite & (x[j] == x[j])
    amax = tl.where(finite, tl.maximum(amax, 0.0), float("inf"))
    return amax, scales, codes, errors


@triton.jit
def _plain_loss(errors, upper, lower, factor_unit, factor_ptr, pivots_ptr, block):
    """[KEYS]: what a key loses by the rule amax/6; a thread has one block."""
    lanes: tl.constexpr = block.shape[0]
    keys: tl.constexpr = lanes // _LANES
    index = tl.arange(0, _DIM)
    factor = tl.load(factor_ptr + index[None, :] * _DIM + index[:, None])
    sums = tl.dot(upper, factor) + tl.dot(lower, factor) * (1 / _LIMB)
    sums = _columns(tl.reshape(sums, [lanes, _BLOCK]))
    loss = tl.zeros_like(factor_unit)
    for group in tl.static_range(_BLOCK // 4):
        fours = pivots_ptr + (block * _BLOCK + group * 4)[:, None] + tl.arange(0, 4)[None, :]
        pivots = four(tl.load(fours))
        for i in tl.static_range(4):
            z = errors[group * 4 + i] + sums[group * 4 + i] * factor_unit
            loss += z * z * pivots[i]
    loss = tl.sum(tl.reshape(loss, [keys, 2, 4]), 1)
    loss = tl.sum(tl.reshape(loss, [keys, 2, 2]), 1)
    return tl.sum(loss, 1)


@triton.jit
def _try_scale(targets, x, inverse, within_ptr, pivots_ptr):
    """Codes of one block under one scale each, four to a float32, and the sum of their losses."""
    z = ()
    own = ()
    for j in tl.static_range(_BLOCK):
        z = z + (targets[j] * inverse,)
        own = own + ((x[j] * inverse + _WITHIN_BLOCK) - _WITHIN_BLOCK,)
    loss = tl.zeros_like(inverse)
    packed = ()
    for j in tl.static_range(_BLOCK):
        code = nearest_code(z[j])
        distance = code - z[j]
        loss += distance * distance * tl.load(pivots_ptr + j)
        error = code - own[j]
        later = z[: j + 1]
        for k in tl.static_range(j + 1, _BLOCK):
            # Column after column of the triangle below the diagonal; the product is exact.
            entry = tl.load(within_ptr + (j * (2 * _BLOCK - 1 - j) // 2 + k - j - 1))
            later = later + (tl.fma(error, -entry, z[k]),)
        z = later
        if j % 4 == 0:
            packed = packed + (tl.fma(code, 2.0, _ZERO_DIGITS),)
        else:
            packed = packed[: j // 4] + (
                tl.fma(code, 2.0 ** (_DIGIT_BITS * (j % 4) + 1), packed[j // 4]),
            )
    return packed, loss


@triton.jit
def _unpack(packed):
    """E2M1 values [KEYS, 16] of four times four."""
    a = tl.join(packed[0], packed[2])
    b = tl.join(packed[1], packed[3])
    keys: tl.constexpr = packed[0].shape[0]
    fours = tl.reshape(tl.join(a, b), [keys, 4]).to(tl.int32)
    digits = (fours[:, :, None] >> (tl.arange(0, 4) * _DIGIT_BITS)[None, None, :]) & 31
    return tl.reshape((digits - 12).to(tl.float32) * 0.5, [keys, _BLOCK])


@triton.jit
def _signs(x):
    """Bit ``j`` of a word for the sign of value ``j``."""
    signs = tl.zeros_like(x[0]).to(tl.int32)
    for j in tl.static_range(_BLOCK):
        signs |= ((x[j].to(tl.int32, bitcast=True) >> 31) & 1) << j
    return signs


@triton.jit
def _found_bytes(packed, signs):
    """The 8 bytes of four times four codes, zeros with the signs of `_signs`."""
    codes = ()
    zeros = ()
    for j in tl.static_range(_BLOCK):
        digit = (packed[j // 4].to(tl.int32) >> (_DIGIT_BITS * (j % 4))) & 31
        codes = codes + ((digit - 12).to(tl.float32) * 0.5,)
        zeros = zeros + (((signs << (31 - j)) & -(2**31)).to(tl.float32, bitcast=True),)
    return code_bytes(codes, zeros)


@triton.jit
def _write_keys(
    x_ptr,
    index_ptr,
    codes_ptr,
    scales_ptr,
    factor_ptr,
    within_ptr,
    pivots_ptr,
    step,
    count,
    x_stride,
    codes_stride,
    scales_stride,
    tile,
    paged,
    KEYS: tl.constexpr,
):
    """Quantize one tile of `KEYS` keys and write each to its index; negative ones are skipped."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    WORDS: tl.constexpr = dtype.primitive_bitwidth // 4
    thread = tl.arange(0, KEYS * _LANES)
    row = tile * KEYS + thread // _LANES
    lane = thread % _LANES
    index = tl.load(index_ptr + row, mask=row < count, other=-1)
    live = index >= 0
    words = x_ptr.to(tl.pointer_type(tl.int32)) + (row.to(tl.int64) * x_stride * 4)
    own_words = words + lane * (2 * WORDS)

    # ---- the rule amax/6, a block each ----
    x = load_block(own_words, live, dtype)
    amax, base, codes, errors = _plain_block(x)
    # All that is kept of a block until the end.
    plain_bytes, signs = code_bytes(codes, x), _signs(x)
    amax = _to_lanes(tl.max(_by_key(amax), 1))
    power = (amax.to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True)
    power = tl.maximum(power, _LEAST_POWER)
    # A power of two: its inverse is a subtraction of exponents.
    inverse_unit = ((254 << 23) - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    inverse_unit *= _LIMB
    factor_unit = power * (1 / _LIMB) * step
    upper, lower = _limbs(_from_columns(errors), inverse_unit[:, None])
    upper, lower = tl.reshape(upper, [KEYS, _DIM]), tl.reshape(lower, [KEYS, _DIM])
    plain = _plain_loss(errors, upper, lower, factor_unit, factor_ptr, pivots_ptr, lane)
    factor_unit_of_key = tl.max(_by_key(factor_unit), 1)[:, None]
    inverse_unit_of_key = tl.max(_by_key(inverse_unit), 1)[:, None]

    # ---- block after block, a scale each ----
    key = tl.arange(0, KEYS)
    column = tl.arange(0, _BLOCK)
    key_row = tile * KEYS + key
    key_live = key_row < count
    key_ptr = x_ptr + (key_row.to(tl.int64) * x_stride * (16 // (dtype.primitive_bitwidth // 8)))
    # Of errors so far only those of blocks without a scale are known.
    has_scale = (_by_key(base) != 0)[:, :, None]
    upper = tl.where(has_scale, 0.0, tl.reshape(upper, [KEYS, _LANES, _BLOCK]))
    lower = tl.where(has_scale, 0.0, tl.reshape(lower, [KEYS, _LANES, _BLOCK]))
    total = tl.zeros([KEYS], tl.float32)
    scales = base
    packed = (tl.zeros_like(amax), tl.zeros_like(amax), tl.zeros_like(amax), tl.zeros_like(amax))
    for block in range(_LANES):
        tile_ptr = key_ptr[:, None] + (column + block * _BLOCK)[None, :]
        values = tl.load(tile_ptr, mask=key_live[:, None], other=0).to(tl.float32)
        entries = (column + block * _BLOCK)[None, :] * _DIM + tl.arange(0, _DIM)[:, None]
        factor = tl.load(factor_ptr + entries)
        targets = _add_sums(
            values,
            tl.reshape(upper, [KEYS, _DIM]),
            tl.reshape(lower, [KEYS, _DIM]),
            factor,
            -factor_unit_of_key,
        )
        targets = tl.broadcast_to(targets[:, None, :], [KEYS, _LANES, _BLOCK])
        targets = _columns(tl.reshape(targets, [KEYS * _LANES, _BLOCK]))
        block_x = load_block(words + block * (2 * WORDS), live, dtype)

        base_of_key = _of_lane(base, lane == block)
        block_base = _to_lanes(base_of_key)
        tried = tl.minimum(tl.maximum(block_base + lane + _FIRST_STEP, 1), _LAST_SCALE)
        is_zero = block_base == 0
        scale = tl.where(is_zero, _ZERO_SCALE, scale_value(tried))
        inverse = tl.where(is_zero, 1 / _ZERO_SCALE, inverse_of_scale(tried))
        tried = tl.where(is_zero, 0, tried)
        these, loss = _try_scale(
            targets,
            block_x,
            inverse,
            within_ptr + block * _TRIANGLE,
            pivots_ptr + block * _BLOCK,
        )

        # ---- the least loss, compared without its last 3 bits, where the thread's number is ----
        loss = (loss + tl.where(is_zero, 0.0, _BLOCK_MARGIN)) * (scale * scale)
        least = tl.min(_by_key((loss.to(tl.int32, bitcast=True) & -8) | lane), 1)
        total += (least & -8).to(tl.float32, bitcast=True)
        is_best = lane == _to_lanes(least & 7)
        best_scale = _of_lane(scale, is_best)
        best_byte = _to_lanes(_of_lane(tried, is_best))
        best = ()
        for i in tl.static_range(4):
            best = best + (_of_lane(these[i], is_best),)
        is_own = lane == block
        scales = tl.where(is_own, best_byte, scales)
        kept = ()
        for i in tl.static_range(4):
            kept = kept + (tl.where(is_own, _to_lanes(best[i]), packed[i]),)
        packed = kept

        new_errors = _unpack(best) * best_scale[:, None] - values
        new_upper, new_lower = _limbs(new_errors, inverse_unit_of_key)
        is_block = (tl.arange(0, _LANES) == block)[None, :, None]
        upper = tl.where(is_block, new_upper[:, None, :], upper)
        lower = tl.where(is_block, new_lower[:, None, :], lower)

    # ---- a block each again: stored so only if less is lost ----
    better = _to_lanes((total + total * _MARGIN < plain).to(tl.int32)) != 0
    better = better & (amax <= _LARGEST_MAGNITUDE)
    word = tl.where(better, _found_bytes(packed, signs), plain_bytes)
    scales = tl.where(better, scales, base)
    record = tl.where(paged, index >> _PAGE_BITS, index)
    lane += tl.where(paged, (index & _IN_PAGE).to(tl.int32) * _LANES, 0)
    tl.store(codes_ptr + (record * codes_stride * 2 + lane), word, mask=live)
    tl.store(scales_ptr + (record * scales_stride + lane), scales.to(tl.uint8), mask=live)


@triton.jit(
    do_not_specialize=[
        "slots_ptr",
        "key_cache_ptr",
        "query_rows_ptr",
        "packed_query_ptr",
        "key_scales_ptr",
        "query_scales_ptr",
        "key_step",
        "query_step",
        "keys",
        "queries",
        "key_stride",
        "query_stride",
        "page_stride",
        "scale_page_stride",
        "packed_stride",
        "query_scale_stride",
    ]
)
def write_covariance_kernel(
    key_ptr,  # bf16, fp16 or fp32 [keys, 128]
    slots_ptr,  # int64 [keys]
    key_cache_ptr,  # int64 [pages, 64, 8]
    key_scales_ptr,  # uint8 [pages, 64, 8]
    key_factor_ptr,  # fp16 [128, 128], as those that follow in `RuleWeights`
    key_within_ptr,  # fp32 [8, 120]
    key_pivots_ptr,  # fp32 [128]
    query_ptr,  # like key_ptr [queries, 128]
    query_rows_ptr,  # int64 [queries]
    packed_query_ptr,  # int64 [rows, 8]
    query_scales_ptr,  # uint8 [rows, 8]
    query_factor_ptr,
    query_within_ptr,
    query_pivots_ptr,
    key_step: tl.float32,
    query_step: tl.float32,
    keys,
    queries,
    key_stride: tl.int64,  # vectors of 16 bytes
    query_stride: tl.int64,
    page_stride: tl.int64,
    packed_stride: tl.int64,
    scale_page_stride: tl.int64,  # bytes
    query_scale_stride: tl.int64,
    KEYS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:  # `launch` says why, and why before anything else
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile = tl.program_id(0)
    key_tiles = tl.cdiv(keys, KEYS)
    # One body for both halves of a call: it is long, and compiling it takes most of a first call.
    x_ptr, index_ptr, codes_ptr, scales_ptr = key_ptr, slots_ptr, key_cache_ptr, key_scales_ptr
    factor_ptr, within_ptr, pivots_ptr = key_factor_ptr, key_within_ptr, key_pivots_ptr
    step, count = key_step, keys
    x_stride, codes_stride, scales_stride = key_stride, page_stride, scale_page_stride
    paged = tile < key_tiles
    if tile >= key_tiles:
        x_ptr, index_ptr = query_ptr, query_rows_ptr
        codes_ptr, scales_ptr = packed_query_ptr, query_scales_ptr
        factor_ptr, within_ptr, pivots_ptr = query_factor_ptr, query_within_ptr, query_pivots_ptr
        step, count = query_step, queries
        x_stride, codes_stride, scales_stride = query_stride, packed_stride, query_scale_stride
        tile -= key_tiles
    _write_keys(
        tl.multiple_of(x_ptr, 16),
        index_ptr,
        codes_ptr,
        scales_ptr,
        tl.multiple_of(factor_ptr, 16),
        tl.multiple_of(within_ptr, 16),
        tl.multiple_of(pivots_ptr, 16),
        step,
        count,
        x_stride,
        codes_stride,
        scales_stride,
        tile,
        paged,
        KEYS,
    )
