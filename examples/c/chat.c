/* chat MODEL QUESTION: the likeliest answer of at most 48 tokens, from plain C. */
#include <stdio.h>
#include <stdlib.h>

#include "qmlp/c_api.h"

static void check(qmlp_status status) {
  if (status == QMLP_OK) return;
  fprintf(stderr, "chat: %s: %s\n", qmlp_status_name(status), qmlp_last_error());
  exit(1);
}

int main(int argc, char** argv) {
  enum { kMaxTokens = 1024, kAnswer = 48 };
  if (argc != 3) {
    fputs("usage: chat MODEL QUESTION\n", stderr);
    return 2;
  }
  qmlp_pool* pool;
  qmlp_checkpoint* checkpoint;
  qmlp_tokenizer* tokenizer;
  qmlp_model* model;
  qmlp_session* session;
  qmlp_sampler* sampler;
  check(qmlp_pool_create(0, &pool));
  check(qmlp_checkpoint_open(argv[1], &checkpoint));
  check(qmlp_tokenizer_open(argv[1], &tokenizer));
  check(qmlp_model_load(checkpoint, NULL, pool, &model));
  qmlp_checkpoint_free(checkpoint); /* the weights are packed */
  check(qmlp_session_create(model, NULL, pool, &session));
  check(qmlp_sampler_create(NULL, &sampler));

  int32_t tokens[kMaxTokens];
  size_t prompt = 0;
  const qmlp_chat_message message = {"user", argv[2]};
  check(qmlp_tokenizer_encode_chat(tokenizer, &message, 1, tokens, kMaxTokens, &prompt));
  if (prompt + kAnswer > kMaxTokens) {
    fprintf(stderr, "chat: the prompt has %zu tokens, at most %d\n", prompt, kMaxTokens - kAnswer);
    return 2;
  }
  const size_t vocab_size = (size_t)qmlp_model_vocab_size(model);
  float* logits = malloc(vocab_size * sizeof(float));
  if (logits == NULL) return 1;

  size_t done = 0, count = prompt; /* the prompt in one call, then token by token */
  while (count < prompt + kAnswer) {
    check(qmlp_session_forward(session, tokens + done, count - done, logits, vocab_size));
    done = count;
    check(qmlp_sampler_sample(sampler, logits, vocab_size, tokens, count, &tokens[count]));
    if (qmlp_model_is_eos(model, tokens[count])) break;
    ++count;
  }
  size_t length = 0;
  check(qmlp_tokenizer_decode(tokenizer, tokens + prompt, count - prompt, NULL, 0, &length));
  char* text = malloc(length + 1);
  if (text == NULL) return 1;
  check(
      qmlp_tokenizer_decode(tokenizer, tokens + prompt, count - prompt, text, length + 1, &length));
  puts(text);

  free(text);
  free(logits);
  qmlp_sampler_free(sampler);
  qmlp_session_free(session);
  qmlp_model_free(model);
  qmlp_tokenizer_free(tokenizer);
  qmlp_pool_free(pool);
  return 0;
}
