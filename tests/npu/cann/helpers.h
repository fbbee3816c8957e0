// What operators do that no single function of ATen does: used by lines of operators.txt.
#pragma once
#include "machinery.h"
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <cmath>

using at::Tensor;
using Numbers = std::vector<int64_t>;
using Flags = std::vector<char>;

// No dims means all of them.
inline Numbers all_of(const Tensor& x, const Numbers& dims) {
  if (!dims.empty()) return dims;
  Numbers all;
  for (int64_t i = 0; i < x.dim(); i++) all.push_back(i);
  return all;
}
inline std::array<bool, 3> three(const Flags& f) { return {f.at(0) != 0, f.at(1) != 0, f.at(2) != 0}; }
inline at::OptionalIntArrayRef bias_sizes(const Numbers& sizes) {
  return sizes.empty() ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(sizes);
}
inline std::optional<c10::string_view> rounding(int mode) {
  if (mode == 1) return "trunc";
  if (mode == 2) return "floor";
  return std::nullopt;
}

// An index of no elements stands for "all of this dimension".
inline c10::List<std::optional<Tensor>> indices_of(const std::vector<Tensor>& index) {
  c10::List<std::optional<Tensor>> all;
  for (auto& t : index)
    all.push_back(t.defined() && t.numel() ? std::optional<Tensor>(t) : std::nullopt);
  return all;
}
// The caller gives room for the most there can be, and asks for the shape afterwards.
inline Tensor shrink(const aclTensor* room, const Tensor& result) {
  auto place = const_cast<aclTensor*>(room);
  auto fitting = result.contiguous();
  place->dims = fitting.sizes().vec();
  place->strides = fitting.strides().vec();
  return fitting;
}
inline Tensor scatter(Tensor self, int64_t dim, const Tensor& index, const Tensor& source, int64_t reduction) {
  if (reduction == 1) return self.scatter_add_(dim, index, source);
  if (reduction == 2) return self.scatter_reduce_(dim, index, source, "prod");
  return self.scatter_(dim, index, source);
}
inline Tensor one_hot(const Tensor& x, int64_t depth, const Tensor& on, const Tensor& off, int64_t axis) {
  auto classes = at::arange(depth, x.options());
  auto hot = x.unsqueeze(-1).eq(classes);
  return at::where(hot, on.flatten()[0], off.flatten()[0]);
}
inline std::tuple<Tensor, Tensor> swapped(const std::tuple<Tensor, Tensor>& two) {
  return {std::get<1>(two), std::get<0>(two)};
}

// Random numbers are those of a generator of the CPU, seeded with what torch_npu's generator gives.
inline at::Generator draw(int64_t seed, int64_t offset) {
  auto generator = at::detail::createCPUGenerator();
  generator.set_current_seed(seed + 1000003 * offset);
  return generator;
}
// A dropout mask has a bit for each element, the lowest of a byte first, set where it stays.
inline Tensor bit_values() { return at::tensor({1, 2, 4, 8, 16, 32, 64, 128}, at::kByte); }
inline Tensor keep_mask(const Tensor& room, double p, at::Generator generator) {
  auto bits = at::bernoulli(at::full({room.numel(), 8}, 1 - p), generator).to(at::kByte);
  return (bits * bit_values()).sum(1).view(room.sizes());
}
inline Tensor bits_of(const Tensor& mask, const Tensor& like) {
  auto bits = mask.flatten().unsqueeze(1).bitwise_and(bit_values()).ne(0).flatten();
  return bits.narrow(0, 0, like.numel()).view(like.sizes());
}

// Kernels of the CPU refuse halves beside the floats that an NPU saves.
inline Tensor wide(const Tensor& x) { return x.defined() ? x.to(at::kFloat) : x; }

inline Tensor bce_with_logits_grad(const Tensor& grad, const Tensor& x, const Tensor& target, const Tensor& weight, const Tensor& pos, int64_t reduction) {
  auto p = at::sigmoid(x);
  auto g = pos.defined() ? (1 + (pos - 1) * target) * p - pos * target : p - target;
  if (weight.defined()) g = g * weight;
  return g * grad / (reduction == 1 ? x.numel() : 1);
}
inline std::tuple<Tensor, Tensor> prelu_grad(const Tensor& grad, const Tensor& x, const Tensor& weight) {
  auto down = x <= 0;
  auto dw = at::where(down, grad * x, at::zeros({}, x.options()));
  return {at::where(down, grad * weight, grad), at::sum_to(dw, weight.sizes())};
}

