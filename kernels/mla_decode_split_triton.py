# mypy: ignore-errors
"""First kernel of ``mla_decode``: attention of a tile of queries over one slice of a request's tokens.

Written for hostile memory: what no request owns may hold NaN, and 0 * NaN is NaN, so a masked score is not enough and
every load of the cache is masked as well (flashinfer-ai/flashinfer#941). Indices become 64-bit before they meet a
stride (lightseekorg/tokenspeed#501).
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_conformance.kernels.mla_decode_rows_triton import request_length, tokens_per_split

_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _row_ptrs(request_ptr, rows, num_heads, token_stride, head_stride):
    """Where the rows of a request start: a query token and a head each."""
    return request_ptr + (rows // num_heads).to(tl.int64) * token_stride + (rows % num_heads).to(tl.int64) * head_stride


@triton.jit
def _tile_pages(
    request_table_ptr,
    table_stride_w,
    tile_start,
    split_end,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_IN_PAGE: tl.constexpr,
):
    """The page of each token of a tile: one number when the tile lies inside one page, else one per token.

    Tokens from split_end on get page -1 without a look at the table, because the entries there are garbage.
    """
    tokens = tile_start if TILE_IN_PAGE else tile_start + tl.arange(0, BLOCK_N)
    # Entry token // PAGE_SIZE of this request's table.
    entry_ptrs = request_table_ptr + (tokens // PAGE_SIZE).to(tl.int64) * table_stride_w
    return tl.load(entry_ptrs, mask=tokens < split_end, other=-1)


@triton.jit
def _load_tile(
    kv_cache_ptr,
    pages,
    tile_start,
    split_end,
    num_pages,
    kv_stride_page,
    kv_stride_token,
    KV_LORA_RANK: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One tile of the cache as stored: its latent part, its rotary part, and which of its pages exist.

    Rows past the slice and rows of a page outside the cache are not read and come as zeros. Without a rotary part the
    latent part stands in for it, unused.
    """
    tokens = tile_start + tl.arange(0, BLOCK_N)
    page_exists = (pages >= 0) & (pages < num_pages)
    readable = (tokens < split_end) & page_exists
    # kv_cache[page, token % PAGE_SIZE, :], the latent first and the rotary part behind it.
    token_ptrs = (
        kv_cache_ptr + pages.to(tl.int64) * kv_stride_page + (tokens % PAGE_SIZE).to(tl.int64) * kv_stride_token
    )
    latent = tl.arange(0, LATENT_BLOCK)
    ckv = tl.load(
        token_ptrs[:, None] + latent[None, :],
        mask=readable[:, None] & (latent < KV_LORA_RANK)[None, :],
        other=0.0,
    )
    kpe = ckv
    if ROPE_DIM > 0:
        rope = tl.arange(0, ROPE_BLOCK)
        kpe = tl.load(
            token_ptrs[:, None] + KV_LORA_RANK + rope[None, :],
            mask=readable[:, None] & (rope < ROPE_DIM)[None, :],
            other=0.0,
        )
    return ckv, kpe, page_exists


