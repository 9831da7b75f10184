#include "kernels/fixture.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <set>
#include <utility>

#include "ref/rounding.h"
#include "ref/weight.h"

namespace qmlp::test {
namespace {

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define QMLP_TEST_ADDRESS_SANITIZER
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define QMLP_TEST_ADDRESS_SANITIZER
#endif
#if defined(QMLP_TEST_ADDRESS_SANITIZER)
constexpr std::size_t kGuardBytes = 0;
#else
constexpr std::size_t kGuardBytes = 4096;
#endif
constexpr std::size_t kAlignment = 256;

void put(std::byte* data, DType type, std::int64_t index, float value) {
  if (type == DType::f32) {
    std::memcpy(data + 4 * index, &value, 4);
    return;
  }
  const std::uint16_t bits = ref::to_bits16(ref::round_to_type(value, type), type);
  std::memcpy(data + 2 * index, &bits, 2);
}

std::size_t matrix_bytes(std::int64_t rows, std::int64_t cols, DType type, std::int64_t stride) {
  const std::int64_t elements = rows == 0 ? 0 : (rows - 1) * stride + cols;
  return static_cast<std::size_t>(elements) * size_of(type);
}

// Bytes that read as NaN in every type, and as an awful index.
class NanWorkspace {
 public:
  explicit NanWorkspace(std::size_t bytes) : bytes_(bytes, kOutputGuard) {
    std::memset(bytes_.data(), 0xFF, bytes);
  }
  Workspace get() { return {{bytes_.data(), bytes_.size()}}; }
  bool intact() const { return bytes_.intact(); }

 private:
  Guarded bytes_;
};

template <class Op, class Epilogue>
std::vector<float> run_checked(Op& op, const Matrix& x, std::int64_t M, std::int64_t N, DType type,
                               const Epilogue& epilogue) {
  // An odd stride leaves a gap after every row.
  Matrix out(M, N, type, N + 3, kOutputGuard);
  std::vector<float> first;
  for (int pass = 0; pass < 2; ++pass) {
    out.fill(kOutputGuard);
    const Status status = op.run(x.view(M), out.out(), epilogue);
    EXPECT_TRUE(status) << status.error().message;
    if (!status) return {};
    EXPECT_TRUE(out.untouched_outside(M, kOutputGuard));
    if (pass == 0) first = out.values();
  }
  const std::vector<float> second = out.values();
  for (std::size_t i = 0; i < first.size(); ++i) {
    if (same_bits(first[i], second[i])) continue;
    ADD_FAILURE() << "a second call differs at " << i << ": " << first[i] << ", " << second[i];
    break;
  }
  return first;
}

}  // namespace

Guarded::Guarded(std::size_t bytes, std::uint8_t guard, std::size_t offset)
    : size_(bytes), total_(kGuardBytes + offset + bytes + kGuardBytes), guard_(guard) {
  block_ = static_cast<std::byte*>(::operator new(total_, std::align_val_t(kAlignment)));
  data_ = block_ + kGuardBytes + offset;
  std::memset(block_, guard, total_);
}
Guarded::Guarded(Guarded&& other) noexcept
    : block_(std::exchange(other.block_, nullptr)),
      data_(other.data_),
      size_(other.size_),
      total_(other.total_),
      guard_(other.guard_) {}
Guarded::~Guarded() {
  if (block_ != nullptr) ::operator delete(block_, std::align_val_t(kAlignment));
}
bool Guarded::intact() const {
  for (const std::byte* at = block_; at != block_ + total_; ++at) {
    if (at == data_) at += size_;
    if (at == block_ + total_) break;
    if (*at != std::byte{guard_}) return false;
  }
  return true;
}

Matrix::Matrix(std::int64_t rows, std::int64_t cols, DType type, std::int64_t row_stride,
               std::uint8_t guard)
    : rows_(rows),
      cols_(cols),
      row_stride_(row_stride != 0 ? row_stride : cols),
      type_(type),
      bytes_(matrix_bytes(rows, cols, type, row_stride_), guard) {
  fill(guard);
}
void Matrix::set(std::int64_t row, std::int64_t col, float value) {
  put(bytes_.data(), type_, row * row_stride_ + col, value);
}
float Matrix::at(std::int64_t row, std::int64_t col) const {
  return ref::element(bytes_.data(), type_, row * row_stride_ + col);
}
MatrixView Matrix::view(std::int64_t rows) const {
  return {bytes_.data(), rows, cols_, row_stride_, type_, {}};
}
MutableMatrixView Matrix::out(std::int64_t rows) {
  return {bytes_.data(), rows, cols_, row_stride_, type_, {}};
}
void Matrix::fill(std::uint8_t byte) {
  if (bytes_.size() != 0) std::memset(bytes_.data(), byte, bytes_.size());
}
bool Matrix::untouched_outside(std::int64_t rows, std::uint8_t filled) const {
  if (!bytes_.intact()) return false;
  const auto element = static_cast<std::int64_t>(size_of(type_));
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(bytes_.size()); ++i) {
    const std::int64_t index = i / element;
    if (index / row_stride_ < rows && index % row_stride_ < cols_) continue;
    if (bytes_.data()[i] != std::byte{filled}) return false;
  }
  return true;
}
std::vector<float> Matrix::values() const {
  std::vector<float> out;
  out.reserve(static_cast<std::size_t>(rows_ * cols_));
  for (std::int64_t r = 0; r < rows_; ++r) {
    for (std::int64_t c = 0; c < cols_; ++c) out.push_back(at(r, c));
  }
  return out;
}

