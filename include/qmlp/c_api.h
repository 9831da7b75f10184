/* The C interface of qmlp: C11, no C++ type, no exception crosses it. In libqmlp_c, CMake target
 * qmlp::c, pkg-config module qmlp_c. docs/c_api.md has an overview.
 *
 * Errors. A function that can fail returns a qmlp_status. After anything but QMLP_OK,
 * qmlp_last_error() gives one line for the calling thread, valid until its next failing call.
 * Outputs are untouched when a call fails.
 *
 * Handles. `..._create`, `..._open`, `..._load`, `qmlp_plan_...` and `qmlp_pack_...` give a handle
 * that its own `..._free` takes back; freeing NULL does nothing. A handle keeps what it was made
 * from alive, so handles may be freed in any order. Plans, weights, checkpoints, models and
 * tokenizers are immutable and may be used by several threads at once; calls that share a pool
 * queue. A session and a sampler serve one thread at a time.
 *
 * Options. A struct that starts with struct_size may grow in later versions: fill it with its
 * QMLP_..._INIT, then set fields. A field that this library does not know is refused unless it is
 * zero.
 *
 * Strings are UTF-8. A function that writes text or ids into a caller's buffer gives the full
 * length in `count` and writes only when the buffer holds all of it (text: and a closing NUL);
 * call it with a NULL buffer of size 0 to learn the length. */
#ifndef QMLP_C_API_H_
#define QMLP_C_API_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define QMLP_C_API __attribute__((visibility("default")))
#define QMLP_C_NODISCARD __attribute__((warn_unused_result))
#else
#define QMLP_C_API
#define QMLP_C_NODISCARD
#endif

/* Names as C has them. NOLINTBEGIN(readability-identifier-naming) */

