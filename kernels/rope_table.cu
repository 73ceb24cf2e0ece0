// Turns of every token and pair for rotary position embedding, in place of a table made on the host and copied (41 MB at
// 80,640 tokens). Angles in f64, rounded to f32, as the CPU's table is.
//
// Floor: 8 bytes written a (token, pair); f64 sines cost about as much again on a data-centre GPU.

extern "C" __global__ void rope_table(const double* positions /*[N, 3]*/, const int* axis /*[P]*/,
                                      const double* frequency /*[P]*/, float2* cos_sin /*[N, P]*/, long long count,
                                      int pairs) {
    // One thread an entry; block 256, grid ceil(N P / 256).
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const int pair = (int)(i % pairs);
    double sine, cosine;
    sincos(positions[i / pairs * 3 + axis[pair]] * frequency[pair], &sine, &cosine);
    cos_sin[i] = make_float2((float)cosine, (float)sine);
}
