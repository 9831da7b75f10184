// The `f32` contract for few rows of x: weights go from codes to sums without leaving the
// registers. Needs matmul_inl.h before it.

// Where the codes of up to kUnitBlocks blocks of one format are read; all advance alike.
template <int kBlocks>
struct CodeStreams {
  const unsigned char* at[kBlocks];
};

template <int kBits, int kIndex, bool kRound, int kRows, int kBlocks>
__attribute__((always_inline)) static inline void add_products(const CodeStreams<kBlocks>& codes,
                                                               const Vec* scale, const Vec* bias,
                                                               Vec keep, const float* x,
                                                               Vec (*acc)[kBlocks]) {
  constexpr int kBit = kIndex * kBits;
  constexpr int kWord = kBit / 32;
  constexpr int kShift = kBit % 32;
#pragma GCC unroll 4
  for (int i = 0; i < kBlocks; ++i) {
    const uint32_t* words = (const uint32_t*)codes.at[i] + kLanes * kWord;
    IntVec next = load_int(words);
    if constexpr (kShift + kBits > 32) next = load_int(words + kLanes);
    Vec w = fma(scale[i], code_to_float<kBits, kShift>(load_int(words), next), bias[i]);
    if constexpr (kRound) w = sub(w, mul(w, keep));
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) acc[r][i] = fma(splat(x[kIndex * kRows + r]), w, acc[r][i]);
  }
  if constexpr (kIndex < 31) {
    add_products<kBits, kIndex + 1, kRound, kRows, kBlocks>(codes, scale, bias, keep, x, acc);
  }
}

// sums[r * kUnitBlocks * 16 + i * 16 ...] = row r of x[k][kRows] times block i.
template <int kBits, bool kRound, int kRows, int kBlocks>
static void row_product(CodeStreams<kBlocks> codes, const BlockMatrix* w, Rounding rounding,
                        const float* x, float* sums) {
  const long long scales_bytes = kLanes * element_bytes(w->scale_type);
  const Vec prescale = splat(rounding.prescale);
  const Vec keep = splat(rounding.keep);
  Vec acc[kRows][kBlocks];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kBlocks; ++i) acc[r][i] = splat(0.0f);
  }
  for (long long k = 0; k < w->K; k += w->group_size) {
    Vec scale[kBlocks], bias[kBlocks];
#pragma GCC unroll 4
    for (int i = 0; i < kBlocks; ++i) {
      load_group<kRound>(codes.at[i], w->scale_type, prescale, &scale[i], &bias[i]);
      codes.at[i] += 2 * scales_bytes;
    }
    for (int part = 0; part < w->group_size; part += 32) {
      add_products<kBits, 0, kRound, kRows, kBlocks>(codes, scale, bias, keep, x, acc);
      x += 32 * kRows;
#pragma GCC unroll 4
      for (int i = 0; i < kBlocks; ++i) codes.at[i] += 4 * kLanes * kBits;
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kBlocks; ++i) {
      store(sums + (r * kUnitBlocks + i) * kLanes, acc[r][i]);
    }
  }
}

template <bool kRound, int kRows, int kBlocks>
static void row_product_of(CodeStreams<kBlocks> codes, const BlockMatrix* w, Rounding rounding,
                           const float* x, float* sums) {
  switch (w->bits) {
    case 2:
      return row_product<2, kRound, kRows, kBlocks>(codes, w, rounding, x, sums);
    case 3:
      return row_product<3, kRound, kRows, kBlocks>(codes, w, rounding, x, sums);
    case 4:
      return row_product<4, kRound, kRows, kBlocks>(codes, w, rounding, x, sums);
    case 5:
      return row_product<5, kRound, kRows, kBlocks>(codes, w, rounding, x, sums);
    case 6:
      return row_product<6, kRound, kRows, kBlocks>(codes, w, rounding, x, sums);
    default:
      return row_product<8, kRound, kRows, kBlocks>(codes, w, rounding, x, sums);
  }
}

template <int kRows>
static void dense_row_product(const BlockMatrix* w, long long block, const float* x, float* sums) {
  const unsigned char* data = w->data + w->block_offsets[block];
  const long long step = kLanes * element_bytes(w->dense_type);
  Vec acc[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) acc[r] = splat(0.0f);
  for (long long k = 0; k < w->K; ++k) {
    const Vec weights = load_as(w->dense_type, data + k * step);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) acc[r] = fma(splat(x[k * kRows + r]), weights, acc[r]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) store(sums + r * kUnitBlocks * kLanes, acc[r]);
}

// sums[kRows][kUnitBlocks][16] of a tile of kRows rows of x.
template <int kRows>
static void unit_row_product(const KernelArgs* args, const Unit* unit, const float* x,
                             float* sums) {
  const Rounding rounding = rounding_of(args->dtype);
  const BlockMatrix* first = unit->weight[0];
  if constexpr (kRows == 1) {
    // One row is a single chain a block; a second block hides its latency.
    const bool alike = unit->num_blocks == 2 && first->bits == unit->weight[1]->bits &&
                       first->group_size == unit->weight[1]->group_size &&
                       first->scale_type == unit->weight[1]->scale_type &&
                       first->block_kinds[unit->block[0]] == kCodeBlock &&
                       unit->weight[1]->block_kinds[unit->block[1]] == kCodeBlock;
    if (alike) {
      CodeStreams<2> codes;
      for (int i = 0; i < 2; ++i) {
        codes.at[i] = unit->weight[i]->data + unit->weight[i]->block_offsets[unit->block[i]];
      }
      if (args->dtype == kF32) {
        row_product_of<false, 1, 2>(codes, first, rounding, x, sums);
      } else {
        row_product_of<true, 1, 2>(codes, first, rounding, x, sums);
      }
      return;
    }
  }
  for (int i = 0; i < unit->num_blocks; ++i) {
    const BlockMatrix* w = unit->weight[i];
    if (w->block_kinds[unit->block[i]] == kDenseBlock) {
      dense_row_product<kRows>(w, unit->block[i], x, sums + i * kLanes);
      continue;
    }
    const CodeStreams<1> codes = {{w->data + w->block_offsets[unit->block[i]]}};
    if (args->dtype == kF32) {
      row_product_of<false, kRows, 1>(codes, w, rounding, x, sums + i * kLanes);
    } else {
      row_product_of<true, kRows, 1>(codes, w, rounding, x, sums + i * kLanes);
    }
  }
}

static void pack_x_rows(const KernelArgs* args, long long tile_begin, long long tile_end) {
  pack_x_tiles(args, kFewRows, tile_begin, tile_end);
}

// scratch: sums [row_count][kUnitBlocks][16].
static void compute_rows(const KernelArgs* args, long long unit_begin, long long unit_end,
                         float* scratch) {
  for (long long u = unit_begin; u < unit_end; ++u) {
    const Unit unit = unit_at(args, u);
    for (long long m = 0; m < args->row_count; m += kFewRows) {
      const float* x = args->x_tiles + m * args->K;
      float* sums = scratch + m * kUnitBlocks * kLanes;
      const long long left = args->row_count - m;
      if constexpr (kFewRows >= 4) {
        if (left >= 4) {
          unit_row_product<4>(args, &unit, x, sums);
          continue;
        }
        if (left == 3) {
          unit_row_product<3>(args, &unit, x, sums);
          continue;
        }
        if (left == 2) {
          unit_row_product<2>(args, &unit, x, sums);
          continue;
        }
      }
      unit_row_product<1>(args, &unit, x, sums);
    }
    finish_unit(args, &unit, scratch);
  }
}
