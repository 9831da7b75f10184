// The `f32` contract: every output is one chain of fused multiply-adds over ascending k. Lanes are
// output features and register rows are tokens, so no sum is ever split. Needs decode_inl.h before
// it.

// The blocks that a unit works on: a gate block with its up block, or neighbouring blocks of a
// linear.
struct Unit {
  const BlockMatrix* weight[kUnitBlocks];
  long long block[kUnitBlocks];
  int num_blocks;
};
static inline Unit unit_at(const KernelArgs* args, long long index) {
  Unit unit;
  if (args->is_swiglu) {
    unit.weight[0] = args->weight[0];
    unit.weight[1] = args->weight[1];
    unit.block[0] = unit.block[1] = index;
    unit.num_blocks = 2;
    return unit;
  }
  const long long first = index * kUnitBlocks;
  const long long left = args->weight[0]->num_blocks - first;
  unit.num_blocks = left < kUnitBlocks ? (int)left : kUnitBlocks;
  for (int i = 0; i < kUnitBlocks; ++i) {
    unit.weight[i] = args->weight[0];
    unit.block[i] = first + i;
  }
  return unit;
}

// Row i of a tile of R rows: element k goes to out[k * R + i].
static void pack_row(int dtype, const void* row, long long K, long long R, float* out) {
  for (long long k = 0; k < K; k += kLanes) {
    const long long count = K - k < kLanes ? K - k : kLanes;
    const Vec v = load_some(dtype, element_at(dtype, row, k), count);
    if (R == 1 && count == kLanes) {
      store(out + k, v);
      continue;
    }
    float lanes[kLanes];
    store(lanes, v);
    for (long long i = 0; i < count; ++i) out[(k + i) * R] = lanes[i];
  }
}

static void pack_x_tiles(const KernelArgs* args, long long tile_rows, long long tile_begin,
                         long long tile_end) {
  for (long long t = tile_begin; t < tile_end; ++t) {
    const long long first = t * tile_rows;
    const long long left = args->row_count - first;
    const long long R = left < tile_rows ? left : tile_rows;
    for (long long i = 0; i < R; ++i) {
      const long long row = args->row_begin + first + i;
      pack_row(args->dtype, element_at(args->dtype, args->x, row * args->x_stride), args->K, R,
               args->x_tiles + first * args->K + i);
    }
  }
}
static void pack_x_f32(const KernelArgs* args, long long tile_begin, long long tile_end) {
  pack_x_tiles(args, kTileRows, tile_begin, tile_end);
}

