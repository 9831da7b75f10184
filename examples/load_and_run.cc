// load_and_run MODEL PROMPT: loads a checkpoint, puts the prompt into its chat template, and prints
// the likeliest answer of at most 48 tokens.
#include <algorithm>
#include <cstdio>

#include "qmlp/exceptions.h"
#include "qmlp/qmlp.h"

namespace {

void answer(const char* path, const char* prompt) {
  const auto checkpoint = value_or_throw(qmlp::Checkpoint::open(path));
  const auto tokenizer = value_or_throw(qmlp::Tokenizer::open(path));
  const auto pool = value_or_throw(qmlp::ThreadPool::create(qmlp::default_num_threads()));
  const auto model = value_or_throw(qmlp::Model::load(checkpoint, {}, *pool));
  const auto session = value_or_throw(qmlp::Session::create(model, {}, *pool));

  const qmlp::ChatMessage message{"user", prompt};
  std::vector<std::int32_t> tokens = value_or_throw(tokenizer->encode_chat({&message, 1}));
  std::vector<float> logits(static_cast<std::size_t>(model->config().vocab_size));
  const auto& ends = model->config().eos_token_ids;
  qmlp::Sampler sampler({.temperature = 0.0});
  qmlp::Utf8Stream text;
  std::span<const std::int32_t> next = tokens;  // the prompt first, then one token at a time
  for (int i = 0; i < 48; ++i) {
    value_or_throw(session->forward(next, qmlp::Logits::last, logits));
    tokens.push_back(sampler.sample(logits, tokens));
    next = std::span(tokens).last(1);
    if (std::find(ends.begin(), ends.end(), tokens.back()) != ends.end()) break;
    std::fputs(text.push(value_or_throw(tokenizer->token_bytes(tokens.back()))).c_str(), stdout);
    std::fflush(stdout);
  }
  std::puts(text.finish().c_str());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fputs("usage: load_and_run MODEL PROMPT\n", stderr);
    return 2;
  }
  try {
    answer(argv[1], argv[2]);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "load_and_run: %s\n", error.what());
    return 1;
  }
}
