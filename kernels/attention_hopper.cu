// Attention at head width 128 in bf16 on Hopper's warpgroup matrix units, forward and backward. It exists because scores
// are the one part of a block that grows with the square of the window, and the general kernels leave the matrix units
// idle. Formulas and the plan (row_keys, tile lists) are those of attention.cu; results do not depend on the run.
//
//   forward              query tile 128, key tile 128: S = QK', O += PV                     4 * 128 FLOPs a pair
//   backward_query       query tile 128, key tile 128: S, dP = dO V', dQ += dS K            6 * 128
//   backward_key         key tile 128, query tile 64:  S' = KQ', dP' = V dO', dV += P' dO, dK += dS' Q    8 * 128
//
// A block is one (tile, head): one producer warpgroup, of which one warp copies tiles by TMA through a ring of buffers in
// shared memory, and two consumer warpgroups of 64 rows each, whose softmax hides behind the other's products. The second
// product of each pair takes its left operand from the registers that the first left it in, so P and dS never see
// shared memory; that is also why dQ and dK/dV are two kernels and need no atomics.
//
// Layouts. A tile of R rows lies in shared memory as two panels of 64 columns, R * 128 bytes each, rows of 128 bytes whose
// 16-byte parts are permuted by the copy engine's 128-byte swizzle (a pattern of 8 rows, 1024 bytes).
// - As operand [rows = M or N, columns = K] ("K major"): 8 rows are 1024 bytes apart (stride offset); 16 columns further
//   are 32 bytes further; columns 64.. are the next panel.
// - As right operand [rows = K, columns = N] ("N major", transposed): 64 columns are one panel apart (leading offset), 8
//   rows 1024 bytes (stride offset); 16 rows further are 2048 bytes further.
// - Accumulators: element 4 j + 2 r + c of a thread is row 16 warp + lane/4 + 8 r, column 8 j + 2 (lane % 4) + c. A left
//   operand of 16 columns in registers has the same rows and columns: elements 8 i .. 8 i + 7 in pairs.
#include "attention.cuh"
#include <cuda.h>
#include <math_constants.h>
#include <stdint.h>

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

namespace hopper {

constexpr int WIDTH = 128, ROWS = 128, QUERY_ROWS = 64, BOX_ROWS = 64;
constexpr int CONSUMERS = 2, THREADS = (CONSUMERS + 1) * 128;
constexpr float LOG2E = 1.4426950408889634f;

__host__ __device__ constexpr uint32_t panel_bytes(int rows) { return rows * 128; }
__host__ __device__ constexpr uint32_t tile_bytes(int rows) { return 2 * panel_bytes(rows); }

__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// ---- barriers of the ring

__device__ __forceinline__ void barrier_init(uint64_t* bar, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}
__device__ __forceinline__ void barrier_expect(uint64_t* bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* bar, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finish;\n"
        "bra again;\n"
        "finish:\n}\n" ::"r"(shared_address(bar)), "r"(parity) : "memory");
}

// Position in a ring of buffers.
template <int STAGES>
struct Ring {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};
// The same for two buffers at step i, without state.
__device__ __forceinline__ Ring<2> ring_of_two(int i) { return Ring<2>{i & 1, uint32_t(i >> 1) & 1}; }

// ---- copies

// R rows of one head from `row` on; rows past the end become zeros.
template <int R>
__device__ __forceinline__ void copy_tile(uint32_t to, const CUtensorMap& map, uint64_t* bar, int head, int row) {
#pragma unroll
    for (int panel = 0; panel < 2; ++panel)
#pragma unroll
        for (int r = 0; r < R; r += BOX_ROWS)
            asm volatile(
                "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
                    to + panel * panel_bytes(R) + r * 128),
                "l"(&map), "r"(panel * 64), "r"(head), "r"(row + r), "r"(shared_address(bar))
                : "memory");
}

