/* The array part of the C interface from C11 alone: results compared bit for bit with plain loops
 * over dequantized weights, every refusal with its code and a message. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "qmlp/c_api.h"

static int failures = 0;

#define CHECK(condition)                                             \
  do {                                                               \
    if (!(condition)) {                                              \
      printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      ++failures;                                                    \
    }                                                                \
  } while (0)

#define OK(call)                                                                                   \
  do {                                                                                             \
    qmlp_status status_ = (call);                                                                  \
    if (status_ != QMLP_OK) {                                                                      \
      printf("%s:%d: %s: %s\n", __FILE__, __LINE__, qmlp_status_name(status_), qmlp_last_error()); \
      exit(1);                                                                                     \
    }                                                                                              \
  } while (0)

/* That a call fails with this code and says every one of up to two texts in one line. */
static void expect_error(int line, qmlp_status status, qmlp_status code, const char* text1,
                         const char* text2) {
  const char* message = qmlp_last_error();
  if (status != code || strstr(message, text1) == NULL || strstr(message, text2) == NULL ||
      strchr(message, '\n') != NULL) {
    printf("%s:%d: got %s: \"%s\", expected %s with \"%s\" and \"%s\"\n", __FILE__, line,
           qmlp_status_name(status), message, qmlp_status_name(code), text1, text2);
    ++failures;
  }
}
#define REFUSED(call, code, text1, text2) expect_error(__LINE__, (call), (code), (text1), (text2))

static void* allocate(size_t bytes) {
  /* aligned_alloc wants a multiple of the alignment */
  size_t rounded =
      (bytes + QMLP_WORKSPACE_ALIGNMENT) / QMLP_WORKSPACE_ALIGNMENT * QMLP_WORKSPACE_ALIGNMENT;
  void* data = aligned_alloc(QMLP_WORKSPACE_ALIGNMENT, rounded);
  if (data == NULL) exit(1);
  memset(data, 0xff, rounded); /* every float is a NaN, so nothing unwritten can pass */
  return data;
}

static float random_float(void) {
  static uint32_t state = 12345;
  state = state * 1664525u + 1013904223u;
  return (float)(int32_t)(state >> 8) / 8388608.0f - 1.0f;
}

static float* random_floats(size_t count) {
  float* values = allocate(count * sizeof(float));
  for (size_t i = 0; i < count; ++i) values[i] = random_float();
  return values;
}

typedef struct weight {
  qmlp_tensor tensor;
  float* decoded; /* [N, K] */
} weight;

static weight make_weight(int64_t N, int64_t K, int32_t bits, int32_t group_size) {
  weight made;
  memset(&made, 0, sizeof(made));
  const qmlp_quant_spec spec = {bits, group_size, QMLP_F32};
  size_t codes_bytes = 0, scales_bytes = 0;
  OK(qmlp_quant_sizes(N, K, &spec, &codes_bytes, &scales_bytes));
  CHECK(codes_bytes == (size_t)(N * K * bits / 8));
  CHECK(scales_bytes == (size_t)(N * (K / group_size) * 4));
  void* codes = allocate(codes_bytes);
  void* scales = allocate(scales_bytes);
  void* biases = allocate(scales_bytes);
  float* values = random_floats((size_t)(N * K));
  OK(qmlp_quantize(values, N, K, &spec, codes, scales, biases));
  free(values);
  made.tensor.codes = codes;
  made.tensor.codes_bytes = codes_bytes;
  made.tensor.scales = scales;
  made.tensor.scales_bytes = scales_bytes;
  made.tensor.biases = biases;
  made.tensor.biases_bytes = scales_bytes;
  made.tensor.N = N;
  made.tensor.K = K;
  made.tensor.spec = spec;
  made.decoded = allocate((size_t)(N * K) * sizeof(float));
  OK(qmlp_dequantize(&made.tensor, 0, N, QMLP_F32, made.decoded));
  return made;
}

static void free_weight(weight* w) {
  free((void*)(uintptr_t)w->tensor.codes);
  free((void*)(uintptr_t)w->tensor.scales);
  free((void*)(uintptr_t)w->tensor.biases);
  free(w->decoded);
}

/* The f32 contract: one chain of fused multiply-adds over ascending k. */
static float chain(const float* x, const float* w, int64_t K) {
  float sum = 0.0f;
  for (int64_t k = 0; k < K; ++k) sum = fmaf(x[k], w[k], sum);
  return sum;
}

