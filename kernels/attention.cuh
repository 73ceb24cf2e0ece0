// What all attention kernels share: how a row of the plan says which keys a query sees.
#pragma once
#include <cuda_bf16.h>

// The keys of one query: three half-open intervals; the unused ones are empty.
struct RowKeys {
    int first[3];
    unsigned count[3];

    __device__ __forceinline__ bool sees(int key) const {
        return unsigned(key - first[0]) < count[0] || unsigned(key - first[1]) < count[1] ||
               unsigned(key - first[2]) < count[2];
    }
};

// row_keys [rows][8]: lo0, hi0, lo1, hi1, lo2, hi2, 0, 0. A row past the end sees nothing.
__device__ __forceinline__ RowKeys load_row_keys(const int* __restrict__ row_keys, int row, int rows) {
    if (row >= rows) return RowKeys{{0, 0, 0}, {0, 0, 0}};
    const int4* at = reinterpret_cast<const int4*>(row_keys + 8ll * row);
    const int4 a = __ldg(at), b = __ldg(at + 1);
    return RowKeys{{a.x, a.z, b.x}, {unsigned(a.y - a.x), unsigned(a.w - a.z), unsigned(b.y - b.x)}};
}
