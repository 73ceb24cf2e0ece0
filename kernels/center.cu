// Keys less their mean. A softmax does not see a shift that all keys of a query share, but the gradient of queries does in
// bf16: ds of a query sums to a rest instead of 0 (see attention.cu), and the rest gathers along the keys' mean. Text keys
// lie close together, and most of the weight is often on one folded row of padding; without their mean, weighed as a softmax
// of even scores would, nothing is left to gather along.
//
// Floor: x read twice, from the second time on out of the cache, and written once.
#include "common.cuh"

// x[row, :] -= the mean of rows span[2 s] .. span[2 s + 1], each with weight exp(bias[row]) (bias f32 [S], null: 0), for every
// span s, in place. x T [S, D], spans i32 [P, 2], disjoint; D a multiple of 4.
// Launch: block 256, grid (ceil(D / 64), P), no dynamic shared memory.
template <typename T>
__device__ __forceinline__ void center(T* x, const float* bias, const int* spans, int D) {
    __shared__ float4 of_lane[16][16];
    __shared__ float weight_of_lane[16];
    const int column = 64 * blockIdx.x + 4 * (threadIdx.x % 16), lane = threadIdx.x / 16;
    const int begin = spans[2 * blockIdx.y], end = spans[2 * blockIdx.y + 1];
    float sum[4] = {0, 0, 0, 0}, weights = 0;
#pragma unroll 4
    for (int row = begin + lane; row < end; row += 16) {
        const float weight = bias ? expf(bias[row]) : 1.0f;
        weights += weight;
        if (column >= D) continue;
        float value[4];
        load(x + (long long)row * D + column, value);
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] += weight * value[i];
    }
    if (threadIdx.x % 16 == 0) weight_of_lane[lane] = weights;
    of_lane[lane][threadIdx.x % 16] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    __syncthreads();
    if (column >= D || begin >= end) return;
    float mean[4] = {0, 0, 0, 0}, total = 0;
    for (int other = 0; other < 16; other++) {
        const float4 value = of_lane[other][threadIdx.x % 16];
        mean[0] += value.x, mean[1] += value.y, mean[2] += value.z, mean[3] += value.w;
        total += weight_of_lane[other];
    }
    const float inverse = 1.0f / total;
#pragma unroll 4
    for (int row = begin + lane; row < end; row += 16) {
        float value[4];
        load(x + (long long)row * D + column, value);
#pragma unroll
        for (int i = 0; i < 4; i++) value[i] -= mean[i] * inverse;
        store(x + (long long)row * D + column, value);
    }
}
extern "C" __global__ void __launch_bounds__(256) center_rows_bf16(bf16* x, const float* bias, const int* spans, int D) {
    center(x, bias, spans, D);
}
extern "C" __global__ void __launch_bounds__(256) center_rows_f32(float* x, const float* bias, const int* spans, int D) {
    center(x, bias, spans, D);
}