static qmlp_matrix view_of(const float* data, int64_t rows, int64_t cols) {
  const qmlp_matrix view = {data, rows, cols, cols, QMLP_F32};
  return view;
}
static qmlp_mutable_matrix output_of(float* data, int64_t rows, int64_t cols) {
  const qmlp_mutable_matrix view = {data, rows, cols, cols, QMLP_F32};
  return view;
}

enum { kM = 5, kHidden = 128, kIntermediate = 48 };

static qmlp_status refuse_launch(void* context, const qmlp_cuda_launch* launch) {
  (void)context;
  (void)launch;
  return QMLP_DEVICE;
}

static void test_ops(qmlp_pool* pool) {
  const qmlp_stream stream = {QMLP_CPU, 0, pool};
  weight gate = make_weight(kIntermediate, kHidden, 4, 64);
  weight up = make_weight(kIntermediate, kHidden, 3, 32);
  weight down = make_weight(kHidden, 64, 8, 64);

  qmlp_linear_problem linear = QMLP_LINEAR_PROBLEM_INIT;
  linear.M_max = kM;
  linear.N = kIntermediate;
  linear.K = kHidden;
  linear.weight = gate.tensor.spec;
  linear.activation = QMLP_F32;
  qmlp_plan* plan = NULL;
  OK(qmlp_plan_linear(&linear, NULL, NULL, &plan));
  CHECK(strncmp(qmlp_plan_kernel_name(plan, 1), "linear_f32_", 11) == 0);
  CHECK(qmlp_plan_can_run(plan) == 1);
  CHECK(qmlp_plan_accumulation(plan) == QMLP_ACCUMULATION_F32);
  CHECK(qmlp_plan_segments(plan) == 1);
  qmlp_weight* packed = NULL;
  OK(qmlp_pack_linear(plan, &gate.tensor, &stream, &packed));
  CHECK(qmlp_weight_bytes(packed) > 0);
  CHECK(qmlp_weight_non_finite(packed) == 0);

  float* x = random_floats(kM * kHidden);
  float* bias = random_floats(kIntermediate);
  float* residual = random_floats(kM * kIntermediate);
  float* out = allocate(kM * kIntermediate * sizeof(float));
  const size_t workspace_bytes = qmlp_plan_workspace_bytes(plan, kM);
  qmlp_workspace workspace = {allocate(workspace_bytes), workspace_bytes};
  const qmlp_matrix x_view = view_of(x, kM, kHidden);
  const qmlp_mutable_matrix out_view = output_of(out, kM, kIntermediate);
  qmlp_linear_epilogue epilogue = QMLP_LINEAR_EPILOGUE_INIT;
  epilogue.linear_bias = bias;
  epilogue.residual = view_of(residual, kM, kIntermediate);
  OK(qmlp_quantized_linear(plan, packed, &x_view, &out_view, &workspace, &stream, &epilogue));
  for (int m = 0; m < kM; ++m) {
    for (int n = 0; n < kIntermediate; ++n) {
      const float sum = chain(x + m * kHidden, gate.decoded + n * kHidden, kHidden);
      const float with_bias = sum + bias[n];
      const float want = residual[m * kIntermediate + n] + with_bias;
      CHECK(memcmp(&want, &out[m * kIntermediate + n], sizeof(float)) == 0);
    }
  }
  float row[kHidden];
  const qmlp_mutable_matrix row_view = output_of(row, 1, kHidden);
  OK(qmlp_weight_decode_row(packed, 7, &row_view));
  CHECK(memcmp(row, gate.decoded + 7 * kHidden, sizeof(row)) == 0);

  /* Fused against its two halves, with a gate tap. */
  qmlp_swiglu_problem swiglu = QMLP_SWIGLU_PROBLEM_INIT;
  swiglu.M_max = kM;
  swiglu.hidden = kHidden;
  swiglu.intermediate = kIntermediate;
  swiglu.gate = gate.tensor.spec;
  swiglu.up = up.tensor.spec;
  swiglu.activation = QMLP_F32;
  qmlp_plan* swiglu_plan = NULL;
  OK(qmlp_plan_swiglu(&swiglu, "cpu", NULL, &swiglu_plan));
  qmlp_weight* gate_up = NULL;
  OK(qmlp_pack_swiglu(swiglu_plan, &gate.tensor, &up.tensor, &stream, &gate_up));
  float* hidden = allocate(kM * kIntermediate * sizeof(float));
  float* tap = allocate(kM * kIntermediate * sizeof(float));
  qmlp_swiglu_epilogue tapped = QMLP_SWIGLU_EPILOGUE_INIT;
  tapped.gate_tap = output_of(tap, kM, kIntermediate);
  const size_t swiglu_bytes = qmlp_plan_workspace_bytes(swiglu_plan, kM);
  qmlp_workspace swiglu_space = {allocate(swiglu_bytes), swiglu_bytes};
  const qmlp_mutable_matrix hidden_view = output_of(hidden, kM, kIntermediate);
  OK(qmlp_fused_swiglu(swiglu_plan, gate_up, &x_view, &hidden_view, &swiglu_space, &stream,
                       &tapped));
  for (int m = 0; m < kM; ++m) {
    for (int n = 0; n < kIntermediate; ++n) {
      const float g = chain(x + m * kHidden, gate.decoded + n * kHidden, kHidden);
      const float u = chain(x + m * kHidden, up.decoded + n * kHidden, kHidden);
      CHECK(memcmp(&g, &tap[m * kIntermediate + n], sizeof(float)) == 0);
      const double want = (double)g / (1.0 + exp(-(double)g)) * (double)u;
      /* sigmoid within 2 ulp, then four f32 roundings */
      CHECK(fabs(hidden[m * kIntermediate + n] - want) <= 8.0 * 0x1p-24 * fabs(want));
    }
  }
  /* The halves share the packed memory and serve the linear plan. */
  qmlp_weight* half = NULL;
  OK(qmlp_weight_part(gate_up, 0, &half));
  qmlp_weight_free(gate_up);
  OK(qmlp_quantized_linear(plan, half, &x_view, &out_view, &workspace, &stream, NULL));
  CHECK(memcmp(out, tap, kM * kIntermediate * sizeof(float)) == 0);
  OK(qmlp_pack_swiglu(swiglu_plan, &gate.tensor, &up.tensor, &stream, &gate_up));

  /* The whole MLP has the bits of the separate calls. intermediate 48 is no group multiple for
   * down, so it takes a SwiGLU of 64 features. */
  weight gate64 = make_weight(64, kHidden, 4, 64);
  weight up64 = make_weight(64, kHidden, 6, 128);
  swiglu.intermediate = 64;
  swiglu.up = up64.tensor.spec;
  qmlp_plan* swiglu64 = NULL;
  OK(qmlp_plan_swiglu(&swiglu, NULL, NULL, &swiglu64));
  qmlp_weight* packed64 = NULL;
  OK(qmlp_pack_swiglu(swiglu64, &gate64.tensor, &up64.tensor, &stream, &packed64));
  linear.N = kHidden;
  linear.K = 64;
  linear.weight = down.tensor.spec;
  qmlp_plan* down_plan = NULL;
  OK(qmlp_plan_linear(&linear, NULL, NULL, &down_plan));
  qmlp_weight* packed_down = NULL;
  OK(qmlp_pack_linear(down_plan, &down.tensor, &stream, &packed_down));
  const size_t mlp_bytes = qmlp_mlp_workspace_bytes(swiglu64, down_plan, kM);
  qmlp_workspace mlp_space = {allocate(mlp_bytes), mlp_bytes};
  float* fused = allocate(kM * kHidden * sizeof(float));
  float* separate = allocate(kM * kHidden * sizeof(float));
  float* between = allocate(kM * 64 * sizeof(float));
  qmlp_linear_epilogue add_x = QMLP_LINEAR_EPILOGUE_INIT;
  add_x.residual = x_view;
  const qmlp_mutable_matrix fused_view = output_of(fused, kM, kHidden);
  const qmlp_mutable_matrix separate_view = output_of(separate, kM, kHidden);
  const qmlp_mutable_matrix between_out = output_of(between, kM, 64);
  const qmlp_matrix between_in = view_of(between, kM, 64);
  OK(qmlp_fused_mlp(swiglu64, packed64, down_plan, packed_down, &x_view, &fused_view, &mlp_space,
                    &stream, NULL, &add_x));
  OK(qmlp_fused_swiglu(swiglu64, packed64, &x_view, &between_out, &mlp_space, &stream, NULL));
  OK(qmlp_quantized_linear(down_plan, packed_down, &between_in, &separate_view, &mlp_space, &stream,
                           &add_x));
  CHECK(memcmp(fused, separate, kM * kHidden * sizeof(float)) == 0);

  /* Refusals. */
  REFUSED(qmlp_quantized_linear(NULL, packed, &x_view, &out_view, &workspace, &stream, NULL),
          QMLP_INVALID_ARGUMENT, "qmlp_quantized_linear", "plan is null");
  REFUSED(qmlp_quantized_linear(plan, packed, NULL, &out_view, &workspace, &stream, NULL),
          QMLP_INVALID_ARGUMENT, "x is null", "needs a value");
  REFUSED(qmlp_quantized_linear(plan, packed, &x_view, &fused_view, &workspace, &stream, NULL),
          QMLP_INVALID_ARGUMENT, "out is [5, 128]", "needs [5, 48]");
  qmlp_matrix wrong = x_view;
  wrong.dtype = 17;
  REFUSED(qmlp_quantized_linear(plan, packed, &wrong, &out_view, &workspace, &stream, NULL),
          QMLP_INVALID_ARGUMENT, "x.dtype is 17", "QMLP_F32");
  wrong.dtype = QMLP_BF16;
  REFUSED(qmlp_quantized_linear(plan, packed, &wrong, &out_view, &workspace, &stream, NULL),
          QMLP_INVALID_ARGUMENT, "x is bf16", "needs f32");
  qmlp_workspace none = {NULL, 0};
  REFUSED(qmlp_quantized_linear(plan, packed, &x_view, &out_view, &none, &stream, NULL),
          QMLP_INVALID_ARGUMENT, "workspace has 0 bytes", "needs");
  qmlp_stream nowhere = {QMLP_CPU, 0, NULL};
  REFUSED(qmlp_quantized_linear(plan, packed, &x_view, &out_view, &workspace, &nowhere, NULL),
          QMLP_INVALID_ARGUMENT, "handle is null", "qmlp_pool");
  nowhere.device_kind = 9;
  REFUSED(qmlp_quantized_linear(plan, packed, &x_view, &out_view, &workspace, &nowhere, NULL),
          QMLP_INVALID_ARGUMENT, "stream.device_kind is 9", "QMLP_CPU");
  nowhere.device_kind = QMLP_CUDA_RECORDER;
  REFUSED(qmlp_quantized_linear(plan, packed, &x_view, &out_view, &workspace, &nowhere, NULL),
          QMLP_INVALID_ARGUMENT, "handle is null", "qmlp_cuda_recorder");
  qmlp_cuda_recorder recorder = {NULL, NULL};
  nowhere.handle = &recorder;
  REFUSED(qmlp_quantized_linear(plan, packed, &x_view, &out_view, &workspace, &nowhere, NULL),
          QMLP_INVALID_ARGUMENT, "launch is null", "needs a function");
  recorder.launch = refuse_launch;
  REFUSED(qmlp_quantized_linear(plan, packed, &x_view, &out_view, &workspace, &nowhere, NULL),
          QMLP_INVALID_ARGUMENT, "stream is of another device", "the plan's");
  REFUSED(qmlp_quantized_linear(plan, packed64, &x_view, &out_view, &workspace, &stream, NULL),
          QMLP_INVALID_ARGUMENT, "weight", "another kind of plan");
  REFUSED(qmlp_weight_part(packed, 2, &half), QMLP_INVALID_ARGUMENT, "index is 2", "0 to 0");
  qmlp_tensor cut = gate.tensor;
  cut.codes_bytes -= 4;
  qmlp_weight* never = NULL;
  REFUSED(qmlp_pack_linear(plan, &cut, &stream, &never), QMLP_INVALID_ARGUMENT, "codes", "bytes");
  CHECK(never == NULL);
  REFUSED(qmlp_dequantize(&gate.tensor, 3, 49, QMLP_F32, out), QMLP_INVALID_ARGUMENT,
          "rows are [3, 49)", "48");

  qmlp_plan_free(plan);
  qmlp_plan_free(swiglu_plan);
  qmlp_plan_free(swiglu64);
  qmlp_plan_free(down_plan);
  qmlp_weight_free(packed);
  qmlp_weight_free(gate_up);
  qmlp_weight_free(half);
  qmlp_weight_free(packed64);
  qmlp_weight_free(packed_down);
  free_weight(&gate);
  free_weight(&up);
  free_weight(&down);
  free_weight(&gate64);
  free_weight(&up64);
  free(x);
  free(bias);
  free(residual);
  free(out);
  free(hidden);
  free(tap);
  free(fused);
  free(separate);
  free(between);
  free(workspace.data);
  free(swiglu_space.data);
  free(mlp_space.data);
}