// ---- matrix products

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving uses of registers across the asynchronous products that own them.
template <int N>
__device__ __forceinline__ void pin(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N>
__device__ __forceinline__ void pin(uint32_t (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// Shared-memory operand: address, leading and stride offsets in units of 16 bytes, 128-byte swizzle.
__device__ __forceinline__ uint64_t operand(uint32_t address, uint32_t leading_bytes) {
    return uint64_t((address & 0x3ffff) >> 4) | uint64_t(leading_bytes >> 4) << 16 | uint64_t(1024 >> 4) << 32 | 1ull << 62;
}

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define D32 D16(0), D16(16)
#define D64 D16(0), D16(16), D16(32), D16(48)
#define REGISTERS_32                                                                                    \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "  \
    "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define REGISTERS_64                                                                                    \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "  \
    "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "   \
    "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "   \
    "%59, %60, %61, %62, %63}"

// d (+)= A B' over 16 columns, both in shared memory, K major; A 64 rows, B 128 or 64.
__device__ __forceinline__ void multiply(float (&d)[64], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " REGISTERS_64 ", %64, %65, add, 1, 1, 0, 0;\n}\n"
        : D64
        : "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void multiply(float (&d)[32], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " REGISTERS_32 ", %32, %33, add, 1, 1, 0, 0;\n}\n"
        : D32
        : "l"(a), "l"(b), "r"(add));
}
// d (+)= A B over 16 rows of B, A in registers, B [16, 128] in shared memory, N major.
__device__ __forceinline__ void multiply(float (&d)[64], const uint32_t* a, uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " REGISTERS_64 ", {%64, %65, %66, %67}, %68, add, 1, 1, 1;\n}\n"
        : D64
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// d = A B' over all 128 columns; A is rows 64 w.. of a tile of RA rows, B a tile of RB rows. Issues and commits.
template <int RA, int RB, int N>
__device__ __forceinline__ void scores(float (&d)[N], uint32_t a, uint32_t b) {
    static_assert(N * 2 == RB, "an accumulator of 64 x RB");
#pragma unroll
    for (int i = 0; i < WIDTH / 16; ++i)
        multiply(d, operand(a + (i / 4) * panel_bytes(RA) + (i % 4) * 32, 16),
                 operand(b + (i / 4) * panel_bytes(RB) + (i % 4) * 32, 16), i > 0);
    products_commit();
}
// d (+)= A B; A [64, R] in registers, B a tile of R rows. Issues and commits.
template <int R>
__device__ __forceinline__ void combine(float (&d)[64], const uint32_t (&a)[R / 4], uint32_t b, int add) {
#pragma unroll
    for (int i = 0; i < R / 16; ++i) multiply(d, a + 4 * i, operand(b + i * 2048, panel_bytes(R)), i > 0 || add);
    products_commit();
}

// ---- arithmetic

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
template <int N>
__device__ __forceinline__ void pack(uint32_t (&to)[N / 2], const float (&from)[N]) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) to[i] = pack(from[2 * i], from[2 * i + 1]);
}
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Scores of rows row, row + 8 with keys from `key` on (the thread's first): those not seen become -inf.
__device__ __forceinline__ void hide_keys(float (&s)[64], const int* row_keys, int row, int rows, int key) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const RowKeys keys = load_row_keys(row_keys, row + 8 * r, rows);
#pragma unroll
        for (int j = 0; j < 16; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c)
                if (!keys.sees(key + 8 * j + c)) s[4 * j + 2 * r + c] = -CUDART_INF_F;
    }
}
// key_bias in units of the raw score, so that scale * s holds it.
__device__ __forceinline__ void add_key_bias(float (&s)[64], const float* key_bias, float scale, int key, int keys) {
    const float unit = 1.f / scale;
#pragma unroll
    for (int j = 0; j < 16; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int at = key + 8 * j + c;
            const float bias = at < keys ? __ldg(key_bias + at) * unit : 0.f;
            s[4 * j + c] += bias;
            s[4 * j + 2 + c] += bias;
        }
}
// The thread's part of rows row, row + 8 of an accumulator of 128 columns.
__device__ __forceinline__ void store_rows(__nv_bfloat16* to, long long ld, int row, int rows, int lane, const float (&d)[64],
                                           float first, float second) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (row + 8 * r >= rows) continue;
        uint32_t* at = reinterpret_cast<uint32_t*>(to + (row + 8 * r) * ld) + lane % 4;
        const float factor = r ? second : first;
#pragma unroll
        for (int j = 0; j < 16; ++j) at[4 * j] = pack(d[4 * j + 2 * r] * factor, d[4 * j + 2 * r + 1] * factor);
    }
}

__device__ __forceinline__ uint32_t aligned_buffer(const void* dynamic) { return (shared_address(dynamic) + 1023) & ~1023u; }

}  // namespace hopper

