#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/random.h"
#include "qmlp/cpu.h"
#include "qmlp/ops.h"
#include "qmlp/plan.h"
#include "qmlp/quant.h"
#include "qmlp/tensor.h"
#include "ref/dot.h"
#include "ref/ops.h"

// What the kernel tests share: guarded buffers, random problems and runs of an op.
namespace qmlp::test {

// Bytes with guards on both sides. Under AddressSanitizer there are none: its own red zones start
// right at the data's end then.
class Guarded {
 public:
  // offset: bytes past a 256-byte boundary where the data starts.
  Guarded(std::size_t bytes, std::uint8_t guard, std::size_t offset = 0);
  ~Guarded();
  Guarded(Guarded&& other) noexcept;
  Guarded& operator=(Guarded&&) = delete;

  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  bool intact() const;  // both guards hold what they were filled with

 private:
  std::byte* block_;
  std::byte* data_;
  std::size_t size_;
  std::size_t total_;
  std::uint8_t guard_;
};

constexpr std::uint8_t kInputGuard = 0xFF;   // NaN in every float type, the largest code
constexpr std::uint8_t kOutputGuard = 0xA5;  // an unlikely result

// A matrix of `type` in a guarded buffer, `row_stride` elements from row to row.
class Matrix {
 public:
  Matrix(std::int64_t rows, std::int64_t cols, DType type, std::int64_t row_stride = 0,
         std::uint8_t guard = kInputGuard);
  void set(std::int64_t row, std::int64_t col, float value);
  float at(std::int64_t row, std::int64_t col) const;
  MatrixView view() const { return view(rows_); }
  MatrixView view(std::int64_t rows) const;
  MutableMatrixView out(std::int64_t rows);
  MutableMatrixView out() { return out(rows_); }
  void fill(std::uint8_t byte);
  // Guards and the gaps between rows still hold the fill.
  bool untouched_outside(std::int64_t rows, std::uint8_t filled) const;
  std::vector<float> values() const;  // contiguous

 private:
  std::int64_t rows_, cols_, row_stride_;
  DType type_;
  Guarded bytes_;
};

// What the scales, biases and codes of a random weight look like.
enum class WeightKind : std::uint8_t {
  quantized,  // of normal data, by the library's quantizer
  wild,       // any code; scales and biases over many magnitudes, with groups that round twice
  exact,      // small integers times powers of two
};
QuantizedTensor random_weight(std::int64_t N, std::int64_t K, const QuantSpec& spec,
                              WeightKind kind, Random& random);
// Moves a weight's arrays into guarded memory, with no spare byte at either end.
struct GuardedWeight {
  explicit GuardedWeight(const QuantizedTensor& source);
  QuantizedTensorView view() const;
  std::vector<Guarded> arrays;
  std::int64_t N, K;
  QuantSpec spec;
};

// x as models have it: normal, a few large channels, some zeros.
std::vector<float> random_x(std::int64_t M, std::int64_t K, DType type, Random& random);
Matrix matrix_of(const std::vector<float>& values, std::int64_t rows, std::int64_t cols, DType type,
                 std::int64_t row_stride = 0);

bool same_bits(float a, float b);  // NaN equals NaN; +0 differs from -0

ThreadPool& pool(int num_threads);

// Kernels of this build that this machine can run, and a note of the others once a process.
std::vector<KernelInfo> runnable_kernels(std::string_view op, DType type,
                                         Accumulation accumulation);
bool is_runnable(const KernelInfo& kernel);
std::string kernel_of(std::string_view op, DType type, Accumulation accumulation, Isa isa);

struct LinearCase {
  LinearProblem problem;
  std::string kernel;  // forced; empty: the library chooses
  int threads = 1;
};
struct SwigluCase {
  SwigluProblem problem;
  std::string kernel;
  int threads = 1;
};

// A plan with its packed weight and a workspace that every run fills with NaN first.
class Linear {
 public:
  Linear(const LinearCase& item, const QuantizedTensorView& weight);
  Status run(const MatrixView& x, const MutableMatrixView& out,
             const LinearEpilogue& epilogue = {});
  // x [M, K] to out [M, N]: into a guarded buffer, twice, with every check on what was written.
  std::vector<float> checked(const Matrix& x, std::int64_t M, const LinearEpilogue& epilogue = {});
  const Plan& plan() const { return *plan_; }
  const PackedWeight& weight() const { return *weight_; }
  PackedWeightPtr weight_ptr() const { return weight_; }

 private:
  LinearCase item_;
  std::unique_ptr<Plan> plan_;
  PackedWeightPtr weight_;
};

class Swiglu {
 public:
  Swiglu(const SwigluCase& item, const QuantizedTensorView& gate, const QuantizedTensorView& up);
  Status run(const MatrixView& x, const MutableMatrixView& out,
             const SwigluEpilogue& epilogue = {});
  std::vector<float> checked(const Matrix& x, std::int64_t M, const SwigluEpilogue& epilogue = {});
  const Plan& plan() const { return *plan_; }
  const PackedWeight& weight() const { return *weight_; }
  PackedWeightPtr weight_ptr() const { return weight_; }

 private:
  SwigluCase item_;
  std::unique_ptr<Plan> plan_;
  PackedWeightPtr weight_;
};

ref::Rules rules_of(DType type, std::optional<Accumulation> accumulation, int segments,
                    Precision precision = Precision::match);

// EXPECTs that `got` [M, N] equals the first M rows of `expected`, naming the first difference.
void expect_same(const std::vector<float>& got, const std::vector<float>& expected, std::int64_t M,
                 std::int64_t N, const std::string& what);

std::string describe(const LinearCase& item, std::int64_t M);
std::string describe(const SwigluCase& item, std::int64_t M);

}  // namespace qmlp::test