/* Packing loses nothing: rows come back as the source held them. */
static void test_unpack(qmlp_pool* pool) {
  static const int kBits[] = {2, 3, 4, 5, 6, 8};
  const qmlp_stream stream = {QMLP_CPU, 0, pool};
  for (size_t i = 0; i < 6; ++i) {
    const int64_t N = 37, K = 128; /* blocks of 16 rows, the last one short */
    weight gate = make_weight(N, K, kBits[i], 32);
    weight up = make_weight(N, K, kBits[5 - i], 128);
    qmlp_swiglu_problem problem = QMLP_SWIGLU_PROBLEM_INIT;
    problem.hidden = K;
    problem.intermediate = N;
    problem.gate = gate.tensor.spec;
    problem.up = up.tensor.spec;
    problem.activation = QMLP_F32;
    qmlp_plan* plan = NULL;
    qmlp_weight* packed = NULL;
    OK(qmlp_plan_swiglu(&problem, NULL, NULL, &plan));
    OK(qmlp_pack_swiglu(plan, &gate.tensor, &up.tensor, &stream, &packed));
    CHECK(qmlp_weight_exact_blocks(packed) == 0);
    for (int part = 0; part < 2; ++part) {
      const qmlp_tensor* source = part == 0 ? &gate.tensor : &up.tensor;
      for (int64_t begin = 0; begin < N; begin += 11) {
        const int64_t count = N - begin < 23 ? N - begin : 23;
        size_t codes_bytes, scales_bytes;
        OK(qmlp_quant_sizes(count, K, &source->spec, &codes_bytes, &scales_bytes));
        char* codes = allocate(codes_bytes);
        char* scales = allocate(scales_bytes);
        char* biases = allocate(scales_bytes);
        OK(qmlp_weight_unpack_rows(packed, part, begin, count, codes, scales, biases));
        const size_t row_codes = codes_bytes / (size_t)count,
                     row_scales = scales_bytes / (size_t)count;
        CHECK(memcmp(codes, (const char*)source->codes + (size_t)begin * row_codes, codes_bytes) ==
              0);
        CHECK(memcmp(scales, (const char*)source->scales + (size_t)begin * row_scales,
                     scales_bytes) == 0);
        CHECK(memcmp(biases, (const char*)source->biases + (size_t)begin * row_scales,
                     scales_bytes) == 0);
        free(codes);
        free(scales);
        free(biases);
      }
    }
    char byte;
    REFUSED(qmlp_weight_unpack_rows(packed, 2, 0, 1, &byte, &byte, &byte), QMLP_INVALID_ARGUMENT,
            "part is 2", "0 to 1");
    REFUSED(qmlp_weight_unpack_rows(packed, 0, 30, 8, &byte, &byte, &byte), QMLP_INVALID_ARGUMENT,
            "rows are 8 from 30", "37");
    REFUSED(qmlp_weight_unpack_rows(packed, 0, 0, 38, &byte, &byte, &byte), QMLP_INVALID_ARGUMENT,
            "row_count is 38", "37");
    REFUSED(qmlp_weight_unpack_rows(packed, 0, 0, 1, NULL, NULL, NULL), QMLP_INVALID_ARGUMENT,
            "codes is null", "needs a value");
    qmlp_weight_free(packed);
    qmlp_plan_free(plan);
    free_weight(&gate);
    free_weight(&up);
  }

  /* A group of f16 scales that fast decoding rounds wrongly: s = 565 * 2^-24, z = 2, code 29. */
  const qmlp_quant_spec spec = {5, 32, QMLP_F16};
  uint32_t codes[16 * 5];
  uint16_t scales[16], biases[16];
  memset(codes, 0xff, sizeof(codes));
  for (int row = 0; row < 16; ++row) {
    codes[5 * row] = 0xfffffffdu; /* the first code is 29 */
    scales[row] = 0x0235;
    biases[row] = 0x4000;
  }
  const qmlp_tensor tensor = {
      codes, sizeof(codes), scales, sizeof(scales), biases, sizeof(biases), 16, 32, spec};
  qmlp_linear_problem problem = QMLP_LINEAR_PROBLEM_INIT;
  problem.N = 16;
  problem.K = 32;
  problem.weight = spec;
  problem.activation = QMLP_F16;
  qmlp_plan* plan = NULL;
  qmlp_weight* packed = NULL;
  OK(qmlp_plan_linear(&problem, NULL, NULL, &plan));
  OK(qmlp_pack_linear(plan, &tensor, &stream, &packed));
  CHECK(qmlp_weight_exact_blocks(packed) == 1);
  REFUSED(qmlp_weight_unpack_rows(packed, 0, 0, 16, codes, scales, biases), QMLP_UNSUPPORTED,
          "kept as decoded floats", "unpack_rows");
  qmlp_weight_free(packed);
  qmlp_plan_free(plan);
}

