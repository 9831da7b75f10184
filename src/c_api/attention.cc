#include "qmlp/attention.h"

#include "base/try.h"
#include "c_api/convert.h"
#include "c_api/guard.h"
#include "c_api/handles.h"

using qmlp::c_api::guarded;

extern "C" {

qmlp_status qmlp_attention_cache_create(int64_t num_kv_heads, int64_t head_dim, qmlp_dtype dtype,
                                        qmlp_attention_cache** out) {
  return guarded([&]() -> qmlp::Status {
    QMLP_NOT_NULL("qmlp_attention_cache_create", out);
    QMLP_ASSIGN(const qmlp::DType type, qmlp::c_api::to_dtype("dtype", dtype));
    QMLP_ASSIGN(auto cache, qmlp::AttentionCache::create(num_kv_heads, head_dim, type));
    *out = new qmlp_attention_cache{std::move(cache)};
    return {};
  });
}
void qmlp_attention_cache_free(qmlp_attention_cache* cache) { delete cache; }
int64_t qmlp_attention_cache_length(const qmlp_attention_cache* cache) {
  return cache == nullptr ? 0 : cache->cache->length();
}

qmlp_status qmlp_attention_cache_append(qmlp_attention_cache* cache, int64_t position,
                                        const qmlp_matrix* k, const qmlp_matrix* v) {
  return guarded([&]() -> qmlp::Status {
    constexpr const char* kName = "qmlp_attention_cache_append";
    QMLP_NOT_NULL(kName, cache);
    QMLP_NOT_NULL(kName, k);
    QMLP_NOT_NULL(kName, v);
    QMLP_ASSIGN(const qmlp::MatrixView keys, qmlp::c_api::to_view("k", *k, qmlp::Device{}));
    QMLP_ASSIGN(const qmlp::MatrixView values, qmlp::c_api::to_view("v", *v, qmlp::Device{}));
    return cache->cache->append(position, keys, values);
  });
}

qmlp_status qmlp_attention_cache_load(const qmlp_attention_cache* cache, int64_t count, void* keys,
                                      void* values, int64_t head_stride) {
  return guarded([&]() -> qmlp::Status {
    QMLP_NOT_NULL("qmlp_attention_cache_load", cache);
    return cache->cache->load(count, static_cast<std::byte*>(keys), static_cast<std::byte*>(values),
                              head_stride);
  });
}

qmlp_status qmlp_attention_cache_store(qmlp_attention_cache* cache, int64_t count, const void* keys,
                                       const void* values, int64_t head_stride) {
  return guarded([&]() -> qmlp::Status {
    constexpr const char* kName = "qmlp_attention_cache_store";
    QMLP_NOT_NULL(kName, cache);
    if (count > 0) {
      QMLP_NOT_NULL(kName, keys);
      QMLP_NOT_NULL(kName, values);
    }
    return cache->cache->store(count, static_cast<const std::byte*>(keys),
                               static_cast<const std::byte*>(values), head_stride);
  });
}

size_t qmlp_attention_workspace_bytes(const qmlp_attention_cache* cache, int64_t length,
                                      int32_t num_threads) {
  return cache == nullptr ? 0 : attention_workspace_bytes(*cache->cache, length, num_threads);
}

qmlp_status qmlp_attention(const qmlp_attention_cache* cache, const qmlp_matrix* q,
                           const qmlp_mutable_matrix* out, float scale,
                           const qmlp_workspace* workspace, const qmlp_stream* stream) {
  return guarded([&]() -> qmlp::Status {
    constexpr const char* kName = "qmlp_attention";
    QMLP_NOT_NULL(kName, cache);
    QMLP_NOT_NULL(kName, q);
    QMLP_NOT_NULL(kName, out);
    QMLP_NOT_NULL(kName, workspace);
    qmlp::CudaStream cuda;
    QMLP_ASSIGN(const qmlp::Stream to, qmlp::c_api::to_stream(stream, cuda));
    QMLP_ASSIGN(const qmlp::MatrixView from, qmlp::c_api::to_view("q", *q, to.device));
    QMLP_ASSIGN(const qmlp::MutableMatrixView into, qmlp::c_api::to_view("out", *out, to.device));
    const std::size_t bytes = workspace->data == nullptr ? 0 : workspace->bytes;
    return attention(*cache->cache, from, into, scale,
                     {{static_cast<std::byte*>(workspace->data), bytes}}, to);
  });
}

}  // extern "C"
