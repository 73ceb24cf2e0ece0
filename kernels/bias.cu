// The gradient of the bias of a product y [N, F]: the column sums of dy. The matrix library adds the bias itself.
//
// Floor, bf16: 2 bytes an element, dy read once. F and ld a multiple of 8, pointers 16-byte aligned.
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
