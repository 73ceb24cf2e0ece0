// Rows of a matrix picked out, and put back: embedders make rows in another order than the sequence has them, and the last
// block works on the tokens that heads read alone.
//
// Floor: each row is read once and written once.
#include "common.cuh"

// Embedded rows become rows of the f32 residual stream: x[place[i]] = rows[i] (place[i] < 0: nowhere), and backward
// d_rows[i] = dx[place[i]], or 0. rows T [count, D], x f32 [., D], place i32 [count] or null: i. D a multiple of 4.
// Launch: block 256, grid ceil(count * D / 1024), no dynamic shared memory.
template <typename T>
__device__ __forceinline__ void embed(const T* rows, const int* place, float* x, int D, long long count) {
    const long long at = 4 * ((long long)blockIdx.x * 256 + threadIdx.x);
    const long long row = at / D, column = at % D;
    if (row >= count) return;
    const long long to = place ? place[row] : row;
    if (to < 0) return;
    float value[4];
    load(rows + at, value);
    store(x + to * D + column, value);
}
template <typename T>
__device__ __forceinline__ void embed_backward(const float* dx, const int* place, T* d_rows, int D, long long count) {
    const long long at = 4 * ((long long)blockIdx.x * 256 + threadIdx.x);
    const long long row = at / D, column = at % D;
    if (row >= count) return;
    const long long from = place ? place[row] : row;
    float value[4] = {0, 0, 0, 0};
    if (from >= 0) load(dx + from * D + column, value);
    store(d_rows + at, value);
}
#define EMBED(SUFFIX, T)                                                                                                \
    extern "C" __global__ void __launch_bounds__(256) embed_rows_##SUFFIX(const T* rows, const int* place, float* x,    \
                                                                          int D, long long count) {                     \
        embed(rows, place, x, D, count);                                                                                \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(256) embed_rows_backward_##SUFFIX(                                     \
        const float* dx, const int* place, T* d_rows, int D, long long count) {                                         \
        embed_backward(dx, place, d_rows, D, count);                                                                    \
    }
EMBED(bf16, bf16)
EMBED(f32, float)

// y[i] = x[index[i]] (take), y[index[i]] = x[i] (put). index i32 [count], each row at most once; a row is `vectors` pieces of
// 16 bytes.
// Launch: block 256, grid ceil(count * vectors / 256), no dynamic shared memory.
#define ROWS(NAME, TO, FROM)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256) NAME(const uint4* x, const int* index, uint4* y, int vectors,     \
                                                           long long count) {                                           \
        const long long at = (long long)blockIdx.x * 256 + threadIdx.x;                                                 \
        const long long row = at / vectors, piece = at % vectors;                                                       \
        if (row >= count) return;                                                                                       \
        y[(long long)(TO) * vectors + piece] = x[(long long)(FROM) * vectors + piece];                                  \
    }
ROWS(take_rows, row, index[row])
ROWS(put_rows, index[row], row)
