#include <cstring>

#include "primitive.h"

namespace qmlp_mlx {
namespace {

class Unpack : public mx::Primitive {
 public:
  Unpack(mx::Stream stream, PackedWeightPtr weight, bool by_ids)
      : mx::Primitive(stream), weight_(std::move(weight)), by_ids_(by_ids) {}

  const char* name() const override { return "QmlpUnpack"; }

  void eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
    for (array& out : outputs) allocate(out);
    if (outputs[0].size() == 0) return;
    const Rows rows = rows_of(outputs, inputs, [](array& a) { return a.data<char>(); });
    const std::int32_t* ids = by_ids_ ? inputs[0].data<std::int32_t>() : nullptr;
    mx::cpu::get_command_encoder(stream()).dispatch(
        [weight = weight_, rows, ids] { unpack_into(*weight, rows, ids); });
  }

  // At once, with the stream waited for: the packed form is read by no kernel of MLX's graph.
  void eval_gpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
    const std::vector<array> kept = weight_->kept_arrays();
    if (!by_ids_ && !kept.empty()) {
      for (std::size_t i = 0; i < outputs.size(); ++i) outputs[i].copy_shared_buffer(kept[i]);
      return;
    }
    // Rows that ids name, and those of a weight on the CPU, are put together on the host; both
    // sides see that memory.
    const bool on_host = by_ids_ || weight_->place() != mx::Device::gpu;
    for (array& out : outputs) on_host ? allocate(out) : gpu::allocate(out);
    if (outputs[0].size() == 0) return;
    gpu::synchronize(stream());
    if (!on_host) {
      const Rows rows = rows_of(outputs, inputs, [](array& a) { return gpu::pointer(a); });
      unpack_into(*weight_, rows, nullptr);
      return;
    }
    const Rows rows = rows_of(outputs, inputs, [](array& a) { return a.data<char>(); });
    unpack_into(*weight_, rows, by_ids_ ? inputs[0].data<std::int32_t>() : nullptr);
  }

  std::vector<mx::Shape> output_shapes(const std::vector<array>& inputs) override {
    mx::Shape lead =
        by_ids_ ? inputs[0].shape() : mx::Shape{static_cast<mx::ShapeElem>(weight_->N())};
    return shapes(lead);
  }
  std::vector<mx::Shape> shapes(mx::Shape lead) const {
    const qmlp_quant_spec& spec = weight_->spec();
    lead.push_back(0);
    if (weight_->is_dense()) return {with_last(lead, weight_->K())};
    const mx::Shape groups = with_last(lead, weight_->K() / spec.group_size);
    return {with_last(lead, weight_->K() * spec.bits / 32), groups, groups};
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& o = static_cast<const Unpack&>(other);
    return weight_ == o.weight_ && by_ids_ == o.by_ids_;
  }

  std::vector<array> vjp(const std::vector<array>& primals, const std::vector<array>&,
                         const std::vector<int>& argnums, const std::vector<array>&) override {
    std::vector<array> zeros;  // ids have no gradient
    for (const int arg : argnums) {
      zeros.push_back(mx::zeros_like(primals[static_cast<std::size_t>(arg)], stream()));
    }
    return zeros;
  }

  std::pair<std::vector<array>, std::vector<int>> vmap(const std::vector<array>& inputs,
                                                       const std::vector<int>& axes) override {
    const std::vector<array> out =
        unpack(weight_, batch_first(inputs[0], axes[0], stream()), stream());
    return {out, std::vector<int>(out.size(), 0)};
  }

 private:
  struct Rows {
    char* data[3];
    std::size_t bytes[3];  // of one row
    std::size_t count;
    bool dense;
  };
  template <class Address>
  Rows rows_of(std::vector<array>& outputs, const std::vector<array>& inputs,
               Address address) const {
    Rows rows = {};
    rows.count = by_ids_ ? inputs[0].size() : static_cast<std::size_t>(weight_->N());
    rows.dense = weight_->is_dense();
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      rows.data[i] = static_cast<char*>(address(outputs[i]));
      rows.bytes[i] = outputs[i].nbytes() / rows.count;
    }
    return rows;
  }
  static void unpack_into(const PackedWeight& weight, const Rows& rows, const std::int32_t* ids) {
    const std::int64_t N = weight.N();
    if (ids == nullptr) {
      weight.unpack_rows(0, N, rows.data[0], rows.data[1], rows.data[2]);
      return;
    }
    for (std::size_t i = 0; i < rows.count; ++i) {
      const std::int64_t id = ids[i] < 0 ? ids[i] + N : ids[i];
      char* to[3] = {};
      for (int j = 0; j < (rows.dense ? 1 : 3); ++j) to[j] = rows.data[j] + i * rows.bytes[j];
      if (id >= 0 && id < N) {
        weight.unpack_rows(id, 1, to[0], to[1], to[2]);
        continue;
      }
      // Past the end, MLX reads whatever is there; zeros are kinder.
      for (int j = 0; j < (rows.dense ? 1 : 3); ++j) std::memset(to[j], 0, rows.bytes[j]);
    }
  }

  PackedWeightPtr weight_;
  bool by_ids_;
};

}  // namespace

std::vector<array> unpack(const PackedWeightPtr& weight, const OptionalArray& ids,
                          StreamOrDevice where) {
  const mx::Stream s = stream_for("unpack", where);
  check_parts("unpack", "weight", weight, 1);
  std::vector<array> inputs;
  if (ids) {
    if (!mx::issubdtype(ids->dtype(), mx::integer)) {
      refuse("unpack: ids are " + name_of(ids->dtype()) + ", need integers");
    }
    inputs.push_back(mx::contiguous(mx::astype(*ids, mx::int32, s), false, s));
  }
  auto primitive = std::make_shared<Unpack>(s, weight, ids.has_value());
  const std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
  const mx::Dtype scale = mlx_dtype(weight->spec().scale_dtype);
  std::vector<mx::Dtype> types = {weight->is_dense() ? scale : mx::uint32};
  if (!weight->is_dense()) types.insert(types.end(), {scale, scale});
  return array::make_arrays(shapes, types, primitive, inputs);
}

}  // namespace qmlp_mlx
