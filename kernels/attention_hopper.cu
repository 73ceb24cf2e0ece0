// Attention at head width 128 in bf16 on Hopper's warpgroup matrix units, forward and backward. It exists because scores
// are the one part of a block that grows with the square of the window, and the general kernels leave the matrix units
// idle. Formulas and the plan (row_keys, tile lists) are those of attention.cu; results do not depend on the run.
//
//   forward              query tile 128, key tile 128: S = QK', O += PV                     4 * 128 FLOPs a pair
//   backward_query       query tile 128, key tile 128: S, dP = dO V', dQ += dS K            6 * 128
//   backward_key         key tile 128, query tile 64:  S' = KQ', dP' = V dO', dV += P' dO, dK += dS' Q    8 * 128
//
// A block works through (tile, head) pairs, every gridDim.x-th: one producer warpgroup, of which one warp copies tiles by
// TMA through a ring of buffers in shared memory and two warps prepare what belongs to rows (visibility bits, biases,
// statistics), and two consumer warpgroups of 64 rows each, whose softmax hides behind the other's products. The producers
// run ahead into the next pair while the consumers finish the last. The second product of each pair takes its left operand
// from the registers that the first left it in, so P and dS never see shared memory; that is also why dQ and dK/dV are two
// kernels and need no atomics. Where keys are few, several blocks share a key tile and `attention_hopper_sum_splits` adds
// their parts in a fixed order.
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

// ---- what the producers know of rows

constexpr int ROW_WARPS = 2;  // warps 2 and 3 of the producers
// State of a tile pair: whether some pair is hidden, and whether the 64 rows of a consumer see anything at all.
constexpr uint32_t PARTIAL = 1, BOTH_SEE = 6;
__device__ __forceinline__ bool sees_nothing(uint32_t state, int group) { return !(state >> group & 1); }

// The n lowest bits, n at most 32.
__device__ __forceinline__ uint32_t low_bits(int n) { return __funnelshift_lc(~0u, 0u, uint32_t(max(n, 0))); }

// Which of keys first .. first + 31 a row sees.
__device__ __forceinline__ uint32_t seen_bits(int4 a, int2 b, int first) {
    return (low_bits(a.y - first) & ~low_bits(a.x - first)) | (low_bits(a.w - first) & ~low_bits(a.z - first)) |
           (low_bits(b.y - first) & ~low_bits(b.x - first));
}

// Scores that are not seen become -inf. `seen` are the bits of rows row, row + 8 with the tile's 128 keys.
__device__ __forceinline__ void hide_keys(float (&s)[64], const uint4 (&seen)[2], int column) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const uint32_t words[4] = {seen[r].x >> column, seen[r].y >> column, seen[r].z >> column, seen[r].w >> column};
#pragma unroll
        for (int j = 0; j < 16; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c)
                if (!(words[j / 4] & 1u << (8 * (j % 4) + c))) s[4 * j + 2 * r + c] = -CUDART_INF_F;
    }
}
// `bias` in units of the raw score, so that scale * s holds it.
__device__ __forceinline__ void add_key_bias(float (&s)[64], const float* bias, int column) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        const float2 x = *reinterpret_cast<const float2*>(bias + 8 * j + column);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            s[4 * j + 2 * r] += x.x;
            s[4 * j + 2 * r + 1] += x.y;
        }
    }
}

// Query tiles of 128 against key tiles of 128: what the producers prepare for a buffer of keys.
template <int STAGES>
struct KeyRows {
    uint4 seen[STAGES][ROWS];    // by query, a bit a key; only where PARTIAL
    float bias[STAGES][ROWS];    // by key, only with key_bias
    uint32_t state[STAGES][ROW_WARPS];

