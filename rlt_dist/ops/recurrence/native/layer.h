// One decoder layer on the tokens of a chunk: each sublayer forward, and backward beside it.
//
// A token is a row t * B + b of the time-major buffers. x holds the chunk's rows side by side.
#pragma once
#include "kernels.h"
#include <vector>

// Sizes, and what is alike for all layers. Ranges replace masks: a token attends to the window
// slots from `window_from` and the memory entries from `memory_from`, up to its own.
template <class F> struct Segment {
  int32_t tokens, lanes, d, heads, kv_heads, width, window, ffn, memory, memory_rows, past;
  F eps;
  const F *cos, *sin;                         // [T, B, width / 2]
  const int32_t *window_from, *memory_from;   // [T, B]
};

// Weights packed for the product and for its gradient, the tape, and the layer's memory.
template <class F> struct Layer {
  Packed<F> qkv, o, cross_q, cross_o, gate_up, down;
  Packed<F> qkv_t, o_t, cross_q_t, cross_o_t, gate_up_t, down_t;
  const F *memory_k, *memory_v;               // the first M of [B, KV, memory_rows, w]
  const F *attn_mask, *cross_mask, *ffn_mask; // [T, B, d] or null
  F *entries, *dentries;                      // [W - 1 + T, B, 2, KV, w]
  // Kept by forward.
  F *attn_input, *attn_scale, *query, *weight;          // [T, B, d | 1 | H w | H W]
  F *cross_input, *cross_scale, *cross_query, *crossed; // [T, B, d | 1 | H w | H w]
  F *ffn_input, *ffn_scale, *gate_up_kept;              // [T, B, d | 1 | 2 f]
  // Formed by backward for weight and memory gradients; the first two are forward's, formed again.
  F *attended, *cross_weight;                   // [T, B, H w | H M]
  F *d_attn, *d_qkv;                            // [T, B, d | (H + 2 KV) w]
  F *d_cross, *d_cross_q, *d_crossed, *d_score; // [T, B, d | H w | H w | H M]
  F *d_ffn, *d_gate_up;                         // [T, B, d | 2 f]
};

// Working memory of one thread.
template <class F> struct Scratch {
  std::vector<F> normed, wide, narrow, grad, weight;
  void reserve(int rows, int widest, int d, int memory) {
    weight.resize(memory), normed.resize((size_t)rows * widest), wide.resize((size_t)rows * (widest + 64));
    narrow.resize((size_t)rows * (d + 64)), grad.resize((size_t)rows * (widest + 64));
  }
};

template <class F> inline void copy(F *to, const F *from, int n) { std::memcpy(to, from, n * sizeof(F)); }

// A sublayer's input, normalised; it is kept together with the scales that made it so.
template <class F>
inline void normalise_rows(const Segment<F> &s, const F *x, F *kept, F *scale, F *out, const int *rows, int n) {
  for (int i = 0; i < n; i++) {
    scale[rows[i]] = normalise(x + (int64_t)i * s.d, out + (int64_t)i * s.d, s.d, s.eps);
    copy(kept + (int64_t)rows[i] * s.d, out + (int64_t)i * s.d, s.d);
  }
}

// dx += its gradient.
template <class F>
inline void normalise_rows_backward(const Segment<F> &s, const F *dn, int stride, const F *kept, const F *scale, F *dx,
                                    const int *rows, int n) {
  for (int i = 0; i < n; i++)
    normalise_backward(dn + (int64_t)i * stride, kept + (int64_t)rows[i] * s.d, scale[rows[i]], dx + (int64_t)i * s.d, s.d);
}

// x += mask * y, row by row.
template <class F>
inline void add_branch(F *x, const F *y, int stride, const F *mask, const int *rows, int n, int d) {
  for (int i = 0; i < n; i++)
    for (int c = 0; c < d; c++)
      x[(int64_t)i * d + c] += y[(int64_t)i * stride + c] * (mask ? mask[(int64_t)rows[i] * d + c] : F(1));
}

