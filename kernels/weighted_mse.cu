// The losses: a sum of squared errors, weighed by frame and masked by element, in f32 for candle's side of the seam.
//
// Floor: forward 8 bytes an element (12 with a mask), backward 12 (16).
#include <stdint.h>

namespace weighted_mse_kernels {

constexpr int THREADS = 256;
constexpr int ELEMENTS_A_THREAD = 16;

__device__ __forceinline__ double block_total(double value) {
    __shared__ double of_warp[THREADS / 32];
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    double sum = 0;
    for (int warp = 0; warp < THREADS / 32; warp++) sum += of_warp[warp];
    return sum;
}

}  // namespace weighted_mse_kernels

// partial[block] = sum of weight[frame] mask (p - t)^2 over the block's elements. p, t, mask f32 [C, F, X] (mask null: 1),
// weight f32 [F], count = C F X, partial f64 [P].
// Launch: block 256, grid P = ceil(count / 4096), no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256) weighted_mse_forward(const float* p, const float* t, const float* weight,
                                                                       const float* mask, double* partial, int F, int X,
                                                                       long long count) {
    using namespace weighted_mse_kernels;
    double sum = 0;
    const long long begin = (long long)blockIdx.x * THREADS * ELEMENTS_A_THREAD + threadIdx.x;
    for (int i = 0; i < ELEMENTS_A_THREAD; i++) {
        const long long at = begin + (long long)i * THREADS;
        if (at >= count) break;
        const float error = p[at] - t[at];
        const float factor = weight[at / X % F] * (mask ? mask[at] : 1.f);
        sum += (double)(factor * error * error);
    }
    sum = block_total(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// loss[0] = the sum of partial [P]. Launch: block 256, grid 1.
extern "C" __global__ void __launch_bounds__(256) weighted_mse_finish(const double* partial, float* loss, int P) {
    using namespace weighted_mse_kernels;
    double sum = 0;
    for (int i = threadIdx.x; i < P; i += THREADS) sum += partial[i];
    sum = block_total(sum);
    if (threadIdx.x == 0) loss[0] = (float)sum;
}

// dp = 2 gradient[0] weight[frame] mask (p - t). Launch: block 256, grid ceil(count / 256).
extern "C" __global__ void __launch_bounds__(256) weighted_mse_backward(const float* p, const float* t, const float* weight,
                                                                        const float* mask, const float* gradient, float* dp,
                                                                        int F, int X, long long count) {
    const long long at = (long long)blockIdx.x * 256 + threadIdx.x;
    if (at >= count) return;
    const float factor = weight[at / X % F] * (mask ? mask[at] : 1.f);
    dp[at] = 2.f * gradient[0] * factor * (p[at] - t[at]);
}
