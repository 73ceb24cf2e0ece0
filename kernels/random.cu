// Normal random numbers for initialization and noise: Philox4x32-10 and Box-Muller, element i a function of seed and
// offset + i alone, so that no launch shape, split or restart changes a value.
//
// Floor: sizeof(T) bytes an element; in practice bound by arithmetic.
#include "common.cuh"

namespace random_kernels {

// Philox4x32 of 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
__device__ __forceinline__ uint4 philox(uint4 counter, uint2 key) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const uint32_t high0 = __umulhi(0xD2511F53u, counter.x), low0 = 0xD2511F53u * counter.x;
        const uint32_t high1 = __umulhi(0xCD9E8D57u, counter.z), low1 = 0xCD9E8D57u * counter.z;
        counter = make_uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
        key.x += 0x9E3779B9u, key.y += 0xBB67AE85u;
    }
    return counter;
}

// Two normals of two words: the radius of the first, in (0, 1], the angle of the second.
__device__ __forceinline__ float2 box_muller(uint32_t first, uint32_t second) {
    constexpr float STEP = 2.3283064365386963e-10f;  // 2^-32
    const float radius = sqrtf(-2.0f * logf(first * STEP + 0.5f * STEP));
    float sine, cosine;
    sincospif(second * (2 * STEP), &sine, &cosine);
    return make_float2(radius * cosine, radius * sine);
}

// Counter c gives the elements 4c .. 4c + 3 of the stream.
template <typename T>
__device__ __forceinline__ void fill(T* out, float std, unsigned long long seed, unsigned long long offset, long long n) {
    const unsigned long long counter = offset / 4 + (unsigned long long)blockIdx.x * 256 + threadIdx.x;
    const long long at = (long long)(4 * counter - offset);  // of the counter's first element in out, may be -3 .. -1
    if (at >= n) return;
    const uint4 words = philox(make_uint4((uint32_t)counter, (uint32_t)(counter >> 32), 0, 0),
                               make_uint2((uint32_t)seed, (uint32_t)(seed >> 32)));
    const float2 low = box_muller(words.x, words.y), high = box_muller(words.z, words.w);
    const float values[4] = {std * low.x, std * low.y, std * high.x, std * high.y};
    if (at >= 0 && at % 4 == 0 && at + 4 <= n) {
        store(out + at, values);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (at + i >= 0 && at + i < n) out[at + i] = from_float<T>(values[i]);
        }
    }
}

}  // namespace random_kernels

// out[i] = std * normal(seed, offset + i), i < n; out 16-byte (bf16: 8-byte) aligned.
// Launch: block 256, grid ceil(n / 1024) + 1 (the last for an offset that is no multiple of 4), no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256) fill_normal_bf16(bf16* out, float std, unsigned long long seed,
                                                                   unsigned long long offset, long long n) {
    random_kernels::fill<bf16>(out, std, seed, offset, n);
}
extern "C" __global__ void __launch_bounds__(256) fill_normal_f32(float* out, float std, unsigned long long seed,
                                                                  unsigned long long offset, long long n) {
    random_kernels::fill<float>(out, std, seed, offset, n);
}
