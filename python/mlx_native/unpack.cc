#include <cstring>

#include "primitive.h"

namespace qmlp_mlx {
namespace {

class Unpack : public CpuPrimitive {
 public:
  Unpack(mx::Stream stream, PackedWeightPtr weight, bool by_ids)
      : CpuPrimitive(stream), weight_(std::move(weight)), by_ids_(by_ids) {}

  const char* name() const override { return "QmlpUnpack"; }

  void eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
    for (array& out : outputs) allocate(out);
    if (outputs[0].size() == 0) return;
    const bool dense = weight_->is_dense();
    char* data[3] = {};
    std::size_t row[3] = {};  // bytes
    const std::size_t rows = by_ids_ ? inputs[0].size() : static_cast<std::size_t>(weight_->N());
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      data[i] = outputs[i].data<char>();
      row[i] = outputs[i].nbytes() / rows;
    }
    const std::int32_t* ids = by_ids_ ? inputs[0].data<std::int32_t>() : nullptr;
    mx::cpu::get_command_encoder(stream()).dispatch([weight = weight_, dense, ids, rows,
                                                     d0 = data[0], d1 = data[1], d2 = data[2],
                                                     r0 = row[0], r1 = row[1]] {
      const std::int64_t N = weight->N();
      if (ids == nullptr) {
        weight->unpack_rows(0, N, d0, dense ? nullptr : d1, dense ? nullptr : d2);
        return;
      }
      for (std::size_t i = 0; i < rows; ++i) {
        std::int64_t id = ids[i] < 0 ? ids[i] + N : ids[i];
        // Past the end, MLX reads whatever is there; zeros are kinder.
        if (id < 0 || id >= N) {
          std::memset(d0 + i * r0, 0, r0);
          if (!dense) std::memset(d1 + i * r1, 0, r1);
          if (!dense) std::memset(d2 + i * r1, 0, r1);
          continue;
        }
        weight->unpack_rows(id, 1, d0 + i * r0, dense ? nullptr : d1 + i * r1,
                            dense ? nullptr : d2 + i * r1);
      }
    });
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
  PackedWeightPtr weight_;
  bool by_ids_;
};

}  // namespace

std::vector<array> unpack(const PackedWeightPtr& weight, const OptionalArray& ids,
                          StreamOrDevice where) {
  const mx::Stream s = mx::to_stream(where);
  check_parts("unpack", weight, 1);
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
