// LN(x) (1 + scale[row]) + shift[row] in f32 for candle's side of the seam: the heads, where every row of the modulation is
// read by equally many consecutive tokens. Composed from candle's ops it moves fifteen times the bytes, and keeps most of
// them for the backward pass.
//
// Floor: forward 8 bytes an element, backward 12; shift and scale are small beside it.
#include "common.cuh"

namespace norm_modulate_kernels {

constexpr int THREADS = 384;
// Channels of a thread that stay in registers: D up to THREADS * 4 * VECTORS.
constexpr int VECTORS = 4;

__device__ __forceinline__ float total(float value, float* shared) {
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    float sum = 0.f;
    for (int warp = 0; warp < THREADS / 32; warp++) sum += shared[warp];
    return sum;
}

}  // namespace norm_modulate_kernels

// One block a token; x, y [N, D], shift, scale [R, D], row = token / run. Block 384, grid N. D % 4 == 0, D <= 6144.
extern "C" __global__ void __launch_bounds__(384) norm_modulate_forward(const float* x, const float* shift,
                                                                        const float* scale, float* y, int run, int D,
                                                                        float eps) {
    using namespace norm_modulate_kernels;
    __shared__ float shared[THREADS / 32];
    const long long token = blockIdx.x, row = token / run;
    float4 held[VECTORS];
    float sum = 0.f;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int column = 4 * (v * THREADS + threadIdx.x);
        if (column < D) {
            held[v] = *reinterpret_cast<const float4*>(x + token * D + column);
            sum += (held[v].x + held[v].y) + (held[v].z + held[v].w);
        }
    }
    const float mean = total(sum, shared) / D;
    float square = 0.f;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (4 * (v * THREADS + (int)threadIdx.x) < D) {
            held[v].x -= mean, held[v].y -= mean, held[v].z -= mean, held[v].w -= mean;
            square += (held[v].x * held[v].x + held[v].y * held[v].y) + (held[v].z * held[v].z + held[v].w * held[v].w);
        }
    }
    const float rstd = 1.f / sqrtf(total(square, shared) / D + eps);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int column = 4 * (v * THREADS + threadIdx.x);
        if (column < D) {
            const float4 a = *reinterpret_cast<const float4*>(scale + row * D + column);
            const float4 b = *reinterpret_cast<const float4*>(shift + row * D + column);
            float4 out;
            out.x = held[v].x * rstd * (1.f + a.x) + b.x, out.y = held[v].y * rstd * (1.f + a.y) + b.y;
            out.z = held[v].z * rstd * (1.f + a.z) + b.z, out.w = held[v].w * rstd * (1.f + a.w) + b.w;
            *reinterpret_cast<float4*>(y + token * D + column) = out;
        }
    }
}

// One block a row: dx [N, D] and the row's sums d_shift, d_scale [R, D] over its `run` tokens, in their order. Block 384,
// grid R.
extern "C" __global__ void __launch_bounds__(384) norm_modulate_backward(const float* x, const float* scale,
                                                                         const float* dy, float* dx, float* d_shift,
                                                                         float* d_scale, int run, int D, float eps) {
    using namespace norm_modulate_kernels;
    __shared__ float shared[THREADS / 32];
    const long long row = blockIdx.x;
    float sum_shift[VECTORS][4] = {}, sum_scale[VECTORS][4] = {};
    for (int of_row = 0; of_row < run; of_row++) {
        const long long token = row * run + of_row;
        float hat[VECTORS][4], grad[VECTORS][4];
        float sum = 0.f;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const int column = 4 * (v * THREADS + threadIdx.x);
#pragma unroll
            for (int i = 0; i < 4; i++) hat[v][i] = grad[v][i] = 0.f;
            if (column < D) {
                const float4 a = *reinterpret_cast<const float4*>(x + token * D + column);
                const float4 g = *reinterpret_cast<const float4*>(dy + token * D + column);
                hat[v][0] = a.x, hat[v][1] = a.y, hat[v][2] = a.z, hat[v][3] = a.w;
                grad[v][0] = g.x, grad[v][1] = g.y, grad[v][2] = g.z, grad[v][3] = g.w;
                sum += (a.x + a.y) + (a.z + a.w);
            }
        }
        const float mean = total(sum, shared) / D;
        float square = 0.f;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            if (4 * (v * THREADS + (int)threadIdx.x) < D) {
#pragma unroll
                for (int i = 0; i < 4; i++) hat[v][i] -= mean, square += hat[v][i] * hat[v][i];
            }
        }
        const float rstd = 1.f / sqrtf(total(square, shared) / D + eps);
        float mean_grad = 0.f, mean_product = 0.f;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const int column = 4 * (v * THREADS + threadIdx.x);
            if (column < D) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    hat[v][i] *= rstd;
                    sum_shift[v][i] += grad[v][i];
                    sum_scale[v][i] += grad[v][i] * hat[v][i];
                    grad[v][i] *= 1.f + scale[row * D + column + i];
                    mean_grad += grad[v][i];
                    mean_product += grad[v][i] * hat[v][i];
                }
            }
        }
        mean_grad = total(mean_grad, shared) / D;
        mean_product = total(mean_product, shared) / D;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const int column = 4 * (v * THREADS + threadIdx.x);
            if (column < D) {
#pragma unroll
                for (int i = 0; i < 4; i++)
                    dx[token * D + column + i] = rstd * (grad[v][i] - mean_grad - hat[v][i] * mean_product);
            }
        }
    }
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int column = 4 * (v * THREADS + threadIdx.x);
        if (column < D) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                d_shift[row * D + column + i] = sum_shift[v][i];
                d_scale[row * D + column + i] = sum_scale[v][i];
            }
        }
    }
}
