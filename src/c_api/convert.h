#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <string>
#include <type_traits>

#include "c_api/handles.h"
#include "qmlp/cuda.h"
#include "qmlp/qmlp.h"

// C values into C++ ones, each checked: a C caller can hand in any integer as an enumerator.
namespace qmlp::c_api {

// A struct that starts with struct_size, from a caller that may be older or newer than this
// library. Fields that an older caller lacks keep their defaults; a newer caller's extra fields
// must be zero.
template <class T>
Result<T> read_versioned(const char* name, const T* from, const T& defaults,
                         std::size_t first_size) {
  static_assert(std::is_trivially_copyable_v<T>);
  T value = defaults;
  if (from == nullptr) return value;
  const std::size_t size = from->struct_size;
  if (size < first_size || size > 4096) {
    return Error{Errc::invalid_argument, std::string(name) + ": struct_size is " +
                                             std::to_string(size) + ", needs sizeof(" + name +
                                             "): start from its QMLP_..._INIT"};
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(from);
  for (std::size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] != 0) {
      return Error{Errc::unsupported, std::string(name) +
                                          ": sets a field that this version of the library does "
                                          "not have; needs zero past byte " +
                                          std::to_string(sizeof(T))};
    }
  }
  std::memcpy(&value, from, std::min(size, sizeof(T)));
  value.struct_size = sizeof(T);
  return value;
}

Result<DType> to_dtype(const char* name, qmlp_dtype dtype);
Result<Precision> to_precision(qmlp_precision precision);
Result<std::optional<Accumulation>> to_accumulation(qmlp_accumulation accumulation);
Result<QuantSpec> to_spec(const char* name, const qmlp_quant_spec& spec);
Result<QuantizedTensorView> to_view(const char* name, const qmlp_tensor& tensor);
Result<MatrixView> to_view(const char* name, const qmlp_matrix& matrix, Device device);
Result<MutableMatrixView> to_view(const char* name, const qmlp_mutable_matrix& matrix,
                                  Device device);
// Facts of a device by its name; force_isa may lower the host's instruction set.
Result<DeviceFacts> to_facts(const char* device, const char* force_isa);
Result<LinearProblem> to_problem(const qmlp_linear_problem* problem);
Result<SwigluProblem> to_problem(const qmlp_swiglu_problem* problem);
// The C stream's C++ twin. A CUDA handle is wrapped in `storage`, which must outlive the call.
Result<Stream> to_stream(const qmlp_stream* stream, CudaStream& storage);

}  // namespace qmlp::c_api
