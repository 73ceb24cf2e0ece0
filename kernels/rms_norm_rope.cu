// Query and key normalization of attention with the rotary embedding that always follows: RMSNorm over the whole width D
// (before the head split), times weight, then the pairs (2i, 2i+1) of every head of 2 * pairs dims rotated by the token's
// angles: (a cos - b sin, a sin + b cos). x [N, D] inside rows of ldx elements (a part of a fused q, k, v product).
//
// Floor, bf16, bytes a channel: forward 4 (x 2, out 2), backward 6 (dy 2, x 2, dx 2), plus 8 * pairs bytes a token.
//
// D and row strides a multiple of 8, pointers 16-byte aligned. Any even head dim that divides D: a vector of 8 channels may
// straddle two heads.
#include "common.cuh"

namespace rms_norm_rope_kernels {

constexpr int TOKENS_A_PARTIAL = 32;

// The 4 rotations of 8 channels that start at `column`.
struct Rotation {
    float cosine[4], sine[4];

    __device__ __forceinline__ void load(const float2* of_token, int pairs, int column) {
        if (pairs % 4 == 0) {
            const float4* from = reinterpret_cast<const float4*>(of_token + (column / 2) % pairs);
            const float4 low = from[0], high = from[1];
            cosine[0] = low.x, sine[0] = low.y, cosine[1] = low.z, sine[1] = low.w;
            cosine[2] = high.x, sine[2] = high.y, cosine[3] = high.z, sine[3] = high.w;
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 one = of_token[(column / 2 + i) % pairs];
                cosine[i] = one.x, sine[i] = one.y;
            }
        }
    }

    __device__ __forceinline__ void none() {
#pragma unroll
        for (int i = 0; i < 4; i++) cosine[i] = 1, sine[i] = 0;
    }

    __device__ __forceinline__ void apply(float (&values)[8]) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float a = values[2 * i], b = values[2 * i + 1];
            values[2 * i] = a * cosine[i] - b * sine[i];
            values[2 * i + 1] = a * sine[i] + b * cosine[i];
        }
    }

    __device__ __forceinline__ void apply_inverse(float (&values)[8]) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float a = values[2 * i], b = values[2 * i + 1];
            values[2 * i] = a * cosine[i] + b * sine[i];
            values[2 * i + 1] = b * cosine[i] - a * sine[i];
        }
    }
};

// A warp takes a token: no barrier, and many rows under way on a multiprocessor.
constexpr int FORWARD_WARPS = 8;

template <typename T, int WIDTH /* 0: any D, x is read twice */>
__device__ __forceinline__ void forward(const T* x, const T* weight, const float2* of_token, int pairs, T* out, float* rstd,
                                        float eps, int D) {
    const int lane = threadIdx.x % 32;
    if constexpr (WIDTH > 0) {
        constexpr int VECTORS = WIDTH / 256;
        static_assert(WIDTH % 256 == 0, "a whole number of vectors a lane");
        Packed<T, 8> packed[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; v++) packed[v].load(x + 8 * (lane + 32 * v));
        // Heads of a divisor of 256 dims give a lane the same place in each of its heads.
        Rotation rotation;
        const bool one_place = of_token && 256 % (2 * pairs) == 0;
        if (one_place) rotation.load(of_token, pairs, 8 * lane);
        float sum = 0;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            float value[8];
            packed[v].unpack(value);
#pragma unroll
            for (int i = 0; i < 8; i++) sum += value[i] * value[i];
        }
        const float inverse = rsqrtf(warp_sum(sum) / D + eps);
        if (lane == 0) *rstd = inverse;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const int column = 8 * (lane + 32 * v);
            float value[8], factor[8];
            packed[v].unpack(value);
            load(weight + column, factor);
#pragma unroll
            for (int i = 0; i < 8; i++) value[i] *= inverse * factor[i];
            if (of_token) {
                if (!one_place) rotation.load(of_token, pairs, column);
                rotation.apply(value);
            }
            store(out + column, value);
        }
    } else {
        float sum = 0;
        for (int column = 8 * lane; column < D; column += 256) {
            float value[8];
            load(x + column, value);
#pragma unroll
            for (int i = 0; i < 8; i++) sum += value[i] * value[i];
        }
        const float inverse = rsqrtf(warp_sum(sum) / D + eps);
        if (lane == 0) *rstd = inverse;
        for (int column = 8 * lane; column < D; column += 256) {
            float value[8], factor[8];
            load(x + column, value);
            load(weight + column, factor);
#pragma unroll
            for (int i = 0; i < 8; i++) value[i] *= inverse * factor[i];
            if (of_token) {
                Rotation rotation;
                rotation.load(of_token, pairs, column);
                rotation.apply(value);
            }
            store(out + column, value);
        }
    }
}

