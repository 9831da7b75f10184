// Models and text through the C interface have the results of the C++ calls, and errors stay with
// the thread that made them.
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "io/temp_folder.h"
#include "model/synthetic.h"
#include "qmlp/c_api.h"
#include "qmlp/exceptions.h"
#include "qmlp/tokenizer.h"

namespace qmlp::test {
namespace {

void expect_status(qmlp_status status, qmlp_status want, std::string_view text) {
  EXPECT_EQ(std::string(qmlp_status_name(status)), qmlp_status_name(want)) << qmlp_last_error();
  if (want != QMLP_OK) {
    EXPECT_NE(std::string_view(qmlp_last_error()).find(text), std::string_view::npos)
        << "'" << text << "' is not in: " << qmlp_last_error();
  }
}
void expect_ok(qmlp_status status) { expect_status(status, QMLP_OK, ""); }

TEST(CModel, LogitsAreTheCxxCalls) {
  const SyntheticModel synthetic(mixed_tied());
  const std::vector<std::int32_t> tokens = some_tokens(synthetic.spec(), 11);
  const auto vocab = static_cast<std::size_t>(synthetic.spec().vocab);

  const auto cxx_pool = make_pool(2);
  const auto cxx_model = load_model(synthetic, with_activations(DType::bf16), *cxx_pool);
  const auto cxx_session = value_or_throw(Session::create(cxx_model, {}, *cxx_pool));
  std::vector<float> want(tokens.size() * vocab);
  value_or_throw(cxx_session->forward(tokens, Logits::all, want));

  qmlp_pool* pool = nullptr;
  qmlp_checkpoint* checkpoint = nullptr;
  qmlp_model* model = nullptr;
  qmlp_session* session = nullptr;
  expect_ok(qmlp_pool_create(1, &pool));
  expect_ok(qmlp_checkpoint_open(synthetic.path().c_str(), &checkpoint));
  qmlp_model_options options = QMLP_MODEL_OPTIONS_INIT;
  options.activations = QMLP_BF16;
  std::int64_t steps = 0;
  options.progress = [](void* context, const char* what, std::int64_t, std::int64_t) {
    EXPECT_NE(what, nullptr);
    ++*static_cast<std::int64_t*>(context);
  };
  options.progress_context = &steps;
  expect_ok(qmlp_model_load(checkpoint, &options, pool, &model));
  EXPECT_GT(steps, 0);
  EXPECT_EQ(qmlp_model_vocab_size(model), synthetic.spec().vocab);
  EXPECT_EQ(qmlp_model_num_layers(model), synthetic.spec().layers);
  EXPECT_EQ(qmlp_model_hidden_size(model), synthetic.spec().hidden);
  EXPECT_EQ(qmlp_model_activations(model), QMLP_BF16);
  EXPECT_EQ(qmlp_model_packed_bytes(model), cxx_model->packed_bytes());
  expect_ok(qmlp_session_create(model, nullptr, pool, &session));
  // A session keeps what it stands on.
  qmlp_checkpoint_free(checkpoint);
  qmlp_model_free(model);
  qmlp_pool_free(pool);

  std::vector<float> got(want.size());
  expect_ok(qmlp_session_forward(session, tokens.data(), 4, got.data(), 4 * vocab));
  expect_ok(qmlp_session_forward(session, tokens.data() + 4, tokens.size() - 4,
                                 got.data() + 4 * vocab, (tokens.size() - 4) * vocab));
  EXPECT_EQ(qmlp_session_position(session), 11);
  EXPECT_EQ(got, want);

  expect_ok(qmlp_session_truncate(session, 5));
  std::vector<float> last(vocab);
  expect_ok(qmlp_session_forward(session, tokens.data() + 5, 6, last.data(), vocab));
  EXPECT_EQ(last, std::vector<float>(want.end() - static_cast<std::ptrdiff_t>(vocab), want.end()));

  qmlp_sampler* sampler = nullptr;
  expect_ok(qmlp_sampler_create(nullptr, &sampler));
  std::int32_t token = -1;
  expect_ok(qmlp_sampler_sample(sampler, last.data(), vocab, nullptr, 0, &token));
  EXPECT_EQ(token, std::max_element(last.begin(), last.end()) - last.begin());
  qmlp_sampler_free(sampler);

  const TempFolder folder;
  expect_ok(qmlp_session_save(session, folder.file("cache").c_str()));
  expect_ok(qmlp_session_truncate(session, 0));
  expect_ok(qmlp_session_load(session, folder.file("cache").c_str()));
  EXPECT_EQ(qmlp_session_position(session), 11);

  expect_status(qmlp_session_forward(session, tokens.data(), 3, last.data(), vocab + 1),
                QMLP_INVALID_ARGUMENT, "logits_count is 132");
  const std::int32_t outside = 131;
  expect_status(qmlp_session_forward(session, &outside, 1, nullptr, 0), QMLP_INVALID_ARGUMENT,
                "131");
  expect_status(qmlp_session_forward(session, nullptr, 1, nullptr, 0), QMLP_INVALID_ARGUMENT,
                "tokens is null");
  expect_status(qmlp_session_truncate(session, 12), QMLP_INVALID_ARGUMENT, "12");
  EXPECT_EQ(qmlp_session_position(session), 11);
  qmlp_session_free(session);
}

TEST(CModel, OpenRefusesWhatCxxRefuses) {
  qmlp_checkpoint* checkpoint = nullptr;
  expect_status(qmlp_checkpoint_open("no-such-folder", &checkpoint), QMLP_IO, "no-such-folder");
  expect_status(qmlp_checkpoint_open(nullptr, &checkpoint), QMLP_INVALID_ARGUMENT, "path is null");
  EXPECT_EQ(checkpoint, nullptr);
  qmlp_sampling_options sampling = QMLP_SAMPLING_OPTIONS_INIT;
  sampling.top_p = 2.0;
  qmlp_sampler* sampler = nullptr;
  expect_status(qmlp_sampler_create(&sampling, &sampler), QMLP_INVALID_ARGUMENT, "top_p");
}

TEST(CText, IdsAndTextAreTheCxxCalls) {
  const std::string folder = std::string(QMLP_TEST_DATA) + "/tokenizer/smollm";
  const auto cxx = value_or_throw(Tokenizer::open(folder));
  qmlp_tokenizer* tokenizer = nullptr;
  expect_ok(qmlp_tokenizer_open(folder.c_str(), &tokenizer));
  EXPECT_EQ(qmlp_tokenizer_vocab_size(tokenizer), cxx->vocab_size());

  const std::string text = "Grüße, world \xF0\x9F\x98\x80!";
  const std::vector<std::int32_t> want = value_or_throw(cxx->encode(text));
  std::size_t count = 0;
  expect_ok(qmlp_tokenizer_encode(tokenizer, text.data(), text.size(), nullptr, 0, &count));
  EXPECT_EQ(count, want.size());
  std::vector<std::int32_t> ids(count, -1);
  expect_ok(
      qmlp_tokenizer_encode(tokenizer, text.data(), text.size(), ids.data(), count - 1, &count));
  EXPECT_EQ(ids, std::vector<std::int32_t>(count, -1)) << "wrote into a buffer that is too small";
  expect_ok(qmlp_tokenizer_encode(tokenizer, text.data(), text.size(), ids.data(), count, &count));
  EXPECT_EQ(ids, want);

  std::size_t length = 0;
  expect_ok(qmlp_tokenizer_decode(tokenizer, ids.data(), ids.size(), nullptr, 0, &length));
  std::vector<char> decoded(length + 1, 'x');
  expect_ok(qmlp_tokenizer_decode(tokenizer, ids.data(), ids.size(), decoded.data(), length + 1,
                                  &length));
  EXPECT_EQ(std::string(decoded.data()), value_or_throw(cxx->decode(want)));

  const qmlp_chat_message message = {"user", "Hello"};
  const ChatMessage cxx_message{"user", "Hello"};
  const auto chat = value_or_throw(cxx->encode_chat({&cxx_message, 1}));
  ids.assign(chat.size(), -1);
  expect_ok(qmlp_tokenizer_encode_chat(tokenizer, &message, 1, ids.data(), ids.size(), &count));
  EXPECT_EQ(ids, chat);
  EXPECT_EQ(qmlp_tokenizer_is_special(tokenizer, chat[0]), cxx->is_special(chat[0]) ? 1 : 0);

  expect_status(qmlp_tokenizer_encode(tokenizer, "\xff", 1, nullptr, 0, &count),
                QMLP_INVALID_ARGUMENT, "byte offset 0");
  qmlp_tokenizer_free(tokenizer);
}

TEST(CErrors, BelongToTheirThread) {
  qmlp_pool* pool = nullptr;
  EXPECT_EQ(qmlp_pool_create(-5, &pool), QMLP_INVALID_ARGUMENT);
  const std::string here = qmlp_last_error();
  std::string before, after;
  std::thread other([&] {
    before = qmlp_last_error();
    qmlp_checkpoint* checkpoint = nullptr;
    EXPECT_EQ(qmlp_checkpoint_open("elsewhere", &checkpoint), QMLP_IO);
    after = qmlp_last_error();
  });
  other.join();
  EXPECT_EQ(before, "");
  EXPECT_NE(after.find("elsewhere"), std::string::npos);
  EXPECT_EQ(here, qmlp_last_error());
  EXPECT_NE(here.find("-5"), std::string::npos);
}

}  // namespace
}  // namespace qmlp::test