QuantizedTensor random_weight(std::int64_t N, std::int64_t K, const QuantSpec& spec,
                              WeightKind kind, Random& random) {
  if (spec.is_dense()) {
    QuantizedTensor weight;
    weight.N = N;
    weight.K = K;
    weight.spec = spec;
    weight.codes.resize(static_cast<std::size_t>(N * K) * size_of(spec.scale_dtype));
    for (std::int64_t i = 0; i < N * K; ++i) {
      put(weight.codes.data(), spec.scale_dtype, i, static_cast<float>(random.normal() * 0.05));
    }
    return weight;
  }
  if (kind == WeightKind::quantized) {
    std::vector<float> values(static_cast<std::size_t>(N * K));
    for (std::int64_t n = 0; n < N; ++n) {
      const double size = 0.02 * std::exp(0.5 * random.normal());
      for (std::int64_t k = 0; k < K; ++k) {
        values[static_cast<std::size_t>(n * K + k)] = static_cast<float>(random.normal() * size);
      }
    }
    auto weight = quantize(values, N, K, spec);
    EXPECT_TRUE(weight);
    return *std::move(weight);
  }
  QuantizedTensor weight;
  weight.N = N;
  weight.K = K;
  weight.spec = spec;
  weight.codes.resize(static_cast<std::size_t>(N * K / 8 * spec.bits));
  for (std::byte& byte : weight.codes) byte = static_cast<std::byte>(random.bits());
  const std::int64_t pairs = N * K / spec.group_size;
  const auto bytes = static_cast<std::size_t>(pairs) * size_of(spec.scale_dtype);
  weight.scales.resize(bytes);
  weight.biases.resize(bytes);
  for (std::int64_t i = 0; i < pairs; ++i) {
    float scale = 0.0f;
    float bias = 0.0f;
    if (kind == WeightKind::exact) {
      scale = static_cast<float>(1 + random.below(3)) * 0.25f;
      bias = static_cast<float>(random.below(7) - 3) * 0.5f;
    } else {
      const double sign = random.below(2) == 0 ? 1.0 : -1.0;
      scale = static_cast<float>(sign * std::exp2(random.uniform(-14.0, 1.0)));
      switch (random.below(5)) {
        case 0:  // cancels some code
          bias = -scale * static_cast<float>(random.below(1 << spec.bits));
          break;
        case 1:  // far larger than the scale: f32 first would round twice
          bias = static_cast<float>(std::exp2(random.uniform(-2.0, 2.0)));
          break;
        case 2:
          bias = 0.0f;
          break;
        case 3:  // far smaller
          bias = scale * static_cast<float>(std::exp2(random.uniform(-16.0, -8.0)));
          break;
        default:
          bias = static_cast<float>(random.normal());
          break;
      }
    }
    put(weight.scales.data(), spec.scale_dtype, i, scale);
    put(weight.biases.data(), spec.scale_dtype, i, bias);
  }
  return weight;
}

