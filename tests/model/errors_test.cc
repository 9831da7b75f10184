#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "base/concat.h"
#include "io/file_limit.h"
#include "model/synthetic.h"
#include "qmlp/exceptions.h"

namespace qmlp::test {
namespace {

void expect_error(const Status& status, Errc code, const std::string& message) {
  ASSERT_FALSE(status);
  EXPECT_EQ(std::string(to_string(status.error().code)), to_string(code));
  EXPECT_EQ(status.error().message, message);
}
template <class T>
void expect_error(const Result<T>& result, Errc code, const std::string& message) {
  ASSERT_FALSE(result);
  expect_error(Status(result.error()), code, message);
}

class SessionErrors : public testing::Test {
 protected:
  SessionErrors()
      : synthetic(one_kv_head()),
        pool(make_pool(2)),
        model(load_model(synthetic, with_activations(DType::f16), *pool)) {}
  std::unique_ptr<Session> session(const SessionOptions& options = {}) {
    return value_or_throw(Session::create(model, options, *pool));
  }
  Status forward(Session& with, std::vector<std::int32_t> tokens) {
    return with.forward(tokens, Logits::none, {});
  }

  SyntheticModel synthetic;
  std::unique_ptr<ThreadPool> pool;
  std::shared_ptr<const Model> model;
};

TEST_F(SessionErrors, ForwardNamesWhatIsWrongAndStaysWhereItWas) {
  SessionOptions options;
  options.max_tokens = 8;
  const auto s = session(options);
  value_or_throw(forward(*s, {1, 2, 3}));
  expect_error(forward(*s, {}), Errc::invalid_argument, "tokens: none given");
  expect_error(forward(*s, {1, 50}), Errc::invalid_argument,
               "tokens: id 50 at index 1 is outside the vocabulary of 50");
  expect_error(forward(*s, {-1}), Errc::invalid_argument,
               "tokens: id -1 at index 0 is outside the vocabulary of 50");
  expect_error(forward(*s, {1, 2, 3, 4, 5, 6}), Errc::invalid_argument,
               "tokens: 6 more after 3 exceed the context of 8");
  std::vector<float> out(99);
  expect_error(s->forward(std::vector<std::int32_t>{1, 2}, Logits::all, out),
               Errc::invalid_argument, "logits: out holds 99 floats, 2 rows of 50 are asked for");
  expect_error(s->forward(std::vector<std::int32_t>{1, 2}, Logits::last, out),
               Errc::invalid_argument, "logits: out holds 99 floats, 1 rows of 50 are asked for");
  // As many as a negative number of them looks like.
  const std::vector<std::int32_t> one = {1};
  for (const std::size_t count : {std::size_t{1} << 63, ~std::size_t{0}}) {
    const Status status = s->forward({one.data(), count}, Logits::none, {});
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().code, Errc::invalid_argument);
  }
  EXPECT_EQ(s->position(), 3);
  EXPECT_EQ(s->tokens().size(), 3u);
  value_or_throw(forward(*s, {4, 5, 6, 7, 8}));  // to the last place
  EXPECT_EQ(s->position(), 8);
  expect_error(forward(*s, {1}), Errc::invalid_argument,
               "tokens: 1 more after 8 exceed the context of 8");
  expect_error(s->truncate(9), Errc::invalid_argument,
               "position: is 9, must be from 0 to 8, the tokens in the cache");
  expect_error(s->truncate(-1), Errc::invalid_argument,
               "position: is -1, must be from 0 to 8, the tokens in the cache");
}

TEST_F(SessionErrors, CreateNamesTheOption) {
  const auto create = [&](auto&& change) {
    SessionOptions options;
    change(options);
    return Session::create(model, options, *pool);
  };
  expect_error(create([](auto& o) { o.max_tokens = -5; }), Errc::invalid_argument,
               "max_tokens: is -5, must be at least 1, or 0 for the default");
  expect_error(create([](auto& o) { o.max_tokens = 513; }), Errc::invalid_argument,
               "max_tokens: is 513, must be at most 512, the model's context");
  expect_error(create([](auto& o) { o.prefill_chunk = 0; }), Errc::invalid_argument,
               "prefill_chunk: is 0, must be from 1 to 8192");
  expect_error(create([](auto& o) { o.prefill_chunk = 8193; }), Errc::invalid_argument,
               "prefill_chunk: is 8193, must be from 1 to 8192");
  expect_error(create([](auto& o) { o.fusion.fuse_min_m = -1; }), Errc::invalid_argument,
               "fuse_min_m: is -1, must be at least 0");
  expect_error(create([](auto& o) { o.fusion.fused_max_calls = -2; }), Errc::invalid_argument,
               "fused_max_calls: is -2, must be at least 0, or -1 for no cap");
  expect_error(Session::create(nullptr, {}, *pool), Errc::invalid_argument, "model: is null");
  EXPECT_EQ(session()->max_tokens(), 512);  // the model's own, below the default
}

TEST_F(SessionErrors, WidePrecisionNeedsFusedCalls) {
  ModelOptions wide = with_activations(DType::f16);
  wide.precision = Precision::wide;
  const auto wide_model = load_model(synthetic, wide, *pool);
  const std::string message =
      "fusion: unfused ops round as precision match does, so with precision wide every MLP must be "
      "fused";
  SessionOptions options;
  options.fusion.fused = false;
  expect_error(Session::create(wide_model, options, *pool), Errc::invalid_argument, message);
  options.fusion = {};
  options.fusion.fuse_min_m = 2;
  expect_error(Session::create(wide_model, options, *pool), Errc::invalid_argument, message);
  options.fusion = {};
  options.fusion.fused_max_calls = 100;
  expect_error(Session::create(wide_model, options, *pool), Errc::invalid_argument, message);
  EXPECT_TRUE(Session::create(wide_model, {}, *pool));
}

TEST(ModelErrors, LoadNamesWhatIsWrong) {
  const SyntheticModel synthetic(one_kv_head());
  const auto pool = make_pool(1);
  const auto checkpoint = value_or_throw(Checkpoint::open(synthetic.path()));
  expect_error(Model::load(nullptr, {}, *pool), Errc::invalid_argument, "checkpoint: is null");
  ModelOptions options;
  options.force_isa = "sse9";
  expect_error(Model::load(checkpoint, options, *pool), Errc::invalid_argument,
               "isa: is 'sse9', must be portable, avx2, avx512 or neon");
#if defined(__x86_64__)
  options.force_isa = "neon";
  expect_error(Model::load(checkpoint, options, *pool), Errc::unsupported,
               concat("isa: neon is not on this machine, which has ", to_string(host_facts().isa)));
#endif
  options = {};
  options.activations = DType::f32;
  options.accumulation = Accumulation::tensor;
  const auto refused = Model::load(checkpoint, options, *pool);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().message.rfind("model.embed_tokens: no kernel takes ", 0), 0u)
      << refused.error().message;
}