extern "C" __global__ void __launch_bounds__(hopper::THREADS, 1)
    attention_hopper(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                     const __grid_constant__ CUtensorMap v_map, __nv_bfloat16* out, long long ldo, float* lse,
                     const int* __restrict__ row_keys, const int* __restrict__ tile_start,
                     const int* __restrict__ tile_list, const int* __restrict__ tile_order,
                     const float* __restrict__ key_bias, float scale, int N, int S, int tiles) {
    using namespace hopper;
    constexpr int STAGES = 2;
    extern __shared__ uint8_t dynamic[];
    __shared__ uint64_t q_full, k_full[STAGES], v_full[STAGES], k_empty[STAGES], v_empty[STAGES];
    const uint32_t tq = aligned_buffer(dynamic), tk = tq + tile_bytes(ROWS), tv = tk + STAGES * tile_bytes(ROWS);
    const int head = blockIdx.x / tiles, tile = tile_order[blockIdx.x % tiles];
    const int begin = tile_start[tile], end = tile_start[tile + 1];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4;
    if (threadIdx.x == 0) {
        barrier_init(&q_full, 1);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&k_full[i], 1);
            barrier_init(&v_full[i], 1);
            barrier_init(&k_empty[i], 4 * CONSUMERS);
            barrier_init(&v_empty[i], 4 * CONSUMERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0 && begin < end) {
            barrier_expect(&q_full, tile_bytes(ROWS));
            copy_tile<ROWS>(tq, q_map, &q_full, head, tile * ROWS);
            Ring<STAGES> at;
            for (int e = begin; e < end; ++e, at.next()) {
                const int first = (tile_list[e] >> 1) * ROWS;
                barrier_wait(&k_empty[at.stage], at.parity ^ 1);
                barrier_expect(&k_full[at.stage], tile_bytes(ROWS));
                copy_tile<ROWS>(tk + at.stage * tile_bytes(ROWS), k_map, &k_full[at.stage], head, first);
                barrier_wait(&v_empty[at.stage], at.parity ^ 1);
                barrier_expect(&v_full[at.stage], tile_bytes(ROWS));
                copy_tile<ROWS>(tv + at.stage * tile_bytes(ROWS), v_map, &v_full[at.stage], head, first);
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const int row = tile * ROWS + (warp - 4) * 16 + lane / 4;  // the thread's rows are row, row + 8
        const int column = 2 * (lane % 4);
        const uint32_t own = tq + (group - 1) * 64 * 128;
        const float factor = scale * LOG2E;
        float o[64], s[64], maximum[2] = {-CUDART_INF_F, -CUDART_INF_F}, sum[2] = {0.f, 0.f}, fade[2];
        uint32_t p[32];

        // Scores to probabilities in place, against the highest score so far.
        auto softmax = [&](int entry) {
            const int key = (entry >> 1) * ROWS + column;
            if (key_bias) add_key_bias(s, key_bias, scale, key, S);
            if (entry & 1) hide_keys(s, row_keys, row, N, key);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float highest = maximum[r];
#pragma unroll
                for (int j = 0; j < 16; ++j) highest = fmaxf(highest, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
                highest = quad_max(highest);
                const float base = highest == -CUDART_INF_F ? 0.f : highest * factor;
                fade[r] = exp2_fast(maximum[r] * factor - base);
                maximum[r] = highest;
                float total = 0.f;
#pragma unroll
                for (int j = 0; j < 16; ++j)
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        float& x = s[4 * j + 2 * r + c];
                        x = exp2_fast(fmaf(x, factor, -base));
                        total += x;
                    }
                sum[r] = sum[r] * fade[r] + total;
            }
        };

        if (begin < end) {
            Ring<STAGES> at;
            barrier_wait(&q_full, 0);
            barrier_wait(&k_full[0], 0);
            pin(s);
            products_begin();
            scores<ROWS, ROWS>(s, own, tk);
            products_wait<0>();
            pin(s);
            if (lane == 0) barrier_arrive(&k_empty[0]);
            softmax(tile_list[begin]);
            pack<64>(p, s);
#pragma unroll
            for (int i = 0; i < 64; ++i) o[i] = 0.f;
            // The scores of this tile and the values of the last are multiplied together: the softmax hides behind them.
            for (int e = begin + 1; e < end; ++e) {
                const Ring<STAGES> last = at;
                at.next();
                barrier_wait(&k_full[at.stage], at.parity);
                pin(s);
                pin(o);
                pin(p);
                products_begin();
                scores<ROWS, ROWS>(s, own, tk + at.stage * tile_bytes(ROWS));
                barrier_wait(&v_full[last.stage], last.parity);
                combine<ROWS>(o, p, tv + last.stage * tile_bytes(ROWS), 1);
                products_wait<1>();
                pin(s);
                if (lane == 0) barrier_arrive(&k_empty[at.stage]);
                softmax(tile_list[e]);
                products_wait<0>();
                pin(o);
                pin(p);
                if (lane == 0) barrier_arrive(&v_empty[last.stage]);
#pragma unroll
                for (int i = 0; i < 64; ++i) o[i] *= fade[i / 2 % 2];
                pack<64>(p, s);
            }
            barrier_wait(&v_full[at.stage], at.parity);
            pin(o);
            pin(p);
            products_begin();
            combine<ROWS>(o, p, tv + at.stage * tile_bytes(ROWS), 1);
            products_wait<0>();
            pin(o);
        } else {
#pragma unroll
            for (int i = 0; i < 64; ++i) o[i] = 0.f;
        }
        float inverse[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float total = quad_sum(sum[r]);
            inverse[r] = total > 0.f ? 1.f / total : 0.f;
            if (lane % 4 == 0 && row + 8 * r < N)
                lse[(long long)head * N + row + 8 * r] = total > 0.f ? maximum[r] * scale + logf(total) : -CUDART_INF_F;
        }
        store_rows(out + head * WIDTH, ldo, row, N, lane, o, inverse[0], inverse[1]);
    }
}