static void count_swiglu(void* context, const char* kernel, uint64_t calls) {
  if (strncmp(kernel, "swiglu_", 7) == 0) *(uint64_t*)context += calls;
}

static void test_plans(void) {
  qmlp_linear_problem problem = QMLP_LINEAR_PROBLEM_INIT;
  problem.N = 64;
  problem.K = 100;
  qmlp_support support;
  OK(qmlp_supports_linear(&problem, NULL, &support));
  CHECK(support.supported == 0);
  CHECK(strcmp(support.reason, "shape") == 0);
  CHECK(strcmp(support.field, "K") == 0);
  CHECK(support.have == 100);
  CHECK(strstr(support.sentence, "K is 100, needs a multiple") == support.sentence);
  problem.K = 128;
  /* A device that is not there is an answer; a plan for it is refused in the same words. */
  OK(qmlp_supports_linear(&problem, "cuda", &support));
  if (!support.supported) {
    CHECK(strcmp(support.reason, "no_device") == 0);
    CHECK(strcmp(support.field, "device") == 0);
    qmlp_plan* none = NULL;
    REFUSED(qmlp_plan_linear(&problem, "cuda", NULL, &none), QMLP_DEVICE, support.sentence, "");
  }
  OK(qmlp_supports_linear(&problem, "h200", &support));
  CHECK(support.supported == 1);
  CHECK(strcmp(support.reason, "ok") == 0);

  qmlp_verdicts* verdicts = NULL;
  OK(qmlp_explain_linear(&problem, "avx2", &verdicts));
  const size_t count = qmlp_verdicts_count(verdicts);
  CHECK(count > 3);
  int found_512 = 0, found_2 = 0;
  for (size_t i = 0; i < count; ++i) {
    const char* name = qmlp_verdicts_get(verdicts, i, &support);
    CHECK(name != NULL);
    if (name == NULL) continue;
    if (strcmp(name, "linear_bf16_any_m4n16_avx512") == 0) {
      found_512 = 1;
      CHECK(support.supported == 0 && strcmp(support.reason, "no_isa") == 0);
    }
    if (strcmp(name, "linear_bf16_any_m4n16_avx2") == 0) {
      found_2 = 1;
      CHECK(support.supported == 1);
    }
  }
  CHECK(found_512 && found_2);
  CHECK(qmlp_verdicts_get(verdicts, count, &support) == NULL);
  qmlp_verdicts_free(verdicts);

  qmlp_plan* plan = NULL;
  OK(qmlp_plan_linear(&problem, "h200", NULL, &plan));
  CHECK(qmlp_plan_device_kind(plan) == QMLP_CUDA);
  CHECK(qmlp_plan_can_run(plan) == 0);
  CHECK(qmlp_plan_accumulation(plan) == QMLP_ACCUMULATION_TENSOR);
  qmlp_plan_free(plan);

  qmlp_plan_options options = QMLP_PLAN_OPTIONS_INIT;
  options.force_isa = "portable";
  OK(qmlp_plan_linear(&problem, NULL, &options, &plan));
  CHECK(strstr(qmlp_plan_kernel_name(plan, 1), "_portable") != NULL);
  qmlp_plan_free(plan);
  options.force_isa = "sse9";
  REFUSED(qmlp_plan_linear(&problem, NULL, &options, &plan), QMLP_INVALID_ARGUMENT,
          "force_isa is 'sse9'", "portable");
  options.force_isa = NULL;
  options.force_kernel = "linear_f32_any_m6n16_portable";
  REFUSED(qmlp_plan_linear(&problem, NULL, &options, &plan), QMLP_UNSUPPORTED,
          "linear_f32_any_m6n16_portable refuses", "bf16");
  REFUSED(qmlp_plan_linear(&problem, "z80", NULL, &plan), QMLP_INVALID_ARGUMENT, "device is 'z80'",
          "h200");
  REFUSED(qmlp_plan_linear(&problem, "cuda:x", NULL, &plan), QMLP_INVALID_ARGUMENT,
          "device is 'cuda:x'", "cuda:N");
  problem.activation = 3;
  REFUSED(qmlp_plan_linear(&problem, NULL, NULL, &plan), QMLP_INVALID_ARGUMENT, "activation is 3",
          "QMLP_F16");
  problem.activation = QMLP_BF16;
  problem.accumulation = -1;
  REFUSED(qmlp_plan_linear(&problem, NULL, NULL, &plan), QMLP_INVALID_ARGUMENT,
          "accumulation is -1", "QMLP_ACCUMULATION_");
  problem.accumulation = 0;
  problem.weight.bits = 7;
  REFUSED(qmlp_plan_linear(&problem, NULL, NULL, &plan), QMLP_UNSUPPORTED, "bits is 7", "2, 3, 4");
  problem.weight.bits = 4;

  /* A caller of another version. */
  problem.struct_size = 8;
  REFUSED(qmlp_plan_linear(&problem, NULL, NULL, &plan), QMLP_INVALID_ARGUMENT, "struct_size is 8",
          "sizeof(qmlp_linear_problem)");
  struct {
    qmlp_linear_problem known;
    int64_t later_field;
  } newer;
  memset(&newer, 0, sizeof(newer));
  newer.known = problem;
  newer.known.struct_size = sizeof(newer);
  OK(qmlp_plan_linear(&newer.known, NULL, NULL, &plan));
  qmlp_plan_free(plan);
  newer.later_field = 1;
  REFUSED(qmlp_plan_linear(&newer.known, NULL, NULL, &plan), QMLP_UNSUPPORTED,
          "sets a field that this version of the library does not have", "qmlp_linear_problem");
}