// ---- norms and activations ------------------------------------------------------------------------

inline std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& gamma, double eps) {
  auto v = x.to(at::kFloat);
  auto rstd = at::rsqrt(v.pow(2).mean(-1, true) + eps);
  return {v * rstd * gamma.to(at::kFloat), rstd};
}
inline std::tuple<Tensor, Tensor> rms_norm_grad(const Tensor& dy, const Tensor& x, const Tensor& rstd, const Tensor& gamma) {
  auto v = x.to(at::kFloat), d = dy.to(at::kFloat);
  auto r = rstd.view_as(v.narrow(-1, 0, 1));
  auto n = v * r, g = d * gamma.to(at::kFloat);
  return {(g - n * (g * n).mean(-1, true)) * r, (d * n).reshape({-1, v.size(-1)}).sum(0)};
}
inline std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& a, const Tensor& b, const Tensor& gamma, double eps) {
  auto x = a + b;
  auto [y, rstd] = rms_norm(x, gamma, eps);
  return {y, rstd, x};
}
inline Tensor swiglu(const Tensor& x, int64_t dim) {
  auto half = x.to(at::kFloat).chunk(2, dim);
  return at::silu(half[0]) * half[1];
}
inline Tensor swiglu_grad(const Tensor& dy, const Tensor& x, int64_t dim) {
  auto half = x.to(at::kFloat).chunk(2, dim);
  auto d = dy.to(at::kFloat);
  return at::cat({at::silu_backward(d * half[1], half[0]), d * at::silu(half[0])}, dim);
}
inline std::tuple<Tensor, Tensor> geglu(const Tensor& x, int64_t dim, int64_t approximate, bool left) {
  auto half = x.chunk(2, dim);
  auto gelu = at::gelu(half[left ? 0 : 1], approximate ? "tanh" : "none");
  return {gelu * half[left ? 1 : 0], gelu};
}
inline Tensor geglu_grad(const Tensor& dy, const Tensor& x, int64_t dim, int64_t approximate, bool left) {
  auto half = x.chunk(2, dim);
  auto how = approximate ? "tanh" : "none";
  auto &through = half[left ? 0 : 1], &beside = half[left ? 1 : 0];
  auto d_through = at::gelu_backward(dy * beside, through, how), d_beside = dy * at::gelu(through, how);
  return at::cat({left ? d_through : d_beside, left ? d_beside : d_through}, dim);
}
// x * sigmoid(1.702 x).
inline Tensor fast_gelu(const Tensor& x) { return x * at::sigmoid(1.702 * x); }
inline Tensor fast_gelu_grad(const Tensor& dy, const Tensor& x) {
  auto s = at::sigmoid(1.702 * x);
  return dy * (s + 1.702 * x * s * (1 - s));
}
inline Tensor scaled_masked_softmax(const Tensor& x, const Tensor& mask, double scale, bool triangle) {
  auto s = x.to(at::kFloat) * scale;
  auto out = triangle ? at::ones({s.size(-2), s.size(-1)}, at::kBool).triu(1) : mask.to(at::kBool);
  return at::softmax(s.masked_fill(out, -10000.0), -1);
}

// ---- rotary embedding -----------------------------------------------------------------------------

inline Tensor turned(const Tensor& x, int64_t mode) {
  if (mode == 0) {  // halves
    auto half = x.chunk(2, -1);
    return at::cat({-half[1], half[0]}, -1);
  }
  TORCH_CHECK(mode == 1, "the stand-in for CANN has no mode ", mode, " of RotaryPositionEmbedding");
  auto pairs = x.unflatten(-1, {-1, 2});
  return at::stack({-pairs.select(-1, 1), pairs.select(-1, 0)}, -1).flatten(-2);
}
inline Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t mode) {
  return x * cos + turned(x, mode) * sin;
}
inline Tensor summed_to(const Tensor& x, const Tensor& like) { return at::sum_to(x, like.sizes()); }
inline std::tuple<Tensor, Tensor, Tensor> rotary_grad(const Tensor& dy, const Tensor& cos, const Tensor& sin, const Tensor& x, int64_t mode) {
  auto dx = dy * cos - turned(dy * sin, mode);  // turning back is turning with the other sign
  if (!x.defined()) return {dx, Tensor(), Tensor()};
  return {dx, summed_to(dy * x, cos), summed_to(dy * turned(x, mode), sin)};
}