extern "C" __global__ void __launch_bounds__(hopper::THREADS, 1)
    attention_hopper_backward_query(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                                    const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap dout_map,
                                    const float* __restrict__ lse, const float* __restrict__ delta, __nv_bfloat16* dq,
                                    long long lddq, const int* __restrict__ row_keys, const int* __restrict__ tile_start,
                                    const int* __restrict__ tile_list, const int* __restrict__ tile_order,
                                    const float* __restrict__ key_bias, float scale, int N, int S, int tiles) {
    using namespace hopper;
    constexpr int STAGES = 2;
    extern __shared__ uint8_t dynamic[];
    __shared__ uint64_t q_full, k_full[STAGES], v_full[STAGES], k_empty[STAGES], v_empty[STAGES];
    const uint32_t tq = aligned_buffer(dynamic), tg = tq + tile_bytes(ROWS), tk = tg + tile_bytes(ROWS),
                   tv = tk + STAGES * tile_bytes(ROWS);
    const int head = blockIdx.x / tiles, tile = tile_order[blockIdx.x % tiles];
    const int begin = tile_start[tile], end = tile_start[tile + 1];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4;
    if (threadIdx.x == 0) {
        barrier_init(&q_full, 1);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&k_full[i], 1);
            barrier_init(&v_full[i], 1);
            barrier_init(&k_empty[i], 4 * CONSUMERS);
            barrier_init(&v_empty[i], 4 * CONSUMERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0 && begin < end) {
            barrier_expect(&q_full, 2 * tile_bytes(ROWS));
            copy_tile<ROWS>(tq, q_map, &q_full, head, tile * ROWS);
            copy_tile<ROWS>(tg, dout_map, &q_full, head, tile * ROWS);
            Ring<STAGES> at;
            for (int e = begin; e < end; ++e, at.next()) {
                const int first = (tile_list[e] >> 1) * ROWS;
                barrier_wait(&k_empty[at.stage], at.parity ^ 1);
                barrier_expect(&k_full[at.stage], tile_bytes(ROWS));
                copy_tile<ROWS>(tk + at.stage * tile_bytes(ROWS), k_map, &k_full[at.stage], head, first);
                barrier_wait(&v_empty[at.stage], at.parity ^ 1);
                barrier_expect(&v_full[at.stage], tile_bytes(ROWS));
                copy_tile<ROWS>(tv + at.stage * tile_bytes(ROWS), v_map, &v_full[at.stage], head, first);
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const int row = tile * ROWS + (warp - 4) * 16 + lane / 4;
        const int column = 2 * (lane % 4);
        const uint32_t own = (group - 1) * 64 * 128;
        const float factor = scale * LOG2E;
        float base[2], own_delta[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const long long at = (long long)head * N + row + 8 * r;
            const float x = row + 8 * r < N ? lse[at] * LOG2E : 0.f;
            base[r] = x == -CUDART_INF_F ? 0.f : x;  // a row that sees nothing: its scores are all -inf
            own_delta[r] = row + 8 * r < N ? delta[at] : 0.f;
        }
        float sum[64], s[64], dp[64];
#pragma unroll
        for (int i = 0; i < 64; ++i) sum[i] = 0.f;
        if (begin < end) barrier_wait(&q_full, 0);
        for (int e = begin; e < end; ++e) {
            const Ring<2> at = ring_of_two(e - begin);
            const int entry = tile_list[e], key = (entry >> 1) * ROWS + column;
            const uint32_t keys = tk + at.stage * tile_bytes(ROWS), values = tv + at.stage * tile_bytes(ROWS);
            barrier_wait(&k_full[at.stage], at.parity);
            pin(s);
            pin(dp);
            products_begin();
            scores<ROWS, ROWS>(s, tq + own, keys);
            barrier_wait(&v_full[at.stage], at.parity);
            scores<ROWS, ROWS>(dp, tg + own, values);
            products_wait<1>();
            pin(s);
            if (key_bias) add_key_bias(s, key_bias, scale, key, S);
            if (entry & 1) hide_keys(s, row_keys, row, N, key);
#pragma unroll
            for (int i = 0; i < 64; ++i) s[i] = exp2_fast(fmaf(s[i], factor, -base[i / 2 % 2]));
            products_wait<0>();
            pin(dp);
            if (lane == 0) barrier_arrive(&v_empty[at.stage]);
            uint32_t ds[32];
#pragma unroll
            for (int i = 0; i < 32; ++i)
                ds[i] = pack(s[2 * i] * (dp[2 * i] - own_delta[i % 2]), s[2 * i + 1] * (dp[2 * i + 1] - own_delta[i % 2]));
            pin(sum);
            pin(ds);
            products_begin();
            combine<ROWS>(sum, ds, keys, 1);
            products_wait<0>();
            pin(sum);
            if (lane == 0) barrier_arrive(&k_empty[at.stage]);
        }
        store_rows(dq + head * WIDTH, lddq, row, N, lane, sum, scale, scale);
    }
}

extern "C" __global__ void __launch_bounds__(hopper::THREADS, 1)
    attention_hopper_backward_key(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                                  const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap dout_map,
                                  const float* __restrict__ lse, const float* __restrict__ delta, __nv_bfloat16* dk,
                                  long long lddk, __nv_bfloat16* dv, long long lddv, const int* __restrict__ row_keys,
                                  const int* __restrict__ tile_start, const int* __restrict__ tile_list,
                                  const int* __restrict__ tile_order, const float* __restrict__ key_bias, float scale,
                                  int N, int S, int tiles) {
    using namespace hopper;
    constexpr int STAGES = 3;
    constexpr uint32_t BYTES = tile_bytes(QUERY_ROWS);
    extern __shared__ uint8_t dynamic[];
    __shared__ uint64_t k_full, full[STAGES], empty[STAGES];
    __shared__ __align__(16) float2 base_delta[STAGES][QUERY_ROWS];  // lse * log2(e), delta
    const uint32_t tk = aligned_buffer(dynamic), tv = tk + tile_bytes(ROWS), tq = tv + tile_bytes(ROWS), tg = tq + STAGES * BYTES;
    const int head = blockIdx.x / tiles, tile = tile_order[blockIdx.x % tiles];
    const int begin = tile_start[tile], end = tile_start[tile + 1];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4;
    if (threadIdx.x == 0) {
        barrier_init(&k_full, 1);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&full[i], 2);  // the copies' and the row values'
            barrier_init(&empty[i], 4 * CONSUMERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (warp == 0 && begin < end) {
            if (lane == 0) {
                barrier_expect(&k_full, 2 * tile_bytes(ROWS));
                copy_tile<ROWS>(tk, k_map, &k_full, head, tile * ROWS);
                copy_tile<ROWS>(tv, v_map, &k_full, head, tile * ROWS);
            }
            Ring<STAGES> at;
            for (int e = begin; e < end; ++e, at.next()) {
                const int first = (tile_list[e] >> 1) * QUERY_ROWS;
                barrier_wait(&empty[at.stage], at.parity ^ 1);
                if (lane == 0) {
                    barrier_expect(&full[at.stage], 2 * BYTES);
                    copy_tile<QUERY_ROWS>(tq + at.stage * BYTES, q_map, &full[at.stage], head, first);
                    copy_tile<QUERY_ROWS>(tg + at.stage * BYTES, dout_map, &full[at.stage], head, first);
                }
#pragma unroll
                for (int i = lane; i < QUERY_ROWS; i += 32) {
                    const long long row = (long long)head * N + first + i;
                    const bool inside = first + i < N;
                    const float base = inside ? lse[row] * LOG2E : 0.f;
                    base_delta[at.stage][i] = make_float2(base == -CUDART_INF_F ? 0.f : base, inside ? delta[row] : 0.f);
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(&full[at.stage]);
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const int key = tile * ROWS + (warp - 4) * 16 + lane / 4;  // the thread's keys are key, key + 8
        const int column = 2 * (lane % 4);
        const uint32_t own = (group - 1) * 64 * 128;
        const float factor = scale * LOG2E;
        float bias[2] = {0.f, 0.f};
        if (key_bias)
            for (int r = 0; r < 2; ++r) bias[r] = key + 8 * r < S ? key_bias[key + 8 * r] * LOG2E : 0.f;
        float sum_k[64], sum_v[64], s[32], dp[32];
        uint32_t p[16], ds[16];
#pragma unroll
        for (int i = 0; i < 64; ++i) sum_k[i] = sum_v[i] = 0.f;
        if (begin < end) barrier_wait(&k_full, 0);
        Ring<STAGES> at;
        for (int e = begin; e < end; ++e, at.next()) {
            const int entry = tile_list[e], query = (entry >> 1) * QUERY_ROWS + column;
            const uint32_t queries = tq + at.stage * BYTES, gradients = tg + at.stage * BYTES;
            const float4* row_values = reinterpret_cast<const float4*>(base_delta[at.stage]) + lane % 4;
            barrier_wait(&full[at.stage], at.parity);
            pin(s);
            pin(dp);
            products_begin();
            scores<ROWS, QUERY_ROWS>(s, tk + own, queries);
            scores<ROWS, QUERY_ROWS>(dp, tv + own, gradients);
            products_wait<1>();
            pin(s);
            if (entry & 1) {
#pragma unroll
                for (int j = 0; j < 8; ++j)
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        const RowKeys keys = load_row_keys(row_keys, query + 8 * j + c, N);
#pragma unroll
                        for (int r = 0; r < 2; ++r)
                            if (!keys.sees(key + 8 * r)) s[4 * j + 2 * r + c] = -CUDART_INF_F;
                    }
            }
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float4 x = row_values[4 * j];  // two queries' base and delta
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    s[4 * j + 2 * r] = exp2_fast(fmaf(s[4 * j + 2 * r], factor, bias[r] - x.x));
                    s[4 * j + 2 * r + 1] = exp2_fast(fmaf(s[4 * j + 2 * r + 1], factor, bias[r] - x.z));
                }
            }
            pack<32>(p, s);
            pin(p);
            pin(sum_v);
            products_begin();
            combine<QUERY_ROWS>(sum_v, p, gradients, 1);
            products_wait<1>();
            pin(dp);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float4 x = row_values[4 * j];
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    ds[2 * j + r] = pack(s[4 * j + 2 * r] * (dp[4 * j + 2 * r] - x.y),
                                         s[4 * j + 2 * r + 1] * (dp[4 * j + 2 * r + 1] - x.w));
            }
            pin(ds);
            pin(sum_k);
            products_begin();
            combine<QUERY_ROWS>(sum_k, ds, queries, 1);
            products_wait<0>();
            pin(sum_k);
            pin(sum_v);
            __syncwarp();
            if (lane == 0) barrier_arrive(&empty[at.stage]);
        }
        store_rows(dk + head * WIDTH, lddk, key, S, lane, sum_k, scale, scale);
        store_rows(dv + head * WIDTH, lddv, key, S, lane, sum_v, 1.f, 1.f);
    }
}

#endif
