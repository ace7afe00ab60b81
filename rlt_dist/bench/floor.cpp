// The products of the recurrent loop alone: the loop's kernels on the rows and lanes that it has,
// nothing between them. Operands' values mean nothing; zeros take as long as any other.
#include "kernels.h"
#include <algorithm>
#include <thread>
#include <vector>

namespace {

struct Loop {
  int32_t tokens, lanes, layers, heads, kv_heads, width, window, past, reach, matrices;
  const Packed<float> *weights; // [layers][matrices], then the feedback's; backward, transposed
  const float *keys, *values;   // memory [B, KV, past + T, w]
  float *entries, *dentries;    // window [W - 1 + T, B, 2, KV, w]
};

// One thread's lanes, token by token. Counts the multiplications it does.
class Worker {
public:
  Worker(const Loop &loop, int from, int to) : l(loop), from(from), to(to) {
    int in = 0, out = 0;
    for (int i = 0; i <= l.layers * l.matrices; i++)
      in = std::max(in, l.weights[i].in), out = std::max(out, l.weights[i].stride());
    x.resize((size_t)(to - from) * in), y.resize((size_t)(to - from) * out);
    query.resize(l.width), result.resize(l.width), weight.resize(l.past + l.tokens + l.window);
  }

  int64_t run(bool backward) {
    for (int step = 0; step < l.tokens; step++) {
      int t = backward ? l.tokens - 1 - step : step;
      for (int layer = 0; layer < l.layers; layer++) {
        for (int i = 0; i < l.matrices; i++) multiply(l.weights[layer * l.matrices + i]);
        for (int lane = from; lane < to; lane++)
          for (int head = 0; head < l.heads; head++)
            attend_window(t, lane, head, backward), attend_memory(t, lane, head, backward);
      }
      multiply(l.weights[l.layers * l.matrices]);
    }
    return count;
  }

private:
  const Loop &l;
  int from, to;
  int64_t count = 0;
  std::vector<float> x, y, query, result, weight;

  void multiply(Packed<float> w) {
    product(w, x.data(), to - from, y.data());
    count += (int64_t)(to - from) * w.in * w.out;
  }

  // Forward q K^T and P V; backward dP = dO V^T and dQ = dS K: the same with keys and values swapped.
  void read(const float *k, const float *v, int64_t hop, int entries) {
    for (int j = 0; j < entries; j++) weight[j] = dot(query.data(), k + j * hop, l.width);
    std::fill(result.begin(), result.end(), 0.0f);
    for (int j = 0; j < entries; j++) add_scaled(result.data(), weight[j], v + j * hop, l.width);
    count += (int64_t)2 * entries * l.width;
  }

  void attend_window(int t, int lane, int head, bool backward) {
    const int64_t entry = (int64_t)2 * l.kv_heads * l.width, hop = l.lanes * entry;
    const int64_t at = ((int64_t)t * l.lanes + lane) * entry + head / (l.heads / l.kv_heads) * l.width;
    const float *k = l.entries + at, *v = k + entry / 2;
    backward ? read(v, k, hop, l.window) : read(k, v, hop, l.window);
    if (!backward) return;
    float *dk = l.dentries + at, *dv = dk + entry / 2;
    for (int j = 0; j < l.window; j++) {
      add_scaled(dk + j * hop, weight[j], query.data(), l.width);
      add_scaled(dv + j * hop, weight[j], query.data(), l.width);
    }
    count += (int64_t)2 * l.window * l.width;
  }

  // The memory's own gradients are batched products outside the loop.
  void attend_memory(int t, int lane, int head, bool backward) {
    const int last = l.past + t, first = std::max(0, last - l.reach);
    const int64_t group = (int64_t)lane * l.kv_heads + head / (l.heads / l.kv_heads);
    const int64_t at = (group * (l.past + l.tokens) + first) * l.width;
    const float *k = l.keys + at, *v = l.values + at;
    backward ? read(v, k, l.width, last - first + 1) : read(k, v, l.width, last - first + 1);
  }
};

} // namespace

// Forward or backward of all tokens; how many multiplications that were.
extern "C" int64_t loop_products(const Loop *loop, int backward, int threads) {
  threads = std::max(1, std::min(threads, loop->lanes));
  std::vector<int64_t> counts(threads);
  auto work = [&](int i) {
    Worker worker(*loop, loop->lanes * i / threads, loop->lanes * (i + 1) / threads);
    counts[i] = worker.run(backward);
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; i++) others.emplace_back(work, i);
  work(0);
  for (auto &other : others) other.join();
  int64_t total = 0;
  for (int64_t count : counts) total += count;
  return total;
}