GuardedWeight::GuardedWeight(const QuantizedTensor& source)
    : N(source.N), K(source.K), spec(source.spec) {
  for (const auto* bytes : {&source.codes, &source.scales, &source.biases}) {
    arrays.emplace_back(bytes->size(), kInputGuard, 0);
    if (!bytes->empty()) std::memcpy(arrays.back().data(), bytes->data(), bytes->size());
  }
}
QuantizedTensorView GuardedWeight::view() const {
  const auto span = [](const Guarded& bytes) {
    return std::span<const std::byte>(bytes.data(), bytes.size());
  };
  return {span(arrays[0]), span(arrays[1]), span(arrays[2]), N, K, spec};
}

std::vector<float> random_x(std::int64_t M, std::int64_t K, DType type, Random& random) {
  std::vector<float> x(static_cast<std::size_t>(M * K));
  const std::int64_t outlier = random.below(K);
  for (std::int64_t i = 0; i < M * K; ++i) {
    double value = random.normal();
    if (i % K == outlier) value *= 30.0;
    if (random.below(50) == 0) value = 0.0;
    x[static_cast<std::size_t>(i)] = ref::round_to_type(static_cast<float>(value), type);
  }
  return x;
}

Matrix matrix_of(const std::vector<float>& values, std::int64_t rows, std::int64_t cols, DType type,
                 std::int64_t row_stride) {
  Matrix matrix(rows, cols, type, row_stride);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      matrix.set(r, c, values[static_cast<std::size_t>(r * cols + c)]);
    }
  }
  return matrix;
}