TEST(ModelErrors, NormValuesMustBeFiniteInTheActivationType) {
  SyntheticModel synthetic(one_kv_head());  // norms stored as f32
  synthetic.set_first("model.layers.1.input_layernorm.weight", DType::f32, 1e6f);
  const auto pool = make_pool(1);
  const auto checkpoint = value_or_throw(Checkpoint::open(synthetic.path()));
  expect_error(Model::load(checkpoint, with_activations(DType::f16), *pool), Errc::unsupported,
               "model.layers.1.input_layernorm.weight: value 0 is not finite in f16");
  EXPECT_TRUE(Model::load(checkpoint, with_activations(DType::bf16), *pool));
}

TEST(NonFinite, ABadScaleIsNamedAndThePositionStays) {
  SyntheticModel synthetic(mixed_tied());
  synthetic.set_first("model.layers.1.mlp.up_proj.scales", DType::f16, NAN);
  const auto pool = make_pool(2);
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const auto model = load_model(synthetic, with_activations(dtype), *pool);
    const auto session = value_or_throw(Session::create(model, {}, *pool));
    const Status status = session->forward(std::vector<std::int32_t>{5, 6}, Logits::none, {});
    expect_error(status, Errc::unsupported,
                 concat("layer 1 mlp hidden (silu(gate) * up) is not finite at token 0, feature 0 "
                        "(nan, ",
                        to_string(dtype), "); the weight model.layers.1.mlp is not finite"));
    EXPECT_EQ(session->position(), 0);
    SessionOptions unchecked;
    unchecked.check_finite = false;
    const auto blind = value_or_throw(Session::create(model, unchecked, *pool));
    std::vector<float> logits(131);
    EXPECT_TRUE(blind->forward(std::vector<std::int32_t>{5}, Logits::last, logits));
    EXPECT_TRUE(std::isnan(logits[0]));
  }
}

