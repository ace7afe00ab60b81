// A segment through decoder[i:j] and its feedback. Threads split the lanes: nothing is shared, so
// there is no barrier, and a lane's result does not depend on how many threads there are.
#include "layer.h"
#include <algorithm>
#include <thread>

// The feedback: which state a chunk is fed, the merge, and their gradients. data is null: RLT-0.
template <class F> struct Feedback {
  Packed<F> weight, weight_t;           // [2 d, d]
  F alpha;
  const F *e, *gate_e;                  // [T, B, d]
  const F *initial, *boundary;          // [B, d]
  F *s, *ds;                            // [T + 1, B, d], what is fed back; slot 0 was carried in
  F *y;                                 // [T, B, d], outputs
  const F *dy;                          // [T, B, d]
  F *r, *r_scale, *fed, *dfed;          // [K, B, d | 1 | 2 d | 2 d]
  F *de, *dgate_e;                      // [T, B, d]
  F *dinitial, *dboundary;              // [B, d]
};

// Chunk k of lane b has tokens first .. first + length - 1 (length may be 0).
struct Chunks {
  const int32_t *first, *length;        // [K, B]
  const uint8_t *fresh, *start;         // [K, B]
};

template <class F> class Worker {
public:
  // For lanes from .. to - 1 of chunks begin .. end - 1.
  Worker(const Segment<F> &s, const Layer<F> *layers, int count, const Feedback<F> &f, const Chunks &c, int begin,
         int end, int from, int to)
      : s(s), layers(layers), count(count), f(f), chunks(c), begin(begin), end(end), from(from), to(to) {
    int longest = 0;
    for (int i = begin * s.lanes; i < end * s.lanes; i++) longest = std::max(longest, c.length[i]);
    int n = longest * (to - from), qkv = (s.heads + 2 * s.kv_heads) * s.width;
    scratch.reserve(std::max(n, to - from), std::max({2 * s.ffn, qkv, 2 * s.d}), s.d, s.memory);
    x.resize((size_t)n * s.d), h.resize((size_t)(to - from) * s.d);
  }

  void forward() {
    for (int k = begin; k < end; k++) {
      if (!gather(k)) continue;
      enter(k);
      for (int l = 0; l < count; l++) {
        self_attention(s, layers[l], x.data(), rows.data(), n(), scratch);
        cross_attention(s, layers[l], x.data(), rows.data(), n(), scratch);
        feed_forward(s, layers[l], x.data(), rows.data(), n(), scratch);
      }
      for (int i = 0; i < n(); i++) copy(f.y + (int64_t)rows[i] * s.d, &x[(int64_t)i * s.d], s.d);
    }
  }

  void backward() {
    for (int k = end - 1; k >= begin; k--) {
      if (!gather(k)) continue;
      for (int i = 0; i < n(); i++) copy(&x[(int64_t)i * s.d], f.dy + (int64_t)rows[i] * s.d, s.d);
      for (int l = count - 1; l >= 0; l--) {
        feed_forward_backward(s, layers[l], x.data(), rows.data(), n(), scratch);
        cross_attention_backward(s, layers[l], x.data(), rows.data(), n(), scratch);
        self_attention_backward(s, layers[l], x.data(), rows.data(), n(), scratch);
      }
      enter_backward(k);
    }
  }

private:
  const Segment<F> &s;
  const Layer<F> *layers;
  int count;
  const Feedback<F> &f;
  const Chunks &chunks;
  int begin, end, from, to;
  Scratch<F> scratch;
  std::vector<F> x, h;
  std::vector<int> rows, lanes;

  int n() const { return (int)rows.size(); }

  // The rows and lanes of this thread in chunk k; whether there are any.
  bool gather(int k) {
    rows.clear(), lanes.clear();
    int longest = 0;
    for (int b = from; b < to; b++) {
      int length = chunks.length[k * s.lanes + b];
      if (length) lanes.push_back(b);
      longest = std::max(longest, length);
    }
    for (int c = 0; c < longest; c++)
      for (int b : lanes)
        if (c < chunks.length[k * s.lanes + b]) rows.push_back((chunks.first[k * s.lanes + b] + c) * s.lanes + b);
    return n() > 0;
  }

  // The boundary state that lane b's chunk k is fed.
  const F *boundary_state(int k, int b) const {
    int at = k * s.lanes + b;
    if (!chunks.fresh[at]) return f.boundary + (int64_t)b * s.d;
    if (chunks.start[at]) return f.initial + (int64_t)b * s.d;
    return f.s + ((int64_t)chunks.first[at] * s.lanes + b) * s.d;
  }

  void enter(int k) {
    for (int i = 0; i < n(); i++) copy(&x[(int64_t)i * s.d], f.e + (int64_t)rows[i] * s.d, s.d);
    if (!f.gate_e) return;
    int m = (int)lanes.size();
    for (int i = 0; i < m; i++) {
      F *r = &scratch.normed[(int64_t)i * s.d];
      f.r_scale[k * s.lanes + lanes[i]] = normalise(boundary_state(k, lanes[i]), r, s.d, s.eps);
      copy(f.r + ((int64_t)k * s.lanes + lanes[i]) * s.d, r, s.d);
    }
    product(f.weight, scratch.normed.data(), m, scratch.wide.data());
    for (int i = 0; i < m; i++)
      copy(f.fed + ((int64_t)k * s.lanes + lanes[i]) * 2 * s.d, &scratch.wide[(int64_t)i * f.weight.stride()], 2 * s.d);
    for (int i = 0; i < n(); i++) {
      const F *fed = f.fed + ((int64_t)k * s.lanes + rows[i] % s.lanes) * 2 * s.d;
      const F *gate_e = f.gate_e + (int64_t)rows[i] * s.d;
      F *u = &x[(int64_t)i * s.d];
      for (int c = 0; c < s.d; c++) u[c] += f.alpha * sigmoid(gate_e[c] + fed[c]) * fed[s.d + c];
    }
  }

  void enter_backward(int k) {
    for (int i = 0; i < n(); i++) copy(f.de + (int64_t)rows[i] * s.d, &x[(int64_t)i * s.d], s.d);
    if (!f.gate_e) return;
    for (int i = 0; i < n(); i++) {
      int64_t at = (int64_t)k * s.lanes + rows[i] % s.lanes;
      const F *fed = f.fed + at * 2 * s.d, *gate_e = f.gate_e + (int64_t)rows[i] * s.d, *du = &x[(int64_t)i * s.d];
      F *dfed = f.dfed + at * 2 * s.d, *dgate_e = f.dgate_e + (int64_t)rows[i] * s.d;
      for (int c = 0; c < s.d; c++) {
        F gate = sigmoid(gate_e[c] + fed[c]), dvalue = f.alpha * du[c] * gate;
        dgate_e[c] = dvalue * fed[s.d + c] * (1 - gate);
        dfed[c] += dgate_e[c];
        dfed[s.d + c] += dvalue;
      }
    }
    int m = (int)lanes.size();
    for (int i = 0; i < m; i++)
      copy(&scratch.normed[(int64_t)i * 2 * s.d], f.dfed + ((int64_t)k * s.lanes + lanes[i]) * 2 * s.d, 2 * s.d);
    product(f.weight_t, scratch.normed.data(), m, scratch.narrow.data());
    for (int i = 0; i < m; i++) {
      int at = k * s.lanes + lanes[i];
      F *dh = !chunks.fresh[at]  ? f.dboundary + (int64_t)lanes[i] * s.d
              : chunks.start[at] ? f.dinitial + (int64_t)lanes[i] * s.d
                                 : f.ds + ((int64_t)chunks.first[at] * s.lanes + lanes[i]) * s.d;
      normalise_backward(&scratch.narrow[(int64_t)i * f.weight_t.stride()], f.r + (int64_t)at * s.d, f.r_scale[at], dh, s.d);
    }
  }
};

template <class F>
void run(const Segment<F> *s, const Layer<F> *layers, int count, const Feedback<F> *f, const Chunks *c, bool back,
         int threads, int begin, int end) {
  auto work = [=](int from, int to) {
    Worker<F> worker(*s, layers, count, *f, *c, begin, end, from, to);
    back ? worker.backward() : worker.forward();
  };
  std::vector<std::thread> others;
  threads = std::max(1, std::min(threads, s->lanes));
  for (int i = 1; i < threads; i++) others.emplace_back(work, s->lanes * i / threads, s->lanes * (i + 1) / threads);
  work(0, s->lanes / threads);
  for (auto &other : others) other.join();
}

extern "C" {
void run_float32(const Segment<float> *s, const Layer<float> *l, int n, const Feedback<float> *f, const Chunks *c,
                 int back, int threads, int begin, int end) {
  run(s, l, n, f, c, back, threads, begin, end);
}
void run_float64(const Segment<double> *s, const Layer<double> *l, int n, const Feedback<double> *f, const Chunks *c,
                 int back, int threads, int begin, int end) {
  run(s, l, n, f, c, back, threads, begin, end);
}
}
