#pragma once

// What the files built for one instruction set share with the rest: plain structs and function
// pointers, nothing that a linker could merge.
namespace qmlp::cpu {

constexpr int kLanes = 16;         // output features of a block, and lanes of a vector
constexpr int kPanelK = 256;       // k of a decoded panel; a multiple of every group size
constexpr int kUnitBlocks = 2;     // blocks that a thread works on at a time
constexpr int kTensorStep = 16;    // terms of one step of the `tensor` contract
constexpr int kSegmentBlock = 64;  // k granularity of its segments

// The values of qmlp::DType.
constexpr int kF32 = 0;
constexpr int kF16 = 1;
constexpr int kBf16 = 2;

constexpr unsigned char kCodeBlock = 0;   // scales, biases and codes of each group
constexpr unsigned char kDenseBlock = 1;  // decoded weights

// A weight packed in blocks of 16 output features; features past N are zero.
// A code block holds, for each group along K: scales[16], biases[16] (scale_type), then for each 32
// k `bits` vectors of 16 words: word j of lane n is word j of those 32 codes in row n of the file.
// A dense block holds [K][16] floats of dense_type.
struct BlockMatrix {
  const unsigned char* data;
  const unsigned long long* block_offsets;  // bytes into data
  const unsigned char* block_kinds;
  long long N, K, num_blocks;
  int bits, group_size, scale_type, dense_type;
  int non_finite;  // some weight is infinite or NaN
};

// One op on rows [row_begin, row_begin + row_count) of x.
struct KernelArgs {
  const void* x;  // [M, K] of dtype, x_stride elements apart
  long long x_stride;
  int dtype;  // of x, out, biases and residual
  long long N, K;
  long long row_begin, row_count;

  const BlockMatrix* weight[2];  // linear: weight[0]; swiglu: gate and up
  int is_swiglu;
  int wide;
  int segments;

  const unsigned short* sigmoid_table;  // 65,536 entries of a 16-bit dtype
  const void* linear_bias[2];           // [N] of dtype, or null
  const void* residual;                 // [M, N] of dtype, or null
  long long residual_stride;
  void* gate_tap;  // [M, N] of dtype, or null
  long long gate_tap_stride;
  void* out;  // [M, N] of dtype
  long long out_stride;

  float* x_tiles;  // f32: tile t at t * tile_rows * K, element (k, i) of its r rows at k * r + i
                   // tensor: [row_count][padded K]
  float* x_exponents;             // tensor: powers of two, laid out as x_tiles
  unsigned char* row_non_finite;  // tensor: [row_count]
};

// A kernel's three parts. Tiles and units are split over threads by the caller.
struct KernelFunctions {
  int tile_rows;
  void (*pack_x)(const KernelArgs* args, long long tile_begin, long long tile_end);
  void (*compute)(const KernelArgs* args, long long unit_begin, long long unit_end, float* scratch);
};
// The elementwise second half of an unfused SwiGLU, `match`: h = silu(gate) * up over n elements.
typedef void (*ActivationFunction)(int dtype, const unsigned short* sigmoid_table, const void* gate,
                                   const void* up, void* out, long long n);

struct IsaFunctions {
  KernelFunctions tiles;  // f32 contract, many rows
  KernelFunctions rows;   // f32 contract, few rows; none in portable code
  KernelFunctions tensor;
  ActivationFunction activation;
};

const IsaFunctions* functions_portable();
const IsaFunctions* functions_avx2();
const IsaFunctions* functions_avx512();

}  // namespace qmlp::cpu
