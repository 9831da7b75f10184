// dump_hidden MODEL IDS OUT: runs the comma-separated token ids with f32 activations and writes
// f32: the embedding, each layer's output and the final norm, [M, hidden] each, then the logits [M,
// vocab].
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "qmlp/exceptions.h"
#include "qmlp/qmlp.h"

namespace {

std::vector<std::int32_t> parse_ids(const char* text) {
  std::vector<std::int32_t> ids;
  for (char* end = nullptr; *text != '\0'; text = *end == ',' ? end + 1 : end) {
    ids.push_back(static_cast<std::int32_t>(std::strtol(text, &end, 10)));
    if (end == text) throw std::runtime_error("IDS: not a number");
  }
  return ids;
}

void dump(const char* path, const char* ids_text, const char* out_path) {
  const std::vector<std::int32_t> ids = parse_ids(ids_text);
  const auto M = static_cast<std::int64_t>(ids.size());
  const auto checkpoint = value_or_throw(qmlp::Checkpoint::open(path));
  const auto pool = value_or_throw(qmlp::ThreadPool::create(qmlp::default_num_threads()));
  qmlp::ModelOptions options;
  options.activations = qmlp::DType::f32;
  const auto model = value_or_throw(qmlp::Model::load(checkpoint, options, *pool));

  std::ofstream file(out_path, std::ios::binary);
  const auto write = [&file](const void* data, std::int64_t floats) {
    file.write(static_cast<const char*>(data), floats * static_cast<std::int64_t>(sizeof(float)));
  };
  qmlp::SessionOptions session_options;
  session_options.max_tokens = M;
  session_options.prefill_chunk = M;
  session_options.observer = [&](const qmlp::TapEvent& event) {
    if (event.tap != qmlp::Tap::embedding && event.tap != qmlp::Tap::layer_out &&
        event.tap != qmlp::Tap::final_norm) {
      return;
    }
    const auto& v = event.values;
    for (std::int64_t row = 0; row < v.rows; ++row) {
      write(v.data + row * v.row_stride * static_cast<std::int64_t>(sizeof(float)), v.cols);
    }
  };
  const auto session = value_or_throw(qmlp::Session::create(model, session_options, *pool));
  std::vector<float> logits(static_cast<std::size_t>(M * model->config().vocab_size));
  value_or_throw(session->forward(ids, qmlp::Logits::all, logits));
  write(logits.data(), static_cast<std::int64_t>(logits.size()));
  if (!file.flush()) throw std::runtime_error(std::string("cannot write ") + out_path);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fputs("usage: dump_hidden MODEL IDS OUT\n", stderr);
    return 2;
  }
  try {
    dump(argv[1], argv[2], argv[3]);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "dump_hidden: %s\n", error.what());
    return 1;
  }
}