// In one feature gate and up pass 256, and their product f16's 65504; bf16 holds it.
TEST(NonFinite, AnF16OverflowIsNamedWithTheWayOut) {
  SyntheticModel synthetic(mixed_tied());
  synthetic.set_first("model.layers.2.mlp.gate_proj.bias", DType::f16, 300.0f);
  synthetic.set_first("model.layers.2.mlp.up_proj.bias", DType::f16, 300.0f);
  const auto pool = make_pool(2);
  const std::vector<std::int32_t> tokens = {9, 8, 7};
  ModelOptions with = with_activations(DType::f16);
  SessionOptions options;
  options.prefill_chunk = 2;
  const std::string message =
      "layer 2 mlp hidden (silu(gate) * up) is not finite at token 0, feature 0 (inf, f16); f16 "
      "ends "
      "at 65504: try --activations bf16";
  auto session =
      value_or_throw(Session::create(load_model(synthetic, with, *pool), options, *pool));
  expect_error(session->forward(tokens, Logits::none, {}), Errc::unsupported,
               message + ", or --precision wide if only gate or up passes it");
  EXPECT_EQ(session->position(), 0);
  EXPECT_TRUE(session->tokens().empty());
  with.precision = Precision::wide;  // here the product itself is too large
  session = value_or_throw(Session::create(load_model(synthetic, with, *pool), options, *pool));
  expect_error(session->forward(tokens, Logits::none, {}), Errc::unsupported, message);
  with = with_activations(DType::bf16);
  session = value_or_throw(Session::create(load_model(synthetic, with, *pool), options, *pool));
  EXPECT_TRUE(session->forward(tokens, Logits::none, {}));
}

// A later chunk fails: the tokens of the earlier ones are not kept, and the session goes on as if
// nothing had happened.
TEST(NonFinite, AFailedPassLeavesTheSessionUsable) {
  SyntheticModel synthetic(mixed_tied());
  synthetic.set_first("model.embed_tokens.scales", DType::f16, INFINITY);  // spoils token 0 alone
  const auto pool = make_pool(2);
  SessionOptions options;
  options.prefill_chunk = 2;
  const auto model = load_model(synthetic, with_activations(DType::bf16), *pool);
  const auto session = value_or_throw(Session::create(model, options, *pool));
  value_or_throw(session->forward(std::vector<std::int32_t>{4, 5, 6}, Logits::none, {}));
  const Status status =
      session->forward(std::vector<std::int32_t>{7, 8, 9, 0, 10}, Logits::none, {});
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().message.rfind("embedding is not finite at token 6, feature 0 (", 0), 0u)
      << status.error().message;
  EXPECT_EQ(session->position(), 3);
  const std::string path = synthetic.file("kept.cache");
  value_or_throw(session->forward(std::vector<std::int32_t>{7, 8}, Logits::none, {}));
  value_or_throw(session->save(path));
  const auto fresh = value_or_throw(Session::create(model, options, *pool));
  value_or_throw(fresh->forward(std::vector<std::int32_t>{4, 5, 6, 7, 8}, Logits::none, {}));
  const std::string other = synthetic.file("fresh.cache");
  value_or_throw(fresh->save(other));
  const auto read = [](const std::string& name) {
    std::ifstream stream(name, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(stream), {});
  };
  EXPECT_EQ(read(path), read(other));  // the caches are equal to the byte
}

