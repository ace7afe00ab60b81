// Arithmetic on rows: products with packed weights, norms, rotary, exponentials.
//
// Vectors are GCC's, 64 bytes wide; the compiler cuts them to what the processor has. A row's result
// never depends on which rows are computed beside it, so threads and chunks change no bit.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

template <class F> struct Simd {
  static constexpr int width = 64 / sizeof(F);
  typedef F type __attribute__((vector_size(64), aligned(sizeof(F)), may_alias));
};

// Columns of the result that one pass over the weights forms: four vectors.
template <class F> constexpr int panel_columns = 4 * Simd<F>::width;

// y[ROWS][columns of one panel] = x[ROWS][in] times the panel [in][panel_columns].
template <class F, int ROWS>
inline void panel_product(const F *panel, int in, const F *x, F *y, int stride) {
  using V = typename Simd<F>::type;
  constexpr int N = Simd<F>::width;
  V sum[ROWS][4] = {};
  for (int k = 0; k < in; k++) {
    const F *w = panel + (int64_t)k * panel_columns<F>;
    V w0 = *(const V *)w, w1 = *(const V *)(w + N);
    V w2 = *(const V *)(w + 2 * N), w3 = *(const V *)(w + 3 * N);
    for (int r = 0; r < ROWS; r++) {
      F value = x[(int64_t)r * in + k];
      sum[r][0] += value * w0, sum[r][1] += value * w1;
      sum[r][2] += value * w2, sum[r][3] += value * w3;
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < 4; c++) *(V *)(y + (int64_t)r * stride + c * N) = sum[r][c];
}

// A weight [out, in] packed into panels [ceil(out / panel_columns)][in][panel_columns].
template <class F> struct Packed {
  const F *data;
  int32_t in, out;
  int stride() const { return (out + panel_columns<F> - 1) / panel_columns<F> * panel_columns<F>; }
};

// y[n][stride] = x[n][in] W^T. The panel is outermost: it stays in cache for all rows.
template <class F> void product(Packed<F> w, const F *x, int n, F *y) {
  const int stride = w.stride();
  for (int first = 0; first < w.out; first += panel_columns<F>) {
    const F *panel = w.data + (int64_t)first * w.in;
    int r = 0;
    for (; r + 4 <= n; r += 4)
      panel_product<F, 4>(panel, w.in, x + (int64_t)r * w.in, y + (int64_t)r * stride + first, stride);
    const F *rest = x + (int64_t)r * w.in;
    F *out = y + (int64_t)r * stride + first;
    if (n - r == 3) panel_product<F, 3>(panel, w.in, rest, out, stride);
    if (n - r == 2) panel_product<F, 2>(panel, w.in, rest, out, stride);
    if (n - r == 1) panel_product<F, 1>(panel, w.in, rest, out, stride);
  }
}

template <class F, int N> struct Vector {
  typedef F type __attribute__((vector_size(N * sizeof(F)), aligned(sizeof(F)), may_alias));
};

// The sum of a vector's numbers and of a[i] b[i], i < n < N, by halves: neither numbers that fill no
// vector nor the sum are one long chain of additions.
template <class F, int N> inline F folded(typename Vector<F, N>::type sums, const F *a, const F *b, int n) {
  if constexpr (N == 1) {
    return sums[0];
  } else {
    constexpr int half = N / 2;
    using H = typename Vector<F, half>::type;
    H parts[2];
    std::memcpy(parts, &sums, sizeof sums);
    H sum = parts[0] + parts[1];
    if (n < half) return folded<F, half>(sum, a, b, n);
    return folded<F, half>(sum + *(const H *)a * *(const H *)b, a + half, b + half, n - half);
  }
}

template <class F> inline F dot(const F *a, const F *b, int n) {
  using V = typename Simd<F>::type;
  constexpr int N = Simd<F>::width;
  V sums = {};
  int i = 0;
  for (; i + N <= n; i += N) sums += *(const V *)(a + i) * *(const V *)(b + i);
  return folded<F, N>(sums, a + i, b + i, n - i);
}

// y += scale * x
template <class F> inline void add_scaled(F *y, F scale, const F *x, int n) {
  for (int i = 0; i < n; i++) y[i] += scale * x[i];
}

// y = x / rms(x); returns 1 / rms(x).
template <class F> inline F normalise(const F *x, F *y, int d, F eps) {
  F scale = 1 / std::sqrt(dot(x, x, d) / d + eps);
  for (int i = 0; i < d; i++) y[i] = x[i] * scale;
  return scale;
}

// dx += the gradient of `normalise` with respect to x, for its results n and scale.
template <class F> inline void normalise_backward(const F *dn, const F *n, F scale, F *dx, int d) {
  F inner = dot(dn, n, d) / d;
  for (int i = 0; i < d; i++) dx[i] += scale * (dn[i] - n[i] * inner);
}

// (a, b) -> (a cos - b sin, b cos + a sin) for every head; direction -1 is the gradient.
template <class F>
inline void rotate(F *x, const F *cos, const F *sin, int heads, int width, F direction) {
  const int half = width / 2;
  for (int h = 0; h < heads; h++, x += width)
    for (int i = 0; i < half; i++) {
      F a = x[i], b = x[i + half], s = direction * sin[i];
      x[i] = a * cos[i] - b * s;
      x[i + half] = b * cos[i] + a * s;
    }
}

// exp by 2^n times a polynomial; arguments beyond the range are clamped. Vectorises.
inline float exponential(float x) {
  x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
  float n = std::nearbyintf(x * 1.44269504f);
  float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.0f / 5040;
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = p * r + c;
  int32_t bits = ((int32_t)n + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

inline double exponential(double x) {
  x = x < -708.0 ? -708.0 : x > 709.0 ? 709.0 : x;
  double n = std::nearbyint(x * 1.4426950408889634);
  double r = (x - n * 6.93145751953125e-1) - n * 1.42860682030941723212e-6;
  double p = 1.0 / 6227020800;
  for (double c : {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,
                   1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0})
    p = p * r + c;
  int64_t bits = ((int64_t)n + 1023) << 52;
  double power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

template <class F> inline F sigmoid(F x) { return 1 / (1 + exponential(-x)); }

// Scores to weights, in place.
template <class F> inline void softmax(F *score, int n) {
  F top = score[0], sum = 0;
  for (int i = 1; i < n; i++) top = score[i] > top ? score[i] : top;
  for (int i = 0; i < n; i++) score[i] = exponential(score[i] - top);
  for (int i = 0; i < n; i++) sum += score[i];
  for (int i = 0; i < n; i++) score[i] /= sum;
}

// The gradient of a softmax: dscore in place of dweight.
template <class F> inline void softmax_backward(F *dweight, const F *weight, int n) {
  F inner = dot(dweight, weight, n);
  for (int i = 0; i < n; i++) dweight[i] = weight[i] * (dweight[i] - inner);
}
