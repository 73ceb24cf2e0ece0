// The residual stream x [N, D] (f32) between two products: x1 = x + sign gate[row] y, then h = LayerNorm(x1), affine, modulated
// by the token's row, or alone. One kernel a direction, so that the stream is read once and written once. The sign is 1, or
// -1 where the backward pass takes back what the forward pass added; x1 may lie where x lies.
//
// Floor, bf16 operands, bytes a channel: forward 12 (x 4, y 2, x1 4, h 2); backward 18 (dh 2, dx 4 + 4, x1 4, y 2, dy 2) and
// 4 a partial sum and segment.
//
// A modulation row part i is e0[row, i, :] + table[i, :], e0 T [R, 6, D], table T [6, D]: of the block that the norm is of, and
// for the gate (gate_table) of the block whose result is added, which may be the one before. D a multiple of 8, pointers 16-byte
// aligned. A thread owns the same channels of every token it sees (two groups of four), so modulation and partial sums
// stay with it. Up to REGISTER_WIDTH channels a token stays in registers; wider ones are read again.
#include "common.cuh"

namespace residual_norm {

constexpr int THREADS = 384;
constexpr int WARPS = THREADS / 32;
constexpr int GROUPS = 2;
constexpr int STRIDE = 4 * THREADS;
constexpr int REGISTER_WIDTH = GROUPS * STRIDE;
constexpr int TOKENS_A_BLOCK = 16;
enum Kind { NONE = 0, AFFINE = 1, MODULATED = 2, ALONE = 3 };

// Four channels of one part of a modulation row.
template <typename T>
__device__ __forceinline__ void modulation(const T* e0, const T* table, int row, int part, int D, int column,
                                           float (&values)[4]) {
    float shared_part[4];
    load(e0 + ((long long)row * 6 + part) * D + column, values);
    load(table + (long long)part * D + column, shared_part);
#pragma unroll
    for (int i = 0; i < 4; i++) values[i] += shared_part[i];
}

// h = xhat * factor + shift: factor and shift of four channels.
template <typename T>
__device__ __forceinline__ void affine(int kind, const T* weight, const T* bias, const T* e0, const T* table, int row,
                                       int shift_part, int scale_part, int D, int column, float (&factor)[4],
                                       float (&shift)[4]) {
    if (kind == AFFINE) {
        load(weight + column, factor);
        load(bias + column, shift);
    } else if (kind == MODULATED) {
        modulation(e0, table, row, scale_part, D, column, factor);
        modulation(e0, table, row, shift_part, D, column, shift);
#pragma unroll
        for (int i = 0; i < 4; i++) factor[i] += 1;
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) factor[i] = 1, shift[i] = 0;
    }
}

template <typename T>
__device__ __forceinline__ void gate_of(int gate_part, const T* e0, const T* table, int row, int D, int column,
                                        float (&gate)[4]) {
    if (gate_part >= 0) {
        modulation(e0, table, row, gate_part, D, column, gate);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) gate[i] = 1;
    }
}