#ifdef __cplusplus
extern "C" {
#endif

/* Raised by one whenever something is added; the library serves callers built for a lower one. */
#define QMLP_C_API_VERSION 1

typedef int32_t qmlp_status;
enum {
  QMLP_OK = 0,
  QMLP_INVALID_ARGUMENT = 1, /* the caller broke a documented requirement */
  QMLP_UNSUPPORTED = 2,      /* well formed, but nothing here takes it */
  QMLP_CORRUPT_FILE = 3,     /* the bytes contradict the format */
  QMLP_IO = 4,               /* the operating system refused a file operation */
  QMLP_OUT_OF_MEMORY = 5,
  QMLP_DEVICE = 6,      /* the driver, runtime or system reported a failure */
  QMLP_INTERRUPTED = 7, /* a caller's stop request was honoured */
  QMLP_INTERNAL = 8     /* a bug in this library */
};

QMLP_C_API const char* qmlp_version(void); /* "0.1.0" */
QMLP_C_API int32_t qmlp_c_api_version(void);
QMLP_C_API const char* qmlp_status_name(qmlp_status status); /* "invalid_argument" */
QMLP_C_API const char* qmlp_last_error(void);                /* never NULL */

/* ---- types ---- */

typedef int32_t qmlp_dtype;
enum { QMLP_F32 = 0, QMLP_F16 = 1, QMLP_BF16 = 2 };

typedef int32_t qmlp_device_kind;
enum { QMLP_CPU = 0, QMLP_CUDA = 1, QMLP_CUDA_RECORDER = 2 /* of a stream alone */ };

typedef int32_t qmlp_precision;
enum {
  QMLP_PRECISION_MATCH = 0, /* rounds where the unfused ops round */
  QMLP_PRECISION_WIDE = 1   /* f32 throughout, one rounding at the store */
};

typedef int32_t qmlp_accumulation;
enum {
  QMLP_ACCUMULATION_DEFAULT = 0, /* the device's own */
  QMLP_ACCUMULATION_F32 = 1,
  QMLP_ACCUMULATION_TENSOR = 2
};

/* Affine: bits 2, 3, 4, 5, 6 or 8, group_size 32, 64 or 128. Dense: bits 16 or 32, group_size 0. */
typedef struct qmlp_quant_spec {
  int32_t bits;
  int32_t group_size;
  qmlp_dtype scale_dtype;
} qmlp_quant_spec;

/* Borrowed weights of a linear layer, row-major [N, K], as MLX stores them. A dense weight keeps
 * its floats in codes and has no scales and biases. No alignment is required. */
typedef struct qmlp_tensor {
  const void* codes; /* [N, K * bits / 32] words */
  size_t codes_bytes;
  const void* scales; /* scale_dtype [N, K / group_size] */
  size_t scales_bytes;
  const void* biases; /* scale_dtype [N, K / group_size] */
  size_t biases_bytes;
  int64_t N;
  int64_t K;
  qmlp_quant_spec spec;
} qmlp_tensor;

/* A borrowed row-major matrix; row_stride counts elements. */
typedef struct qmlp_matrix {
  const void* data;
  int64_t rows;
  int64_t cols;
  int64_t row_stride;
  qmlp_dtype dtype;
} qmlp_matrix;
typedef struct qmlp_mutable_matrix {
  void* data;
  int64_t rows;
  int64_t cols;
  int64_t row_stride;
  qmlp_dtype dtype;
} qmlp_mutable_matrix;

/* Borrowed scratch of a call, aligned to QMLP_WORKSPACE_ALIGNMENT, any contents. */
#define QMLP_WORKSPACE_ALIGNMENT 256
typedef struct qmlp_workspace {
  void* data;
  size_t bytes;
} qmlp_workspace;

/* ---- threads and streams ---- */

/* The threads that run CPU ops; the calling thread is one of them. A pool serves one call at a
 * time. */
typedef struct qmlp_pool qmlp_pool;
/* num_threads 0: qmlp_default_num_threads(), from the affinity mask and the cgroup. */
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_pool_create(int32_t num_threads, qmlp_pool** out);
QMLP_C_API void qmlp_pool_free(qmlp_pool* pool);
QMLP_C_API int32_t qmlp_pool_num_threads(const qmlp_pool* pool);
/* Calls task(context, index, thread) for each index below num_tasks, once, on the pool's threads,
 * thread below their number. Returns when all are done. */
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_pool_run(qmlp_pool* pool, int64_t num_tasks,
                                                      void (*task)(void* context, int64_t index,
                                                                   int32_t thread),
                                                      void* context);
QMLP_C_API int32_t qmlp_default_num_threads(void);

/* One kernel of an op, as cuLaunchKernel takes it. */
typedef struct qmlp_cuda_launch {
  void* function; /* a CUfunction of the device's primary context */
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_bytes; /* dynamic; the function's limit is already set */
  void** params;         /* valid during the call */
} qmlp_cuda_launch;
/* Gets an op's kernels for a graph of the caller's. Anything but QMLP_OK fails the op. */
typedef struct qmlp_cuda_recorder {
  qmlp_status (*launch)(void* context, const qmlp_cuda_launch* launch);
  void* context;
} qmlp_cuda_recorder;

/* Where an op runs. CPU: handle is a qmlp_pool, the op is done when the call returns. CUDA: handle
 * is a cudaStream_t (NULL: the default stream), the op is asynchronous on it. CUDA_RECORDER: handle
 * is a qmlp_cuda_recorder, which gets each kernel in order, each to run after the one before it;
 * nothing is launched. Weights are packed with the other two. */
typedef struct qmlp_stream {
  qmlp_device_kind device_kind;
  int32_t device_ordinal;
  void* handle;
} qmlp_stream;

/* ---- plans ---- */

/* out[M, N] = x * w^T */
typedef struct qmlp_linear_problem {
  size_t struct_size;
  int64_t M_max; /* most tokens one call may carry */
  int64_t N;
  int64_t K;
  qmlp_quant_spec weight;
  qmlp_dtype activation;
  qmlp_accumulation accumulation;
  int32_t segments; /* of the tensor contract; 0: the plan's choice */
} qmlp_linear_problem;
#define QMLP_LINEAR_PROBLEM_INIT \
  { sizeof(qmlp_linear_problem), 1, 0, 0, {4, 64, QMLP_BF16}, QMLP_BF16, 0, 0 }

/* out[M, intermediate] = silu(x * gate^T) * (x * up^T), K = hidden */
typedef struct qmlp_swiglu_problem {
  size_t struct_size;
  int64_t M_max;
  int64_t hidden;
  int64_t intermediate;
  qmlp_quant_spec gate;
  qmlp_quant_spec up;
  qmlp_dtype activation;
  qmlp_precision precision;
  qmlp_accumulation accumulation;
  int32_t segments;
} qmlp_swiglu_problem;
#define QMLP_SWIGLU_PROBLEM_INIT                                                                   \
  {                                                                                                \
    sizeof(qmlp_swiglu_problem), 1, 0, 0, {4, 64, QMLP_BF16}, {4, 64, QMLP_BF16}, QMLP_BF16, 0, 0, \
        0                                                                                          \
  }

typedef struct qmlp_plan_options {
  size_t struct_size;
  const char* force_kernel; /* that row of the tables or an error; NULL: the library chooses */
  const char* force_isa;    /* at most this instruction set of the host, such as "avx2"; or NULL */
} qmlp_plan_options;
#define QMLP_PLAN_OPTIONS_INIT \
  { sizeof(qmlp_plan_options), NULL, NULL }

/* A device is "cpu" (or NULL), "cuda", "cuda:N", or the name of a machine that is not here
 * ("portable", "avx2", "avx512", "a100", "h200"): its plans can be read, not run. */

typedef struct qmlp_support {
  int32_t supported;
  const char* reason; /* "ok", "no_device", "no_isa", "dtype", "bits", "group_size", "shape", ... */
  const char* field;  /* "K" */
  int64_t have;       /* 100 */
  const char* need;   /* "a multiple of the group size" */
  char sentence[160]; /* "K is 100, needs a multiple of the group size" */
} qmlp_support;

/* Whether some kernel takes the problem. An error only for a malformed argument; a CUDA device that
 * is not there is a "no_device", whose sentence says why. */
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_supports_linear(const qmlp_linear_problem* problem,
                                                             const char* device, qmlp_support* out);
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_supports_swiglu(const qmlp_swiglu_problem* problem,
                                                             const char* device, qmlp_support* out);

/* Every kernel's answer at M = M_max, fastest first. */
typedef struct qmlp_verdicts qmlp_verdicts;
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_explain_linear(const qmlp_linear_problem* problem,
                                                            const char* device,
                                                            qmlp_verdicts** out);
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_explain_swiglu(const qmlp_swiglu_problem* problem,
                                                            const char* device,
                                                            qmlp_verdicts** out);
QMLP_C_API void qmlp_verdicts_free(qmlp_verdicts* verdicts);
QMLP_C_API size_t qmlp_verdicts_count(const qmlp_verdicts* verdicts);
/* The kernel's name, and its answer in `support` unless NULL; NULL past the end. */
QMLP_C_API const char* qmlp_verdicts_get(const qmlp_verdicts* verdicts, size_t index,
                                         qmlp_support* support);

typedef struct qmlp_plan qmlp_plan;
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_plan_linear(const qmlp_linear_problem* problem,
                                                         const char* device,
                                                         const qmlp_plan_options* options,
                                                         qmlp_plan** out);
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_plan_swiglu(const qmlp_swiglu_problem* problem,
                                                         const char* device,
                                                         const qmlp_plan_options* options,
                                                         qmlp_plan** out);
QMLP_C_API void qmlp_plan_free(qmlp_plan* plan);
/* The kernel that a call of M tokens runs. */
QMLP_C_API const char* qmlp_plan_kernel_name(const qmlp_plan* plan, int64_t M);
QMLP_C_API size_t qmlp_plan_workspace_bytes(const qmlp_plan* plan, int64_t M);
QMLP_C_API qmlp_accumulation qmlp_plan_accumulation(const qmlp_plan* plan);
QMLP_C_API int32_t qmlp_plan_segments(const qmlp_plan* plan);
QMLP_C_API qmlp_device_kind qmlp_plan_device_kind(const qmlp_plan* plan);
/* 0 for a machine that is not here. */
QMLP_C_API int32_t qmlp_plan_can_run(const qmlp_plan* plan);

/* How often each kernel ran in this process since the last reset. Calls `visit` once for each. */
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_dispatch_counts(
    void (*visit)(void* context, const char* kernel, uint64_t calls), void* context);
QMLP_C_API void qmlp_reset_dispatch_counts(void);

/* ---- weights ---- */

/* Bytes of the codes and of the scales (the biases take as many) of an [N, K] weight. */
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_quant_sizes(int64_t N, int64_t K,
                                                         const qmlp_quant_spec* spec,
                                                         size_t* codes_bytes, size_t* scales_bytes);
/* Quantizes f32 weights [N, K] as MLX's CPU quantize does, bit for bit, into buffers of exactly the
 * sizes that qmlp_quant_sizes gives. */
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_quantize(const float* weights, int64_t N, int64_t K,
                                                      const qmlp_quant_spec* spec, void* codes,
                                                      void* scales, void* biases);
/* Rows [row_begin, row_end) decoded, rounded once to round_to, and widened to f32:
 * out holds (row_end - row_begin) * K floats. */
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_dequantize(const qmlp_tensor* weight,
                                                        int64_t row_begin, int64_t row_end,
                                                        qmlp_dtype round_to, float* out);

/* Weights re-laid for one plan's kernels. With a QMLP_CUDA stream the source may be in host memory
 * or in a device's, already written. The source may be freed afterwards. */
typedef struct qmlp_weight qmlp_weight;
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_pack_linear(const qmlp_plan* plan,
                                                         const qmlp_tensor* weight,
                                                         const qmlp_stream* stream,
                                                         qmlp_weight** out);
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_pack_swiglu(const qmlp_plan* plan,
                                                         const qmlp_tensor* gate,
                                                         const qmlp_tensor* up,
                                                         const qmlp_stream* stream,
                                                         qmlp_weight** out);
/* The gate (0) or up (1) half of a packed SwiGLU weight as a linear weight: on a CPU it shares the
 * memory, on CUDA it is a copy in the device's memory. */
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_weight_part(const qmlp_weight* weight, int32_t index,
                                                         qmlp_weight** out);
QMLP_C_API void qmlp_weight_free(qmlp_weight* weight);
QMLP_C_API size_t qmlp_weight_bytes(const qmlp_weight* weight);
/* 1 when some decoded weight is infinite or NaN. */
QMLP_C_API int32_t qmlp_weight_non_finite(const qmlp_weight* weight);
/* Blocks whose codes are kept as decoded floats. A weight with none can be unpacked, unless it is
 * dense and of another type than the plan's activations. */
QMLP_C_API int64_t qmlp_weight_exact_blocks(const qmlp_weight* weight);
/* Rows of a part (0, or 1 for up) as the source held them, bit for bit, into buffers of exactly the
 * sizes that qmlp_quant_sizes gives for row_count rows, of a CUDA weight in host or device memory.
 * Refused where the source's bits were not kept. Done when it returns. */
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_weight_unpack_rows(const qmlp_weight* weight,
                                                                int32_t part, int64_t row_begin,
                                                                int64_t row_count, void* codes,
                                                                void* scales, void* biases);
/* Row `row`, decoded and rounded to the plan's activation type; out is [1, K], of a CUDA weight in
 * host or device memory. Done when it returns. */
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_weight_decode_row(const qmlp_weight* weight,
                                                               int64_t row,
                                                               const qmlp_mutable_matrix* out);

/* ---- ops ---- */

typedef struct qmlp_swiglu_epilogue {
  size_t struct_size;
  const void* gate_bias; /* activation type [intermediate], or NULL */
  const void* up_bias;
  qmlp_mutable_matrix gate_tap; /* receives the gate projection when data is not NULL */
} qmlp_swiglu_epilogue;
#define QMLP_SWIGLU_EPILOGUE_INIT                                  \
  {                                                                \
    sizeof(qmlp_swiglu_epilogue), NULL, NULL, { NULL, 0, 0, 0, 0 } \
  }

typedef struct qmlp_linear_epilogue {
  size_t struct_size;
  const void* linear_bias; /* activation type [N], or NULL */
  qmlp_matrix residual;    /* [M, N], added last when data is not NULL; may be out itself */
} qmlp_linear_epilogue;
#define QMLP_LINEAR_EPILOGUE_INIT                            \
  {                                                          \
    sizeof(qmlp_linear_epilogue), NULL, { NULL, 0, 0, 0, 0 } \
  }

/* out[M, N] = x[M, K] * w^T (+ linear bias) (+ residual). out may not overlap x; workspace holds
 * qmlp_plan_workspace_bytes(plan, M). An epilogue may be NULL. */
QMLP_C_API QMLP_C_NODISCARD qmlp_status
qmlp_quantized_linear(const qmlp_plan* plan, const qmlp_weight* weight, const qmlp_matrix* x,
                      const qmlp_mutable_matrix* out, const qmlp_workspace* workspace,
                      const qmlp_stream* stream, const qmlp_linear_epilogue* epilogue);
/* out[M, intermediate] = silu(x * gate^T) * (x * up^T). */
QMLP_C_API QMLP_C_NODISCARD qmlp_status
qmlp_fused_swiglu(const qmlp_plan* plan, const qmlp_weight* weight, const qmlp_matrix* x,
                  const qmlp_mutable_matrix* out, const qmlp_workspace* workspace,
                  const qmlp_stream* stream, const qmlp_swiglu_epilogue* epilogue);
/* out[M, N] = down(swiglu(x)) (+ residual), with the bits of the separate calls. Workspace:
 * qmlp_mlp_workspace_bytes. */
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_fused_mlp(
    const qmlp_plan* swiglu, const qmlp_weight* gate_up, const qmlp_plan* down,
    const qmlp_weight* down_weight, const qmlp_matrix* x, const qmlp_mutable_matrix* out,
    const qmlp_workspace* workspace, const qmlp_stream* stream,
    const qmlp_swiglu_epilogue* swiglu_epilogue, const qmlp_linear_epilogue* down_epilogue);
QMLP_C_API size_t qmlp_mlp_workspace_bytes(const qmlp_plan* swiglu, const qmlp_plan* down,
                                           int64_t M);

/* ---- attention (CPU) ---- */

/* Keys and values of one layer of one sequence, in the kernels' layout. One call at a time. */
typedef struct qmlp_attention_cache qmlp_attention_cache;
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_attention_cache_create(int64_t num_kv_heads,
                                                                    int64_t head_dim,
                                                                    qmlp_dtype dtype,
                                                                    qmlp_attention_cache** out);
QMLP_C_API void qmlp_attention_cache_free(qmlp_attention_cache* cache);
QMLP_C_API int64_t qmlp_attention_cache_length(const qmlp_attention_cache* cache);
/* Drops the positions from `position` on and appends the rows of k and v, both
 * [M, num_kv_heads * head_dim] of the cache's type. */
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_attention_cache_append(qmlp_attention_cache* cache,
                                                                    int64_t position,
                                                                    const qmlp_matrix* k,
                                                                    const qmlp_matrix* v);
/* Positions [0, count) out of the cache and into it: [num_kv_heads, count, head_dim], head_stride
 * elements from one head to the next. load takes NULL for a part that is not wanted. */
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_attention_cache_load(const qmlp_attention_cache* cache,
                                                                  int64_t count, void* keys,
                                                                  void* values,
                                                                  int64_t head_stride);
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_attention_cache_store(qmlp_attention_cache* cache,
                                                                   int64_t count, const void* keys,
                                                                   const void* values,
                                                                   int64_t head_stride);
/* Causal attention of the last q->rows positions: q and out are [M, num_heads * head_dim] without
 * gaps, num_heads a multiple of the cache's. Bits: docs/forward.md. The workspace holds what
 * qmlp_attention_workspace_bytes says for the cache's length and the pool's threads. */
QMLP_C_API size_t qmlp_attention_workspace_bytes(const qmlp_attention_cache* cache, int64_t length,
                                                 int32_t num_threads);
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_attention(const qmlp_attention_cache* cache,
                                                       const qmlp_matrix* q,
                                                       const qmlp_mutable_matrix* out, float scale,
                                                       const qmlp_workspace* workspace,
                                                       const qmlp_stream* stream);

/* ---- models ---- */

typedef struct qmlp_checkpoint qmlp_checkpoint;
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_checkpoint_open(const char* path,
                                                             qmlp_checkpoint** out);
QMLP_C_API void qmlp_checkpoint_free(qmlp_checkpoint* checkpoint);

typedef struct qmlp_model_options {
  size_t struct_size;
  int32_t activations; /* a qmlp_dtype, or -1: the stored type of the embedding's scales */
  qmlp_precision precision;
  qmlp_accumulation accumulation;
  int32_t segments;
  const char* force_isa; /* NULL: the best */
  void (*progress)(void* context, const char* what, int64_t done, int64_t total); /* or NULL */
  void* progress_context;
} qmlp_model_options;
#define QMLP_MODEL_OPTIONS_INIT \
  { sizeof(qmlp_model_options), -1, 0, 0, 0, NULL, NULL, NULL }

typedef struct qmlp_model qmlp_model;
/* Packs the weights with the pool's threads. options may be NULL. */
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_model_load(const qmlp_checkpoint* checkpoint,
                                                        const qmlp_model_options* options,
                                                        qmlp_pool* pool, qmlp_model** out);
QMLP_C_API void qmlp_model_free(qmlp_model* model);
QMLP_C_API int64_t qmlp_model_vocab_size(const qmlp_model* model);
QMLP_C_API int64_t qmlp_model_num_layers(const qmlp_model* model);
QMLP_C_API int64_t qmlp_model_hidden_size(const qmlp_model* model);
QMLP_C_API qmlp_dtype qmlp_model_activations(const qmlp_model* model);
QMLP_C_API uint64_t qmlp_model_packed_bytes(const qmlp_model* model);
/* 1 when `token` ends a text, by config.json and generation_config.json. */
QMLP_C_API int32_t qmlp_model_is_eos(const qmlp_model* model, int32_t token);

typedef struct qmlp_session_options {
  size_t struct_size;
  int64_t max_tokens;    /* context to allocate; 0: the config's, at most 4096 */
  int64_t prefill_chunk; /* most tokens one pass carries */
  int32_t fused;         /* 0: MLPs run as separate calls, with the same result */
  int32_t check_finite;  /* stop at the first layer whose output is not finite, naming it */
} qmlp_session_options;
#define QMLP_SESSION_OPTIONS_INIT \
  { sizeof(qmlp_session_options), 0, 256, 1, 1 }

/* One conversation: a KV cache and the scratch of a forward. */
typedef struct qmlp_session qmlp_session;
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_session_create(const qmlp_model* model,
                                                            const qmlp_session_options* options,
                                                            qmlp_pool* pool, qmlp_session** out);
QMLP_C_API void qmlp_session_free(qmlp_session* session);
QMLP_C_API int64_t qmlp_session_position(const qmlp_session* session); /* tokens in the cache */
QMLP_C_API int64_t qmlp_session_max_tokens(const qmlp_session* session);
/* Appends tokens. logits receives vocab_size floats for the last token, or num_tokens * vocab_size
 * for all of them; logits_count says which, 0 for none. After an error the position is
 * unchanged. */
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_session_forward(qmlp_session* session,
                                                             const int32_t* tokens,
                                                             size_t num_tokens, float* logits,
                                                             size_t logits_count);
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_session_truncate(qmlp_session* session,
                                                              int64_t position);
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_session_save(const qmlp_session* session,
                                                          const char* path);
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_session_load(qmlp_session* session, const char* path);

typedef struct qmlp_sampling_options {
  size_t struct_size;
  double temperature; /* 0: greedy, ties to the lower id */
  double top_p;
  int64_t top_k; /* 0: off */
  double min_p;
  double repeat_penalty;
  int64_t repeat_window;
  uint64_t seed;
} qmlp_sampling_options;
#define QMLP_SAMPLING_OPTIONS_INIT \
  { sizeof(qmlp_sampling_options), 0.0, 1.0, 0, 0.0, 1.0, 64, 0 }

typedef struct qmlp_sampler qmlp_sampler;
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_sampler_create(const qmlp_sampling_options* options,
                                                            qmlp_sampler** out);
QMLP_C_API void qmlp_sampler_free(qmlp_sampler* sampler);
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_sampler_sample(qmlp_sampler* sampler,
                                                            const float* logits, size_t num_logits,
                                                            const int32_t* history,
                                                            size_t num_history, int32_t* token);

/* ---- text ---- */

typedef struct qmlp_tokenizer qmlp_tokenizer;
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_tokenizer_open(const char* checkpoint_path,
                                                            qmlp_tokenizer** out);
QMLP_C_API void qmlp_tokenizer_free(qmlp_tokenizer* tokenizer);
QMLP_C_API int64_t qmlp_tokenizer_vocab_size(const qmlp_tokenizer* tokenizer);
QMLP_C_API int32_t qmlp_tokenizer_is_special(const qmlp_tokenizer* tokenizer, int32_t token);
/* Ids of `length` bytes of UTF-8. */
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_tokenizer_encode(const qmlp_tokenizer* tokenizer,
                                                              const char* text, size_t length,
                                                              int32_t* ids, size_t capacity,
                                                              size_t* count);
typedef struct qmlp_chat_message {
  const char* role; /* "system", "user", "assistant" */
  const char* content;
} qmlp_chat_message;
/* The prompt of a conversation in the model's own template, ending where the answer starts. */
QMLP_C_API QMLP_C_NODISCARD qmlp_status
qmlp_tokenizer_encode_chat(const qmlp_tokenizer* tokenizer, const qmlp_chat_message* messages,
                           size_t num_messages, int32_t* ids, size_t capacity, size_t* count);
/* The bytes of some tokens; a character that the last token leaves open stays open. */
QMLP_C_API QMLP_C_NODISCARD qmlp_status qmlp_tokenizer_decode(const qmlp_tokenizer* tokenizer,
                                                              const int32_t* ids, size_t num_ids,
                                                              char* text, size_t capacity,
                                                              size_t* count);

#ifdef __cplusplus
} /* extern "C" */
#endif

/* NOLINTEND(readability-identifier-naming) */

#endif /* QMLP_C_API_H_ */
