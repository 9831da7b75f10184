// A tokenizer at the end of two pipes, for comparisons with other implementations.
//
//   encode_file CHECKPOINT < requests > answers
//
// Numbers are little-endian 32-bit; a string is its length and its bytes. A request is one byte:
// 'e' or 'p' (as a prompt) and a text; 'c', a count and that many pairs of role and content; 'd' or
// 's' (token by token), a count and that many ids; 't', flags (1: add_generation_prompt, 2:
// enable_thinking is given, 4: its value), tools as a string and then as 'c', for the text of the
// prompt. An answer is 0 and, for 'e', 'p' and 'c', a count
// and ids, for 'd', 's' and 't' the bytes as a string; or 1 and an error message.

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "qmlp/tokenizer.h"

namespace {

constexpr std::uint32_t kMaxCount = std::uint32_t{1} << 30;

std::optional<std::uint32_t> read_number() {
  unsigned char bytes[4];
  if (std::fread(bytes, 1, 4, stdin) != 4) return std::nullopt;
  const std::uint32_t value =
      bytes[0] | bytes[1] << 8 | bytes[2] << 16 | static_cast<std::uint32_t>(bytes[3]) << 24;
  if (value > kMaxCount) return std::nullopt;
  return value;
}

std::optional<std::string> read_string() {
  const auto length = read_number();
  if (!length) return std::nullopt;
  std::string text(*length, '\0');
  if (std::fread(text.data(), 1, text.size(), stdin) != text.size()) return std::nullopt;
  return text;
}

void write_number(std::uint32_t value) {
  const unsigned char bytes[4] = {
      static_cast<unsigned char>(value), static_cast<unsigned char>(value >> 8),
      static_cast<unsigned char>(value >> 16), static_cast<unsigned char>(value >> 24)};
  std::fwrite(bytes, 1, 4, stdout);
}

void write_string(const std::string& text) {
  write_number(static_cast<std::uint32_t>(text.size()));
  std::fwrite(text.data(), 1, text.size(), stdout);
}

// Writes whether there is an answer, or the error.
template <class T>
bool refused(const qmlp::Result<T>& result) {
  write_number(result ? 0 : 1);
  if (!result) write_string(result.error().message);
  return !result;
}

void answer(const qmlp::Result<std::vector<std::int32_t>>& ids) {
  if (refused(ids)) return;
  write_number(static_cast<std::uint32_t>(ids->size()));
  for (const std::int32_t id : *ids) write_number(static_cast<std::uint32_t>(id));
}

struct Timing {
  double seconds = 0;
  std::size_t bytes = 0;
};

// False when the input ends inside a request.
bool serve(const qmlp::Tokenizer& tokenizer, int request, Timing& timing) {
  if (request == 'e' || request == 'p') {
    const auto text = read_string();
    if (!text) return false;
    const auto start = std::chrono::steady_clock::now();
    const auto ids = request == 'e' ? tokenizer.encode(*text) : tokenizer.encode_prompt(*text);
    timing.seconds +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    timing.bytes += text->size();
    answer(ids);
    return true;
  }
  qmlp::ChatOptions options;
  if (request == 't') {
    const auto flags = read_number();
    auto tools = read_string();
    if (!flags || !tools) return false;
    options.add_generation_prompt = (*flags & 1) != 0;
    if ((*flags & 2) != 0) options.enable_thinking = (*flags & 4) != 0;
    options.tools = *std::move(tools);
  }
  const auto count = read_number();
  if (!count) return false;
  if (request == 'c' || request == 't') {
    std::vector<qmlp::ChatMessage> messages;
    for (std::uint32_t i = 0; i < *count; ++i) {
      auto role = read_string();
      auto content = read_string();
      if (!role || !content) return false;
      messages.push_back({*std::move(role), *std::move(content)});
    }
    const auto ids = tokenizer.encode_chat(messages, options);
    if (request == 'c') {
      answer(ids);
    } else if (!refused(ids)) {
      write_string(*tokenizer.decode(*ids));
    }
    return true;
  }
  if (request != 'd' && request != 's') return false;
  std::vector<std::int32_t> ids;
  for (std::uint32_t i = 0; i < *count; ++i) {
    const auto id = read_number();
    if (!id) return false;
    ids.push_back(static_cast<std::int32_t>(*id));
  }
  if (request == 's') {
    qmlp::Detokenizer detokenizer(tokenizer);
    std::string streamed;
    for (const std::int32_t id : ids) streamed += detokenizer.push(id);
    streamed += detokenizer.finish();
    write_number(0);
    write_string(streamed);
    return true;
  }
  const auto text = tokenizer.decode(ids);
  if (!refused(text)) write_string(*text);
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: encode_file CHECKPOINT < requests > answers\n");
    return 2;
  }
  const auto tokenizer = qmlp::Tokenizer::open(argv[1]);
  if (!tokenizer) {
    std::fprintf(stderr, "encode_file: %s\n", tokenizer.error().message.c_str());
    return 2;
  }
  Timing timing;
  for (int request = std::getchar(); request != EOF; request = std::getchar()) {
    if (!serve(**tokenizer, request, timing)) {
      std::fprintf(stderr, "encode_file: a malformed request\n");
      return 2;
    }
  }
  if (timing.seconds > 0) {
    std::fprintf(stderr, "encode_file: %.1f MB in %.3f s, %.1f MB/s\n",
                 static_cast<double>(timing.bytes) * 1e-6, timing.seconds,
                 static_cast<double>(timing.bytes) * 1e-6 / timing.seconds);
  }
  return 0;
}