template <typename T>
__device__ __forceinline__ void forward(const float* x, const T* y, int gate_part, const T* gate_table, const T* e0,
                                        const T* table, const int* rows, float sign, float* x_out, int kind, const T* weight,
                                        const T* bias, int shift_part, int scale_part, T* h, float* mean_out,
                                        float* rstd_out, float eps, long long N, int D) {
    __shared__ typename BlockSum<WARPS, 1>::Shared shared;
    BlockSum<WARPS, 1> block_sum(shared);
    const long long first = (long long)blockIdx.x * TOKENS_A_BLOCK;
    const long long end = min(first + TOKENS_A_BLOCK, N);
    const bool gated = y != nullptr && gate_part >= 0;
    const bool by_row = gated || kind == MODULATED;
    const float inverse_width = 1.0f / D;

    if (D <= REGISTER_WIDTH) {
        int column[GROUPS];
        bool active[GROUPS];
        Packed<float, 4> x_next[GROUPS];
        Packed<T, 4> y_next[GROUPS];
        float gate[GROUPS][4], factor[GROUPS][4], shift[GROUPS][4];
        int row_next = 0;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            column[g] = 4 * threadIdx.x + g * STRIDE;
            active[g] = column[g] < D;
        }
        // The next token's values are under way while this one is summed.
        auto fetch = [&](long long token) {
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                if (!active[g]) continue;
                x_next[g].load(x + token * D + column[g]);
                if (y) y_next[g].load(y + token * D + column[g]);
            }
            if (by_row) row_next = rows[token];
        };
        int row_held = -1;
        if (first < end) fetch(first);
        for (long long token = first; token < end; token++) {
            float value[GROUPS][4], added[GROUPS][4];
            const int row = row_next;
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
#pragma unroll
                for (int i = 0; i < 4; i++) value[g][i] = 0;
                if (!active[g]) continue;
                x_next[g].unpack(value[g]);
                if (y) y_next[g].unpack(added[g]);
            }
            if (token + 1 < end) fetch(token + 1);
            if (row != row_held) {
                row_held = row;
#pragma unroll
                for (int g = 0; g < GROUPS; g++) {
                    if (!active[g]) continue;
                    gate_of(gated ? gate_part : -1, e0, gate_table, row, D, column[g], gate[g]);
#pragma unroll
                    for (int i = 0; i < 4; i++) gate[g][i] *= sign;
                    affine(kind, weight, bias, e0, table, row, shift_part, scale_part, D, column[g], factor[g], shift[g]);
                }
            }
            float sum[1] = {0};
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                if (!active[g]) continue;
                if (y) {
#pragma unroll
                    for (int i = 0; i < 4; i++) value[g][i] += gate[g][i] * added[g][i];
                    store(x_out + token * D + column[g], value[g]);
                }
#pragma unroll
                for (int i = 0; i < 4; i++) sum[0] += value[g][i];
            }
            if (kind == NONE) continue;
            block_sum(sum);
            const float mean = sum[0] * inverse_width;
            sum[0] = 0;
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    value[g][i] -= mean;
                    if (active[g]) sum[0] += value[g][i] * value[g][i];
                }
            }
            block_sum(sum);
            const float rstd = rsqrtf(sum[0] * inverse_width + eps);
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                if (!active[g]) continue;
#pragma unroll
                for (int i = 0; i < 4; i++) value[g][i] = value[g][i] * rstd * factor[g][i] + shift[g][i];
                store(h + token * D + column[g], value[g]);
            }
            if (threadIdx.x == 0) mean_out[token] = mean, rstd_out[token] = rstd;
        }
        return;
    }

    for (long long token = first; token < end; token++) {
        const int row = by_row ? rows[token] : 0;
        const float* stream = (y ? x_out : x) + token * D;  // x1, of which a thread reads only what it wrote itself
        float sum[1] = {0};
        for (int column = 4 * threadIdx.x; column < D; column += STRIDE) {
            float value[4];
            load(x + token * D + column, value);
            if (y) {
                float gate[4], added[4];
                load(y + token * D + column, added);
                gate_of(gated ? gate_part : -1, e0, gate_table, row, D, column, gate);
#pragma unroll
                for (int i = 0; i < 4; i++) value[i] += sign * gate[i] * added[i];
                store(x_out + token * D + column, value);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) sum[0] += value[i];
        }
        if (kind == NONE) continue;
        block_sum(sum);
        const float mean = sum[0] * inverse_width;
        sum[0] = 0;
        for (int column = 4 * threadIdx.x; column < D; column += STRIDE) {
            float value[4];
            load(stream + column, value);
#pragma unroll
            for (int i = 0; i < 4; i++) sum[0] += (value[i] - mean) * (value[i] - mean);
        }
        block_sum(sum);
        const float rstd = rsqrtf(sum[0] * inverse_width + eps);
        for (int column = 4 * threadIdx.x; column < D; column += STRIDE) {
            float value[4], factor[4], shift[4];
            load(stream + column, value);
            affine(kind, weight, bias, e0, table, row, shift_part, scale_part, D, column, factor, shift);
#pragma unroll
            for (int i = 0; i < 4; i++) value[i] = (value[i] - mean) * rstd * factor[i] + shift[i];
            store(h + token * D + column, value);
        }
        if (threadIdx.x == 0) mean_out[token] = mean, rstd_out[token] = rstd;
    }
}

