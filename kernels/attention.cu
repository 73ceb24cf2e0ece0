// Attention over the keys that a plan lets each query see, for any even head width up to 128, forward and backward, in
// plain f32 arithmetic. It exists to be right on every shape, type and GPU: small models, f32 runs, and the check of the
// faster kernels. One thread row (4 threads) a query; nothing here is tuned.
//
//   out[n,h,:] = sum_s p[n,s] v[s,h,:],  p[n,s] = exp(scale q[n,h,:].k[s,h,:] + key_bias[s] - lse[h,n])
//   dv = p^T dout;  ds = p (dout.v - delta);  dq = scale ds k;  dk = scale ds^T q;  delta[h,n] = dout[n,h,:].out[n,h,:]
//
// delta comes from an output that was rounded, so ds of a query would sum to a rest instead of 0, and the rests of all
// queries would gather in dk. The query kernel adds the rest to delta: p sums to 1, so the key kernel, which runs after
// it, finds no rest. dq keeps its part, rest * scale * (mean key under p): about what rounding ds to bf16 leaves there anyway.
//
// Operands are [rows, heads, d] with a row stride of ld* elements; lse, delta [heads, N]. A query that sees nothing gets
// out 0 and lse -inf. Tiles are 32 queries by 32 keys; `tile_list` says which key tiles a query tile reads (for the key
// kernel: which query tiles a key tile reads) as tile << 1 | partial; every pair is checked against row_keys anyway.
// Keys within S that no query sees must be finite. FLOPs: 4 d a pair forward, 6 d + 8 d backward.
#include "attention.cuh"
#include <math_constants.h>

namespace {

constexpr int TILE = 32, THREADS = 128, QUAD = 4, COLUMNS = TILE / QUAD, DIMS = 128 / QUAD, SCORE_PITCH = TILE + 1;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void store(float* at, float x) { *at = x; }
__device__ __forceinline__ void store(__nv_bfloat16* at, float x) { *at = __float2bfloat16(x); }

// Rows [first, first + 32) of one head into shared memory; rows past the end are zeros.
template <typename T>
__device__ void load_tile(float* to, const T* from, long long ld, int head, int first, int rows, int d) {
    for (int i = threadIdx.x; i < TILE * d; i += THREADS) {
        const int r = i / d, c = i % d;
        to[r * (d + 1) + c] = first + r < rows ? to_float(from[(first + r) * ld + head * d + c]) : 0.f;
    }
}

// The 8 products of one row of `left` with rows part, part + 4, ... of `right`.
__device__ __forceinline__ void dots(float (&out)[COLUMNS], const float* left, const float* right, int part, int d) {
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) out[j] = 0.f;
    for (int c = 0; c < d; ++c) {
        const float x = left[c];
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) out[j] = fmaf(x, right[(part + QUAD * j) * (d + 1) + c], out[j]);
    }
}

// sum[i] += sum over the 32 rows r of `right`: weights[r] right[r][part + 4 i].
__device__ __forceinline__ void accumulate(float (&sum)[DIMS], const float* weights, const float* right, int part, int d) {
    for (int r = 0; r < TILE; ++r) {
        const float w = weights[r];
#pragma unroll
        for (int i = 0; i < DIMS; ++i)
            if (part + QUAD * i < d) sum[i] = fmaf(w, right[r * (d + 1) + part + QUAD * i], sum[i]);
    }
}

template <typename T>
__device__ __forceinline__ void store_row(T* to, const float (&sum)[DIMS], float factor, int part, int d) {
#pragma unroll
    for (int i = 0; i < DIMS; ++i)
        if (part + QUAD * i < d) store(to + part + QUAD * i, sum[i] * factor);
}

template <typename T>
__device__ void forward(const T* q, long long ldq, const T* k, long long ldk, const T* v, long long ldv, T* out,
                        long long ldo, float* lse, const int* row_keys, const int* tile_start, const int* tile_list,
                        const int* tile_order, const float* key_bias, float scale, int N, int S, int tiles, int d) {
    extern __shared__ float shared[];
    const int head = blockIdx.x / tiles, tile = tile_order[blockIdx.x % tiles], pitch = d + 1;
    float *tq = shared, *tk = tq + TILE * pitch, *tv = tk + TILE * pitch, *tp = tv + TILE * pitch;
    const int row = threadIdx.x / QUAD, part = threadIdx.x % QUAD, query = tile * TILE + row;
    const RowKeys keys = load_row_keys(row_keys, query, N);
    load_tile(tq, q, ldq, head, tile * TILE, N, d);
    float o[DIMS] = {}, maximum = -CUDART_INF_F, sum = 0.f;
    for (int e = tile_start[tile]; e < tile_start[tile + 1]; ++e) {
        const int first = (tile_list[e] >> 1) * TILE;
        __syncthreads();
        load_tile(tk, k, ldk, head, first, S, d);
        load_tile(tv, v, ldv, head, first, S, d);
        __syncthreads();
        float s[COLUMNS];
        dots(s, tq + row * pitch, tk, part, d);
        float highest = maximum;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const int key = first + part + QUAD * j;
            s[j] = keys.sees(key) ? s[j] * scale + (key_bias ? key_bias[key] : 0.f) : -CUDART_INF_F;
            highest = fmaxf(highest, s[j]);
        }
        highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
        const float base = highest == -CUDART_INF_F ? 0.f : highest, fade = expf(maximum - base);
        maximum = highest;
        sum *= fade;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const float p = expf(s[j] - base);
            sum += p;
            tp[row * SCORE_PITCH + part + QUAD * j] = p;
        }