// ---- optimizers -----------------------------------------------------------------------------------

inline void adamw(Tensor var, Tensor m, Tensor v, Tensor most, Tensor grad, const Tensor& step, double lr, double beta1, double beta2, double decay, double eps, bool amsgrad, bool maximize) {
  auto g = maximize ? -grad : grad;
  double n = step.item<double>() + 1;  // the caller takes one off
  var.mul_(1 - lr * decay);
  m.lerp_(g.to(m.scalar_type()), 1 - beta1);
  v.mul_(beta2).addcmul_(g, g, 1 - beta2);
  auto second = v;
  if (amsgrad) second = most.copy_(at::maximum(most, v));
  auto below = (second.sqrt() / std::sqrt(1 - std::pow(beta2, n))).add_(eps);
  var.addcdiv_(m, below, -lr / (1 - std::pow(beta1, n)));
}

inline void update_scale(Tensor scale, Tensor tracker, const Tensor& found, double growth, double backoff, int64_t interval) {
  if (found.item<float>() != 0) {
    scale.mul_(backoff);
    tracker.zero_();
    return;
  }
  bool grows = tracker.item<int64_t>() + 1 >= interval;
  if (grows) scale.mul_(growth);
  tracker.fill_(grows ? 0 : tracker.item<int64_t>() + 1);
}

// ---- LSTM -----------------------------------------------------------------------------------------

struct Lstm { Tensor out, h, c; };
inline Lstm run_lstm(const Tensor& x, const std::vector<Tensor>& params, const std::vector<Tensor>& hx, bool biases, int64_t layers, bool both, bool batch_first) {
  auto r = at::lstm(x, hx, params, biases, layers, 0.0, false, both, batch_first);
  return {std::get<0>(r), std::get<1>(r), std::get<2>(r)};
}
// The lists of gates are what the caller keeps for the backward: here it runs the forward again, so
// they stay as they are.
inline std::tuple<Tensor, Tensor, Tensor> lstm(const Tensor& x, const std::vector<Tensor>& params, const std::vector<Tensor>& hx, bool biases, int64_t layers, double dropout, bool train, bool both, bool batch_first, const Tensor& batch_sizes) {
  TORCH_CHECK(!batch_sizes.defined(), "the stand-in for CANN has no LSTM of packed sequences");
  TORCH_CHECK(!train || dropout == 0, "the stand-in for CANN has no LSTM with dropout");
  auto r = run_lstm(x, params, hx, biases, layers, both, batch_first);
  return {r.out, r.h, r.c};
}
inline std::vector<Tensor> lstm_grad(const Tensor& x, const std::vector<Tensor>& hx, const std::vector<Tensor>& params, const Tensor& grad, const Tensor& grad_hy, const Tensor& grad_cy, bool biases, int64_t layers, bool both, bool batch_first, size_t) {
  c10::impl::ForceDispatchKeyGuard keys(c10::default_included_set, c10::default_excluded_set);
  at::AutoGradMode on(true);
  auto leaf = [](const Tensor& t) { return t.detach().clone().requires_grad_(true); };
  auto x1 = leaf(x);
  std::vector<Tensor> hx1, params1;
  for (auto& t : hx) hx1.push_back(leaf(t));
  for (auto& t : params) params1.push_back(leaf(t));
  auto r = run_lstm(x1, params1, hx1, biases, layers, both, batch_first);
  auto total = (r.out * 0).sum();
  if (grad.defined()) total = total + (r.out * grad).sum();
  if (grad_hy.defined()) total = total + (r.h * grad_hy).sum();
  if (grad_cy.defined()) total = total + (r.c * grad_cy).sum();
  total.backward();
  std::vector<Tensor> all = {x1.grad(), hx1[0].grad(), hx1[1].grad()};
  for (auto& t : params1) all.push_back(t.grad());
  return all;
}

// ---- attention ------------------------------------------------------------------------------------

