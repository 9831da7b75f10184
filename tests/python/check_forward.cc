// check_forward MODEL IDS PREFILL OUT [--logits-only]: runs the comma-separated token ids with f32
// activations, the first PREFILL of them in one pass and the others one by one, and writes the
// logits [ids, vocab] to OUT as f32. Then checks that other ways to run the same ids change no bit
// of them: passes of other sizes, threads, instruction sets, a truncated and a restored cache,
// unfused ops; for f32, f16 and bf16. Prints the number of runs that agreed; fails at the first
// that does not.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "qmlp/exceptions.h"
#include "qmlp/qmlp.h"

namespace {

using Ids = std::vector<std::int32_t>;
using Rows = std::vector<float>;

Ids parse_ids(const char* text) {
  Ids ids;
  for (char* end = nullptr; *text != '\0'; text = *end == ',' ? end + 1 : end) {
    ids.push_back(static_cast<std::int32_t>(std::strtol(text, &end, 10)));
    if (end == text) throw std::runtime_error("IDS: not a number");
  }
  return ids;
}

// Appends ids[from, ...) in pieces of the given sizes (the last repeats); their logits go to their
// places in `out`.
void run(qmlp::Session& session, const Ids& ids, std::size_t from,
         const std::vector<std::size_t>& pieces, Rows& out) {
  const std::size_t vocab = out.size() / ids.size();
  for (std::size_t i = 0; from < ids.size(); ++i) {
    const std::size_t count = std::min(pieces[std::min(i, pieces.size() - 1)], ids.size() - from);
    value_or_throw(session.forward(std::span(ids).subspan(from, count), qmlp::Logits::all,
                                   std::span(out).subspan(from * vocab, count * vocab)));
    from += count;
  }
}

class Checker {
 public:
  Checker(const char* path, Ids ids)
      : checkpoint_(value_or_throw(qmlp::Checkpoint::open(path))), ids_(std::move(ids)) {}

  Rows parity_logits(std::size_t prefill) const {
    const auto pool = value_or_throw(qmlp::ThreadPool::create(qmlp::default_num_threads()));
    const auto model = load(qmlp::DType::f32, "", *pool);
    Rows out = empty();
    run(*session(model, *pool, {}), ids_, 0, {prefill, 1}, out);
    return out;
  }

  // Plain code in one pass is the measure. The best instruction set here runs in every way, one
  // between in one way.
  int check(qmlp::DType dtype) {
    const auto one = value_or_throw(qmlp::ThreadPool::create(1));
    want_ = empty();
    run(*session(load(dtype, "portable", *one), *one, {}), ids_, 0, {ids_.size()}, want_);
    agreed_ = 0;
    const qmlp::Isa best = qmlp::host_facts().isa;
    for (const qmlp::Isa isa : {qmlp::Isa::portable, qmlp::Isa::avx2, qmlp::Isa::avx512}) {
      const bool between = isa == qmlp::Isa::avx2 && best == qmlp::Isa::avx512;
      if (!between && isa != best) continue;
      const int threads = dtype == qmlp::DType::f32 ? 3 : 2;
      const auto pool = value_or_throw(qmlp::ThreadPool::create(threads));
      const auto model = load(dtype, to_string(isa), *pool);
      where_ = std::string(to_string(dtype)) + " " + to_string(isa);
      check_passes(model, *pool, {5, 1, 16, 2});
      if (isa != best) continue;
      check_passes(model, *pool, {1});
      check_passes(model, *pool, {ids_.size()});
      check_chunks(model, *pool);
      check_caches(model, *pool);
    }
    return agreed_;
  }