// What multiplies dh to give the gradient of xhat, four channels.
template <typename T>
__device__ __forceinline__ void factor_of(int kind, const T* weight, const T* e0, const T* table, int row, int scale_part,
                                          int D, int column, float (&factor)[4]) {
    if (kind == AFFINE) {
        load(weight + column, factor);
    } else if (kind == MODULATED) {
        modulation(e0, table, row, scale_part, D, column, factor);
#pragma unroll
        for (int i = 0; i < 4; i++) factor[i] += 1;
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) factor[i] = 1;
    }
}

template <typename T>
__device__ __forceinline__ void backward(const T* dh, float* dx, const float* x1, const float* mean_in,
                                         const float* rstd_in, int kind, const T* weight, const T* y, int gate_part,
                                         const T* gate_table, const T* e0, const T* table, const int* rows,
                                         int scale_part, T* dy, float* d_scale, float* d_shift, float* d_gate, const int* tokens_by_row,
                                         const int* segment_start, int S, int D) {
    __shared__ typename BlockSum<WARPS, 2>::Shared shared;
    // Each thread's own gate and factor: 16 registers a thread fewer, and a second block fits on a multiprocessor.
    __shared__ float4 held_gate[GROUPS][THREADS], held_factor[GROUPS][THREADS];
    BlockSum<WARPS, 2> block_sum(shared);
    const int segment = blockIdx.x;
    if (segment >= S) return;
    const int begin = segment_start[segment], end = segment_start[segment + 1];
    const float inverse_width = 1.0f / D;
    const bool by_row = (gate_part >= 0 && dy) || kind == MODULATED;
    const int row = by_row && begin < end ? rows[tokens_by_row[begin]] : 0;
    const int gate_read = dy && begin < end ? gate_part : -1;
    const int kind_read = begin < end ? kind : NONE;

    if (D <= REGISTER_WIDTH) {
        int column[GROUPS];
        bool active[GROUPS];
        float sum_scale[GROUPS][4], sum_shift[GROUPS][4], sum_gate[GROUPS][4];
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            column[g] = 4 * threadIdx.x + g * STRIDE;
            active[g] = column[g] < D;
#pragma unroll
            for (int i = 0; i < 4; i++) sum_scale[g][i] = sum_shift[g][i] = sum_gate[g][i] = 0;
            if (!active[g]) continue;
            float values[4];
            gate_of(gate_read, e0, gate_table, row, D, column[g], values);
            held_gate[g][threadIdx.x] = make_float4(values[0], values[1], values[2], values[3]);
            factor_of(kind_read, weight, e0, table, row, scale_part, D, column[g], values);
            held_factor[g][threadIdx.x] = make_float4(values[0], values[1], values[2], values[3]);
        }
        int next = begin < end ? tokens_by_row[begin] : 0;
        for (int place = begin; place < end; place++) {
            const long long token = next, start = token * D;
            if (place + 1 < end) next = tokens_by_row[place + 1];
            float gradient[GROUPS][4];
            Packed<T, 4> y_packed[GROUPS];
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
#pragma unroll
                for (int i = 0; i < 4; i++) gradient[g][i] = 0;
                if (!active[g]) continue;
                load(dx + start + column[g], gradient[g]);
                if (d_gate) y_packed[g].load(y + start + column[g]);
            }
            if (kind != NONE) {
                float xhat[GROUPS][4], inner[GROUPS][4];
                const float mean = mean_in[token], rstd = rstd_in[token];
#pragma unroll
                for (int g = 0; g < GROUPS; g++) {
                    if (!active[g]) continue;
                    load(x1 + start + column[g], xhat[g]);
                    load(dh + start + column[g], inner[g]);
                }
                float sums[2] = {0, 0};
#pragma unroll
                for (int g = 0; g < GROUPS; g++) {
                    if (!active[g]) continue;
                    const float4 four = held_factor[g][threadIdx.x];
                    const float factor[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        xhat[g][i] = (xhat[g][i] - mean) * rstd;
                        sum_shift[g][i] += inner[g][i];
                        sum_scale[g][i] += inner[g][i] * xhat[g][i];
                        inner[g][i] *= factor[i];
                        sums[0] += inner[g][i];
                        sums[1] += inner[g][i] * xhat[g][i];
                    }
                }
                block_sum(sums);
                const float mean_inner = sums[0] * inverse_width, mean_product = sums[1] * inverse_width;
#pragma unroll
                for (int g = 0; g < GROUPS; g++) {
                    if (!active[g]) continue;
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        gradient[g][i] += rstd * (inner[g][i] - mean_inner - xhat[g][i] * mean_product);
                    }
                    store(dx + start + column[g], gradient[g]);
                }
            }
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                if (!active[g]) continue;
                if (d_gate) {
                    float added[4];
                    y_packed[g].unpack(added);
#pragma unroll
                    for (int i = 0; i < 4; i++) sum_gate[g][i] += gradient[g][i] * added[i];
                }
                if (dy) {
                    const float4 gate = held_gate[g][threadIdx.x];
                    const float out[4] = {gate.x * gradient[g][0], gate.y * gradient[g][1], gate.z * gradient[g][2],
                                          gate.w * gradient[g][3]};
                    store(dy + start + column[g], out);
                }
            }
        }
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            if (!active[g]) continue;
            const long long at = (long long)segment * D + column[g];
            if (d_scale) store(d_scale + at, sum_scale[g]);
            if (d_shift) store(d_shift + at, sum_shift[g]);
            if (d_gate) store(d_gate + at, sum_gate[g]);
        }
        return;
    }

    // Partial sums of a wide row lie in their place in memory, where only their own thread touches them.
    const auto add = [&](float* partial, int column, const float (&values)[4]) {
        if (!partial) return;
        float total[4];
        load(partial + (long long)segment * D + column, total);
#pragma unroll
        for (int i = 0; i < 4; i++) total[i] += values[i];
        store(partial + (long long)segment * D + column, total);
    };
    const float zero[4] = {0, 0, 0, 0};
    for (int column = 4 * threadIdx.x; column < D; column += STRIDE) {
        const long long at = (long long)segment * D + column;
        if (d_scale) store(d_scale + at, zero);
        if (d_shift) store(d_shift + at, zero);
        if (d_gate) store(d_gate + at, zero);
    }
    for (int place = begin; place < end; place++) {
        const long long token = tokens_by_row[place], start = token * D;
        float sums[2] = {0, 0}, mean = 0, rstd = 0;
        if (kind != NONE) {
            mean = mean_in[token], rstd = rstd_in[token];
            for (int column = 4 * threadIdx.x; column < D; column += STRIDE) {
                float xhat[4], inner[4], factor[4];
                load(x1 + start + column, xhat);
                load(dh + start + column, inner);
                factor_of(kind, weight, e0, table, row, scale_part, D, column, factor);
                float product[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    xhat[i] = (xhat[i] - mean) * rstd;
                    product[i] = inner[i] * xhat[i];
                    sums[0] += inner[i] * factor[i];
                    sums[1] += product[i] * factor[i];
                }
                add(d_shift, column, inner);
                add(d_scale, column, product);
            }
            block_sum(sums);
        }
        for (int column = 4 * threadIdx.x; column < D; column += STRIDE) {
            float gradient[4];
            load(dx + start + column, gradient);
            if (kind != NONE) {
                float xhat[4], inner[4], factor[4];
                load(x1 + start + column, xhat);
                load(dh + start + column, inner);
                factor_of(kind, weight, e0, table, row, scale_part, D, column, factor);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    xhat[i] = (xhat[i] - mean) * rstd;
                    gradient[i] += rstd * (inner[i] * factor[i] - sums[0] * inverse_width -
                                           xhat[i] * (sums[1] * inverse_width));
                }
                store(dx + start + column, gradient);
            }
            if (d_gate) {
                float product[4];
                load(y + start + column, product);
#pragma unroll
                for (int i = 0; i < 4; i++) product[i] *= gradient[i];
                add(d_gate, column, product);
            }
            if (dy) {
                float gate[4];
                gate_of(gate_part, e0, gate_table, row, D, column, gate);
#pragma unroll
                for (int i = 0; i < 4; i++) gate[i] *= gradient[i];
                store(dy + start + column, gate);
            }
        }
    }
}

}  // namespace residual_norm

