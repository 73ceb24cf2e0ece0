// What every kernel file shares: wide loads and stores of the operand type as f32 values, and sums over a warp or a block
// in a fixed order, so that two runs agree bit for bit. f32 arithmetic throughout; only loads and stores know the type.
#pragma once

#include <cuda_bf16.h>
#include <stdint.h>

using bf16 = __nv_bfloat16;

// COUNT consecutive elements (4 or 8) as they lie in memory, moved by 8- or 16-byte accesses. The address must be a
// multiple of min(16, COUNT * sizeof(T)) bytes.
template <typename T, int COUNT>
struct Packed {
    static constexpr int WORDS = COUNT * (int)sizeof(T) / 4;
    static_assert(WORDS == 2 || WORDS % 4 == 0, "8 bytes or a multiple of 16");
    uint32_t words[WORDS];

    __device__ __forceinline__ void load(const T* from) {
        if constexpr (WORDS == 2) {
            const uint2 part = *reinterpret_cast<const uint2*>(from);
            words[0] = part.x, words[1] = part.y;
        } else {
#pragma unroll
            for (int i = 0; i < WORDS / 4; i++) {
                const uint4 part = reinterpret_cast<const uint4*>(from)[i];
                words[4 * i] = part.x, words[4 * i + 1] = part.y, words[4 * i + 2] = part.z, words[4 * i + 3] = part.w;
            }
        }
    }

    __device__ __forceinline__ void store(T* to) const {
        if constexpr (WORDS == 2) {
            *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
        } else {
#pragma unroll
            for (int i = 0; i < WORDS / 4; i++) {
                reinterpret_cast<uint4*>(to)[i] =
                    make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
            }
        }
    }

    __device__ __forceinline__ void unpack(float (&values)[COUNT]) const {
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            if constexpr (sizeof(T) == 4) {
                values[i] = __uint_as_float(words[i]);
            } else {  // a bf16 is the upper half of its f32
                values[2 * i] = __uint_as_float(words[i] << 16);
                values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
            }
        }
    }

    __device__ __forceinline__ void pack(const float (&values)[COUNT]) {
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            if constexpr (sizeof(T) == 4) {
                words[i] = __float_as_uint(values[i]);
            } else {
                const __nv_bfloat162 both = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
                words[i] = *reinterpret_cast<const uint32_t*>(&both);
            }
        }
    }
};

template <typename T, int COUNT>
__device__ __forceinline__ void load(const T* from, float (&values)[COUNT]) {
    Packed<T, COUNT> packed;
    packed.load(from);
    packed.unpack(values);
}

template <typename T, int COUNT>
__device__ __forceinline__ void store(T* to, const float (&values)[COUNT]) {
    Packed<T, COUNT> packed;
    packed.pack(values);
    packed.store(to);
}

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(bf16 value) { return __bfloat162float(value); }

template <typename T>
__device__ __forceinline__ T from_float(float value) {
    if constexpr (sizeof(T) == 4) return value;
    else return __float2bfloat16_rn(value);
}

// The sum of all 32 lanes, in every lane.
template <typename S>
__device__ __forceinline__ S warp_sum(S value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
}

// Sums of COUNT values over a block of WARPS warps, in every thread. One barrier a call: calls in a row take turns at two
// buffers, and a thread can write a buffer again only after the barrier of the call between, which all threads reach
// after they have read it.
template <int WARPS, int COUNT>
struct BlockSum {
    struct Shared {
        float of_warp[2][COUNT][WARPS];
    };
    Shared& shared;
    int turn = 0;

    __device__ __forceinline__ explicit BlockSum(Shared& shared) : shared(shared) {}

    __device__ __forceinline__ void operator()(float (&values)[COUNT]) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            values[i] = warp_sum(values[i]);
            if (threadIdx.x % 32 == 0) shared.of_warp[turn][i][threadIdx.x / 32] = values[i];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            values[i] = 0;
#pragma unroll
            for (int warp = 0; warp < WARPS; warp++) values[i] += shared.of_warp[turn][i][warp];
        }
        turn ^= 1;
    }
};
