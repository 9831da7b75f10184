/* y = x * w^T from plain C: quantizes a weight to 4 bits, packs it, multiplies, and compares one
 * output with the dequantized weight. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "qmlp/c_api.h"

/* Ends the program with the library's own sentence. */
static void check(qmlp_status status) {
  if (status == QMLP_OK) return;
  fprintf(stderr, "linear: %s: %s\n", qmlp_status_name(status), qmlp_last_error());
  exit(1);
}

static void* allocate(size_t bytes) {
  const size_t step = QMLP_WORKSPACE_ALIGNMENT;
  void* data = aligned_alloc(step, (bytes / step + 1) * step);
  if (data == NULL) exit(1);
  return data;
}

int main(void) {
  enum { M = 3, N = 256, K = 512 };
  float* w = allocate(sizeof(float) * N * K);
  float* x = allocate(sizeof(float) * M * K);
  for (int i = 0; i < N * K; ++i) w[i] = (float)((i * 37) % 201 - 100) / 100.0f;
  for (int i = 0; i < M * K; ++i) x[i] = (float)((i * 53) % 199 - 99) / 99.0f;

  const qmlp_quant_spec spec = {4, 64, QMLP_F32};
  size_t codes_bytes, scales_bytes;
  check(qmlp_quant_sizes(N, K, &spec, &codes_bytes, &scales_bytes));
  void* codes = allocate(codes_bytes);
  void* scales = allocate(scales_bytes);
  void* biases = allocate(scales_bytes);
  check(qmlp_quantize(w, N, K, &spec, codes, scales, biases));
  const qmlp_tensor tensor = {codes,        codes_bytes, scales, scales_bytes, biases,
                              scales_bytes, N,           K,      spec};

  qmlp_linear_problem problem = QMLP_LINEAR_PROBLEM_INIT;
  problem.M_max = M;
  problem.N = N;
  problem.K = K;
  problem.weight = spec;
  problem.activation = QMLP_F32;
  qmlp_plan* plan;
  check(qmlp_plan_linear(&problem, "cpu", NULL, &plan));
  qmlp_pool* pool;
  check(qmlp_pool_create(0, &pool));
  const qmlp_stream stream = {QMLP_CPU, 0, pool};
  qmlp_weight* weight;
  check(qmlp_pack_linear(plan, &tensor, &stream, &weight));

  float* y = allocate(sizeof(float) * M * N);
  const qmlp_matrix in = {x, M, K, K, QMLP_F32};
  const qmlp_mutable_matrix out = {y, M, N, N, QMLP_F32};
  const size_t workspace_bytes = qmlp_plan_workspace_bytes(plan, M);
  const qmlp_workspace workspace = {allocate(workspace_bytes), workspace_bytes};
  check(qmlp_quantized_linear(plan, weight, &in, &out, &workspace, &stream, NULL));

  float row[K]; /* w's row 5 as the kernels see it; the contract is one chain of fmaf */
  check(qmlp_dequantize(&tensor, 5, 6, QMLP_F32, row));
  float expected = 0.0f;
  for (int k = 0; k < K; ++k) expected = fmaf(x[2 * K + k], row[k], expected);
  printf("%s: y[2][5] = %.9g, expected %.9g\n", qmlp_plan_kernel_name(plan, M),
         (double)y[2 * N + 5], (double)expected);
  const int equal = y[2 * N + 5] == expected;

  qmlp_weight_free(weight);
  qmlp_pool_free(pool);
  qmlp_plan_free(plan);
  free(workspace.data);
  free(y);
  free(biases);
  free(scales);
  free(codes);
  free(x);
  free(w);
  return equal ? 0 : 1;
}