// x1 = x + sign gate[row] y and h = norm(x1). kind 0: no norm, 1: LN w + b, 2: LN (1 + scale) + shift, 3: LN alone.
//   x f32 [N, D]; y T [N, D] or null (nothing added, x_out not written); gate_part -1: gate 1; rows i32 [N], read if a part
//   of the modulation is; x_out f32 [N, D], may be x; h T [N, D]; mean, rstd f32 [N], both written unless kind is 0.
// Launch: block 384, grid ceil(N / 16), no dynamic shared memory.
#define RESIDUAL_NORM(SUFFIX, T)                                                                                        \
    extern "C" __global__ void __launch_bounds__(384, 2) residual_norm_##SUFFIX(                                       \
        const float* x, const T* y, int gate_part, const T* gate_table, const T* e0, const T* table, const int* rows,   \
        float sign, float* x_out, int kind, const T* weight, const T* bias, int shift_part, int scale_part, T* h,       \
        float* mean, float* rstd, float eps, long long N, int D) {                                                      \
        residual_norm::forward<T>(x, y, gate_part, gate_table, e0, table, rows, sign, x_out, kind, weight, bias,        \
                                  shift_part, scale_part, h, mean, rstd, eps, N, D);                                   \
    }
RESIDUAL_NORM(bf16, bf16)
RESIDUAL_NORM(f32, float)