static void add_index(void* context, int64_t index, int32_t thread) {
  int64_t* sums = context; /* one for each thread, 64 bytes apart */
  sums[8 * thread] += index;
}

static void test_pool_run(qmlp_pool* pool) {
  int64_t sums[8 * 16] = {0};
  int64_t total = 0;
  CHECK(qmlp_pool_num_threads(pool) <= 16);
  OK(qmlp_pool_run(pool, 1000, add_index, sums));
  for (int i = 0; i < 16; ++i) total += sums[8 * i];
  CHECK(total == 999 * 500);
  OK(qmlp_pool_run(pool, 0, add_index, sums));
  REFUSED(qmlp_pool_run(NULL, 1, add_index, sums), QMLP_INVALID_ARGUMENT, "pool", "null");
  REFUSED(qmlp_pool_run(pool, 1, NULL, sums), QMLP_INVALID_ARGUMENT, "task", "null");
}

/* Attention over a cache: in one call and position by position, and the cache's rows given back. */
static void test_attention(qmlp_pool* pool) {
  enum { kTokens = 21, kHeads = 4, kKvHeads = 2, kDim = 24 };
  const int64_t q_width = kHeads * kDim, kv_width = kKvHeads * kDim;
  float* q = random_floats((size_t)(kTokens * q_width));
  float* k = random_floats((size_t)(kTokens * kv_width));
  float* v = random_floats((size_t)(kTokens * kv_width));
  float* whole = allocate((size_t)(kTokens * q_width) * sizeof(float));
  float* steps = allocate((size_t)(kTokens * q_width) * sizeof(float));
  qmlp_attention_cache* cache = NULL;
  OK(qmlp_attention_cache_create(kKvHeads, kDim, QMLP_F32, &cache));
  const size_t bytes = qmlp_attention_workspace_bytes(cache, kTokens, qmlp_pool_num_threads(pool));
  CHECK(bytes > 0);
  const qmlp_workspace workspace = {allocate(bytes), bytes};
  const qmlp_stream stream = {QMLP_CPU, 0, pool};
  const float scale = 0.25f;
  const qmlp_matrix all_q = {q, kTokens, q_width, q_width, QMLP_F32};
  const qmlp_matrix all_k = {k, kTokens, kv_width, kv_width, QMLP_F32};
  const qmlp_matrix all_v = {v, kTokens, kv_width, kv_width, QMLP_F32};
  const qmlp_mutable_matrix all_out = {whole, kTokens, q_width, q_width, QMLP_F32};
  OK(qmlp_attention_cache_append(cache, 0, &all_k, &all_v));
  CHECK(qmlp_attention_cache_length(cache) == kTokens);
  OK(qmlp_attention(cache, &all_q, &all_out, scale, &workspace, &stream));
  /* the first query sees one key alone */
  for (int64_t i = 0; i < q_width; ++i) {
    CHECK(whole[i] == v[i / kDim / (kHeads / kKvHeads) * kDim + i % kDim]);
  }
  float* keys = allocate((size_t)(kTokens * kv_width) * sizeof(float));
  OK(qmlp_attention_cache_load(cache, kTokens, keys, NULL, kTokens * kDim));
  for (int64_t head = 0; head < kKvHeads; ++head) {
    for (int64_t p = 0; p < kTokens; ++p) {
      CHECK(memcmp(keys + (head * kTokens + p) * kDim, k + p * kv_width + head * kDim,
                   kDim * sizeof(float)) == 0);
    }
  }
  for (int64_t p = 0; p < kTokens; ++p) {
    const qmlp_matrix one_q = {q + p * q_width, 1, q_width, q_width, QMLP_F32};
    const qmlp_matrix one_k = {k + p * kv_width, 1, kv_width, kv_width, QMLP_F32};
    const qmlp_matrix one_v = {v + p * kv_width, 1, kv_width, kv_width, QMLP_F32};
    const qmlp_mutable_matrix one_out = {steps + p * q_width, 1, q_width, q_width, QMLP_F32};
    OK(qmlp_attention_cache_append(cache, p, &one_k, &one_v));
    OK(qmlp_attention(cache, &one_q, &one_out, scale, &workspace, &stream));
  }
  CHECK(memcmp(steps, whole, (size_t)(kTokens * q_width) * sizeof(float)) == 0);

  qmlp_attention_cache* other = NULL;
  OK(qmlp_attention_cache_create(kKvHeads, kDim, QMLP_F32, &other));
  OK(qmlp_attention_cache_store(other, kTokens, keys, keys, kTokens * kDim));
  CHECK(qmlp_attention_cache_length(other) == kTokens);
  REFUSED(qmlp_attention_cache_create(kKvHeads, kDim, 9, &other), QMLP_INVALID_ARGUMENT, "dtype",
          "9");
  REFUSED(qmlp_attention_cache_append(cache, 30, &all_k, &all_v), QMLP_INVALID_ARGUMENT,
          "position: is 30", "21");
  REFUSED(qmlp_attention_cache_append(NULL, 0, &all_k, &all_v), QMLP_INVALID_ARGUMENT, "cache",
          "null");
  REFUSED(qmlp_attention_cache_store(cache, 2, NULL, keys, 48), QMLP_INVALID_ARGUMENT, "keys",
          "null");
  REFUSED(qmlp_attention(cache, &all_k, &all_out, scale, &workspace, &stream),
          QMLP_INVALID_ARGUMENT, "out is 21 x 96", "21 x");
  CHECK(qmlp_attention_workspace_bytes(NULL, 1, 1) == 0);
  CHECK(qmlp_attention_cache_length(NULL) == 0);
  qmlp_attention_cache_free(other);
  qmlp_attention_cache_free(cache);
  qmlp_attention_cache_free(NULL);
  free(workspace.data);
  free(keys);
  free(steps);
  free(whole);
  free(v);
  free(k);
  free(q);
}