@triton.jit(
    do_not_specialize=[
        "num_heads",
        "num_query_tokens",
        "num_pages",
        "table_width",
        "num_splits",
        "table_stride_b",
        "seq_lens_stride",
        "query_lens_stride",
        "lse_stride_b",
        "lse_stride_t",
        "lse_stride_h",
        "lse_stride_s",
    ],
    do_not_specialize_on_alignment=["block_table_ptr", "seq_lens_ptr", "query_lens_ptr", "k_scale_ptr", "lse_ptr"],
)
def mla_decode_split_kernel(
    q_nope_ptr,
    q_pe_ptr,
    kv_cache_ptr,
    block_table_ptr,
    seq_lens_ptr,
    query_lens_ptr,
    k_scale_ptr,
    out_ptr,
    lse_ptr,
    score_scale,
    k_scale,
    num_heads,
    num_query_tokens,
    num_pages,
    table_width,
    num_splits,
    q_nope_stride_b,
    q_nope_stride_t,
    q_nope_stride_h,
    q_pe_stride_b,
    q_pe_stride_t,
    q_pe_stride_h,
    kv_stride_page,
    kv_stride_token,
    table_stride_b,
    table_stride_w,
    seq_lens_stride,
    query_lens_stride,
    out_stride_b,
    out_stride_t,
    out_stride_h,
    out_stride_s,
    lse_stride_b,
    lse_stride_t,
    lse_stride_h,
    lse_stride_s,
    KV_LORA_RANK: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_IN_PAGE: tl.constexpr,
    PREFETCH: tl.constexpr,
    ROW_LIMITS: tl.constexpr,
    CAUSAL: tl.constexpr,
    FINAL: tl.constexpr,
):
    """Attend BLOCK_Q query rows of one request to one contiguous slice of its tokens.

        score = softmax_scale * (q_nope . ckv + q_pe . kpe)         for each token of the slice
        out   = sum(softmax(score) * ckv),   lse = log(sum(exp(score)))

    A request has a query row for each of its query tokens and heads, the heads of a token one after the other: they
    all read the same cache, so rows of several tokens share a tile, and the cache is read once for all of them.

    The latent row ckv is key and value at once, so a [BLOCK_N, kv_lora_rank] tile is loaded once, row-major, and enters
    two products: transposed for the scores, as it is for the output. Loading it transposed would make Triton keep two
    copies in shared memory, or load synchronously.

    The softmax runs online and in base 2 (score_scale holds softmax_scale * log2 e): a running maximum, a running sum
    and an unnormalised float32 accumulator, the last two rescaled whenever the maximum grows.

    The pages of the next tile are fetched one iteration early and carried through the loop as an ordinary value. A load
    whose address was itself loaded in the same iteration would cost the pipeliner the stages that should buffer ckv.

    An e4m3 tile passes through registers on its way to shared memory, to be widened, and the pipeliner does not overlap
    that. With PREFETCH the loop does it by hand: it carries the next tile, still as e4m3, in registers. Widening is
    exact, and the scale of the cache multiplies the scores and the final normalisation instead of every element, so the
    dequantised value is never rounded.

    The products ask for "ieee": float32 is multiplied as float32 and not as TF32. The word means nothing to the
    half-precision types.

    ROW_LIMITS says that rows may see fewer tokens than the request has: with CAUSAL, a token sees none behind its own,
    the last of them the whole context, and query tokens from query_lens[request] on are padding and see none. Without
    it every row sees all, and the masks are left out.

    FINAL says that the request has one split, so that this result is the whole: out and the natural lse are written, 0
    and -inf for a row without tokens, NaN for a request too long for its table. Otherwise the lse is written in base 2,
    and a slice without tokens writes nothing. A page number outside the cache is not followed; its tokens score NaN,
    which reaches the out and lse of the rows that see them.
    """
    # The query tile is the fastest grid axis, so the tiles that share a slice of the cache run together and meet in L2.
    query_tile = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.program_id(2)
    request64 = request.to(tl.int64)

    seq_len, too_long = request_length(seq_lens_ptr, seq_lens_stride, request, table_width, PAGE_SIZE)
    split_len = tokens_per_split(seq_len, num_splits, BLOCK_N)
    split_start = split * split_len
    split_end = tl.minimum(split_start + split_len, seq_len)
    if not FINAL:  # noqa: SIM102 - the outer condition is decided at compile time
        if split_start >= split_end:
            return

    rows = query_tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    row_mask = rows < num_query_tokens * num_heads
    if ROW_LIMITS:
        query_tokens = rows // num_heads
        query_len = num_query_tokens
        if query_lens_ptr is not None:
            query_len = tl.load(query_lens_ptr + request64 * query_lens_stride).to(tl.int64)
            query_len = tl.minimum(query_len, num_query_tokens).to(tl.int32)
        visible = seq_len - query_len + 1 + query_tokens if CAUSAL else tl.zeros_like(rows) + seq_len
        visible = tl.where(query_tokens < query_len, visible, 0)
    latent = tl.arange(0, LATENT_BLOCK)
    latent_mask = latent < KV_LORA_RANK

    # q_nope[request, query token, head, :], zero beyond the last row and the last latent column.
    q_nope_rows = _row_ptrs(q_nope_ptr + request64 * q_nope_stride_b, rows, num_heads, q_nope_stride_t, q_nope_stride_h)
    q_nope = tl.load(q_nope_rows[:, None] + latent[None, :], mask=row_mask[:, None] & latent_mask[None, :], other=0.0)
    if ROPE_DIM > 0:
        rope = tl.arange(0, ROPE_BLOCK)
        rope_mask = rope < ROPE_DIM
        # q_pe[request, query token, head, :], likewise.
        q_pe_rows = _row_ptrs(q_pe_ptr + request64 * q_pe_stride_b, rows, num_heads, q_pe_stride_t, q_pe_stride_h)
        q_pe = tl.load(q_pe_rows[:, None] + rope[None, :], mask=row_mask[:, None] & rope_mask[None, :], other=0.0)

    # Multiplied as float32 either way, so that a k_scale gives the same bits as a number and as a tensor.
    if k_scale_ptr is not None:
        k_scale = tl.load(k_scale_ptr)
    score_scale = tl.cast(score_scale, tl.float32) * tl.cast(k_scale, tl.float32)

    running_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, LATENT_BLOCK], tl.float32)

    # block_table[request, :]; pages always holds those of the next tile to load.
    request_table_ptr = block_table_ptr + request64 * table_stride_b
    pages = _tile_pages(request_table_ptr, table_stride_w, split_start, split_end, PAGE_SIZE, BLOCK_N, TILE_IN_PAGE)
    if PREFETCH:
        stored_ckv, stored_kpe, page_exists = _load_tile(
            kv_cache_ptr,
            pages,
            split_start,
            split_end,
            num_pages,
            kv_stride_page,
            kv_stride_token,
            KV_LORA_RANK,
            LATENT_BLOCK,
            ROPE_DIM,
            ROPE_BLOCK,
            PAGE_SIZE,
            BLOCK_N,
        )
        pages = _tile_pages(
            request_table_ptr, table_stride_w, split_start + BLOCK_N, split_end, PAGE_SIZE, BLOCK_N, TILE_IN_PAGE
        )
    for tile_start in range(split_start, split_end, BLOCK_N):
        if not PREFETCH:
            stored_ckv, stored_kpe, page_exists = _load_tile(
                kv_cache_ptr,
                pages,
                tile_start,
                split_end,
                num_pages,
                kv_stride_page,
                kv_stride_token,
                KV_LORA_RANK,
                LATENT_BLOCK,
                ROPE_DIM,
                ROPE_BLOCK,
                PAGE_SIZE,
                BLOCK_N,
            )
            pages = _tile_pages(
                request_table_ptr, table_stride_w, tile_start + BLOCK_N, split_end, PAGE_SIZE, BLOCK_N, TILE_IN_PAGE
            )
        # Tokens past the slice get weight 0; tokens of a page that does not exist make the rows NaN that see them.
        tokens = tile_start + tl.arange(0, BLOCK_N)
        in_split = tokens < split_end
        token_bias = tl.where(in_split, tl.where(page_exists, 0.0, float("nan")), float("-inf"))
        ckv = stored_ckv.to(q_nope.dtype)
        kpe = stored_kpe.to(q_nope.dtype)
        scores = tl.dot(q_nope, tl.trans(ckv), input_precision="ieee")
        if ROPE_DIM > 0:
            scores = tl.dot(q_pe, tl.trans(kpe), acc=scores, input_precision="ieee")
        # Not before the stored tile is used up: registers hold one tile.
        if PREFETCH:
            stored_ckv, stored_kpe, page_exists = _load_tile(
                kv_cache_ptr,
                pages,
                tile_start + BLOCK_N,
                split_end,
                num_pages,
                kv_stride_page,
                kv_stride_token,
                KV_LORA_RANK,
                LATENT_BLOCK,
                ROPE_DIM,
                ROPE_BLOCK,
                PAGE_SIZE,
                BLOCK_N,
            )
            pages = _tile_pages(
                request_table_ptr, table_stride_w, tile_start + 2 * BLOCK_N, split_end, PAGE_SIZE, BLOCK_N, TILE_IN_PAGE
            )
        scores = scores * score_scale + token_bias[None, :]
        if ROW_LIMITS:
            scores = tl.where(tokens[None, :] < visible[:, None], scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        # A row that has seen no token yet has no maximum to subtract.
        subtracted = tl.where(new_max == float("-inf"), 0.0, new_max) if ROW_LIMITS else new_max
        rescale = tl.exp2(running_max - subtracted)
        weights = tl.exp2(scores - subtracted[:, None])
        running_sum = running_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q_nope.dtype), ckv, acc=acc * rescale[:, None], input_precision="ieee")
        running_max = new_max

    if FINAL:
        running_sum = tl.where(too_long, float("nan"), running_sum)
    # A sum of 0 means a row that sees no token: its output is 0, not 0 / 0 (vllm-project/vllm#57017), its lse -inf.
    divisor = tl.where(running_sum == 0.0, 1.0, running_sum)
    lse = running_max + tl.log2(divisor)
    if FINAL:
        lse *= _LN_2

    # out[request, query token, head, split, :] and lse likewise; FINAL has one split, so its stride does not matter.
    split64 = split.to(tl.int64)
    out_ptr += request64 * out_stride_b + split64 * out_stride_s
    out_rows = _row_ptrs(out_ptr, rows, num_heads, out_stride_t, out_stride_h)
    out = (acc * (k_scale / divisor)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_rows[:, None] + latent[None, :], out, mask=row_mask[:, None] & latent_mask[None, :])
    lse_ptr += request64 * lse_stride_b + split64 * lse_stride_s
    tl.store(_row_ptrs(lse_ptr, rows, num_heads, lse_stride_t, lse_stride_h), lse, mask=row_mask)