    // By both row warps; `at` counts their threads.
    __device__ __forceinline__ void fill(int stage, int at, const int* row_keys, int query, int queries, int entry,
                                         const float* key_bias, float scale, int keys) {
        const int first = (entry >> 1) * ROWS;
        uint32_t found = BOTH_SEE;
        if (entry & PARTIAL) {
            found = PARTIAL;
#pragma unroll 1
            for (int group = 0; group < CONSUMERS; ++group) {
                const int row = at + 64 * group;
                uint4 bits = make_uint4(0, 0, 0, 0);
                if (query + row < queries) {
                    const int4* of_row = reinterpret_cast<const int4*>(row_keys + 8ll * (query + row));
                    const int4 a = __ldg(of_row);
                    const int2 b = __ldg(reinterpret_cast<const int2*>(of_row + 1));
                    bits = make_uint4(seen_bits(a, b, first), seen_bits(a, b, first + 32), seen_bits(a, b, first + 64),
                                      seen_bits(a, b, first + 96));
                }
                seen[stage][row] = bits;
                if (__any_sync(~0u, (bits.x | bits.y | bits.z | bits.w) != 0)) found |= 2 << group;
            }
        }
        if (key_bias) {
#pragma unroll 1
            for (int key = at; key < ROWS; key += 32 * ROW_WARPS)
                bias[stage][key] = first + key < keys ? __ldg(key_bias + first + key) / scale : 0.f;
        }
        if (at % 32 == 0) state[stage][at / 32] = found;
    }
    __device__ __forceinline__ uint32_t state_of(int stage) const { return state[stage][0] | state[stage][1]; }
};

// The thread's part of rows row, row + 8 of an accumulator of 128 columns. The four threads of a row trade parts, so that
// each stores 16 bytes.
__device__ __forceinline__ void store_rows(__nv_bfloat16* to, long long ld, int row, int rows, int lane, const float (&d)[64],
                                           float first, float second) {
    const bool odd = lane & 1, high = lane & 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float factor = r ? second : first;
        uint4* at = reinterpret_cast<uint4*>(to + (row + 8 * r) * ld) + lane % 4;
#pragma unroll
        for (int j = 0; j < 16; j += 4) {
            uint32_t x[4];  // before: part lane % 4 of 16-byte columns j .. j + 3; after: parts 0 .. 3 of column j + lane % 4
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] = pack(d[4 * (j + i) + 2 * r] * factor, d[4 * (j + i) + 2 * r + 1] * factor);
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const uint32_t other = __shfl_xor_sync(~0u, odd ? x[i] : x[i + 1], 1);
                x[i] = odd ? other : x[i];
                x[i + 1] = odd ? x[i + 1] : other;
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32_t other = __shfl_xor_sync(~0u, high ? x[i] : x[i + 2], 2);
                x[i] = high ? other : x[i];
                x[i + 2] = high ? x[i + 2] : other;
            }
            if (row + 8 * r < rows) at[j] = make_uint4(x[0], x[1], x[2], x[3]);
        }
    }
}
// The same in f32.
__device__ __forceinline__ void store_rows(float* to, long long ld, int row, int rows, int lane, const float (&d)[64],
                                           float factor) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (row + 8 * r >= rows) continue;
        float2* at = reinterpret_cast<float2*>(to + (row + 8 * r) * ld) + lane % 4;
#pragma unroll
        for (int j = 0; j < 16; ++j) at[4 * j] = make_float2(d[4 * j + 2 * r] * factor, d[4 * j + 2 * r + 1] * factor);
    }
}

// ---- whose turn it is to issue products

// The two consumers issue in turn, the first first: one computes while the other multiplies.
__device__ __forceinline__ void turn_wait(int group) { asm volatile("bar.sync %0, 256;" ::"r"(group) : "memory"); }
__device__ __forceinline__ void turn_pass(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(3 - group) : "memory"); }
__device__ __forceinline__ void turn_begin(int group) {
    if (group == 2) turn_pass(group);
}

// ---- a run of a key tile's queries

// Read anew each time: a copy kept through the loop costs the producers a register that they lack.
__device__ __forceinline__ int grid_width() {
    int x;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(x));
    return x;
}
__device__ __forceinline__ unsigned grid_height() {
    unsigned y;
    asm volatile("mov.u32 %0, %%nctaid.y;" : "=r"(y));
    return y;
}

struct KeyWork {
    int head, tile, begin, end;

    __device__ __forceinline__ KeyWork(int item, int tiles, const int* tile_order, const int* tile_start)
        : head(item / tiles), tile(tile_order[item % tiles]) {
        const int start = tile_start[tile], count = tile_start[tile + 1] - start;
        begin = start + int(unsigned(count) * blockIdx.y / grid_height());
        end = start + int(unsigned(count) * (blockIdx.y + 1) / grid_height());
    }
};