// The branch's gradient mask * dy, kept on the tape for the weight's gradient.
template <class F>
inline void branch_gradient(const F *dy, F *kept, F *out, const F *mask, const int *rows, int n, int d) {
  for (int i = 0; i < n; i++) {
    for (int c = 0; c < d; c++)
      out[(int64_t)i * d + c] = dy[(int64_t)i * d + c] * (mask ? mask[(int64_t)rows[i] * d + c] : F(1));
    copy(kept + (int64_t)rows[i] * d, out + (int64_t)i * d, d);
  }
}

// -- attention over the window -----------------------------------------------------------------

template <class F>
void self_attention(const Segment<F> &s, const Layer<F> &l, F *x, const int *rows, int n, Scratch<F> &a) {
  const int queries = s.heads * s.width, keys = s.kv_heads * s.width, stride = l.qkv.stride();
  const int entry = 2 * keys, repeat = s.heads / s.kv_heads;
  normalise_rows(s, x, l.attn_input, l.attn_scale, a.normed.data(), rows, n);
  product(l.qkv, a.normed.data(), n, a.wide.data());
  for (int i = 0; i < n; i++) {
    F *q = &a.wide[(int64_t)i * stride];
    const F *cos = s.cos + (int64_t)rows[i] * (s.width / 2), *sin = s.sin + (int64_t)rows[i] * (s.width / 2);
    rotate(q, cos, sin, s.heads + s.kv_heads, s.width, F(1));
    copy(l.query + (int64_t)rows[i] * queries, q, queries);
    copy(l.entries + ((int64_t)(s.window - 1) * s.lanes + rows[i]) * entry, q + queries, entry);
  }
  for (int i = 0; i < n; i++) {
    const F *first = l.entries + (int64_t)rows[i] * entry;
    F *out = &a.normed[(int64_t)i * queries];
    std::memset(out, 0, queries * sizeof(F));
    for (int h = 0; h < s.heads; h++) {
      const F *q = l.query + (int64_t)rows[i] * queries + h * s.width;
      F *weight = l.weight + ((int64_t)rows[i] * s.heads + h) * s.window;
      const F *k = first + h / repeat * s.width, *v = k + keys;
      const int from = s.window_from[rows[i]];
      const int64_t hop = (int64_t)s.lanes * entry;
      for (int j = from; j < s.window; j++) weight[j] = dot(q, k + j * hop, s.width);
      softmax(weight + from, s.window - from);
      for (int j = from; j < s.window; j++) add_scaled(out + h * s.width, weight[j], v + j * hop, s.width);
    }
  }
  product(l.o, a.normed.data(), n, a.narrow.data());
  add_branch(x, a.narrow.data(), l.o.stride(), l.attn_mask, rows, n, s.d);
}

template <class F>
void self_attention_backward(const Segment<F> &s, const Layer<F> &l, F *dx, const int *rows, int n, Scratch<F> &a) {
  const int queries = s.heads * s.width, keys = s.kv_heads * s.width, stride = l.o_t.stride();
  const int entry = 2 * keys, repeat = s.heads / s.kv_heads, total = queries + entry;
  const int64_t hop = (int64_t)s.lanes * entry;
  branch_gradient(dx, l.d_attn, a.normed.data(), l.attn_mask, rows, n, s.d);
  product(l.o_t, a.normed.data(), n, a.grad.data());
  std::vector<F> dscore(s.window);
  for (int i = 0; i < n; i++) {
    const F *first = l.entries + (int64_t)rows[i] * entry;
    F *dfirst = l.dentries + (int64_t)rows[i] * entry, *dq = l.d_qkv + (int64_t)rows[i] * total;
    F *attended = l.attended + (int64_t)rows[i] * queries;
    std::memset(dq, 0, queries * sizeof(F)), std::memset(attended, 0, queries * sizeof(F));
    for (int h = 0; h < s.heads; h++) {
      const F *dout = &a.grad[(int64_t)i * stride + h * s.width];
      const F *q = l.query + (int64_t)rows[i] * queries + h * s.width;
      const F *weight = l.weight + ((int64_t)rows[i] * s.heads + h) * s.window;
      const int from = s.window_from[rows[i]], at = h / repeat * s.width;
      for (int j = from; j < s.window; j++) dscore[j] = dot(dout, first + j * hop + at + keys, s.width);
      softmax_backward(&dscore[from], weight + from, s.window - from);
      for (int j = from; j < s.window; j++) {
        add_scaled(attended + h * s.width, weight[j], first + j * hop + at + keys, s.width);
        add_scaled(dq + h * s.width, dscore[j], first + j * hop + at, s.width);
        add_scaled(dfirst + j * hop + at, dscore[j], q, s.width);
        add_scaled(dfirst + j * hop + at + keys, weight[j], dout, s.width);
      }
    }
  }
  for (int i = 0; i < n; i++) {
    F *dqkv = l.d_qkv + (int64_t)rows[i] * total;
    const F *cos = s.cos + (int64_t)rows[i] * (s.width / 2), *sin = s.sin + (int64_t)rows[i] * (s.width / 2);
    copy(dqkv + queries, l.dentries + ((int64_t)(s.window - 1) * s.lanes + rows[i]) * entry, entry);
    rotate(dqkv, cos, sin, s.heads + s.kv_heads, s.width, F(-1));
    copy(&a.normed[(int64_t)i * total], dqkv, total);
  }
  product(l.qkv_t, a.normed.data(), n, a.narrow.data());
  normalise_rows_backward(s, a.narrow.data(), l.qkv_t.stride(), l.attn_input, l.attn_scale, dx, rows, n);
}