class CacheFile : public SessionErrors {
 protected:
  CacheFile() : path(synthetic.file("prompt.cache")) {
    const auto s = session();
    value_or_throw(forward(*s, {1, 2, 3, 4, 5}));
    value_or_throw(s->save(path));
    std::ifstream stream(path, std::ios::binary);
    good.assign(std::istreambuf_iterator<char>(stream), {});
  }
  Status load_changed(const std::string& bytes) {
    const std::string changed = synthetic.file("changed.cache");
    std::ofstream(changed, std::ios::binary) << bytes;
    const auto s = session();
    value_or_throw(forward(*s, {7, 8}));
    const Status status = s->load(changed);
    if (!status) {
      EXPECT_EQ(s->position(), 2) << status.error().message;
      EXPECT_EQ(s->tokens()[1], 8);
      EXPECT_TRUE(forward(*s, {9}));
    }
    return status;
  }
  std::string with_word(std::size_t offset, std::uint64_t value, std::size_t size = 8) const {
    std::string bytes = good;
    std::memcpy(bytes.data() + offset, &value, size);
    return bytes;
  }
  std::string changed_name() const { return synthetic.file("changed.cache"); }

  std::string path;
  std::string good;
};

TEST_F(CacheFile, HasTheSizeThatItsFormatSays) {
  // 5 tokens, then keys and values of 2 layers, 1 head, 64 features of f16.
  EXPECT_EQ(good.size(), 64u + 5 * 4 + 2u * 2 * 1 * 64 * 2 * 5);
  EXPECT_TRUE(load_changed(good));
}

TEST_F(CacheFile, EveryDamageIsRefusedByOneLine) {
  const std::string name = changed_name();
  expect_error(load_changed(""), Errc::corrupt_file,
               name + ": is truncated: holds 0 bytes, the header alone needs 64");
  expect_error(load_changed(good.substr(0, 63)), Errc::corrupt_file,
               name + ": is truncated: holds 63 bytes, the header alone needs 64");
  expect_error(load_changed(good.substr(0, good.size() - 1)), Errc::corrupt_file,
               concat(name, ": is truncated: holds ", good.size() - 1, " bytes, its 5 tokens need ",
                      good.size()));
  expect_error(load_changed(good + "x"), Errc::corrupt_file,
               concat(name, ": is too long: holds ", good.size() + 1, " bytes, its 5 tokens need ",
                      good.size()));
  expect_error(load_changed(with_word(0, 0x1122334455667788u)), Errc::corrupt_file,
               name + ": is not a qmlp prompt cache");
  expect_error(load_changed(with_word(8, 9, 4)), Errc::corrupt_file,
               name + ": has format version 9, this program reads 1");
  expect_error(load_changed(with_word(12, 7, 4)), Errc::corrupt_file,
               name + ": names an unknown type, 7");
  expect_error(load_changed(with_word(12, 2, 4)), Errc::invalid_argument,
               name + ": was made with bf16 activations, this session has f16");
  expect_error(load_changed(with_word(24, 3)), Errc::invalid_argument,
               name + ": has 3 layers of 1 x 64, this model has 2 of 1 x 64");
  expect_error(load_changed(with_word(48, ~std::uint64_t{0})), Errc::invalid_argument,
               name + ": holds 18446744073709551615 tokens, this session has room for 512");
  expect_error(load_changed(with_word(48, 6)), Errc::corrupt_file,
               concat(name, ": is truncated: holds ", good.size(), " bytes, its 6 tokens need ",
                      good.size() + 4 + 512));
  for (const std::size_t offset :
       {std::size_t{56}, std::size_t{64}, std::size_t{90}, good.size() / 2, good.size() - 1}) {
    std::string bytes = good;
    bytes[offset] = static_cast<char>(bytes[offset] ^ 0x10);
    expect_error(load_changed(bytes), Errc::corrupt_file,
                 name + ": is damaged: its checksum does not match");
  }
}