// c[R][c_stride] (+)= x[k][R] * panel[k][16] for V panels that follow each other.
template <int R, int V>
static void multiply_tile(const float* x, const float* panels, long long panel_stride,
                          long long k_count, bool first, float* c, long long c_stride) {
  Vec acc[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      acc[r][v] = first ? splat(0.0f) : load(c + r * c_stride + v * kLanes);
    }
  }
  for (long long k = 0; k < k_count; ++k) {
    Vec w[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) w[v] = load(panels + v * panel_stride + k * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec xr = splat(x[k * R + r]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[r][v] = fma(xr, w[v], acc[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(c + r * c_stride + v * kLanes, acc[r][v]);
  }
}

template <int R>
static void multiply_rows(const float* x, const float* panels, long long panel_stride,
                          int num_panels, long long k_count, bool first, float* c,
                          long long c_stride) {
  // Few rows leave registers for more panels, whose chains then hide the latency of one another.
  constexpr int V = R * kUnitBlocks <= kTileRows * kTileVectors ? kUnitBlocks : kTileVectors;
  int v = 0;
  for (; v + V <= num_panels; v += V) {
    multiply_tile<R, V>(x, panels + v * panel_stride, panel_stride, k_count, first, c + v * kLanes,
                        c_stride);
  }
  for (; v < num_panels; ++v) {
    multiply_tile<R, 1>(x, panels + v * panel_stride, panel_stride, k_count, first, c + v * kLanes,
                        c_stride);
  }
}

static void multiply(long long R, const float* x, const float* panels, long long panel_stride,
                     int num_panels, long long k_count, bool first, float* c, long long c_stride) {
#define QMLP_ROWS(n)                                                                      \
  case n:                                                                                 \
    if constexpr (n <= kTileRows) {                                                       \
      multiply_rows<n>(x, panels, panel_stride, num_panels, k_count, first, c, c_stride); \
    }                                                                                     \
    return;
  switch (R) {
    QMLP_ROWS(1)
    QMLP_ROWS(2)
    QMLP_ROWS(3)
    QMLP_ROWS(4)
    QMLP_ROWS(5)
    QMLP_ROWS(6)
    QMLP_ROWS(7)
    QMLP_ROWS(8)
    QMLP_ROWS(9)
    QMLP_ROWS(10)
    QMLP_ROWS(11)
    QMLP_ROWS(12)
    default:
      return;
  }
#undef QMLP_ROWS
}

// y rounded, then the linear bias and the residual, each rounded.
static void finish_linear(const KernelArgs* args, long long row, long long n, long long count,
                          Vec acc) {
  const int dtype = args->dtype;
  Vec y = acc;
  if (args->linear_bias[0] != 0) {
    const Vec bias = load_some(dtype, element_at(dtype, args->linear_bias[0], n), count);
    y = add(round_as(dtype, y), bias);
  }
  if (args->residual != 0) {
    const Vec r =
        load_some(dtype, element_at(dtype, args->residual, row * args->residual_stride + n), count);
    y = add(r, round_as(dtype, y));
  }
  store_some(dtype, (void*)element_at(dtype, args->out, row * args->out_stride + n), y, count);
}

static void finish_swiglu(const KernelArgs* args, long long row, long long n, long long count,
                          Vec gate, Vec up) {
  const int dtype = args->dtype;
  if (!args->wide) {
    gate = round_as(dtype, gate);
    up = round_as(dtype, up);
  }
  if (args->linear_bias[0] != 0) {
    gate = add(gate, load_some(dtype, element_at(dtype, args->linear_bias[0], n), count));
    if (!args->wide) gate = round_as(dtype, gate);
  }
  if (args->linear_bias[1] != 0) {
    up = add(up, load_some(dtype, element_at(dtype, args->linear_bias[1], n), count));
    if (!args->wide) up = round_as(dtype, up);
  }
  if (args->gate_tap != 0) {
    store_some(dtype, (void*)element_at(dtype, args->gate_tap, row * args->gate_tap_stride + n),
               gate, count);
  }
  const Vec h = args->wide ? mul(mul(gate, sigmoid_f32(gate)), up)
                           : swiglu_match(dtype, args->sigmoid_table, gate, up);
  store_some(dtype, (void*)element_at(dtype, args->out, row * args->out_stride + n), h, count);
}

// Sums c[row_count][kUnitBlocks][16] to outputs.
static void finish_unit(const KernelArgs* args, const Unit* unit, const float* c) {
  for (long long m = 0; m < args->row_count; ++m) {
    const long long row = args->row_begin + m;
    const float* sums = c + m * kUnitBlocks * kLanes;
    if (args->is_swiglu) {
      const long long n = unit->block[0] * kLanes;
      const long long count = args->N - n < kLanes ? args->N - n : kLanes;
      finish_swiglu(args, row, n, count, load(sums), load(sums + kLanes));
      continue;
    }
    for (int i = 0; i < unit->num_blocks; ++i) {
      const long long n = unit->block[i] * kLanes;
      const long long count = args->N - n < kLanes ? args->N - n : kLanes;
      finish_linear(args, row, n, count, load(sums + i * kLanes));
    }
  }
}

// scratch: panels [kUnitBlocks][kPanelK][16], then sums [row_count][kUnitBlocks][16].
static void compute_f32(const KernelArgs* args, long long unit_begin, long long unit_end,
                        float* scratch) {
  float* panels = scratch;
  constexpr long long kPanelStride = (long long)kPanelK * kLanes;
  float* c = scratch + kUnitBlocks * kPanelStride;
  constexpr long long kSumStride = (long long)kUnitBlocks * kLanes;
  for (long long u = unit_begin; u < unit_end; ++u) {
    const Unit unit = unit_at(args, u);
    for (long long k = 0; k < args->K; k += kPanelK) {
      const long long k_count = args->K - k < kPanelK ? args->K - k : kPanelK;
      for (int i = 0; i < unit.num_blocks; ++i) {
        decode_panel(unit.weight[i], unit.block[i], args->dtype, k, k_count,
                     panels + i * kPanelStride);
      }
      for (long long m = 0; m < args->row_count; m += kTileRows) {
        const long long left = args->row_count - m;
        const long long R = left < kTileRows ? left : kTileRows;
        multiply(R, args->x_tiles + m * args->K + k * R, panels, kPanelStride, unit.num_blocks,
                 k_count, k == 0, c + m * kSumStride, kSumStride);
      }
    }
    finish_unit(args, &unit, c);
  }
}
