// Every argument that an op must refuse: with a message that says what was found and what was
// needed, and with nothing written.
#include <gtest/gtest.h>

#include <string>

#include "kernels/fixture.h"

namespace qmlp::test {
namespace {

constexpr std::int64_t kM = 3;
constexpr std::int64_t kN = 24;
constexpr std::int64_t kK = 64;
constexpr DType kType = DType::bf16;
const QuantSpec kSpec{4, 32, DType::bf16};

void expect_refused(const Status& status, Errc code, std::initializer_list<const char*> parts) {
  ASSERT_FALSE(status) << "accepted";
  EXPECT_EQ(status.error().code, code) << status.error().message;
  for (const char* part : parts) {
    EXPECT_NE(status.error().message.find(part), std::string::npos)
        << "'" << status.error().message << "' lacks '" << part << "'";
  }
  EXPECT_EQ(status.error().message.find('\n'), std::string::npos);
}

// A linear and a SwiGLU call that are right, for tests to break one argument of.
class Refusals : public testing::Test {
 protected:
  Refusals()
      : random_(300),
        source_(random_weight(kN, kK, kSpec, WeightKind::quantized, random_)),
        linear_({{kM, kN, kK, kSpec, kType, {}, 0}, "", 2}, source_.view()),
        swiglu_({{kM, kK, kN, kSpec, kSpec, kType, Precision::match, {}, 0}, "", 2}, source_.view(),
                source_.view()),
        x_matrix_(matrix_of(random_x(kM, kK, kType, random_), kM, kK, kType)),
        out_matrix_(kM, kN, kType, 0, kOutputGuard),
        scratch_(
            std::max(linear_.plan().workspace_bytes(kM), swiglu_.plan().workspace_bytes(kM)) + 4096,
            kOutputGuard),
        x(x_matrix_.view()),
        out(out_matrix_.out()),
        workspace{{scratch_.data(), scratch_.size()}},
        stream(cpu_stream(pool(2))) {
    out_matrix_.fill(kOutputGuard);
  }
  ~Refusals() override { EXPECT_TRUE(out_matrix_.untouched_outside(0, kOutputGuard)); }

  Status linear() const {
    return quantized_linear(linear_.plan(), linear_.weight(), x, out, workspace, stream,
                            linear_epilogue);
  }
  Status swiglu() const {
    return fused_swiglu(swiglu_.plan(), swiglu_.weight(), x, out, workspace, stream,
                        swiglu_epilogue);
  }
  void expect_both(Errc code, std::initializer_list<const char*> parts) const {
    expect_refused(linear(), code, parts);
    expect_refused(swiglu(), code, parts);
  }

  Random random_;
  QuantizedTensor source_;
  Linear linear_;
  Swiglu swiglu_;
  Matrix x_matrix_;
  Matrix out_matrix_;
  Guarded scratch_;