// Gradients of the above. A block takes a segment: tokens of one modulation row, at any places of the sequence.
//   dh T [N, D], null if kind is 0; dx f32 [N, D] in: what reaches x1 from later, out: the gradient of x1 in all, which is
//   that of x (left as it is if kind is 0); x1, mean, rstd: of the forward, null if kind is 0; weight: kind 1 only;
//   y T [N, D], read if d_gate is wanted; dy T [N, D] or null: gate * dx; d_scale (sum of dh xhat), d_shift (sum of dh),
//   d_gate (sum of dx y) f32 [S, D] or null: of a segment's tokens in their order. With kind 1 d_scale and d_shift are
//   those of weight and bias. d_scale and d_shift must be null if kind is 0.
//   tokens_by_row i32 [N]; segment_start i32 [S+1]. A segment may have any number of tokens; 32 balance well.
// Launch: block 384, grid S, no dynamic shared memory.
#define RESIDUAL_NORM_BACKWARD(SUFFIX, T)                                                                               \
    extern "C" __global__ void __launch_bounds__(384, sizeof(T) == 2 ? 2 : 1) residual_norm_backward_##SUFFIX(       \
        const T* dh, float* dx, const float* x1, const float* mean, const float* rstd, int kind, const T* weight,       \
        const T* y, int gate_part, const T* gate_table, const T* e0, const T* table, const int* rows, int scale_part,   \
        T* dy, float* d_scale, float* d_shift, float* d_gate, const int* tokens_by_row, const int* segment_start, int S, \
        int D) {                                                                                                        \
        residual_norm::backward<T>(dh, dx, x1, mean, rstd, kind, weight, y, gate_part, gate_table, e0, table, rows,     \
                                   scale_part, dy, d_scale, d_shift, d_gate, tokens_by_row, segment_start, S, D);      \
    }
