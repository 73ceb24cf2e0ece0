// AdamW over flat buffers of n elements (n past 2^31), its global norm, and accumulation of gradients: one pass each.
//
// Floor, bytes an element: square_sum 4; adamw_bf16 34 (gradient 4 + 4 for the zero, moments 16, master 8, parameter 2),
// adamw_f32 32; accumulate_bf16 10, accumulate_f32 12; first_non_finite 4.
//
// Pointers 16-byte aligned (bf16: 8), any n.
#include "common.cuh"

namespace optimizer {

constexpr int THREADS = 256;

// A fixed-order sum over a block of 256 threads; the result is thread 0's.
__device__ __forceinline__ double block_sum(double value) {
    __shared__ double of_warp[THREADS / 32];
    value = warp_sum(value);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    double total = 0;
    for (int warp = 0; warp < THREADS / 32; warp++) total += of_warp[warp];
    return total;
}

struct Rule {
    float scale, beta1, beta2, eps, decay, rate, root_correction2;

    __device__ __forceinline__ void apply(float& parameter, float& first, float& second, float gradient) const {
        gradient *= scale;
        first = beta1 * first + (1 - beta1) * gradient;
        second = beta2 * second + (1 - beta2) * gradient * gradient;
        parameter = parameter * decay - rate * first / (sqrtf(second) * root_correction2 + eps);
    }
};

template <typename T>
__device__ __forceinline__ void adamw(T* params, float* master, float* first, float* second, float* gradient,
                                      const double* norm_squared, float clip_norm, float lr, float beta1, float beta2,
                                      float eps, float weight_decay, float correction1, float root_correction2,
                                      long long n) {
    const double square = *norm_squared;
    if (!isfinite(square)) return;
    const double norm = sqrt(square);
    Rule rule;
    rule.scale = norm > clip_norm ? (float)(clip_norm / norm) : 1.0f;
    rule.beta1 = beta1, rule.beta2 = beta2, rule.eps = eps;
    rule.decay = 1 - lr * weight_decay;
    rule.rate = lr / correction1;
    rule.root_correction2 = root_correction2;
    if constexpr (sizeof(T) == 4) master = params;

    const long long at = 4 * ((long long)blockIdx.x * THREADS + threadIdx.x);
    if (at + 4 <= n) {
        float p[4], m[4], v[4], g[4];
        load(gradient + at, g);
        load(first + at, m);
        load(second + at, v);
        load(master + at, p);
#pragma unroll
        for (int i = 0; i < 4; i++) rule.apply(p[i], m[i], v[i], g[i]), g[i] = 0;
        store(first + at, m);
        store(second + at, v);
        store(gradient + at, g);
        store(master + at, p);
        if constexpr (sizeof(T) == 2) store(params + at, p);
    } else {
        for (long long i = at; i < n; i++) {
            float p = master[i];
            rule.apply(p, first[i], second[i], gradient[i]);
            master[i] = p;
            if constexpr (sizeof(T) == 2) params[i] = from_float<T>(p);
            gradient[i] = 0;
        }
    }
}

template <typename T>
__device__ __forceinline__ void accumulate(const T* src, float* dst, float weight, long long n) {
    const long long start = (long long)blockIdx.x * (THREADS * 8) + 4 * threadIdx.x;
    float from[2][4], to[2][4];
#pragma unroll
    for (int v = 0; v < 2; v++) {
        const long long at = start + v * THREADS * 4;
        if (at + 4 > n) continue;
        load(src + at, from[v]);
        load(dst + at, to[v]);
    }
#pragma unroll
    for (int v = 0; v < 2; v++) {
        const long long at = start + v * THREADS * 4;
        if (at + 4 <= n) {
#pragma unroll
            for (int i = 0; i < 4; i++) to[v][i] += weight * from[v][i];
            store(dst + at, to[v]);
        } else {
            for (long long i = at; i < n; i++) dst[i] += weight * to_float(src[i]);
        }
    }
}

}  // namespace optimizer

