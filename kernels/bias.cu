// The bias of a product y [N, F] where the matrix library does not add it, and its gradient, the column sums of dy.
//
// Floor, bf16, bytes an element: bias_gradient 2 (dy read once), add_bias 4. F and ld a multiple of 8, pointers 16-byte
// aligned.
#include "common.cuh"

namespace bias_kernels {

constexpr int WARPS = 8;
constexpr int COLUMNS_A_BLOCK = 256;

// A warp reads 256 columns of a row at once, the block's warps take rows in turn; their sums meet in shared memory.
template <typename T>
__device__ __forceinline__ void gradient(const T* dy, int ld, float* partial, long long N, int F, int rows_per_block) {
    alignas(16) __shared__ float of_warp[WARPS][COLUMNS_A_BLOCK];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int column = blockIdx.x * COLUMNS_A_BLOCK + 8 * lane;
    const long long begin = (long long)blockIdx.y * rows_per_block, end = min(begin + rows_per_block, N);
    float sum[8];
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] = 0;
    if (column < F) {
        constexpr int AHEAD = 32 / (int)sizeof(T) / 2;  // 8 rows of bf16, 4 of f32 under way a thread
        const T* from = dy + column;
        long long row = begin + warp;
        for (; row + (AHEAD - 1) * WARPS < end; row += AHEAD * WARPS) {
            Packed<T, 8> packed[AHEAD];
#pragma unroll
            for (int a = 0; a < AHEAD; a++) packed[a].load(from + (row + a * WARPS) * ld);
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                float value[8];
                packed[a].unpack(value);
#pragma unroll
                for (int i = 0; i < 8; i++) sum[i] += value[i];
            }
        }
        for (; row < end; row += WARPS) {
            float value[8];
            load(from + row * ld, value);
#pragma unroll
            for (int i = 0; i < 8; i++) sum[i] += value[i];
        }
    }
    store(&of_warp[warp][8 * lane], sum);
    __syncthreads();
    const int own = blockIdx.x * COLUMNS_A_BLOCK + threadIdx.x;
    if (own >= F) return;
    float total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += of_warp[w][threadIdx.x];
    partial[(long long)blockIdx.y * F + own] = total;
}

constexpr int ROWS_TO_ADD = 16;

template <typename T>
__device__ __forceinline__ void add(T* y, const T* bias, long long N, int F) {
    const int column = 8 * (blockIdx.y * 256 + threadIdx.x);
    if (column >= F) return;
    const long long begin = (long long)blockIdx.x * ROWS_TO_ADD;
    float added[8];
    load(bias + column, added);
    constexpr int AHEAD = 4;
#pragma unroll
    for (int step = 0; step < ROWS_TO_ADD; step += AHEAD) {
        Packed<T, 8> packed[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            if (begin + step + a < N) packed[a].load(y + (begin + step + a) * F + column);
        }
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            if (begin + step + a >= N) continue;
            float value[8];
            packed[a].unpack(value);
#pragma unroll
            for (int i = 0; i < 8; i++) value[i] += added[i];
            store(y + (begin + step + a) * F + column, value);
        }
    }
}

}  // namespace bias_kernels

// partial f32 [P, F], P = ceil(N / rows_per_block): column sums of rows_per_block rows of dy T [N, F] in rows of ld. Then
// column_sum_second(partial, d_bias, P, F). rows_per_block 512 suits a full device.
// Launch: block 256, grid (ceil(F / 256), P), no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256) bias_gradient_bf16(const bf16* dy, int ld, float* partial, long long N,
                                                                     int F, int rows_per_block) {
    bias_kernels::gradient<bf16>(dy, ld, partial, N, F, rows_per_block);
}
extern "C" __global__ void __launch_bounds__(256) bias_gradient_f32(const float* dy, int ld, float* partial, long long N,
                                                                    int F, int rows_per_block) {
    bias_kernels::gradient<float>(dy, ld, partial, N, F, rows_per_block);
}

// y T [N, F] += bias T [F], in place. Launch: block 256, grid (ceil(N / 16), ceil(F / 2048)), no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256) add_bias_bf16(bf16* y, const bf16* bias, long long N, int F) {
    bias_kernels::add<bf16>(y, bias, N, F);
}
extern "C" __global__ void __launch_bounds__(256) add_bias_f32(float* y, const float* bias, long long N, int F) {
    bias_kernels::add<float>(y, bias, N, F);
}