TEST_F(CacheFile, AnotherModelPrecisionOrSizeIsRefused) {
  const std::string other_message =
      path +
      ": was made by another model, or with another precision or accumulation, than this "
      "session's";
  SyntheticSpec spec = one_kv_head();
  spec.seed = 99;  // the same shapes, other weights
  const SyntheticModel other(spec);
  const auto other_model = load_model(other, with_activations(DType::f16), *pool);
  expect_error(value_or_throw(Session::create(other_model, {}, *pool))->load(path),
               Errc::invalid_argument, other_message);
  ModelOptions wide = with_activations(DType::f16);
  wide.precision = Precision::wide;
  expect_error(
      value_or_throw(Session::create(load_model(synthetic, wide, *pool), {}, *pool))->load(path),
      Errc::invalid_argument, other_message);
  ModelOptions tensor = with_activations(DType::f16);
  tensor.accumulation = Accumulation::tensor;
  expect_error(
      value_or_throw(Session::create(load_model(synthetic, tensor, *pool), {}, *pool))->load(path),
      Errc::invalid_argument, other_message);
  SessionOptions small;
  small.max_tokens = 4;
  expect_error(session(small)->load(path), Errc::invalid_argument,
               path + ": holds 5 tokens, this session has room for 4");
  // Another instruction set has the same bits, so its caches are welcome.
  ModelOptions portable = with_activations(DType::f16);
  portable.force_isa = "portable";
  EXPECT_TRUE(value_or_throw(Session::create(load_model(synthetic, portable, *pool), {}, *pool))
                  ->load(path));
}

TEST_F(CacheFile, FilesThatCannotBeOpenedOrWrittenAreNamed) {
  const std::string missing = synthetic.file("none.cache");
  expect_error(session()->load(missing), Errc::io,
               missing + ": cannot open: No such file or directory");
  const std::string folder = synthetic.file("folder");
  std::filesystem::create_directory(folder);
  expect_error(session()->load(folder), Errc::io, folder + ": is a directory, not a file");
  const std::string nowhere = synthetic.file("no/such/folder.cache");
  expect_error(session()->save(nowhere), Errc::io,
               nowhere + ": cannot create: No such file or directory");
  expect_error(session()->save(folder), Errc::io, folder + ": cannot write to it: Is a directory");
  const std::string pipe = synthetic.file("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  expect_error(session()->save(pipe), Errc::io, pipe + ": is not a regular file");
  expect_error(session()->load(pipe), Errc::io, pipe + ": is not a regular file");  // nor waits
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
  const std::string nothing = synthetic.file("dangling");
  std::filesystem::create_symlink("nowhere", nothing);
  expect_error(session()->save(nothing), Errc::io, nothing + ": is a symbolic link to nothing");
  expect_error(session()->save(""), Errc::invalid_argument, "path: is empty");
  // Neither attempt leaves its temporary file behind.
  for (const auto& entry : std::filesystem::directory_iterator(synthetic.path())) {
    EXPECT_EQ(entry.path().string().find(".tmp."), std::string::npos) << entry.path();
  }
  const auto empty = session();
  value_or_throw(empty->save(path));  // no tokens: a valid file, replacing the old one
  value_or_throw(empty->load(path));
  EXPECT_EQ(empty->position(), 0);
  // A link stays one, and its target keeps its rights.
  const std::string link = synthetic.file("link");
  std::filesystem::create_symlink(path, link);
  std::filesystem::permissions(
      path, std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  value_or_throw(empty->save(link));
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_EQ(std::filesystem::status(path).permissions(),
            std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
}

TEST_F(CacheFile, AFullDiskLeavesTheOldFile) {
  const auto s = session();
  value_or_throw(forward(*s, {6, 7, 8, 9, 10, 11}));
  {
    const FileLimit limit(good.size() - 1);
    expect_error(s->save(path), Errc::io, path + ": cannot write: File too large");
  }
  value_or_throw(s->load(path));
  EXPECT_EQ(s->position(), 5);
  EXPECT_EQ(s->tokens()[0], 1);
  for (const auto& entry : std::filesystem::directory_iterator(synthetic.path())) {
    EXPECT_EQ(entry.path().string().find(".tmp."), std::string::npos) << entry.path();
  }
}

}  // namespace
}  // namespace qmlp::test