// partial[block] = the block's sum of g^2, in f64: a NaN or an infinity shows in it. The result depends on the grid alone.
// Launch: block 256, grid any number B (1056 fills an H200), partial f64 [B], no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256) square_sum(const float* g, double* partial, long long n) {
    constexpr int AHEAD = 4;
    const long long threads = (long long)gridDim.x * 256, vectors = n / 4;
    long long v = (long long)blockIdx.x * 256 + threadIdx.x;
    double sum[4] = {0, 0, 0, 0};
    for (; v + (AHEAD - 1) * threads < vectors; v += AHEAD * threads) {
        float value[AHEAD][4];
#pragma unroll
        for (int a = 0; a < AHEAD; a++) load(g + 4 * (v + a * threads), value[a]);
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
#pragma unroll
            for (int i = 0; i < 4; i++) sum[i] += (double)value[a][i] * value[a][i];
        }
    }
    for (; v < vectors; v += threads) {
        float value[4];
        load(g + 4 * v, value);
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] += (double)value[i] * value[i];
    }
    if (blockIdx.x == 0 && threadIdx.x < n % 4) {
        const double value = g[4 * vectors + threadIdx.x];
        sum[0] += value * value;
    }
    const double total = optimizer::block_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

// *out = the sum of partial f64 [blocks]: the squared norm. Launch: block 256, grid 1, no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256) square_sum_finish(const double* partial, int blocks, double* out) {
    double sum = 0;
    for (int block = threadIdx.x; block < blocks; block += 256) sum += partial[block];
    const double total = optimizer::block_sum(sum);
    if (threadIdx.x == 0) *out = total;
}

// One AdamW update: g *= min(1, clip_norm / norm); m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2;
// p = p (1 - lr wd) - lr / correction1 * m / (sqrt(v) root_correction2 + eps), with correction1 = 1 - b1^t and
// root_correction2 = 1 / sqrt(1 - b2^t). The gradient is then 0. If the norm is not finite nothing is written.
//   bf16: master f32 is updated, params is its rounding. f32: params is updated, master is not used.
// Launch: block 256, grid ceil(n / 1024), no dynamic shared memory.
#define ADAMW(SUFFIX, T)                                                                                                \
    extern "C" __global__ void __launch_bounds__(256) adamw_##SUFFIX(                                                  \
        T* params, float* master, float* first, float* second, float* gradient, const double* norm_squared,             \
        float clip_norm, float lr, float beta1, float beta2, float eps, float weight_decay, float correction1,          \
        float root_correction2, long long n) {                                                                          \
        optimizer::adamw<T>(params, master, first, second, gradient, norm_squared, clip_norm, lr, beta1, beta2, eps,    \
                            weight_decay, correction1, root_correction2, n);                                           \
    }
ADAMW(bf16, bf16)
ADAMW(f32, float)

// dst += weight * src. Launch: block 256, grid ceil(n / 2048), no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256) accumulate_bf16(const bf16* src, float* dst, float weight, long long n) {
    optimizer::accumulate<bf16>(src, dst, weight, n);
}
extern "C" __global__ void __launch_bounds__(256) accumulate_f32(const float* src, float* dst, float weight, long long n) {
    optimizer::accumulate<float>(src, dst, weight, n);
}

// *index = the smallest index of a NaN or infinity in g; the host sets it to 2^64 - 1 first, which stays if there is none.
// Launch: block 256, grid any number (1056 fills an H200), no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256) first_non_finite(const float* g, long long n, unsigned long long* index) {
    const long long threads = (long long)gridDim.x * 256, vectors = n / 4;
    unsigned long long found = ~0ull;
    // A thread's indices rise, so its first find is its smallest.
    for (long long v = (long long)blockIdx.x * 256 + threadIdx.x; v < vectors && found == ~0ull; v += threads) {
        float value[4];
        load(g + 4 * v, value);
#pragma unroll
        for (int i = 3; i >= 0; i--) {
            if (!isfinite(value[i])) found = 4 * v + i;
        }
    }
    const long long tail = 4 * vectors + threadIdx.x;
    if (blockIdx.x == 0 && tail < n && found == ~0ull && !isfinite(g[tail])) found = tail;
    if (found != ~0ull) atomicMin(index, found);
}
