// GELU in its tanh form over n elements, and its gradient: 0.5 u (1 + tanh(w)) = u s, s = 1 / (1 + exp(-2 w)),
// w = sqrt(2 / pi) (u + 0.044715 u^3). The logistic form keeps the relative accuracy of the negative side.
//
// Floor, bf16, bytes an element: forward 4, backward 6. Pointers 16-byte aligned, any n.
#include "common.cuh"

namespace activation {

constexpr int THREADS = 256;
constexpr int VECTORS = 2;
constexpr int ELEMENTS_A_BLOCK = THREADS * VECTORS * 8;

__device__ __forceinline__ float logistic_of(float u) {
    constexpr float TWICE_ROOT = 1.5957691216057308f, CUBIC = 0.044715f;
    // __expf: at most a few ulp of the exponential, which reaches s only where the exponential is not small against 1, and
    // for large exponents s itself is small.
    return __fdividef(1.0f, 1.0f + __expf(-TWICE_ROOT * (u + CUBIC * u * u * u)));
}

__device__ __forceinline__ float gelu(float u) { return u * logistic_of(u); }

__device__ __forceinline__ float gelu_slope(float u) {
    constexpr float TWICE_ROOT = 1.5957691216057308f, CUBIC = 0.044715f;
    const float s = logistic_of(u);
    return s + u * s * (1.0f - s) * TWICE_ROOT * (1.0f + 3.0f * CUBIC * u * u);
}

template <typename T, bool BACKWARD>
__device__ __forceinline__ void apply(const T* u, const T* da, T* out, long long n) {
    const long long start = (long long)blockIdx.x * ELEMENTS_A_BLOCK + 8 * threadIdx.x;
    Packed<T, 8> input[VECTORS], gradient[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const long long at = start + v * THREADS * 8;
        if (at + 8 > n) continue;
        input[v].load(u + at);
        if (BACKWARD) gradient[v].load(da + at);
    }
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const long long at = start + v * THREADS * 8;
        if (at + 8 <= n) {
            float value[8], factor[8];
            input[v].unpack(value);
            if (BACKWARD) gradient[v].unpack(factor);
#pragma unroll
            for (int i = 0; i < 8; i++) value[i] = BACKWARD ? factor[i] * gelu_slope(value[i]) : gelu(value[i]);
            store(out + at, value);
        } else {
            for (long long i = at; i < n; i++) {
                const float value = to_float(u[i]);
                out[i] = from_float<T>(BACKWARD ? to_float(da[i]) * gelu_slope(value) : gelu(value));
            }
        }
    }
}

}  // namespace activation

// a = gelu(u); a may be u. Launch: block 256, grid ceil(n / 4096), no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256) gelu_tanh_bf16(const bf16* u, bf16* a, long long n) {
    activation::apply<bf16, false>(u, nullptr, a, n);
}
extern "C" __global__ void __launch_bounds__(256) gelu_tanh_f32(const float* u, float* a, long long n) {
    activation::apply<float, false>(u, nullptr, a, n);
}

// du = da gelu'(u); du may be da or u. Launch: block 256, grid ceil(n / 4096), no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256) gelu_tanh_backward_bf16(const bf16* u, const bf16* da, bf16* du,
                                                                          long long n) {
    activation::apply<bf16, true>(u, da, du, n);
}
extern "C" __global__ void __launch_bounds__(256) gelu_tanh_backward_f32(const float* u, const float* da, float* du,
                                                                         long long n) {
    activation::apply<float, true>(u, da, du, n);
}