// Any layout is brought to batch, heads, sequence, width. The mask is true where a score is left out.
// Sparse modes: 0 and 1 by the mask, 2 and 3 causal (from the upper left, the lower right), 4 a band;
// the mask of these three is only a pattern. Not there: sequences of several lengths (TND), prefixes.
// The gradient works the probabilities out again; of the saved sums nothing is read.
struct Attention { Tensor q, k, v, scores, p, kept; int64_t groups; };
inline Tensor to_heads(const Tensor& x, const std::string& layout, int64_t heads) {
  if (layout == "BNSD") return x;
  if (layout == "BSND") return x.transpose(1, 2);
  TORCH_CHECK(layout == "SBH" || layout == "BSH", "the stand-in for CANN has no attention of layout ", layout);
  auto y = layout == "SBH" ? x.transpose(0, 1) : x;
  return y.reshape({y.size(0), y.size(1), heads, y.size(2) / heads}).transpose(1, 2);
}
inline Tensor from_heads(const Tensor& x, const std::string& layout) {
  if (layout == "BNSD") return x;
  auto y = x.transpose(1, 2);
  if (layout == "BSND") return y;
  y = y.reshape({y.size(0), y.size(1), y.size(2) * y.size(3)});
  return layout == "SBH" ? y.transpose(0, 1) : y;
}
inline Attention attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& pse, const Tensor& drop, const Tensor& mask, const Numbers& prefix, double scale, double keep, int64_t before, int64_t after, int64_t heads, const std::string& layout, int64_t sparse) {
  TORCH_CHECK(prefix.empty() && sparse <= 4, "the stand-in for CANN has no attention of sparse mode ", sparse);
  Attention r;
  r.q = to_heads(q, layout, heads).to(at::kFloat);
  auto width = r.q.size(3);
  r.groups = layout == "BNSD" ? k.size(1) : layout == "BSND" ? k.size(2) : k.size(2) / width;
  auto spread = [&](const Tensor& x) { return to_heads(x, layout, r.groups).to(at::kFloat).repeat_interleave(heads / r.groups, 1); };
  r.k = spread(k);
  r.v = spread(v);
  auto s = at::matmul(r.q, r.k.transpose(2, 3));
  if (pse.defined()) s = s + pse;
  s = s * scale;
  auto rows = s.size(2), columns = s.size(3);
  auto all = at::ones({rows, columns}, at::kBool);
  if (sparse == 2) s = s.masked_fill(all.triu(1), -INFINITY);
  else if (sparse == 3) s = s.masked_fill(all.triu(1 + columns - rows), -INFINITY);
  else if (sparse == 4) s = s.masked_fill(all.triu(1 + after + columns - rows).logical_or(all.tril(columns - rows - before - 1)), -INFINITY);
  else if (mask.defined()) s = s.masked_fill(mask.to(at::kBool), -INFINITY);
  r.scores = s;
  r.p = at::softmax(s, -1);
  r.kept = keep < 1 ? bits_of(drop, r.p).to(at::kFloat) / keep : at::ones({}, at::kFloat);
  return r;
}
inline std::tuple<Tensor, Tensor, Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& pse, const Tensor& drop, const Tensor& mask, const Numbers& prefix, double scale, double keep, int64_t before, int64_t after, int64_t heads, const std::string& layout, int64_t sparse) {
  auto a = attend(q, k, v, pse, drop, mask, prefix, scale, keep, before, after, heads, layout, sparse);
  auto top = a.scores.amax(-1, true), total = (a.scores - top).exp().sum(-1, true);
  auto wide = [](const Tensor& x) { return x.expand({x.size(0), x.size(1), x.size(2), 8}); };  // eight times the same
  return {wide(top), wide(total), Tensor(), from_heads(at::matmul(a.p * a.kept, a.v), layout)};
}
inline std::tuple<Tensor, Tensor, Tensor, Tensor> attention_grad(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dy, const Tensor& pse, const Tensor& drop, const Tensor& mask, const Numbers& prefix, double scale, double keep, int64_t before, int64_t after, int64_t heads, const std::string& layout, int64_t sparse) {
  auto a = attend(q, k, v, pse, drop, mask, prefix, scale, keep, before, after, heads, layout, sparse);
  auto g = to_heads(dy, layout, heads).to(at::kFloat);
  auto dp = at::matmul(g, a.v.transpose(2, 3)) * a.kept;
  auto ds = at::_softmax_backward_data(dp, a.p, -1, at::kFloat) * scale;
  auto fold = [&](const Tensor& x) { return x.size(1) == a.groups ? x : x.reshape({x.size(0), a.groups, x.size(1) / a.groups, x.size(2), x.size(3)}).sum(2); };
  return {from_heads(at::matmul(ds, a.k), layout), from_heads(fold(at::matmul(ds.transpose(2, 3), a.q)), layout),
          from_heads(fold(at::matmul((a.p * a.kept).transpose(2, 3), g)), layout), pse.defined() ? summed_to(ds, pse) : Tensor()};
}