__device__ __forceinline__ uint32_t aligned_buffer(const void* dynamic) { return (shared_address(dynamic) + 1023) & ~1023u; }

}  // namespace hopper

extern "C" __global__ void __launch_bounds__(hopper::THREADS, 1)
    attention_hopper(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                     const __grid_constant__ CUtensorMap v_map, __nv_bfloat16* out, long long ldo, float* lse,
                     const int* __restrict__ row_keys, const int* __restrict__ tile_start,
                     const int* __restrict__ tile_list, const int* __restrict__ tile_order,
                     const float* __restrict__ key_bias, float scale, int N, int S, int tiles, int heads) {
    using namespace hopper;
    constexpr int STAGES = 2;
    extern __shared__ uint8_t dynamic[];
    __shared__ uint64_t q_full, q_empty, k_full[STAGES], v_full[STAGES], k_empty[STAGES], v_empty[STAGES];
    __shared__ KeyRows<STAGES> rows;
    const uint32_t tq = aligned_buffer(dynamic), tk = tq + tile_bytes(ROWS), tv = tk + STAGES * tile_bytes(ROWS);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4;
    if (threadIdx.x == 0) {
        barrier_init(&q_full, 1);
        barrier_init(&q_empty, 4 * CONSUMERS);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&k_full[i], 1 + ROW_WARPS);
            barrier_init(&v_full[i], 1);
            barrier_init(&k_empty[i], 4 * CONSUMERS);
            barrier_init(&v_empty[i], 4 * CONSUMERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        Ring<STAGES> at;
        if (threadIdx.x == 0) {
            uint32_t parity = 0;
            for (int item = blockIdx.x; item < tiles * heads; item += gridDim.x) {
                const int head = item / tiles, tile = tile_order[item % tiles];
                const int begin = tile_start[tile], end = tile_start[tile + 1];
                for (int e = begin; e < end; ++e, at.next()) {
                    const int first = (tile_list[e] >> 1) * ROWS;
                    barrier_wait(&k_empty[at.stage], at.parity ^ 1);
                    barrier_expect(&k_full[at.stage], tile_bytes(ROWS));
                    copy_tile<ROWS>(tk + at.stage * tile_bytes(ROWS), k_map, &k_full[at.stage], head, first);
                    if (e == begin) {
                        barrier_wait(&q_empty, parity ^ 1);
                        barrier_expect(&q_full, tile_bytes(ROWS));
                        copy_tile<ROWS>(tq, q_map, &q_full, head, tile * ROWS);
                        parity ^= 1;
                    }
                    barrier_wait(&v_empty[at.stage], at.parity ^ 1);
                    barrier_expect(&v_full[at.stage], tile_bytes(ROWS));
                    copy_tile<ROWS>(tv + at.stage * tile_bytes(ROWS), v_map, &v_full[at.stage], head, first);
                }
            }
        } else if (warp > 1) {
            for (int item = blockIdx.x; item < tiles * heads; item += gridDim.x) {
                const int tile = tile_order[item % tiles];
                const int begin = tile_start[tile], end = tile_start[tile + 1];
                for (int e = begin; e < end; ++e, at.next()) {
                    const int entry = tile_list[e];
                    barrier_wait(&k_empty[at.stage], at.parity ^ 1);
                    rows.fill(at.stage, threadIdx.x - 64, row_keys, tile * ROWS, N, entry, key_bias, scale, S);
                    __syncwarp();
                    if (lane == 0) barrier_arrive(&k_full[at.stage]);
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int own_row = (warp - 4) * 16 + lane / 4;  // the thread's rows are row, row + 8
        const int column = 2 * (lane % 4);
        const uint32_t own = tq + (group - 1) * 64 * 128;
        const float factor = scale * LOG2E;
        float o[64], s[64], maximum[2], sum[2], fade[2];
        uint32_t p[32], state;
        uint4 seen[2];
        Ring<STAGES> at;
        uint32_t parity = 0;

        // What the producers left for the scores of this buffer.
        auto look = [&](int stage) {
            state = rows.state_of(stage);
            if (state & PARTIAL) {
                seen[0] = rows.seen[stage][own_row];
                seen[1] = rows.seen[stage][own_row + 8];
            }
        };
        auto biased = [&](int stage) {
            if (key_bias) add_key_bias(s, rows.bias[stage], column);
        };
        // Scores to probabilities in place, against the highest score so far.
        auto softmax = [&]() {
            if (state & PARTIAL) hide_keys(s, seen, column);
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

        turn_begin(group);
        for (int item = blockIdx.x; item < tiles * heads; item += gridDim.x) {
            const int head = item / tiles, tile = tile_order[item % tiles];
            const int begin = tile_start[tile], end = tile_start[tile + 1];
            maximum[0] = maximum[1] = -CUDART_INF_F;
            sum[0] = sum[1] = 0.f;
#pragma unroll
            for (int i = 0; i < 64; ++i) o[i] = 0.f;
            if (begin < end) {
                barrier_wait(&k_full[at.stage], at.parity);
                barrier_wait(&q_full, parity);
                parity ^= 1;
                pin(s);
                products_begin();
                scores<ROWS, ROWS>(s, own, tk + at.stage * tile_bytes(ROWS));
                look(at.stage);
                products_wait<0>();
                pin(s);
                biased(at.stage);
                __syncwarp();
                if (lane == 0) {
                    barrier_arrive(&k_empty[at.stage]);
                    if (begin + 1 == end) barrier_arrive(&q_empty);
                }
                softmax();
                pack<64>(p, s);
                // The scores of this tile and the values of the last are multiplied together: the softmax hides behind
                // them, and behind the other consumers' products, since the two take turns to issue theirs.
                for (int e = begin + 1; e < end; ++e) {
                    const Ring<STAGES> last = at;
                    at.next();
                    barrier_wait(&k_full[at.stage], at.parity);
                    turn_wait(group);
                    pin(s);
                    pin(o);
                    pin(p);
                    products_begin();
                    scores<ROWS, ROWS>(s, own, tk + at.stage * tile_bytes(ROWS));
                    barrier_wait(&v_full[last.stage], last.parity);
                    combine<ROWS>(o, p, tv + last.stage * tile_bytes(ROWS), 1);
                    turn_pass(group);
                    look(at.stage);
                    products_wait<1>();
                    pin(s);
                    biased(at.stage);
                    __syncwarp();
                    if (lane == 0) {
                        barrier_arrive(&k_empty[at.stage]);
                        if (e + 1 == end) barrier_arrive(&q_empty);
                    }
                    softmax();
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
                if (lane == 0) barrier_arrive(&v_empty[at.stage]);
                at.next();
            }
            const int row = tile * ROWS + own_row;
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
}

// delta[h, n] = out[n, h, :] . dout[n, h, :] for attention_hopper_backward_query. Half a warp a head, 16 bytes a load; a block has
// eight rows, whose results for a head lie beside each other. Floor: 4 bytes an element.
// Launch: block 256, grid ceil(N / 8), 32 heads bytes of dynamic shared memory. Rows 16-byte aligned.
extern "C" __global__ void __launch_bounds__(256)
    attention_hopper_delta(const __nv_bfloat16* __restrict__ out, long long ldo, const __nv_bfloat16* __restrict__ dout,
                           long long lddo, float* delta, int N, int heads, int d) {
    extern __shared__ float sums[];  // [heads][8]
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = lane / 16, column = 8 * (lane % 16);
    const long long first = 8ll * blockIdx.x, row = first + warp;
    if (row < N) {
        const __nv_bfloat16* const o = out + row * ldo + column;
        const __nv_bfloat16* const g = dout + row * lddo + column;
#pragma unroll 4
        for (int pair = 0; pair < heads; pair += 2) {
            const int head = pair + half;
            float sum = 0.f;
            if (head < heads) {
                const uint4 a = __ldg(reinterpret_cast<const uint4*>(o + (long long)head * d));
                const uint4 b = __ldg(reinterpret_cast<const uint4*>(g + (long long)head * d));
                const uint32_t left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    // A bf16 is the upper half of an f32.
                    sum = fmaf(__uint_as_float(left[i] << 16), __uint_as_float(right[i] << 16), sum);
                    sum = fmaf(__uint_as_float(left[i] & 0xffff0000u), __uint_as_float(right[i] & 0xffff0000u), sum);
                }
            }
#pragma unroll
            for (int step = 8; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
            if (lane % 16 == 0 && head < heads) sums[8 * head + warp] = sum;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 8 * heads; i += 256) {
        const long long to = first + i % 8;
        if (to < N) delta[(long long)(i / 8) * N + to] = sums[i];
    }
}

extern "C" __global__ void __launch_bounds__(hopper::THREADS, 1)
    attention_hopper_backward_query(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                                    const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap dout_map,
                                    const float* __restrict__ lse, float* delta, __nv_bfloat16* dq, long long lddq,
                                    const int* __restrict__ row_keys, const int* __restrict__ tile_start,
                                    const int* __restrict__ tile_list, const int* __restrict__ tile_order,
                                    const float* __restrict__ key_bias, float scale, int N, int S, int tiles, int heads) {
    using namespace hopper;
    constexpr int STAGES = 2;
    extern __shared__ uint8_t dynamic[];
    __shared__ uint64_t q_full, q_empty, k_full[STAGES], v_full[STAGES], k_empty[STAGES], v_empty[STAGES];
    __shared__ KeyRows<STAGES> rows;
    const uint32_t tq = aligned_buffer(dynamic), tg = tq + tile_bytes(ROWS), tk = tg + tile_bytes(ROWS),
                   tv = tk + STAGES * tile_bytes(ROWS);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4;
    if (threadIdx.x == 0) {
        barrier_init(&q_full, 1);
        barrier_init(&q_empty, 4 * CONSUMERS);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&k_full[i], 1 + ROW_WARPS);
            barrier_init(&v_full[i], 1);
            barrier_init(&k_empty[i], 4 * CONSUMERS);
            barrier_init(&v_empty[i], 4 * CONSUMERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        Ring<STAGES> at;
        if (threadIdx.x == 0) {
            uint32_t parity = 0;
            for (int item = blockIdx.x; item < tiles * heads; item += gridDim.x) {
                const int head = item / tiles, tile = tile_order[item % tiles];
                const int begin = tile_start[tile], end = tile_start[tile + 1];
                for (int e = begin; e < end; ++e, at.next()) {
                    const int first = (tile_list[e] >> 1) * ROWS;
                    barrier_wait(&k_empty[at.stage], at.parity ^ 1);
                    barrier_expect(&k_full[at.stage], tile_bytes(ROWS));
                    copy_tile<ROWS>(tk + at.stage * tile_bytes(ROWS), k_map, &k_full[at.stage], head, first);
                    if (e == begin) {
                        barrier_wait(&q_empty, parity ^ 1);
                        barrier_expect(&q_full, 2 * tile_bytes(ROWS));
                        copy_tile<ROWS>(tq, q_map, &q_full, head, tile * ROWS);
                        copy_tile<ROWS>(tg, dout_map, &q_full, head, tile * ROWS);
                        parity ^= 1;
                    }
                    barrier_wait(&v_empty[at.stage], at.parity ^ 1);
                    barrier_expect(&v_full[at.stage], tile_bytes(ROWS));
                    copy_tile<ROWS>(tv + at.stage * tile_bytes(ROWS), v_map, &v_full[at.stage], head, first);
                }
            }
        } else if (warp > 1) {
            for (int item = blockIdx.x; item < tiles * heads; item += gridDim.x) {
                const int tile = tile_order[item % tiles];
                const int begin = tile_start[tile], end = tile_start[tile + 1];
                for (int e = begin; e < end; ++e, at.next()) {
                    const int entry = tile_list[e];
                    barrier_wait(&k_empty[at.stage], at.parity ^ 1);
                    rows.fill(at.stage, threadIdx.x - 64, row_keys, tile * ROWS, N, entry, key_bias, scale, S);
                    __syncwarp();
                    if (lane == 0) barrier_arrive(&k_full[at.stage]);
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int own_row = (warp - 4) * 16 + lane / 4;
        const int column = 2 * (lane % 4);
        const uint32_t own = (group - 1) * 64 * 128;
        const float factor = scale * LOG2E;
        Ring<STAGES> at;
        uint32_t parity = 0;
        for (int item = blockIdx.x; item < tiles * heads; item += gridDim.x) {
            const int head = item / tiles, tile = tile_order[item % tiles], row = tile * ROWS + own_row;
            const int begin = tile_start[tile], end = tile_start[tile + 1];
            float base[2], own_delta[2], rest[2] = {0.f, 0.f};  // rest: see attention.cu
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const long long of_row = (long long)head * N + row + 8 * r;
                const float x = row + 8 * r < N ? lse[of_row] * LOG2E : 0.f;
                base[r] = x == -CUDART_INF_F ? 0.f : x;  // a row that sees nothing: its scores are all -inf
                own_delta[r] = row + 8 * r < N ? delta[of_row] : 0.f;
            }
            float sum[64], s[64], dp[64];
#pragma unroll
            for (int i = 0; i < 64; ++i) sum[i] = 0.f;
            if (begin < end) {
                barrier_wait(&q_full, parity);
                parity ^= 1;
            }
            for (int e = begin; e < end; ++e, at.next()) {
                const uint32_t keys = tk + at.stage * tile_bytes(ROWS), values = tv + at.stage * tile_bytes(ROWS);
                barrier_wait(&k_full[at.stage], at.parity);
                const uint32_t state = rows.state_of(at.stage);
                if (sees_nothing(state, group)) {
                    barrier_wait(&v_full[at.stage], at.parity);
                    __syncwarp();
                    if (lane == 0) {
                        barrier_arrive(&v_empty[at.stage]);
                        barrier_arrive(&k_empty[at.stage]);
                        if (e + 1 == end) barrier_arrive(&q_empty);
                    }
                    continue;
                }
                pin(s);
                pin(dp);
                products_begin();
                scores<ROWS, ROWS>(s, tq + own, keys);
                barrier_wait(&v_full[at.stage], at.parity);
                scores<ROWS, ROWS>(dp, tg + own, values);
                products_wait<1>();
                pin(s);
                if (key_bias) add_key_bias(s, rows.bias[at.stage], column);
                if (state & PARTIAL) {
                    const uint4 seen[2] = {rows.seen[at.stage][own_row], rows.seen[at.stage][own_row + 8]};
                    hide_keys(s, seen, column);
                }
#pragma unroll
                for (int i = 0; i < 64; ++i) s[i] = exp2_fast(fmaf(s[i], factor, -base[i / 2 % 2]));
                products_wait<0>();
                pin(dp);
                if (lane == 0) {
                    barrier_arrive(&v_empty[at.stage]);
                    if (e + 1 == end) barrier_arrive(&q_empty);
                }
                uint32_t ds[32];
#pragma unroll
                for (int i = 0; i < 32; ++i) {
                    const float x = s[2 * i] * (dp[2 * i] - own_delta[i % 2]);
                    const float y = s[2 * i + 1] * (dp[2 * i + 1] - own_delta[i % 2]);
                    rest[i % 2] += x + y;
                    ds[i] = pack(x, y);
                }
                pin(sum);
                pin(ds);
                products_begin();
                combine<ROWS>(sum, ds, keys, 1);
                products_wait<0>();
                pin(sum);
                if (lane == 0) barrier_arrive(&k_empty[at.stage]);
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float corrected = own_delta[r] + quad_sum(rest[r]);
                if (lane % 4 == 0 && row + 8 * r < N) delta[(long long)head * N + row + 8 * r] = corrected;
            }
            store_rows(dq + head * WIDTH, lddq, row, N, lane, sum, scale, scale);
        }
    }
}

extern "C" __global__ void __launch_bounds__(hopper::THREADS, 1)
    attention_hopper_backward_key(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                                  const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap dout_map,
                                  const float* __restrict__ lse, const float* __restrict__ delta, __nv_bfloat16* dk,
                                  long long lddk, __nv_bfloat16* dv, long long lddv, const int* __restrict__ row_keys,
                                  const int* __restrict__ tile_start, const int* __restrict__ tile_list,
                                  const int* __restrict__ tile_order, const float* __restrict__ key_bias, float scale,
                                  int N, int S, int tiles, int heads, float* partial) {
    using namespace hopper;
    constexpr int STAGES = 3;
    constexpr uint32_t BYTES = tile_bytes(QUERY_ROWS);
    extern __shared__ uint8_t dynamic[];
    __shared__ uint64_t k_full, k_empty, full[STAGES], empty[STAGES];
    __shared__ __align__(16) float2 base_delta[STAGES][QUERY_ROWS];  // lse * log2(e), delta
    __shared__ __align__(16) uint32_t seen[STAGES][ROWS / 32][QUERY_ROWS];  // a bit a key; only where PARTIAL
    __shared__ uint32_t states[STAGES][ROW_WARPS];
    const uint32_t tk = aligned_buffer(dynamic), tv = tk + tile_bytes(ROWS), tq = tv + tile_bytes(ROWS), tg = tq + STAGES * BYTES;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4;
    if (threadIdx.x == 0) {
        barrier_init(&k_full, 1);
        barrier_init(&k_empty, 4 * CONSUMERS);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&full[i], 2 + ROW_WARPS);  // the copies', the statistics', the visibility's
            barrier_init(&empty[i], 4 * CONSUMERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int items = tiles * heads;

    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        Ring<STAGES> at;
        if (threadIdx.x == 0) {
            uint32_t parity = 0;
            for (int item = blockIdx.x; item < items; item += grid_width()) {
                const KeyWork work(item, tiles, tile_order, tile_start);
#pragma unroll 1
                for (int e = work.begin; e < work.end; ++e, at.next()) {
                    const int first = (tile_list[e] >> 1) * QUERY_ROWS;
                    barrier_wait(&empty[at.stage], at.parity ^ 1);
                    barrier_expect(&full[at.stage], 2 * BYTES);
                    copy_tile<QUERY_ROWS>(tq + at.stage * BYTES, q_map, &full[at.stage], work.head, first);
                    copy_tile<QUERY_ROWS>(tg + at.stage * BYTES, dout_map, &full[at.stage], work.head, first);
                    if (e == work.begin) {
                        barrier_wait(&k_empty, parity ^ 1);
                        barrier_expect(&k_full, 2 * tile_bytes(ROWS));
                        copy_tile<ROWS>(tk, k_map, &k_full, work.head, work.tile * ROWS);
                        copy_tile<ROWS>(tv, v_map, &k_full, work.head, work.tile * ROWS);
                        parity ^= 1;
                    }
                }
            }
        } else if (warp == 1) {
            for (int item = blockIdx.x; item < items; item += grid_width()) {
                const KeyWork work(item, tiles, tile_order, tile_start);
                for (int e = work.begin; e < work.end; ++e, at.next()) {
                    const int first = (tile_list[e] >> 1) * QUERY_ROWS;
                    barrier_wait(&empty[at.stage], at.parity ^ 1);
#pragma unroll
                    for (int i = lane; i < QUERY_ROWS; i += 32) {
                        const bool inside = first + i < N;
                        const int row = work.head * N + first + i;
                        const float base = inside ? lse[row] * LOG2E : 0.f;
                        base_delta[at.stage][i] = make_float2(base == -CUDART_INF_F ? 0.f : base, inside ? delta[row] : 0.f);
                    }
                    __syncwarp();
                    if (lane == 0) barrier_arrive(&full[at.stage]);
                }
            }
        } else if (warp > 1) {
            for (int item = blockIdx.x; item < items; item += grid_width()) {
                const KeyWork work(item, tiles, tile_order, tile_start);
                for (int e = work.begin; e < work.end; ++e, at.next()) {
                    const int entry = tile_list[e], own_query = threadIdx.x - 64;
                    const int query = (entry >> 1) * QUERY_ROWS + own_query;
                    barrier_wait(&empty[at.stage], at.parity ^ 1);
                    uint32_t found = BOTH_SEE;
                    if (entry & PARTIAL) {
                        found = PARTIAL;
                        int4 a = make_int4(0, 0, 0, 0);
                        int2 b = make_int2(0, 0);
                        if (query < N) {
                            a = __ldg(reinterpret_cast<const int4*>(row_keys) + 2 * query);
                            b = __ldg(reinterpret_cast<const int2*>(row_keys) + 4 * query + 2);
                        }
#pragma unroll
                        for (int word = 0; word < ROWS / 32; ++word) {
                            const uint32_t bits = seen_bits(a, b, work.tile * ROWS + 32 * word);
                            seen[at.stage][word][own_query] = bits;
                            if (__any_sync(~0u, bits != 0)) found |= 2 << word / 2;
                        }
                    }
                    if (lane == 0) states[at.stage][warp - 2] = found;
                    __syncwarp();
                    if (lane == 0) barrier_arrive(&full[at.stage]);
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const int own_key = (warp - 4) * 16 + lane / 4;  // the thread's keys are own_key, own_key + 8 of a tile
        const int column = 2 * (lane % 4);
        const uint32_t own = (group - 1) * 64 * 128;
        const float factor = scale * LOG2E;
        Ring<STAGES> at;
        uint32_t parity = 0;
        for (int item = blockIdx.x; item < items; item += grid_width()) {
            const KeyWork work(item, tiles, tile_order, tile_start);
            float bias[2] = {0.f, 0.f};
            if (key_bias)
                for (int r = 0; r < 2; ++r) {
                    const int key = work.tile * ROWS + own_key + 8 * r;
                    bias[r] = key < S ? key_bias[key] * LOG2E : 0.f;
                }
            float sum_k[64], sum_v[64], s[32], dp[32];
            uint32_t p[16], ds[16];
#pragma unroll
            for (int i = 0; i < 64; ++i) sum_k[i] = sum_v[i] = 0.f;
            if (work.begin < work.end) {
                barrier_wait(&k_full, parity);
                parity ^= 1;
            }
            for (int left = work.end - work.begin; left > 0; --left, at.next()) {
                const uint32_t queries = tq + at.stage * BYTES, gradients = tg + at.stage * BYTES;
                const float4* row_values = reinterpret_cast<const float4*>(base_delta[at.stage]) + lane % 4;
                barrier_wait(&full[at.stage], at.parity);
                const uint32_t state = states[at.stage][0] | states[at.stage][1];
                if (sees_nothing(state, group)) {
                    __syncwarp();
                    if (lane == 0) {
                        barrier_arrive(&empty[at.stage]);
                        if (left == 1) barrier_arrive(&k_empty);
                    }
                    continue;
                }
                pin(s);
                pin(dp);
                products_begin();
                scores<ROWS, QUERY_ROWS>(s, tk + own, queries);
                scores<ROWS, QUERY_ROWS>(dp, tv + own, gradients);
                products_wait<1>();
                pin(s);
                if (state & PARTIAL) {
                    const uint32_t* words = seen[at.stage][(warp - 4) / 2] + column;
#pragma unroll
                    for (int j = 0; j < 8; ++j) {
                        const uint2 x = *reinterpret_cast<const uint2*>(words + 8 * j);
                        const uint32_t bits[2] = {x.x >> own_key % 32, x.y >> own_key % 32};
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            if (!(bits[i % 2] & (i / 2 ? 256u : 1u))) s[4 * j + i] = -CUDART_INF_F;
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
                if (left == 1 && lane == 0) barrier_arrive(&k_empty);
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
            const int key = work.tile * ROWS + own_key;
            if (partial) {
                const long long width = heads * WIDTH;
                float* to = partial + 2 * width * S * blockIdx.y + work.head * WIDTH;
                store_rows(to, width, key, S, lane, sum_k, scale);
                store_rows(to + width * S, width, key, S, lane, sum_v, 1.f);
            } else {
                store_rows(dk + work.head * WIDTH, lddk, key, S, lane, sum_k, scale, scale);
                store_rows(dv + work.head * WIDTH, lddv, key, S, lane, sum_v, 1.f, 1.f);
            }
        }
    }
}

// dk, dv [S, width] = the sum of `splits` parts [2, S, width] in order. Four columns a thread; grid (ceil(S width / 1024), 2).
extern "C" __global__ void __launch_bounds__(256)
    attention_hopper_sum_splits(const float* __restrict__ partial, __nv_bfloat16* dk, long long lddk, __nv_bfloat16* dv,
                                long long lddv, int S, int width, int splits) {
    const long long size = (long long)S * width, at = 4ll * (blockIdx.x * 256ll + threadIdx.x);
    if (at >= size) return;
    const float* from = partial + blockIdx.y * size + at;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
    for (int i = 0; i < splits; ++i) {
        const float4 x = __ldg(reinterpret_cast<const float4*>(from + 2 * size * i));
        sum.x += x.x;
        sum.y += x.y;
        sum.z += x.z;
        sum.w += x.w;
    }
    __nv_bfloat16* to = (blockIdx.y ? dv + at / width * lddv : dk + at / width * lddk) + at % width;
    *reinterpret_cast<uint2*>(to) = make_uint2(hopper::pack(sum.x, sum.y), hopper::pack(sum.z, sum.w));
}

#endif