// -- attention to the encoder memory -----------------------------------------------------------

// A query's weights on the memory entries that it sees, `from` .. `to` - 1.
template <class F>
inline void memory_weight(const F *query, const F *k, int width, int from, int to, F *weight) {
  for (int j = from; j < to; j++) weight[j] = dot(query, k + (int64_t)j * width, width);
  softmax(weight + from, to - from);
}

template <class F>
void cross_attention(const Segment<F> &s, const Layer<F> &l, F *x, const int *rows, int n, Scratch<F> &a) {
  const int queries = s.heads * s.width, repeat = s.heads / s.kv_heads, stride = l.cross_q.stride();
  normalise_rows(s, x, l.cross_input, l.cross_scale, a.normed.data(), rows, n);
  product(l.cross_q, a.normed.data(), n, a.wide.data());
  for (int i = 0; i < n; i++) {
    const int lane = rows[i] % s.lanes, from = s.memory_from[rows[i]], to = s.past + rows[i] / s.lanes + 1;
    F *query = &a.wide[(int64_t)i * stride], *out = &a.normed[(int64_t)i * queries];
    rotate(query, s.cos + (int64_t)rows[i] * (s.width / 2), s.sin + (int64_t)rows[i] * (s.width / 2), s.heads,
           s.width, F(1));
    copy(l.cross_query + (int64_t)rows[i] * queries, query, queries);
    std::memset(out, 0, queries * sizeof(F));
    for (int h = 0; h < s.heads; h++) {
      const int64_t base = ((int64_t)lane * s.kv_heads + h / repeat) * s.memory_rows * s.width;
      F *weight = a.weight.data();
      memory_weight(query + h * s.width, l.memory_k + base, s.width, from, to, weight);
      for (int j = from; j < to; j++)
        add_scaled(out + h * s.width, weight[j], l.memory_v + base + (int64_t)j * s.width, s.width);
    }
    copy(l.crossed + (int64_t)rows[i] * queries, out, queries);
  }
  product(l.cross_o, a.normed.data(), n, a.narrow.data());
  add_branch(x, a.narrow.data(), l.cross_o.stride(), l.cross_mask, rows, n, s.d);
}