bool same_bits(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

ThreadPool& pool(int num_threads) {
  static std::unique_ptr<ThreadPool> pools[9];
  auto& slot = pools[num_threads];
  if (slot == nullptr) {
    auto created = ThreadPool::create(num_threads);
    if (!created) {
      std::fprintf(stderr, "%s\n", created.error().message.c_str());
      std::abort();
    }
    slot = *std::move(created);
  }
  return *slot;
}

bool is_runnable(const KernelInfo& kernel) {
  if (kernel.device != DeviceKind::cpu || !kernel.compiled) return false;
  const Isa have = host_facts().isa;
  if (kernel.isa == Isa::portable || kernel.isa == have) return true;
  return kernel.isa == Isa::avx2 && have == Isa::avx512;
}

std::vector<KernelInfo> runnable_kernels(std::string_view op, DType type,
                                         Accumulation accumulation) {
  static std::set<Isa> noted;
  std::vector<KernelInfo> found;
  const std::string prefix = std::string(op) + "_" + to_string(type) + "_";
  for (const KernelInfo& kernel : kernel_table()) {
    if (kernel.device != DeviceKind::cpu || kernel.accumulation != accumulation) continue;
    if (!kernel.name.starts_with(prefix)) continue;
    if (is_runnable(kernel)) {
      found.push_back(kernel);
    } else if (noted.insert(kernel.isa).second) {
      std::printf("skipped: no %s\n", to_string(kernel.isa));
    }
  }
  return found;
}

std::string kernel_of(std::string_view op, DType type, Accumulation accumulation, Isa isa) {
  for (const KernelInfo& kernel : runnable_kernels(op, type, accumulation)) {
    if (kernel.isa == isa) return std::string(kernel.name);
  }
  return {};
}

namespace {

template <class Problem>
std::unique_ptr<Plan> plan_of(const Problem& problem, const std::string& kernel, int threads) {
  DeviceFacts device = host_facts();
  device.num_threads = threads;
  auto plan = make_plan(problem, device, {kernel});
  EXPECT_TRUE(plan) << plan.error().message;
  if (!plan) return nullptr;
  if (!kernel.empty()) {
    EXPECT_EQ(plan->kernel_name(problem.M_max), kernel);
  }
  return std::make_unique<Plan>(*std::move(plan));
}

}  // namespace

Linear::Linear(const LinearCase& item, const QuantizedTensorView& weight) : item_(item) {
  plan_ = plan_of(item.problem, item.kernel, item.threads);
  if (plan_ == nullptr) return;
  auto packed = pack(*plan_, weight, cpu_stream(pool(item.threads)));
  EXPECT_TRUE(packed) << packed.error().message;
  if (packed) weight_ = *std::move(packed);
}

Status Linear::run(const MatrixView& x, const MutableMatrixView& out,
                   const LinearEpilogue& epilogue) {
  if (weight_ == nullptr) return Error{Errc::internal, "no plan or weight"};
  NanWorkspace workspace(plan_->workspace_bytes(x.rows));
  const Status status = quantized_linear(*plan_, *weight_, x, out, workspace.get(),
                                         cpu_stream(pool(item_.threads)), epilogue);
  EXPECT_TRUE(workspace.intact()) << "the workspace's guards";
  return status;
}

std::vector<float> Linear::checked(const Matrix& x, std::int64_t M,
                                   const LinearEpilogue& epilogue) {
  SCOPED_TRACE(describe(item_, M));
  return run_checked(*this, x, M, item_.problem.N, item_.problem.activation, epilogue);
}

Swiglu::Swiglu(const SwigluCase& item, const QuantizedTensorView& gate,
               const QuantizedTensorView& up)
    : item_(item) {
  plan_ = plan_of(item.problem, item.kernel, item.threads);
  if (plan_ == nullptr) return;
  auto packed = pack(*plan_, gate, up, cpu_stream(pool(item.threads)));
  EXPECT_TRUE(packed) << packed.error().message;
  if (packed) weight_ = *std::move(packed);
}

Status Swiglu::run(const MatrixView& x, const MutableMatrixView& out,
                   const SwigluEpilogue& epilogue) {
  if (weight_ == nullptr) return Error{Errc::internal, "no plan or weight"};
  NanWorkspace workspace(plan_->workspace_bytes(x.rows));
  const Status status = fused_swiglu(*plan_, *weight_, x, out, workspace.get(),
                                     cpu_stream(pool(item_.threads)), epilogue);
  EXPECT_TRUE(workspace.intact()) << "the workspace's guards";
  return status;
}

std::vector<float> Swiglu::checked(const Matrix& x, std::int64_t M,
                                   const SwigluEpilogue& epilogue) {
  SCOPED_TRACE(describe(item_, M));
  return run_checked(*this, x, M, item_.problem.intermediate, item_.problem.activation, epilogue);
}

ref::Rules rules_of(DType type, std::optional<Accumulation> accumulation, int segments,
                    Precision precision) {
  ref::Rules rules;
  rules.type = type;
  rules.contract = {accumulation.value_or(Accumulation::f32), segments == 0 ? 1 : segments};
  rules.precision = precision;
  return rules;
}

void expect_same(const std::vector<float>& got, const std::vector<float>& expected, std::int64_t M,
                 std::int64_t N, const std::string& what) {
  ASSERT_EQ(got.size(), static_cast<std::size_t>(M * N)) << what;
  ASSERT_GE(expected.size(), got.size()) << what;
  std::int64_t different = 0;
  std::string first;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (same_bits(got[i], expected[i])) continue;
    if (different++ == 0) {
      char text[128];
      std::snprintf(text, sizeof(text), "row %lld column %lld is %a, must be %a",
                    static_cast<long long>(static_cast<std::int64_t>(i) / N),
                    static_cast<long long>(static_cast<std::int64_t>(i) % N),
                    static_cast<double>(got[i]), static_cast<double>(expected[i]));
      first = text;
    }
  }
  EXPECT_EQ(different, 0) << what << ": " << first;
}

namespace {

std::string spec_name(const QuantSpec& spec) {
  return std::to_string(spec.bits) + "/" + std::to_string(spec.group_size) + "/" +
         to_string(spec.scale_dtype);
}

}  // namespace

std::string describe(const LinearCase& item, std::int64_t M) {
  const LinearProblem& p = item.problem;
  return item.kernel + " M " + std::to_string(M) + " N " + std::to_string(p.N) + " K " +
         std::to_string(p.K) + " " + to_string(p.activation) + " weight " + spec_name(p.weight) +
         " segments " + std::to_string(p.segments) + " threads " + std::to_string(item.threads);
}

std::string describe(const SwigluCase& item, std::int64_t M) {
  const SwigluProblem& p = item.problem;
  return item.kernel + " M " + std::to_string(M) + " I " + std::to_string(p.intermediate) + " H " +
         std::to_string(p.hidden) + " " + to_string(p.activation) + " gate " + spec_name(p.gate) +
         " up " + spec_name(p.up) + " " + to_string(p.precision) + " segments " +
         std::to_string(p.segments) + " threads " + std::to_string(item.threads);
}

}  // namespace qmlp::test
