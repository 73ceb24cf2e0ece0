// Moves without arithmetic: between f32 and bf16, between rows of different strides, and rows picked by an index.
//
// Floor, bytes an element: convert 6, the others twice the element.
#include "common.cuh"

namespace convert {

template <typename From, typename To>
__device__ __forceinline__ void cast(const From* from, To* to, long long n) {
    constexpr int VECTORS = 4;
    const long long start = (long long)blockIdx.x * 4096 + 4 * threadIdx.x;
    Packed<From, 4> packed[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (start + v * 1024 + 4 <= n) packed[v].load(from + start + v * 1024);
    }
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const long long at = start + v * 1024;
        if (at + 4 <= n) {
            float value[4];
            packed[v].unpack(value);
            store(to + at, value);
        } else {
            for (long long i = at; i < n; i++) to[i] = from_float<To>(to_float(from[i]));
        }
    }
}

template <typename T>
__device__ __forceinline__ void gather(const T* __restrict__ src, const int* __restrict__ index, T* __restrict__ out,
                                       long long rows, int D) {
    constexpr int ELEMENTS = 16 / (int)sizeof(T);
    const long long row = (long long)blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= rows) return;
    const int from = index[row];
#pragma unroll 4
    for (int column = ELEMENTS * (threadIdx.x % 32); column < D; column += 32 * ELEMENTS) {
        Packed<T, ELEMENTS> packed;
        if (from >= 0) {
            packed.load(src + (long long)from * D + column);
        } else {
#pragma unroll
            for (int i = 0; i < Packed<T, ELEMENTS>::WORDS; i++) packed.words[i] = 0;
        }
        packed.store(out + row * D + column);
    }
}

}  // namespace convert

// convert_<from>_<to>: n elements, to the nearest (ties to even). Pointers 16-byte aligned.
// Launch: block 256, grid ceil(n / 4096), no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256) convert_bf16_f32(const bf16* from, float* to, long long n) {
    convert::cast<bf16, float>(from, to, n);
}
extern "C" __global__ void __launch_bounds__(256) convert_f32_bf16(const float* from, bf16* to, long long n) {
    convert::cast<float, bf16>(from, to, n);
}

// rows rows of row_bytes bytes between strides in bytes; pointers, strides and row_bytes a multiple of 16; no overlap.
// Launch: block 256, grid ceil(rows / 8), no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256) copy_rows(const char* __restrict__ from, long long from_stride,
                                                            char* __restrict__ to, long long to_stride, long long rows,
                                                            int row_bytes) {
    const long long row = (long long)blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= rows) return;
    const uint4* __restrict__ source = reinterpret_cast<const uint4*>(from + row * from_stride);
    uint4* __restrict__ target = reinterpret_cast<uint4*>(to + row * to_stride);
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < row_bytes / 16; i += 32) target[i] = source[i];
}

// out T [rows, D]: out[r] = src[index[r]], 0 if index[r] is negative. D a multiple of 8.
// Launch: block 256, grid ceil(rows / 8), no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256) gather_rows_bf16(const bf16* src, const int* index, bf16* out,
                                                                   long long rows, int D) {
    convert::gather<bf16>(src, index, out, rows, D);
}
extern "C" __global__ void __launch_bounds__(256) gather_rows_f32(const float* src, const int* index, float* out,
                                                                  long long rows, int D) {
    convert::gather<float>(src, index, out, rows, D);
}