int main(void) {
  CHECK(strcmp(qmlp_last_error(), "") == 0);
  CHECK(strncmp(qmlp_version(), "0.", 2) == 0);
  CHECK(qmlp_c_api_version() == QMLP_C_API_VERSION);
  CHECK(strcmp(qmlp_status_name(QMLP_OK), "ok") == 0);
  CHECK(strcmp(qmlp_status_name(QMLP_INTERNAL), "internal") == 0);
  CHECK(strcmp(qmlp_status_name(99), "unknown") == 0);

  qmlp_pool* pool = NULL;
  REFUSED(qmlp_pool_create(-1, &pool), QMLP_INVALID_ARGUMENT, "threads is -1", "1 to 1024");
  REFUSED(qmlp_pool_create(1, NULL), QMLP_INVALID_ARGUMENT, "qmlp_pool_create", "out is null");
  OK(qmlp_pool_create(0, &pool));
  CHECK(qmlp_pool_num_threads(pool) == qmlp_default_num_threads());
  qmlp_pool_free(pool);
  OK(qmlp_pool_create(2, &pool));
  CHECK(qmlp_pool_num_threads(pool) == 2);

  test_plans();
  test_unpack(pool);
  test_pool_run(pool);
  test_attention(pool);
  qmlp_reset_dispatch_counts();
  test_ops(pool);
  uint64_t swiglu_calls = 0;
  OK(qmlp_dispatch_counts(count_swiglu, &swiglu_calls));
  CHECK(swiglu_calls == 3);

  REFUSED(qmlp_quant_sizes(4, 100, &(qmlp_quant_spec){4, 64, QMLP_F16}, &(size_t){0}, &(size_t){0}),
          QMLP_INVALID_ARGUMENT, "100", "64");

  qmlp_pool_free(pool);
  qmlp_pool_free(NULL);
  qmlp_plan_free(NULL);
  qmlp_weight_free(NULL);
  qmlp_verdicts_free(NULL);
  if (failures == 0) printf("c_api plain_test: all good\n");
  return failures == 0 ? 0 : 1;
}
