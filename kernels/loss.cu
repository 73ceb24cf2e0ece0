// The loss where the trunk meets its targets: sum over tokens i of weight[i] sum over c of mask[i, c] (p - t)^2, and its
// gradient, in one pass. Every normalization (over tokens, channels, episodes) is in the weights, made by the host.
//
// Floor, bf16, bytes an element: 10 (prediction 2, target 4, d_prediction 4), 14 with a mask; small beside the trunk.
#include "common.cuh"

namespace loss_kernels {

constexpr int THREADS = 256;
constexpr int ELEMENTS_A_THREAD = 8;
constexpr int ELEMENTS_A_BLOCK = THREADS * ELEMENTS_A_THREAD;

template <typename T>
__device__ __forceinline__ void weighted_mse(const T* prediction, const float* target, const float* mask,
                                             const float* weight, float* partial_loss, float* d_prediction, long long n,
                                             int C) {
    __shared__ typename BlockSum<THREADS / 32, 1>::Shared shared;
    BlockSum<THREADS / 32, 1> block_sum(shared);
    const long long total = n * C, start = (long long)blockIdx.x * ELEMENTS_A_BLOCK;
    const long long first_row = start / C;
    const int first_column = (int)(start % C);  // so that the divisions below are of 32 bits
    float sum[1] = {0};
#pragma unroll
    for (int e = 0; e < ELEMENTS_A_THREAD; e++) {
        const int inside = e * THREADS + threadIdx.x;
        const long long at = start + inside;
        if (at >= total) break;
        const float of_token = weight[first_row + (unsigned)(first_column + inside) / (unsigned)C];
        const float factor = mask && of_token != 0 ? of_token * mask[at] : of_token;
        // What does not count is not read: a target may be anything there.
        float slope = 0;
        if (factor != 0) {
            const float difference = to_float(prediction[at]) - target[at];
            sum[0] += factor * difference * difference;
            slope = 2 * factor * difference;
        }
        if (d_prediction) d_prediction[at] = slope;
    }
    block_sum(sum);
    if (threadIdx.x == 0) partial_loss[blockIdx.x] = sum[0];
}

}  // namespace loss_kernels

// prediction T [n, C]; target f32 [n, C]; mask f32 [n, C] or null (all 1); weight f32 [n]; partial_loss f32 [grid];
// d_prediction f32 [n, C] or null: 2 weight mask (p - t). Where weight or mask is 0 neither prediction nor target is read.
// Launch: block 256, grid ceil(n * C / 2048), no dynamic shared memory. Any C >= 1.
extern "C" __global__ void __launch_bounds__(256) weighted_mse_bf16(const bf16* prediction, const float* target,
                                                                    const float* mask, const float* weight,
                                                                    float* partial_loss, float* d_prediction, long long n,
                                                                    int C) {
    loss_kernels::weighted_mse<bf16>(prediction, target, mask, weight, partial_loss, d_prediction, n, C);
}
extern "C" __global__ void __launch_bounds__(256) weighted_mse_f32(const float* prediction, const float* target,
                                                                   const float* mask, const float* weight,
                                                                   float* partial_loss, float* d_prediction, long long n,
                                                                   int C) {
    loss_kernels::weighted_mse<float>(prediction, target, mask, weight, partial_loss, d_prediction, n, C);
}

// *loss f64 += the sum of partial_loss f32 [blocks]. Launch: block 256, grid 1, no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256) weighted_mse_finish(const float* partial_loss, int blocks, double* loss) {
    __shared__ double of_warp[8];
    double sum = 0;
    for (int block = threadIdx.x; block < blocks; block += 256) sum += partial_loss[block];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    double total = 0;
    for (int warp = 0; warp < 8; warp++) total += of_warp[warp];
    *loss += total;
}