constexpr int BACKWARD_THREADS = 384;

// dy turned back is the gradient of y = x rstd weight. With g = dy weight:
// dx = rstd (g - x rstd^2 mean(g x)), d_weight = sum over tokens of dy x rstd.
template <typename T>
__device__ __forceinline__ void backward(const T* dy, int ldy, const T* x, int ldx, const T* weight, const float* rstd_in,
                                         const float2* cos_sin, int pairs, T* dx, int lddx, float* d_weight, long long N,
                                         int D) {
    __shared__ typename BlockSum<BACKWARD_THREADS / 32, 1>::Shared shared;
    BlockSum<BACKWARD_THREADS / 32, 1> block_sum(shared);
    const long long first = (long long)blockIdx.x * TOKENS_A_PARTIAL;
    const long long end = min(first + TOKENS_A_PARTIAL, N);
    float* const partial = d_weight ? d_weight + (long long)blockIdx.x * D : nullptr;
    const float inverse_width = 1.0f / D;

    if (D <= 8 * BACKWARD_THREADS) {  // a thread owns 8 channels; the next token's are under way while this one is summed
        const int column = 8 * threadIdx.x;
        const bool active = column < D;
        float sum_weight[8];
        Packed<T, 8> weight_packed, x_next, dy_next;
        float rstd_next = 0;
        auto fetch = [&](long long token) {
            rstd_next = rstd_in[token];
            if (!active) return;
            dy_next.load(dy + token * ldy + column);
            x_next.load(x + token * ldx + column);
        };
#pragma unroll
        for (int i = 0; i < 8; i++) sum_weight[i] = 0;
        if (active) weight_packed.load(weight + column);
        if (first < end) fetch(first);
        for (long long token = first; token < end; token++) {
            float gradient[8], value[8];
            const float rstd = rstd_next;
            float sum[1] = {0};
            if (active) {
                float factor[8];
                Rotation rotation;
                if (cos_sin) rotation.load(cos_sin + token * pairs, pairs, column);
                else rotation.none();
                dy_next.unpack(gradient);
                x_next.unpack(value);
                rotation.apply_inverse(gradient);
                weight_packed.unpack(factor);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    sum_weight[i] += gradient[i] * (value[i] * rstd);
                    gradient[i] *= factor[i];
                    sum[0] += gradient[i] * value[i];
                }
            }
            if (token + 1 < end) fetch(token + 1);
            block_sum(sum);
            if (!active) continue;
            const float correction = sum[0] * inverse_width * rstd * rstd;
#pragma unroll
            for (int i = 0; i < 8; i++) gradient[i] = rstd * (gradient[i] - value[i] * correction);
            store(dx + token * lddx + column, gradient);
        }
        if (active && partial) store(partial + column, sum_weight);
        return;
    }

    // Wider: values are read again, and partial sums lie in their place in memory, touched by their own thread alone.
    for (long long token = first; token < end; token++) {
        const float2* const of_token = cos_sin ? cos_sin + token * pairs : nullptr;
        const float rstd = rstd_in[token];
        float sum[1] = {0};
        const auto turned = [&](int column, float (&gradient)[8], float (&value)[8], float (&factor)[8]) {
            load(dy + token * ldy + column, gradient);
            load(x + token * ldx + column, value);
            load(weight + column, factor);
            if (!of_token) return;
            Rotation rotation;
            rotation.load(of_token, pairs, column);
            rotation.apply_inverse(gradient);
        };
        float gradient[8], value[8], factor[8];
        for (int column = 8 * threadIdx.x; column < D; column += 8 * BACKWARD_THREADS) {
            turned(column, gradient, value, factor);
            float total[8];
#pragma unroll
            for (int i = 0; i < 8; i++) total[i] = 0;
            if (partial && token > first) load(partial + column, total);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                total[i] += gradient[i] * (value[i] * rstd);
                sum[0] += gradient[i] * factor[i] * value[i];
            }
            if (partial) store(partial + column, total);
        }
        block_sum(sum);
        const float correction = sum[0] * inverse_width * rstd * rstd;
        for (int column = 8 * threadIdx.x; column < D; column += 8 * BACKWARD_THREADS) {
            turned(column, gradient, value, factor);
#pragma unroll
            for (int i = 0; i < 8; i++) gradient[i] = rstd * (gradient[i] * factor[i] - value[i] * correction);
            store(dx + token * lddx + column, gradient);
        }
    }
}

}  // namespace rms_norm_rope_kernels

