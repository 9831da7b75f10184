#include "cpu/kernels/simd_portable.h"

#include <stddef.h>

#include "cpu/kernels/kernel_args.h"

namespace qmlp::cpu {
namespace {

#include "cpu/kernels/math_inl.h"
//
#include "cpu/kernels/element_inl.h"
//
#include "cpu/kernels/swiglu_inl.h"
//
#include "cpu/kernels/decode_inl.h"
//
#include "cpu/kernels/matmul_inl.h"
//
#include "cpu/kernels/tensor_inl.h"

const IsaFunctions kFunctions = {
    {kTileRows, pack_x_f32, compute_f32},
    {0, nullptr, nullptr},
    {1, pack_x_tensor, compute_tensor},
    swiglu_elements,
};

}  // namespace

const IsaFunctions* functions_portable() { return &kFunctions; }

}  // namespace qmlp::cpu
