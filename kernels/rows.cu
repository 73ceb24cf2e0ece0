// Rows of a matrix picked out, and put back: the last block works on the tokens that heads read alone.
//
// Floor: each row is read once and written once.
#include "common.cuh"

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