// x T [N, D] in rows of ldx; weight T [D]; cos_sin f32 pairs [N, pairs] or null (no rotation); out T [N, D] in rows of ldo,
// may be x; rstd f32 [N] = 1 / sqrt(mean(x^2) + eps). bf16 at D = 3072 reads x once; other shapes twice.
// Launch: block 256, grid ceil(N / 8), no dynamic shared memory.
#define RMS_NORM_ROPE(SUFFIX, T)                                                                                        \
    extern "C" __global__ void __launch_bounds__(256, 2) rms_norm_rope_##SUFFIX(                                       \
        const T* x, int ldx, const T* weight, const float2* cos_sin, int pairs, T* out, int ldo, float* rstd, float eps, \
        long long N, int D) {                                                                                           \
        using namespace rms_norm_rope_kernels;                                                                         \
        const long long token = (long long)blockIdx.x * FORWARD_WARPS + threadIdx.x / 32;                              \
        if (token >= N) return;                                                                                        \
        const float2* const of_token = cos_sin ? cos_sin + token * pairs : nullptr;                                    \
        if (sizeof(T) == 2 && D == 3072) {                                                                             \
            forward<T, sizeof(T) == 2 ? 3072 : 0>(x + token * ldx, weight, of_token, pairs, out + token * ldo,          \
                                                  rstd + token, eps, D);                                               \
        } else {                                                                                                       \
            forward<T, 0>(x + token * ldx, weight, of_token, pairs, out + token * ldo, rstd + token, eps, D);           \
        }                                                                                                              \
    }
RMS_NORM_ROPE(bf16, bf16)
RMS_NORM_ROPE(f32, float)

// dy T [N, D] in rows of ldy: the gradient of out; dx T [N, D] in rows of lddx, may be dy, not x if D > 3072;
// d_weight f32 [ceil(N / 32), D] or null: partial sums of 32 tokens each, to be added by column_sum_*.
// Launch: block 384, grid ceil(N / 32), no dynamic shared memory.
#define RMS_NORM_ROPE_BACKWARD(SUFFIX, T)                                                                               \
    extern "C" __global__ void __launch_bounds__(384, sizeof(T) == 2 ? 3 : 2) rms_norm_rope_backward_##SUFFIX(         \
        const T* dy, int ldy, const T* x, int ldx, const T* weight, const float* rstd, const float2* cos_sin, int pairs, \
        T* dx, int lddx, float* d_weight, long long N, int D) {                                                        \
        rms_norm_rope_kernels::backward<T>(dy, ldy, x, ldx, weight, rstd, cos_sin, pairs, dx, lddx, d_weight, N, D);   \
    }
RMS_NORM_ROPE_BACKWARD(bf16, bf16)
RMS_NORM_ROPE_BACKWARD(f32, float)