RESIDUAL_NORM_BACKWARD(bf16, bf16)
RESIDUAL_NORM_BACKWARD(f32, float)

// out[row, part, :] += the sum of the row's partials, in segment order. partial f32 [S, D]; row_segment_start i32 [R+1];
// out f32 [R, 6, D]. A row without tokens has no segment and gets nothing.
// Launch: block 256, grid (R, ceil(D / 1024)), no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256) reduce_rows(const float* partial, const int* row_segment_start, float* out,
                                                              int part, int R, int D) {
    const int row = blockIdx.x, column = 4 * (blockIdx.y * 256 + threadIdx.x);
    if (row >= R || column >= D) return;
    const int begin = row_segment_start[row], end = row_segment_start[row + 1];
    if (begin >= end) return;
    float sum[4] = {0, 0, 0, 0}, value[4];
    for (int segment = begin; segment < end; segment++) {
        load(partial + (long long)segment * D + column, value);
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] += value[i];
    }
    float* const to = out + ((long long)row * 6 + part) * D + column;
    load(to, value);
#pragma unroll
    for (int i = 0; i < 4; i++) value[i] += sum[i];
    store(to, value);
}

// Column sums of partial f32 [S, D] in two launches. First: scratch[k, :] = the sum of the k-th of 64 runs of rows; every
// row of scratch is written, one without rows with 0.
// Launch: block 256, grid (ceil(D / 1024), 64), no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256) column_sum_first(const float* partial, float* scratch, int S, int D) {
    const int column = 4 * (blockIdx.x * 256 + threadIdx.x);
    if (column >= D) return;
    const int run = (S + gridDim.y - 1) / gridDim.y;
    const int begin = min((int)blockIdx.y * run, S), end = min(begin + run, S);
    float sum[4] = {0, 0, 0, 0};
#pragma unroll 8
    for (int row = begin; row < end; row++) {
        float value[4];
        load(partial + (long long)row * D + column, value);
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] += value[i];
    }
    store(scratch + (long long)blockIdx.y * D + column, sum);
}

// Second: out[:] += the column sums of scratch f32 [rows_of_scratch, D]. A block takes 64 columns, 16 threads each.
// Launch: block 256, grid ceil(D / 64), no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256) column_sum_second(const float* scratch, float* out, int rows_of_scratch,
                                                                    int D) {
    __shared__ float4 of_lane[16][16];
    const int column = 64 * blockIdx.x + 4 * (threadIdx.x % 16), lane = threadIdx.x / 16;
    float sum[4] = {0, 0, 0, 0};
    if (column < D) {
#pragma unroll 4
        for (int row = lane; row < rows_of_scratch; row += 16) {
            float value[4];
            load(scratch + (long long)row * D + column, value);
#pragma unroll
            for (int i = 0; i < 4; i++) sum[i] += value[i];
        }
    }
    of_lane[lane][threadIdx.x % 16] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    __syncthreads();
    if (lane != 0 || column >= D) return;
    float4 total = of_lane[0][threadIdx.x];
    for (int other = 1; other < 16; other++) {
        const float4 value = of_lane[other][threadIdx.x];
        total.x += value.x, total.y += value.y, total.z += value.z, total.w += value.w;
    }
    float value[4];
    load(out + column, value);
    value[0] += total.x, value[1] += total.y, value[2] += total.z, value[3] += total.w;
    store(out + column, value);
}