template <class F>
void cross_attention_backward(const Segment<F> &s, const Layer<F> &l, F *dx, const int *rows, int n, Scratch<F> &a) {
  const int queries = s.heads * s.width, repeat = s.heads / s.kv_heads, stride = l.cross_o_t.stride();
  branch_gradient(dx, l.d_cross, a.normed.data(), l.cross_mask, rows, n, s.d);
  product(l.cross_o_t, a.normed.data(), n, a.grad.data());
  for (int i = 0; i < n; i++) {
    const int lane = rows[i] % s.lanes, from = s.memory_from[rows[i]], to = s.past + rows[i] / s.lanes + 1;
    const F *dout = &a.grad[(int64_t)i * stride];
    F *dq = l.d_cross_q + (int64_t)rows[i] * queries;
    copy(l.d_crossed + (int64_t)rows[i] * queries, dout, queries);
    std::memset(dq, 0, queries * sizeof(F));
    for (int h = 0; h < s.heads; h++) {
      const int64_t base = ((int64_t)lane * s.kv_heads + h / repeat) * s.memory_rows * s.width;
      F *weight = l.cross_weight + ((int64_t)rows[i] * s.heads + h) * s.memory;
      memory_weight(l.cross_query + (int64_t)rows[i] * queries + h * s.width, l.memory_k + base, s.width, from, to, weight);
      F *dscore = l.d_score + ((int64_t)rows[i] * s.heads + h) * s.memory;
      for (int j = from; j < to; j++)
        dscore[j] = dot(dout + h * s.width, l.memory_v + base + (int64_t)j * s.width, s.width);
      softmax_backward(dscore + from, weight + from, to - from);
      for (int j = from; j < to; j++)
        add_scaled(dq + h * s.width, dscore[j], l.memory_k + base + (int64_t)j * s.width, s.width);
    }
    rotate(dq, s.cos + (int64_t)rows[i] * (s.width / 2), s.sin + (int64_t)rows[i] * (s.width / 2), s.heads,
           s.width, F(-1));
    copy(&a.normed[(int64_t)i * queries], dq, queries);
  }
  product(l.cross_q_t, a.normed.data(), n, a.narrow.data());
  normalise_rows_backward(s, a.narrow.data(), l.cross_q_t.stride(), l.cross_input, l.cross_scale, dx, rows, n);
}

// -- feed-forward ------------------------------------------------------------------------------

template <class F>
void feed_forward(const Segment<F> &s, const Layer<F> &l, F *x, const int *rows, int n, Scratch<F> &a) {
  const int stride = l.gate_up.stride();
  normalise_rows(s, x, l.ffn_input, l.ffn_scale, a.normed.data(), rows, n);
  product(l.gate_up, a.normed.data(), n, a.wide.data());
  for (int i = 0; i < n; i++) {
    const F *gate = &a.wide[(int64_t)i * stride], *up = gate + s.ffn;
    copy(l.gate_up_kept + (int64_t)rows[i] * 2 * s.ffn, gate, 2 * s.ffn);
    F *hidden = &a.normed[(int64_t)i * s.ffn];
    for (int c = 0; c < s.ffn; c++) hidden[c] = gate[c] * sigmoid(gate[c]) * up[c];
  }
  product(l.down, a.normed.data(), n, a.narrow.data());
  add_branch(x, a.narrow.data(), l.down.stride(), l.ffn_mask, rows, n, s.d);
}

template <class F>
void feed_forward_backward(const Segment<F> &s, const Layer<F> &l, F *dx, const int *rows, int n, Scratch<F> &a) {
  branch_gradient(dx, l.d_ffn, a.normed.data(), l.ffn_mask, rows, n, s.d);
  product(l.down_t, a.normed.data(), n, a.grad.data());
  for (int i = 0; i < n; i++) {
    const F *gate = l.gate_up_kept + (int64_t)rows[i] * 2 * s.ffn, *up = gate + s.ffn;
    const F *dhidden = &a.grad[(int64_t)i * l.down_t.stride()];
    F *dgate = l.d_gate_up + (int64_t)rows[i] * 2 * s.ffn, *dup = dgate + s.ffn;
    for (int c = 0; c < s.ffn; c++) {
      F open = sigmoid(gate[c]);
      dgate[c] = dhidden[c] * up[c] * open * (1 + gate[c] * (1 - open));
      dup[c] = dhidden[c] * gate[c] * open;
    }
    copy(&a.normed[(int64_t)i * 2 * s.ffn], dgate, 2 * s.ffn);
  }
  product(l.gate_up_t, a.normed.data(), n, a.narrow.data());
  normalise_rows_backward(s, a.narrow.data(), l.gate_up_t.stride(), l.ffn_input, l.ffn_scale, dx, rows, n);
}
