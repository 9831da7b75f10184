#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "base/float16.h"
#include "model/synthetic.h"
#include "qmlp/exceptions.h"

namespace qmlp::test {
namespace {

constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16};
constexpr std::size_t kTokens = 37;

std::vector<std::uint32_t> bits_of(std::span<const float> values) {
  std::vector<std::uint32_t> bits(values.size());
  std::memcpy(bits.data(), values.data(), values.size_bytes());
  return bits;
}

// The logits of every position, by passes of the given sizes (the last repeats).
std::vector<std::uint32_t> run_by(Session& session, const std::vector<std::int32_t>& tokens,
                                  const std::vector<std::size_t>& pieces, std::size_t vocab) {
  std::vector<float> logits(tokens.size() * vocab);
  std::size_t done = 0;
  for (std::size_t i = 0; done < tokens.size(); ++i) {
    const std::size_t count =
        std::min(pieces[std::min(i, pieces.size() - 1)], tokens.size() - done);
    value_or_throw(session.forward(std::span(tokens).subspan(done, count), Logits::all,
                                   std::span(logits).subspan(done * vocab, count * vocab)));
    done += count;
  }
  return bits_of(logits);
}

std::unique_ptr<Session> make_session(const std::shared_ptr<const Model>& model, ThreadPool& pool,
                                      const SessionOptions& options = {}) {
  return value_or_throw(Session::create(model, options, pool));
}

std::vector<std::string> usable_isas() {
  std::vector<std::string> isas = {"portable"};
  for (const Isa isa : {Isa::avx2, Isa::avx512}) {
    const Isa best = host_facts().isa;
    if (isa == best || (isa == Isa::avx2 && best == Isa::avx512)) {
      isas.push_back(to_string(isa));
    } else {
      std::printf("skipped: %s is missing on this machine\n", to_string(isa));
    }
  }
  return isas;
}

std::vector<SyntheticSpec> all_specs() {
  return {mixed_tied(), untied_interleaved(), one_kv_head(), stacked_partial(), normed_heads(),
          scaled(),     unlike_layers()};
}

// f32 keeps 24 bits through a few hundred chained operations a layer; 2e-5 of the largest logit is
// 300 times its rounding error, and a wrong pairing, scale or mask is off by the logits themselves.
TEST(Forward, IsADoubleReferenceUpToRounding) {
  const auto pool = make_pool(2);
  for (const SyntheticSpec& spec : all_specs()) {
    const SyntheticModel synthetic(spec);
    const auto model = load_model(synthetic, with_activations(DType::f32), *pool);
    const std::vector<std::int32_t> tokens = some_tokens(spec, kTokens);
    const auto vocab = static_cast<std::size_t>(spec.vocab);
    std::vector<float> logits(kTokens * vocab);
    const auto session = make_session(model, *pool);
    value_or_throw(session->forward(tokens, Logits::all, logits));
    const std::vector<double> want = reference_logits(synthetic, tokens);
    double largest = 0.0;
    for (const double value : want) largest = std::max(largest, std::abs(value));
    for (std::size_t i = 0; i < want.size(); ++i) {
      ASSERT_LE(std::abs(logits[i] - want[i]), 2e-5 * largest)
          << "seed " << spec.seed << " position " << i / vocab << " id " << i % vocab;
    }
  }
}

TEST(Forward, ChunksThreadsAndInstructionSetsChangeNoBit) {
  const std::vector<std::string> isas = usable_isas();
  for (const SyntheticSpec& spec : all_specs()) {
    const SyntheticModel synthetic(spec);
    const std::vector<std::int32_t> tokens = some_tokens(spec, kTokens);
    const auto vocab = static_cast<std::size_t>(spec.vocab);
    for (const DType dtype : kTypes) {
      const auto one_thread = make_pool(1);
      ModelOptions options = with_activations(dtype);
      options.force_isa = "portable";
      const auto plain = load_model(synthetic, options, *one_thread);
      const auto want = run_by(*make_session(plain, *one_thread), tokens, {kTokens}, vocab);
      for (const std::string& isa : isas) {
        // The fastest tries every way to cut the tokens and the work, the others two of them; so
        // do other model types, whose forward is the same code.
        const bool fastest = isa == isas.back() && spec.model_type == "llama";
        options.force_isa = isa;
        for (const int threads : fastest ? std::vector<int>{1, 2, 3} : std::vector<int>{2}) {
          const auto pool = make_pool(threads);
          const auto model = load_model(synthetic, options, *pool);
          for (const std::int64_t chunk :
               fastest ? std::vector<std::int64_t>{1, 2, 3, 7, 64} : std::vector<std::int64_t>{7}) {
            SessionOptions chunked;
            chunked.prefill_chunk = chunk;
            const auto session = make_session(model, *pool, chunked);
            ASSERT_EQ(run_by(*session, tokens, {kTokens}, vocab), want)
                << isa << " " << to_string(dtype) << " threads " << threads << " chunk " << chunk;
          }
          std::vector<std::vector<std::size_t>> cuts = {{1}};
          if (fastest) cuts = {{1}, {5, 1}, {16, 1, 16, 2}, {kTokens - 1, 1}};
          const auto session = make_session(model, *pool);
          for (const std::vector<std::size_t>& pieces : cuts) {
            value_or_throw(session->truncate(0));
            ASSERT_EQ(run_by(*session, tokens, pieces, vocab), want)
                << isa << " " << to_string(dtype) << " threads " << threads;
          }
        }
      }
    }
  }
}

TEST(Forward, EveryPrecisionAndAccumulationIsInvariantToo) {
  const SyntheticSpec spec = mixed_tied();
  const SyntheticModel synthetic(spec);
  const std::vector<std::int32_t> tokens = some_tokens(spec, kTokens);
  const auto vocab = static_cast<std::size_t>(spec.vocab);
  const auto pool = make_pool(2);
  ModelOptions options = with_activations(DType::bf16);
  const auto match =
      run_by(*make_session(load_model(synthetic, options, *pool), *pool), tokens, {kTokens}, vocab);
  for (const bool tensor : {false, true}) {
    for (const int segments : {1, 2}) {
      if (!tensor && segments != 1) continue;
      options.precision = tensor ? Precision::match : Precision::wide;
      if (tensor) {
        options.accumulation = Accumulation::tensor;
        options.segments = segments;
      }
      const auto model = load_model(synthetic, options, *pool);
      const auto all = run_by(*make_session(model, *pool), tokens, {kTokens}, vocab);
      EXPECT_NE(all, match);  // the option acts
      EXPECT_EQ(run_by(*make_session(model, *pool), tokens, {1}, vocab), all);
      EXPECT_EQ(run_by(*make_session(model, *pool), tokens, {9, 4}, vocab), all);
    }
  }
}

TEST(Forward, LastAndNoLogitsGoWithAll) {
  const SyntheticSpec spec = mixed_tied();
  const SyntheticModel synthetic(spec);
  const auto vocab = static_cast<std::size_t>(spec.vocab);
  const std::vector<std::int32_t> tokens = some_tokens(spec, kTokens);
  const auto pool = make_pool(2);
  for (const DType dtype : kTypes) {
    const auto model = load_model(synthetic, with_activations(dtype), *pool);
    SessionOptions options;
    options.prefill_chunk = 8;  // 37 = 4 * 8 + 5
    const auto session = make_session(model, *pool, options);
    std::vector<float> all(kTokens * vocab);
    value_or_throw(session->forward(tokens, Logits::all, all));
    value_or_throw(session->truncate(0));
    std::vector<float> last(vocab);
    value_or_throw(session->forward(tokens, Logits::last, last));
    EXPECT_EQ(bits_of(last), bits_of(std::span(all).last(vocab)));
    value_or_throw(session->truncate(0));
    value_or_throw(session->forward(std::span(tokens).first(20), Logits::none, {}));
    EXPECT_EQ(session->position(), 20);
    value_or_throw(session->forward(std::span(tokens).subspan(20), Logits::last, last));
    EXPECT_EQ(bits_of(last), bits_of(std::span(all).last(vocab)));
    EXPECT_TRUE(std::equal(tokens.begin(), tokens.end(), session->tokens().begin(),
                           session->tokens().end()));
  }
}

TEST(Forward, TruncatedAndRestoredCachesChangeNoBit) {
  const SyntheticSpec spec = mixed_tied();
  const SyntheticModel synthetic(spec);
  const auto vocab = static_cast<std::size_t>(spec.vocab);
  const std::vector<std::int32_t> tokens = some_tokens(spec, kTokens);
  const auto pool = make_pool(2);
  for (const DType dtype : kTypes) {
    const auto model = load_model(synthetic, with_activations(dtype), *pool);
    const auto want = run_by(*make_session(model, *pool), tokens, {kTokens}, vocab);
    const auto tail = [&](std::size_t from) {
      return std::vector<std::uint32_t>(want.begin() + static_cast<std::ptrdiff_t>(from * vocab),
                                        want.end());
    };
    for (const std::size_t kept : {std::size_t{1}, std::size_t{16}, std::size_t{21}}) {
      const auto rest = std::vector<std::int32_t>(
          tokens.begin() + static_cast<std::ptrdiff_t>(kept), tokens.end());
      const auto session = make_session(model, *pool);
      value_or_throw(session->forward(std::span(tokens).first(kept), Logits::none, {}));
      const std::string path = synthetic.file("prompt.cache");
      value_or_throw(session->save(path));
      // Another continuation, then back.
      const std::vector<std::int32_t> other(12, 3);
      value_or_throw(session->forward(other, Logits::none, {}));
      value_or_throw(session->truncate(static_cast<std::int64_t>(kept)));
      ASSERT_EQ(run_by(*session, rest, {5, 1}, vocab), tail(kept)) << to_string(dtype);

      SessionOptions smaller;  // another size, chunk and poison than the writer's
      smaller.max_tokens = 40;
      smaller.prefill_chunk = 3;
      smaller.fusion.poison_scratch = true;
      const auto restored = make_session(model, *pool, smaller);
      value_or_throw(restored->forward(other, Logits::none, {}));
      value_or_throw(restored->load(path));
      EXPECT_EQ(restored->position(), static_cast<std::int64_t>(kept));
      EXPECT_TRUE(std::equal(restored->tokens().begin(), restored->tokens().end(), tokens.begin(),
                             tokens.begin() + static_cast<std::ptrdiff_t>(kept)));
      ASSERT_EQ(run_by(*restored, rest, {7}, vocab), tail(kept)) << to_string(dtype);
    }
  }
}

std::uint64_t swiglu_calls() {
  std::uint64_t calls = 0;
  for (const KernelCount& count : dispatch_counts()) {
    if (count.kernel.starts_with("swiglu_")) calls += count.calls;
  }
  return calls;
}

TEST(Fusion, SwitchesActAndChangeNoBit) {
  for (const SyntheticSpec& spec : all_specs()) {
    const SyntheticModel synthetic(spec);
    const auto vocab = static_cast<std::size_t>(spec.vocab);
    const std::vector<std::int32_t> tokens = some_tokens(spec, 12);
    const auto pool = make_pool(2);
    const auto layers = static_cast<std::uint64_t>(spec.layers);
    for (const DType dtype : kTypes) {
      const auto model = load_model(synthetic, with_activations(dtype), *pool);
      std::vector<std::uint32_t> want;
      // Five passes of 4, 1, 4, 1 and 2 tokens.
      const auto check = [&](const SessionOptions& options, std::uint64_t fused_calls,
                             const char* what) {
        const auto session = make_session(model, *pool, options);
        reset_dispatch_counts();
        const auto got = run_by(*session, tokens, {4, 1, 4, 1, 2}, vocab);
        if (want.empty()) want = got;
        EXPECT_EQ(got, want) << what << " " << to_string(dtype) << " seed " << spec.seed;
        EXPECT_EQ(swiglu_calls(), fused_calls) << what;
      };
      SessionOptions options;
      check(options, 5 * layers, "fused");
      options.fusion.fused = false;
      check(options, 0, "unfused");
      options = {};
      options.fusion.fuse_min_m = 2;
      check(options, 3 * layers, "fuse_min_m 2");
      options.fusion.fuse_min_m = 5;
      check(options, 0, "fuse_min_m 5");
      options = {};
      options.fusion.fused_max_calls = 0;
      check(options, 0, "cap 0");
      options.fusion.fused_max_calls = 3;
      check(options, 3, "cap 3");
      options = {};
      options.fusion.poison_scratch = true;
      check(options, 5 * layers, "poison");
      options.fusion.fused = false;
      options.tap_gate = true;
      check(options, 0, "poison, unfused, tap");
      options.fusion.fused = true;
      check(options, 5 * layers, "poison, fused, tap");
      options = {};
      options.check_finite = false;
      check(options, 5 * layers, "unchecked");
    }
  }
}

struct Seen {
  Tap tap;
  std::int64_t layer;
  std::int64_t rows, cols;
  std::vector<float> values;
};

TEST(Observer, SeesEveryPointInOrderAndTheSameGateBothWays) {
  const SyntheticSpec spec = mixed_tied();
  const SyntheticModel synthetic(spec);
  const std::vector<std::int32_t> tokens = some_tokens(spec, 5);
  const auto pool = make_pool(2);
  const auto model = load_model(synthetic, with_activations(DType::f16), *pool);
  const auto observe = [&](bool fused, Logits logits) {
    std::vector<Seen> seen;
    SessionOptions options;
    options.tap_gate = true;
    options.fusion.fused = fused;
    options.observer = [&](const TapEvent& event) {
      Seen one{event.tap, event.layer, event.values.rows, event.values.cols, {}};
      for (std::int64_t r = 0; r < one.rows; ++r) {
        for (std::int64_t c = 0; c < one.cols; ++c) {
          one.values.push_back(
              load_float(event.values.data, event.values.dtype, r * event.values.row_stride + c));
        }
      }
      seen.push_back(std::move(one));
    };
    const auto session = make_session(model, *pool, options);
    const std::size_t rows = logits == Logits::all ? 5 : 1;
    std::vector<float> out(rows * static_cast<std::size_t>(spec.vocab));
    value_or_throw(session->forward(tokens, logits, out));
    EXPECT_EQ(bits_of(seen.back().values), bits_of(out));
    return seen;
  };
  const std::vector<Seen> fused = observe(true, Logits::last);
  std::size_t i = 0;
  const auto expect = [&](Tap tap, std::int64_t layer, std::int64_t rows, std::int64_t cols) {
    ASSERT_LT(i, fused.size());
    EXPECT_EQ(to_string(fused[i].tap), std::string(to_string(tap)));
    EXPECT_EQ(fused[i].layer, layer);
    EXPECT_EQ(fused[i].rows, rows);
    EXPECT_EQ(fused[i].cols, cols);
    ++i;
  };
  expect(Tap::embedding, -1, 5, spec.hidden);
  for (std::int64_t layer = 0; layer < spec.layers; ++layer) {
    expect(Tap::attention_out, layer, 5, spec.hidden);
    expect(Tap::gate, layer, 5, spec.intermediate);
    expect(Tap::swiglu, layer, 5, spec.intermediate);
    expect(Tap::layer_out, layer, 5, spec.hidden);
  }
  expect(Tap::final_norm, -1, 1, spec.hidden);
  expect(Tap::logits, -1, 1, spec.vocab);
  EXPECT_EQ(i, fused.size());

  const std::vector<Seen> unfused = observe(false, Logits::all);
  for (std::size_t j = 0; j + 2 < fused.size(); ++j) {
    EXPECT_EQ(bits_of(unfused[j].values), bits_of(fused[j].values)) << j;
  }
  EXPECT_EQ(unfused.back().rows, 5);
}

TEST(Model, ListsItsOpsAndReportsProgress) {
  for (const SyntheticSpec& spec : all_specs()) {
    const SyntheticModel synthetic(spec);
    const auto pool = make_pool(1);
    std::vector<std::string> steps;
    ModelOptions options;
    std::int64_t total = 0;
    options.progress = [&](std::string_view what, std::int64_t done, std::int64_t all) {
      steps.emplace_back(what);
      total = all;
      EXPECT_EQ(done, static_cast<std::int64_t>(steps.size()));
    };
    const auto model = load_model(synthetic, options, *pool);
    EXPECT_EQ(static_cast<std::int64_t>(steps.size()), total);
    EXPECT_EQ(steps.front(), "model.embed_tokens");
    EXPECT_EQ(model->activations(), spec.scale_dtype);  // of the embedding
    EXPECT_EQ(model->config().vocab_size, spec.vocab);
    const auto& ops = model->ops();
    ASSERT_EQ(static_cast<std::int64_t>(ops.size()), 6 * spec.layers + 1);
    EXPECT_EQ(ops[0].path, "model.layers.0.self_attn.q_proj");
    EXPECT_EQ(ops[4].path, "model.layers.0.mlp");
    EXPECT_TRUE(ops[4].is_swiglu);
    EXPECT_EQ(ops[5].path, "model.layers.0.mlp.down_proj");
    EXPECT_EQ(ops.back().path, spec.tied ? "model.embed_tokens" : "lm_head");
    std::uint64_t bytes = 0;
    for (const Model::Op& op : ops) bytes += packed_info(*op.weight).bytes;
    if (spec.tied) {
      EXPECT_EQ(model->packed_bytes(), bytes);  // one copy of the embedding
    } else {
      EXPECT_GT(model->packed_bytes(), bytes);
    }
    EXPECT_EQ(ops[4].linear_bias.size(),
              spec.mlp_bias ? static_cast<std::size_t>(2 * spec.intermediate) : 0u);
    EXPECT_EQ(ops[0].linear_bias.size(),
              spec.attention_bias ? static_cast<std::size_t>(spec.heads * spec.head_dim) : 0u);
  }
}

TEST(Session, SeveralShareAModel) {
  const SyntheticSpec spec = one_kv_head();
  const SyntheticModel synthetic(spec);
  const auto vocab = static_cast<std::size_t>(spec.vocab);
  const auto pool = make_pool(2);
  const auto model = load_model(synthetic, with_activations(DType::bf16), *pool);
  const std::vector<std::int32_t> a = some_tokens(spec, 10);
  const std::vector<std::int32_t> b(a.rbegin(), a.rend());
  const auto want_a = run_by(*make_session(model, *pool), a, {10}, vocab);
  const auto want_b = run_by(*make_session(model, *pool), b, {10}, vocab);
  const auto first = make_session(model, *pool);
  const auto second = make_session(model, *pool);
  std::vector<float> got_a(10 * vocab);
  std::vector<float> got_b(10 * vocab);
  for (std::size_t i = 0; i < 10; ++i) {
    value_or_throw(first->forward(std::span(a).subspan(i, 1), Logits::last,
                                  std::span(got_a).subspan(i * vocab, vocab)));
    value_or_throw(second->forward(std::span(b).subspan(i, 1), Logits::last,
                                   std::span(got_b).subspan(i * vocab, vocab)));
  }
  EXPECT_EQ(bits_of(got_a), want_a);
  EXPECT_EQ(bits_of(got_b), want_b);
}

}  // namespace
}  // namespace qmlp::test