#pragma unroll
        for (int i = 0; i < DIMS; ++i) o[i] *= fade;
        __syncwarp();  // the four threads of a row are of one warp
        accumulate(o, tp + row * SCORE_PITCH, tv, part, d);
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (query >= N) return;
    store_row(out + query * ldo + head * d, o, sum > 0.f ? 1.f / sum : 0.f, part, d);
    if (part == 0) lse[(long long)head * N + query] = sum > 0.f ? maximum + logf(sum) : -CUDART_INF_F;
}

// One warp a (row, head).
template <typename T>
__device__ void row_products(const T* out, long long ldo, const T* dout, long long lddo, float* delta, int N, int heads,
                             int d) {
    const long long at = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (at >= (long long)N * heads) return;
    const int row = int(at / heads), head = int(at % heads);
    float sum = 0.f;
    for (int c = threadIdx.x % 32; c < d; c += 32)
        sum = fmaf(to_float(out[row * ldo + head * d + c]), to_float(dout[row * lddo + head * d + c]), sum);
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (threadIdx.x % 32 == 0) delta[(long long)head * N + row] = sum;
}

template <typename T>
__device__ void backward_query(const T* q, long long ldq, const T* k, long long ldk, const T* v, long long ldv,
                               const T* dout, long long lddo, const float* lse, float* delta, T* dq,
                               long long lddq, const int* row_keys, const int* tile_start, const int* tile_list,
                               const int* tile_order, const float* key_bias, float scale, int N, int S, int tiles, int d) {
    extern __shared__ float shared[];
    const int head = blockIdx.x / tiles, tile = tile_order[blockIdx.x % tiles], pitch = d + 1;
    float *tq = shared, *tg = tq + TILE * pitch, *tk = tg + TILE * pitch, *tv = tk + TILE * pitch, *ts = tv + TILE * pitch;
    const int row = threadIdx.x / QUAD, part = threadIdx.x % QUAD, query = tile * TILE + row;
    const RowKeys keys = load_row_keys(row_keys, query, N);
    const float own_lse = query < N ? lse[(long long)head * N + query] : 0.f;
    const float own_delta = query < N ? delta[(long long)head * N + query] : 0.f;
    load_tile(tq, q, ldq, head, tile * TILE, N, d);
    load_tile(tg, dout, lddo, head, tile * TILE, N, d);
    float sum[DIMS] = {}, rest = 0.f;
    for (int e = tile_start[tile]; e < tile_start[tile + 1]; ++e) {
        const int first = (tile_list[e] >> 1) * TILE;
        __syncthreads();
        load_tile(tk, k, ldk, head, first, S, d);
        load_tile(tv, v, ldv, head, first, S, d);
        __syncthreads();
        float s[COLUMNS], dp[COLUMNS];
        dots(s, tq + row * pitch, tk, part, d);
        dots(dp, tg + row * pitch, tv, part, d);
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const int key = first + part + QUAD * j;
            const float p = keys.sees(key) ? expf(s[j] * scale + (key_bias ? key_bias[key] : 0.f) - own_lse) : 0.f;
            const float ds = p * (dp[j] - own_delta);
            rest += ds;
            ts[row * SCORE_PITCH + part + QUAD * j] = ds;
        }
        __syncwarp();
        accumulate(sum, ts + row * SCORE_PITCH, tk, part, d);
    }
    rest += __shfl_xor_sync(~0u, rest, 1);
    rest += __shfl_xor_sync(~0u, rest, 2);
    if (query >= N) return;
    store_row(dq + query * lddq + head * d, sum, scale, part, d);
    if (part == 0) delta[(long long)head * N + query] = own_delta + rest;
}

