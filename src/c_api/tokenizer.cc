#include <cstring>

#include "base/try.h"
#include "c_api/guard.h"
#include "c_api/handles.h"

using qmlp::c_api::guarded;

namespace {

qmlp::Status give_ids(const std::vector<std::int32_t>& from, int32_t* ids, size_t capacity,
                      size_t* count) {
  *count = from.size();
  if (ids != nullptr && capacity >= from.size() && !from.empty()) {
    std::memcpy(ids, from.data(), from.size() * sizeof(int32_t));
  }
  return {};
}

}  // namespace

extern "C" {

qmlp_status qmlp_tokenizer_open(const char* checkpoint_path, qmlp_tokenizer** out) {
  return guarded([&]() -> qmlp::Status {
    QMLP_NOT_NULL("qmlp_tokenizer_open", checkpoint_path);
    QMLP_NOT_NULL("qmlp_tokenizer_open", out);
    QMLP_ASSIGN(auto tokenizer, qmlp::Tokenizer::open(checkpoint_path));
    *out = new qmlp_tokenizer{std::move(tokenizer)};
    return {};
  });
}
void qmlp_tokenizer_free(qmlp_tokenizer* tokenizer) { delete tokenizer; }
int64_t qmlp_tokenizer_vocab_size(const qmlp_tokenizer* tokenizer) {
  return tokenizer == nullptr ? 0 : tokenizer->tokenizer->vocab_size();
}
int32_t qmlp_tokenizer_is_special(const qmlp_tokenizer* tokenizer, int32_t token) {
  return tokenizer != nullptr && tokenizer->tokenizer->is_special(token) ? 1 : 0;
}

qmlp_status qmlp_tokenizer_encode(const qmlp_tokenizer* tokenizer, const char* text, size_t length,
                                  int32_t* ids, size_t capacity, size_t* count) {
  return guarded([&]() -> qmlp::Status {
    constexpr const char* kName = "qmlp_tokenizer_encode";
    QMLP_NOT_NULL(kName, tokenizer);
    QMLP_NOT_NULL(kName, count);
    if (length != 0) QMLP_NOT_NULL(kName, text);
    QMLP_ASSIGN(const std::vector<std::int32_t> made, tokenizer->tokenizer->encode({text, length}));
    return give_ids(made, ids, capacity, count);
  });
}

qmlp_status qmlp_tokenizer_encode_chat(const qmlp_tokenizer* tokenizer,
                                       const qmlp_chat_message* messages, size_t num_messages,
                                       int32_t* ids, size_t capacity, size_t* count) {
  return guarded([&]() -> qmlp::Status {
    constexpr const char* kName = "qmlp_tokenizer_encode_chat";
    QMLP_NOT_NULL(kName, tokenizer);
    QMLP_NOT_NULL(kName, count);
    if (num_messages != 0) QMLP_NOT_NULL(kName, messages);
    std::vector<qmlp::ChatMessage> chat;
    for (size_t i = 0; i < num_messages; ++i) {
      QMLP_NOT_NULL(kName, messages[i].role);
      QMLP_NOT_NULL(kName, messages[i].content);
      chat.push_back({messages[i].role, messages[i].content});
    }
    QMLP_ASSIGN(const std::vector<std::int32_t> made, tokenizer->tokenizer->encode_chat(chat));
    return give_ids(made, ids, capacity, count);
  });
}

qmlp_status qmlp_tokenizer_decode(const qmlp_tokenizer* tokenizer, const int32_t* ids,
                                  size_t num_ids, char* text, size_t capacity, size_t* count) {
  return guarded([&]() -> qmlp::Status {
    constexpr const char* kName = "qmlp_tokenizer_decode";
    QMLP_NOT_NULL(kName, tokenizer);
    QMLP_NOT_NULL(kName, count);
    if (num_ids != 0) QMLP_NOT_NULL(kName, ids);
    QMLP_ASSIGN(const std::string made, tokenizer->tokenizer->decode({ids, num_ids}));
    *count = made.size();
    if (text != nullptr && capacity > made.size()) {
      std::memcpy(text, made.c_str(), made.size() + 1);
    }
    return {};
  });
}

}  // extern "C"
