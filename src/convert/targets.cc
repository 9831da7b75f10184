#include <algorithm>
#include <string>

#include "base/concat.h"
#include "convert/patterns.h"
#include "convert/writer.h"

namespace qmlp {
namespace {

// MLX's default for weights that had no group before.
constexpr int kDefaultGroup = 64;

MatrixTarget choose_target(const SourceMatrix& matrix, const ConvertOptions& options,
                           std::vector<bool>& pattern_used, std::vector<std::string>& notes) {
  MatrixTarget target;
  target.source = &matrix;
  target.spec = matrix.spec;
  target.keep = !matrix.decode;
  if (!matrix.spec.is_dense() && options.scale_dtype) {
    target.spec.scale_dtype = *options.scale_dtype;
  }
  const QuantPattern* chosen = nullptr;
  for (std::size_t i = 0; i < options.patterns.size(); ++i) {
    if (!matches(options.patterns[i], matrix.path)) continue;
    pattern_used[i] = true;
    chosen = &options.patterns[i];
  }
  if (chosen == nullptr) return target;
  QuantSpec wanted;
  wanted.bits = chosen->bits;
  const int own_group = matrix.spec.is_dense() ? kDefaultGroup : matrix.spec.group_size;
  wanted.group_size =
      chosen->group_size != 0 ? chosen->group_size : options.group_size.value_or(own_group);
  wanted.scale_dtype = options.scale_dtype.value_or(matrix.spec.scale_dtype);
  if (matrix.K % wanted.group_size != 0) {
    notes.push_back(concat(matrix.path, ": K ", matrix.K, " is no multiple of group ",
                           wanted.group_size, ", it stays ",
                           matrix.spec.is_dense() ? std::string(to_string(matrix.spec.scale_dtype))
                                                  : concat(matrix.spec.bits, " bits, group ",
                                                           matrix.spec.group_size)));
    return target;
  }
  target.keep = !matrix.decode && !matrix.spec.is_dense() && wanted.bits == matrix.spec.bits &&
                wanted.group_size == matrix.spec.group_size;
  target.spec = wanted;
  return target;
}

// Why a short name may match nothing.
std::string_view hint(const SourceModel& model, std::string_view pattern) {
  if (pattern == "head") return " (its head is the embedding: use embed)";
  const auto has = [&model](std::string_view name) {
    return std::any_of(model.matrices.begin(), model.matrices.end(),
                       [name](const SourceMatrix& matrix) { return matrix.path.ends_with(name); });
  };
  if ((pattern == "gate" || pattern == "up") && has(".gate_up_proj")) {
    return " (its gate and up are stored as one: use gate_up)";
  }
  if ((pattern == "q" || pattern == "k" || pattern == "v") && has(".qkv_proj")) {
    return " (its q, k and v are stored as one: use qkv)";
  }
  return "";
}

}  // namespace

Result<std::vector<MatrixTarget>> choose_targets(const SourceModel& model,
                                                 const ConvertOptions& options,
                                                 std::vector<std::string>& notes) {
  if (options.group_size && *options.group_size != 32 && *options.group_size != 64 &&
      *options.group_size != 128) {
    return Error{Errc::invalid_argument,
                 concat("group size: ", *options.group_size, ", needs 32, 64 or 128")};
  }
  if (options.group_size && options.patterns.empty()) {
    return Error{Errc::invalid_argument, "a group size needs bits to quantize to (--bits)"};
  }
  std::vector<bool> pattern_used(options.patterns.size());
  std::vector<MatrixTarget> targets;
  for (const SourceMatrix& matrix : model.matrices) {
    targets.push_back(choose_target(matrix, options, pattern_used, notes));
  }
  for (std::size_t i = 0; i < pattern_used.size(); ++i) {
    if (pattern_used[i]) continue;
    const std::string& pattern = options.patterns[i].pattern;
    return Error{
        Errc::invalid_argument,
        concat("--bits '", pattern, "': matches no module of this model", hint(model, pattern))};
  }
  return targets;
}

}  // namespace qmlp
