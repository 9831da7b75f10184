#pragma once

#include <cstdint>

#include "cpu/kernels/model_args.h"
#include "qmlp/cpu.h"

namespace qmlp {

// Floats of scratch that one thread of `attend` needs.
std::int64_t attention_scratch_floats(std::int64_t score_stride, std::int64_t head_dim,
                                      std::int64_t v_row_stride) noexcept;

// Attention of M query rows on the pool's threads, or on the caller's alone where that is quicker.
// Fills args.score_stride floats a row of `scratch`, attention_scratch_floats for each thread.
void attend(const cpu::ModelKernels& kernels, const cpu::AttentionArgs& args,
            std::int64_t num_kv_heads, std::int64_t M, float* scratch, ThreadPool& pool) noexcept;

}  // namespace qmlp