 private:
  std::shared_ptr<const qmlp::Model> load(qmlp::DType dtype, const char* isa,
                                          qmlp::ThreadPool& pool) const {
    qmlp::ModelOptions options;
    options.activations = dtype;
    options.force_isa = isa;
    return value_or_throw(qmlp::Model::load(checkpoint_, options, pool));
  }
  std::unique_ptr<qmlp::Session> session(const std::shared_ptr<const qmlp::Model>& model,
                                         qmlp::ThreadPool& pool,
                                         qmlp::SessionOptions options) const {
    options.max_tokens = static_cast<std::int64_t>(ids_.size());
    return value_or_throw(qmlp::Session::create(model, options, pool));
  }
  Rows empty() const {
    return Rows(ids_.size() * static_cast<std::size_t>(checkpoint_->config().vocab_size));
  }

  void compare(const Rows& got, std::size_t from, const char* what) {
    const std::size_t begin = from * (want_.size() / ids_.size());
    if (std::memcmp(got.data() + begin, want_.data() + begin,
                    (want_.size() - begin) * sizeof(float)) != 0) {
      throw std::runtime_error(where_ + ": " + what + ": other bits");
    }
    ++agreed_;
  }

  void check_passes(const std::shared_ptr<const qmlp::Model>& model, qmlp::ThreadPool& pool,
                    const std::vector<std::size_t>& pieces) {
    Rows got = empty();
    run(*session(model, pool, {}), ids_, 0, pieces, got);
    compare(got, 0, pieces.front() == ids_.size() ? "one pass" : "other passes");
  }

  void check_chunks(const std::shared_ptr<const qmlp::Model>& model, qmlp::ThreadPool& pool) {
    qmlp::SessionOptions options;
    options.prefill_chunk = 3;
    options.fusion.fused = false;
    options.fusion.poison_scratch = true;
    Rows got = empty();
    run(*session(model, pool, options), ids_, 0, {ids_.size()}, got);
    compare(got, 0, "chunks of 3, unfused, poisoned");
  }

  void check_caches(const std::shared_ptr<const qmlp::Model>& model, qmlp::ThreadPool& pool) {
    const std::size_t kept = ids_.size() / 2;
    const std::string file = checkpoint_->path() + "/prompt.cache";
    const auto first = session(model, pool, {});
    value_or_throw(first->forward(std::span(ids_).first(kept), qmlp::Logits::none, {}));
    value_or_throw(first->save(file));
    value_or_throw(first->forward(Ids(3, 1), qmlp::Logits::none, {}));
    value_or_throw(first->truncate(static_cast<std::int64_t>(kept)));
    Rows got = empty();
    run(*first, ids_, kept, {4, 1}, got);
    compare(got, kept, "truncated cache");

    const auto second = session(model, pool, {});
    value_or_throw(second->load(file));
    std::filesystem::remove(file);
    got = empty();
    run(*second, ids_, kept, {7}, got);
    compare(got, kept, "restored cache");
  }

  std::shared_ptr<const qmlp::Checkpoint> checkpoint_;
  Ids ids_;
  Rows want_;
  std::string where_;
  int agreed_ = 0;
};

void check(const char* path, const char* ids, const char* prefill, const char* out_path,
           bool logits_only) {
  Checker checker(path, parse_ids(ids));
  const Rows logits = checker.parity_logits(std::strtoul(prefill, nullptr, 10));
  std::ofstream file(out_path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(logits.data()),
             static_cast<std::streamsize>(logits.size() * sizeof(float)));
  if (!file.flush()) throw std::runtime_error(std::string("cannot write ") + out_path);
  if (logits_only) return;
  int agreed = 0;
  for (const qmlp::DType dtype : {qmlp::DType::f32, qmlp::DType::f16, qmlp::DType::bf16}) {
    agreed += checker.check(dtype);
  }
  std::printf("%d\n", agreed);
}

}  // namespace

int main(int argc, char** argv) {
  const bool logits_only = argc == 6 && std::string_view(argv[5]) == "--logits-only";
  if (argc != 5 && !logits_only) {
    std::fputs("usage: check_forward MODEL IDS PREFILL OUT [--logits-only]\n", stderr);
    return 2;
  }
  try {
    check(argv[1], argv[2], argv[3], argv[4], logits_only);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "check_forward: %s\n", error.what());
    return 1;
  }
}