template <typename T>
__device__ void backward_key(const T* q, long long ldq, const T* k, long long ldk, const T* v, long long ldv,
                             const T* dout, long long lddo, const float* lse, const float* delta, T* dk, long long lddk,
                             T* dv, long long lddv, const int* row_keys, const int* tile_start, const int* tile_list,
                             const int* tile_order, const float* key_bias, float scale, int N, int S, int tiles, int d) {
    extern __shared__ float shared[];
    const int head = blockIdx.x / tiles, tile = tile_order[blockIdx.x % tiles], pitch = d + 1;
    float *tk = shared, *tv = tk + TILE * pitch, *tq = tv + TILE * pitch, *tg = tq + TILE * pitch;
    float *tp = tg + TILE * pitch, *ts = tp + TILE * SCORE_PITCH;
    const int row = threadIdx.x / QUAD, part = threadIdx.x % QUAD, key = tile * TILE + row;
    const float bias = key_bias && key < S ? key_bias[key] : 0.f;
    load_tile(tk, k, ldk, head, tile * TILE, S, d);
    load_tile(tv, v, ldv, head, tile * TILE, S, d);
    float sum_k[DIMS] = {}, sum_v[DIMS] = {};
    for (int e = tile_start[tile]; e < tile_start[tile + 1]; ++e) {
        const int first = (tile_list[e] >> 1) * TILE;
        __syncthreads();
        load_tile(tq, q, ldq, head, first, N, d);
        load_tile(tg, dout, lddo, head, first, N, d);
        __syncthreads();
        float s[COLUMNS], dp[COLUMNS];
        dots(s, tk + row * pitch, tq, part, d);
        dots(dp, tv + row * pitch, tg, part, d);
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const int query = first + part + QUAD * j;
            float p = 0.f, ds = 0.f;
            if (load_row_keys(row_keys, query, N).sees(key)) {
                p = expf(s[j] * scale + bias - lse[(long long)head * N + query]);
                ds = p * (dp[j] - delta[(long long)head * N + query]);
            }
            tp[row * SCORE_PITCH + part + QUAD * j] = p;
            ts[row * SCORE_PITCH + part + QUAD * j] = ds;
        }
        __syncwarp();
        accumulate(sum_v, tp + row * SCORE_PITCH, tg, part, d);
        accumulate(sum_k, ts + row * SCORE_PITCH, tq, part, d);
    }
    if (key >= S) return;
    store_row(dk + key * lddk + head * d, sum_k, scale, part, d);
    store_row(dv + key * lddv + head * d, sum_v, 1.f, part, d);
}

}  // namespace

// Grid: tiles * heads blocks of 128 threads (delta: ceil(N heads / 8) blocks of 256). Dynamic shared memory in bytes, with
// t = 128 (d + 1): forward 3 t + 4224, backward_query 4 t + 4224, backward_key 4 t + 8448, delta 0.
#define ATTENTION(T, t)                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        attention_##t(const T* q, long long ldq, const T* k, long long ldk, const T* v, long long ldv, T* out,        \
                      long long ldo, float* lse, const int* row_keys, const int* tile_start, const int* tile_list,    \
                      const int* tile_order, const float* key_bias, float scale, int N, int S, int tiles, int d) {    \
        forward(q, ldq, k, ldk, v, ldv, out, ldo, lse, row_keys, tile_start, tile_list, tile_order, key_bias, scale,  \
                N, S, tiles, d);                                                                                      \
    }                                                                                                                 \
    extern "C" __global__ void attention_delta_##t(const T* out, long long ldo, const T* dout, long long lddo,        \
                                                   float* delta, int N, int heads, int d) {                           \
        row_products(out, ldo, dout, lddo, delta, N, heads, d);                                                       \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS) attention_backward_query_##t(                               \
        const T* q, long long ldq, const T* k, long long ldk, const T* v, long long ldv, const T* dout,               \
        long long lddo, const float* lse, float* delta, T* dq, long long lddq, const int* row_keys,                   \
        const int* tile_start, const int* tile_list, const int* tile_order, const float* key_bias, float scale,       \
        int N, int S, int tiles, int d) {                                                                             \
        backward_query(q, ldq, k, ldk, v, ldv, dout, lddo, lse, delta, dq, lddq, row_keys, tile_start, tile_list,     \
                       tile_order, key_bias, scale, N, S, tiles, d);                                                  \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS) attention_backward_key_##t(                                 \
        const T* q, long long ldq, const T* k, long long ldk, const T* v, long long ldv, const T* dout,               \
        long long lddo, const float* lse, const float* delta, T* dk, long long lddk, T* dv, long long lddv,           \
        const int* row_keys, const int* tile_start, const int* tile_list, const int* tile_order,                      \
        const float* key_bias, float scale, int N, int S, int tiles, int d) {                                         \
        backward_key(q, ldq, k, ldk, v, ldv, dout, lddo, lse, delta, dk, lddk, dv, lddv, row_keys, tile_start,        \
                     tile_list, tile_order, key_bias, scale, N, S, tiles, d);                                         \
    }

ATTENTION(float, f32)
ATTENTION(__nv_bfloat16, bf16)