 public:
  MatrixView x;
  MutableMatrixView out;
  Workspace workspace;
  Stream stream;
  LinearEpilogue linear_epilogue;
  SwigluEpilogue swiglu_epilogue;
};

TEST_F(Refusals, Shapes) {
  x.cols = kK - 1;
  expect_both(Errc::invalid_argument, {"x", "63", "64"});
  x.cols = kK;
  out.cols = kN + 1;
  expect_both(Errc::invalid_argument, {"out", "25", "24"});
  out.cols = kN;
  out.rows = kM - 1;
  expect_both(Errc::invalid_argument, {"out", "[2, 24]", "[3, 24]"});
  out.rows = kM;
  x.rows = out.rows = kM + 1;
  expect_both(Errc::invalid_argument, {"x", "4", "3"});
  x.rows = out.rows = -1;
  expect_both(Errc::invalid_argument, {"x", "-1"});
}

TEST_F(Refusals, Types) {
  x.dtype = DType::f16;
  expect_both(Errc::invalid_argument, {"x", "f16", "bf16"});
  x.dtype = kType;
  out.dtype = DType::f32;
  expect_both(Errc::invalid_argument, {"out", "f32", "bf16"});
}

TEST_F(Refusals, Strides) {
  x.row_stride = kK - 1;
  expect_both(Errc::invalid_argument, {"x", "stride", "63", "64"});
  x.row_stride = -kK;
  expect_both(Errc::invalid_argument, {"x", "stride", "-64"});
  x.row_stride = std::int64_t{1} << 61;
  expect_both(Errc::invalid_argument, {"x"});
  x.row_stride = kK;
  out.row_stride = 0;
  expect_both(Errc::invalid_argument, {"out", "stride", "0"});
}

TEST_F(Refusals, NullAndUnaligned) {
  const MatrixView good_x = x;
  const MutableMatrixView good_out = out;
  x.data = nullptr;
  expect_both(Errc::invalid_argument, {"x", "null"});
  x = good_x;
  x.data += 1;
  expect_both(Errc::invalid_argument, {"x", "2-byte"});
  x = good_x;
  out.data = nullptr;
  expect_both(Errc::invalid_argument, {"out", "null"});
  out = good_out;
  out.data += 1;
  expect_both(Errc::invalid_argument, {"out", "2-byte"});
  out = good_out;
  linear_epilogue.linear_bias = x_matrix_.view().data + 1;
  expect_refused(linear(), Errc::invalid_argument, {"linear_bias"});
  swiglu_epilogue.gate_bias = x_matrix_.view().data + 1;
  expect_refused(swiglu(), Errc::invalid_argument, {"gate_bias"});
  swiglu_epilogue.gate_bias = nullptr;
  swiglu_epilogue.up_bias = x_matrix_.view().data + 1;
  expect_refused(swiglu(), Errc::invalid_argument, {"up_bias"});
}

TEST_F(Refusals, Overlap) {
  // x's own rows as the output, whole or in part.
  out = {const_cast<std::byte*>(x.data), kM, kN, kK, kType, {}};
  expect_both(Errc::invalid_argument, {"out", "overlaps x"});
  out.data += (kM - 1) * kK * 2;
  out.row_stride = kN;
  expect_both(Errc::invalid_argument, {"out", "overlaps x"});
  out = out_matrix_.out();
  linear_epilogue.residual = {out.data + 2, kM, kN, kN, kType, {}};
  expect_refused(linear(), Errc::invalid_argument, {"out", "residual"});
  linear_epilogue = {};
  swiglu_epilogue.gate_tap = out;
  expect_refused(swiglu(), Errc::invalid_argument, {"gate_tap"});
  swiglu_epilogue.gate_tap = {const_cast<std::byte*>(x.data), kM, kN, kK, kType, {}};
  expect_refused(swiglu(), Errc::invalid_argument, {"gate_tap"});
  swiglu_epilogue = {};
  linear_epilogue.linear_bias = out.data;
  expect_refused(linear(), Errc::invalid_argument, {"out", "linear bias"});
  linear_epilogue = {};
  swiglu_epilogue.up_bias = out.data;
  expect_refused(swiglu(), Errc::invalid_argument, {"out", "linear bias"});
  swiglu_epilogue = {};
  // A later row of the tap, and a bias of which only the last value is in it.
  swiglu_epilogue.gate_tap = {scratch_.data() + 512, kM, kN, kN, kType, {}};
  swiglu_epilogue.gate_bias = scratch_.data() + 512 + (kM - 1) * kN * 2;
  expect_refused(swiglu(), Errc::invalid_argument, {"gate_tap", "linear bias"});
  swiglu_epilogue.gate_bias = nullptr;
  swiglu_epilogue.up_bias = scratch_.data() + 512 - (kN - 1) * 2;
  expect_refused(swiglu(), Errc::invalid_argument, {"gate_tap", "linear bias"});
  swiglu_epilogue = {};
  linear_epilogue.linear_bias = scratch_.data();
  expect_refused(linear(), Errc::invalid_argument, {"workspace", "overlaps"});
  linear_epilogue = {};
  out.data = scratch_.data() + 512;
  expect_both(Errc::invalid_argument, {"workspace", "overlaps"});
}

TEST_F(Refusals, Workspaces) {
  const std::size_t need = linear_.plan().workspace_bytes(kM);
  ASSERT_GT(need, 0u);
  workspace = {{scratch_.data(), need - 1}};
  expect_refused(linear(), Errc::invalid_argument,
                 {"workspace", std::to_string(need).c_str(), std::to_string(need - 1).c_str()});
  workspace = {{scratch_.data() + 64, need + 1024}};
  expect_refused(linear(), Errc::invalid_argument, {"workspace", "256"});
  workspace = {};
  expect_both(Errc::invalid_argument, {"workspace", "0"});
}

TEST_F(Refusals, Epilogues) {
  linear_epilogue.residual = {x.data, kM, kN + 1, kK, kType, {}};
  expect_refused(linear(), Errc::invalid_argument, {"residual", "25", "24"});
  linear_epilogue.residual = {x.data, kM, kN, kK, DType::f32, {}};
  expect_refused(linear(), Errc::invalid_argument, {"residual", "f32", "bf16"});
  Matrix tap(kM, kN, kType);
  swiglu_epilogue.gate_tap = tap.out();
  swiglu_epilogue.gate_tap.rows = 2;
  expect_refused(swiglu(), Errc::invalid_argument, {"gate_tap", "2", "3"});
}

TEST_F(Refusals, StreamsAndPlans) {
  stream.handle = nullptr;
  expect_both(Errc::invalid_argument, {"stream"});
  stream = cpu_stream(pool(2));
  stream.device.kind = DeviceKind::cuda;
  expect_both(Errc::invalid_argument, {"stream"});
  stream = cpu_stream(pool(2));
  stream.device.ordinal = 1;
  expect_both(Errc::invalid_argument, {"stream", "another device"});
  {
    DeviceFacts second = host_facts();
    second.ordinal = 1;
    const LinearProblem problem{kM, kN, kK, kSpec, kType, {}, 0};
    const auto plan = make_plan(problem, second);
    ASSERT_TRUE(plan);
    expect_refused(quantized_linear(*plan, linear_.weight(), x, out, workspace, stream),
                   Errc::invalid_argument, {"weight", "another device"});
    EXPECT_TRUE(pack(*plan, source_.view(), stream));
    expect_refused(decode_row(linear_.weight(), 0, Matrix(1, kK, kType).out(), stream),
                   Errc::invalid_argument, {"stream", "another device"});
  }
  stream = cpu_stream(pool(2));
  expect_refused(fused_swiglu(linear_.plan(), swiglu_.weight(), x, out, workspace, stream),
                 Errc::invalid_argument, {"plan"});
  expect_refused(quantized_linear(swiglu_.plan(), linear_.weight(), x, out, workspace, stream),
                 Errc::invalid_argument, {"plan"});
  expect_refused(quantized_linear(linear_.plan(), swiglu_.weight(), x, out, workspace, stream),
                 Errc::invalid_argument, {"weight"});
  // A weight packed for another problem, and one for other activations.
  const QuantSpec other_spec{8, 32, kType};
  const auto other = random_weight(kN, kK, other_spec, WeightKind::quantized, random_);
  Linear other_bits({{kM, kN, kK, other_spec, kType, {}, 0}, "", 1}, other.view());
  expect_refused(quantized_linear(linear_.plan(), other_bits.weight(), x, out, workspace, stream),
                 Errc::invalid_argument, {"weight", "8", "4"});
  Linear other_type({{kM, kN, kK, kSpec, DType::f16, {}, 0}, "", 1}, source_.view());
  expect_refused(quantized_linear(linear_.plan(), other_type.weight(), x, out, workspace, stream),
                 Errc::invalid_argument, {"weight"});
  // A plan of a machine that is not here.
  const auto facts = machine_facts("avx2");
  ASSERT_TRUE(facts);
  if (!facts->present) {
    const auto plan = make_plan(LinearProblem{kM, kN, kK, kSpec, kType, {}, 0}, *facts);
    ASSERT_TRUE(plan);
    expect_refused(quantized_linear(*plan, linear_.weight(), x, out, workspace, stream),
                   Errc::unsupported, {"not here"});
  }
}

TEST_F(Refusals, PackedSources) {
  const Stream good = cpu_stream(pool(2));
  const auto refused = [&](const QuantizedTensorView& view,
                           std::initializer_list<const char*> parts,
                           Errc code = Errc::invalid_argument) {
    const auto packed = pack(linear_.plan(), view, good);
    expect_refused(packed ? Status() : Status(packed.error()), code, parts);
  };
  QuantizedTensorView view = source_.view();
  view.codes = view.codes.first(view.codes.size() - 4);
  refused(view, {"codes", "764", "768"});
  view = source_.view();
  view.scales = view.scales.first(view.scales.size() - 2);
  refused(view, {"scales", "94", "96"});
  view = source_.view();
  view.biases = {};
  refused(view, {"biases", "0", "96"});
  view = source_.view();
  std::swap(view.N, view.K);  // [K, N], with as many bytes
  view.spec.group_size = 32;
  refused(view, {"24"});
  const auto narrow = random_weight(kN, kK, {4, 64, DType::bf16}, WeightKind::quantized, random_);
  refused(narrow.view(), {"64", "32"});
  const auto other_scales =
      random_weight(kN, kK, {4, 32, DType::f16}, WeightKind::quantized, random_);
  refused(other_scales.view(), {"f16", "bf16"});
  const auto more_rows = random_weight(kN + 1, kK, kSpec, WeightKind::quantized, random_);
  refused(more_rows.view(), {"25", "24"});
  const auto one = pack(swiglu_.plan(), source_.view(), good);
  expect_refused(one ? Status() : Status(one.error()), Errc::invalid_argument, {"1", "2"});
}

TEST_F(Refusals, DecodeRow) {
  Matrix row(1, kK, kType);
  expect_refused(decode_row(linear_.weight(), kN, row.out()), Errc::invalid_argument,
                 {"row", "24"});
  expect_refused(decode_row(linear_.weight(), -1, row.out()), Errc::invalid_argument,
                 {"row", "-1"});
  expect_refused(decode_row(swiglu_.weight(), 0, row.out()), Errc::invalid_argument, {"part"});
  MutableMatrixView wrong = row.out();
  wrong.cols = 32;
  expect_refused(decode_row(linear_.weight(), 0, wrong), Errc::invalid_argument, {"32", "64"});
  const Stream other{{DeviceKind::cuda, 0}, stream.handle};
  expect_refused(decode_row(linear_.weight(), 0, row.out(), other), Errc::invalid_argument,
                 {"stream", "another device"});
}

TEST_F(Refusals, ActivationArguments) {
  Matrix a(kM, kN, kType);
  Matrix b(kM, kN, kType);
  MatrixView gate = a.view();
  gate.dtype = DType::f16;
  expect_refused(swiglu_activation(gate, b.view(), out, stream), Errc::invalid_argument,
                 {"gate", "f16"});
  gate = a.view();
  gate.cols = kN - 1;
  expect_refused(swiglu_activation(gate, b.view(), out, stream), Errc::invalid_argument,
                 {"gate", "23", "24"});
  MutableMatrixView shifted = a.out(kM - 1);
  shifted.data += 2;
  expect_refused(swiglu_activation(a.view(kM - 1), b.view(kM - 1), shifted, stream),
                 Errc::invalid_argument, {"out", "overlaps"});
  expect_refused(swiglu_activation(a.view(), b.view(), out, {}), Errc::invalid_argument,
                 {"stream", "no handle"});
  const Stream metal{{DeviceKind::metal, 0}, stream.handle};
  expect_refused(swiglu_activation(a.view(), b.view(), out, metal), Errc::invalid_argument,
                 {"stream", "without kernels"});
}

TEST_F(Refusals, FusedMlpChecksItsOwnWorkspaceAndRows) {
  const QuantSpec down_spec{4, 32, kType};
  // K of down must be gate's N: 24 is no multiple of a group, so use a dense down projection.
  const auto down = random_weight(kK, kN, QuantSpec::dense(kType), WeightKind::quantized, random_);
  Linear linear({{kM, kK, kN, QuantSpec::dense(kType), kType, {}, 0}, "", 2}, down.view());
  Matrix y(kM, kK, kType);
  const std::size_t need = mlp_workspace_bytes(swiglu_.plan(), linear.plan(), kM);
  Guarded scratch(need, kOutputGuard);
  const auto call = [&](const MatrixView& in, const MutableMatrixView& result, std::size_t bytes) {
    return fused_mlp(swiglu_.plan(), swiglu_.weight(), linear.plan(), linear.weight(), in, result,
                     Workspace{{scratch.data(), bytes}}, stream);
  };
  EXPECT_TRUE(call(x, y.out(), need));
  expect_refused(call(x, y.out(), need - 1), Errc::invalid_argument, {"workspace"});
  MatrixView tall = x;
  tall.rows = kM + 1;
  expect_refused(call(tall, y.out(), need), Errc::invalid_argument, {"x", "4"});
  MutableMatrixView narrow = y.out();
  narrow.cols = kK - 1;
  expect_refused(call(x, narrow, need), Errc::invalid_argument, {"out", "63", "64"});
  // down's problem must take the intermediate width.
  const auto wrong_down = random_weight(kK, kK, down_spec, WeightKind::quantized, random_);
  Linear wrong({{kM, kK, kK, down_spec, kType, {}, 0}, "", 2}, wrong_down.view());
  Guarded room(mlp_workspace_bytes(swiglu_.plan(), wrong.plan(), kM), kOutputGuard);
  expect_refused(fused_mlp(swiglu_.plan(), swiglu_.weight(), wrong.plan(), wrong.weight(), x,
                           y.out(), Workspace{{room.data(), room.size()}}, stream),
                 Errc::invalid_argument, {"24", "64"});
}

}  // namespace
}  // namespace qmlp::test
