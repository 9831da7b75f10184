#include "golden_file.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string_view>

#include "base/concat.h"
#include "base/float16.h"
#include "base/try.h"
#include "io/files.h"
#include "io/safetensors.h"

namespace qmlp {
namespace {

// The tensors of one file by name, with the type and shape checks that every layout needs.
class Tensors {
 public:
  Tensors(const SafetensorsFile& file, std::string_view what) : file_(file), what_(what) {
    for (const SafetensorsEntry& entry : file.header().entries) by_name_[entry.name] = &entry;
  }

  const std::map<std::string, const SafetensorsEntry*, std::less<>>& by_name() const {
    return by_name_;
  }
  bool has(std::string_view name) const { return by_name_.find(name) != by_name_.end(); }

  Error error(std::string_view tensor, std::string_view text) const {
    return Error{Errc::corrupt_file, concat(what_, ": ", tensor, ": ", text)};
  }

  Result<const SafetensorsEntry*> find(std::string_view name) const {
    const auto at = by_name_.find(name);
    if (at == by_name_.end()) return error(name, "missing, the layout needs it");
    return at->second;
  }

  // A matrix of `dtype` whose shape must be [rows, columns].
  Result<std::span<const std::byte>> matrix(std::string_view name, std::string_view dtype,
                                            std::int64_t rows, std::int64_t columns) const {
    QMLP_ASSIGN(const SafetensorsEntry* entry, find(name));
    if (entry->dtype != dtype) {
      return error(name, concat("type is ", entry->dtype, ", must be ", dtype));
    }
    if (entry->shape != std::vector<std::int64_t>{rows, columns}) {
      return error(name, concat("shape is ", shape_to_string(entry->shape), ", must be [", rows,
                                ", ", columns, "]"));
    }
    return file_.data(*entry);
  }

  Result<std::vector<float>> floats(std::string_view name, DType type, std::int64_t rows,
                                    std::int64_t columns) const {
    QMLP_ASSIGN(const std::span<const std::byte> bytes,
                matrix(name, safetensors_name(type), rows, columns));
    std::vector<float> out(bytes.size() / size_of(type));
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = load_float(bytes.data(), type, static_cast<std::int64_t>(i));
    }
    return out;
  }

  Result<std::vector<double>> doubles(std::string_view name, std::int64_t rows,
                                      std::int64_t columns) const {
    QMLP_ASSIGN(const std::span<const std::byte> bytes, matrix(name, "F64", rows, columns));
    std::vector<double> out(bytes.size() / sizeof(double));
    if (!out.empty()) std::memcpy(out.data(), bytes.data(), bytes.size());
    return out;
  }

  Result<QuantizedTensor> weight(std::string_view codes, std::string_view scales,
                                 std::string_view biases, std::int64_t K, int bits, int group,
                                 DType type) const {
    QMLP_ASSIGN(const SafetensorsEntry* entry, find(codes));
    QuantizedTensor weight;
    weight.spec = {bits, group, type};
    weight.K = K;
    if (entry->shape.size() != 2) return error(codes, "must be a matrix");
    weight.N = entry->shape[0];
    QMLP_TRY(validate(weight.spec));
    QMLP_TRY(quant_sizes(weight.N, K, weight.spec));
    const auto copy = [](std::span<const std::byte> bytes) {
      return std::vector<std::byte>(bytes.begin(), bytes.end());
    };
    QMLP_ASSIGN(const auto code_bytes, matrix(codes, "U32", weight.N, K * bits / 32));
    weight.codes = copy(code_bytes);
    const char* dtype = safetensors_name(type);
    QMLP_ASSIGN(const auto scale_bytes, matrix(scales, dtype, weight.N, K / group));
    weight.scales = copy(scale_bytes);
    QMLP_ASSIGN(const auto bias_bytes, matrix(biases, dtype, weight.N, K / group));
    weight.biases = copy(bias_bytes);
    return weight;
  }

 private:
  const SafetensorsFile& file_;
  std::string_view what_;
  std::map<std::string, const SafetensorsEntry*, std::less<>> by_name_;
};

// "bf16_b4_g64_m8" as its four fields; false when it is not of that form.
bool parse_matmul_name(std::string_view name, DType& type, int& bits, int& group) {
  const std::size_t underscore = name.find('_');
  if (underscore == std::string_view::npos) return false;
  const std::string_view type_name = name.substr(0, underscore);
  if (type_name == "bf16") {
    type = DType::bf16;
  } else if (type_name == "f16") {
    type = DType::f16;
  } else if (type_name == "f32") {
    type = DType::f32;
  } else {
    return false;
  }
  int rows = 0;
  const std::string rest(name.substr(underscore));
  int used = 0;
  if (std::sscanf(rest.c_str(), "_b%d_g%d_m%d%n", &bits, &group, &rows, &used) != 3) return false;
  return static_cast<std::size_t>(used) == rest.size();
}

Result<MatmulCase> read_matmul(const Tensors& tensors, const std::string& name) {
  MatmulCase item;
  item.name = name;
  int bits = 0;
  int group = 0;
  if (!parse_matmul_name(name, item.type, bits, group)) {
    return tensors.error(name, "name is not of the form <type>_b<bits>_g<group>_m<M>");
  }
  QMLP_ASSIGN(const SafetensorsEntry* x, tensors.find(name + ".x"));
  if (x->shape.size() != 2) return tensors.error(x->name, "must be a matrix");
  item.M = x->shape[0];
  const std::int64_t K = x->shape[1];
  QMLP_ASSIGN(item.x, tensors.floats(name + ".x", item.type, item.M, K));
  QMLP_ASSIGN(item.weight, tensors.weight(name + ".w", name + ".scales", name + ".biases", K, bits,
                                          group, item.type));
  const std::int64_t N = item.weight.N;
  QMLP_ASSIGN(item.y, tensors.floats(name + ".y", item.type, item.M, N));
  if (tensors.has(name + ".dequantized")) {
    QMLP_ASSIGN(item.dequantized, tensors.floats(name + ".dequantized", item.type, N, K));
  }
  return item;
}

Result<SwigluCase> read_swiglu(const Tensors& tensors,
                               const std::map<std::string, std::string>& metadata,
                               std::string_view what) {
  SwigluCase item;
  item.name = std::string(base_name(what));
  const auto text = [&metadata](const char* key) {
    const auto at = metadata.find(key);
    return at == metadata.end() ? std::string() : at->second;
  };
  const auto number = [&text](const char* key) {
    const std::string value = text(key);
    char* end = nullptr;
    const long parsed = std::strtol(value.c_str(), &end, 10);
    return value.empty() || *end != '\0' ? -1 : static_cast<int>(parsed);
  };
  item.kind = text("kind");
  const std::string type = text("dtype");
  if (type != "bf16" && type != "f16" && type != "f32") {
    return tensors.error("metadata", concat("dtype is '", type, "', must be bf16, f16 or f32"));
  }
  item.type = type == "bf16" ? DType::bf16 : type == "f16" ? DType::f16 : DType::f32;
  QMLP_ASSIGN(const SafetensorsEntry* x, tensors.find("x"));
  if (x->shape.size() != 2) return tensors.error("x", "must be a matrix");
  item.M = x->shape[0];
  const std::int64_t K = x->shape[1];
  QMLP_ASSIGN(item.x, tensors.floats("x", item.type, item.M, K));
  QMLP_ASSIGN(item.gate_weight, tensors.weight("wg_q", "wg_s", "wg_b", K, number("bits_gate"),
                                               number("group_gate"), item.type));
  QMLP_ASSIGN(item.up_weight, tensors.weight("wu_q", "wu_s", "wu_b", K, number("bits_up"),
                                             number("group_up"), item.type));
  const std::int64_t N = item.gate_weight.N;
  if (item.up_weight.N != N) return tensors.error("wu_q", "must have as many rows as wg_q");
  const auto floats = [&](const char* name) { return tensors.floats(name, item.type, item.M, N); };
  QMLP_ASSIGN(item.gate, floats("gate"));
  QMLP_ASSIGN(item.up, floats("up"));
  QMLP_ASSIGN(item.hidden, floats("hidden"));
  if (tensors.has("gate_r")) {
    QMLP_ASSIGN(item.gate_rounded, floats("gate_r"));
    QMLP_ASSIGN(item.up_rounded, floats("up_r"));
    QMLP_ASSIGN(item.hidden_rounded, floats("hidden_r"));
  }
  QMLP_ASSIGN(item.ref_gate, tensors.doubles("ref_gate", item.M, N));
  QMLP_ASSIGN(item.ref_up, tensors.doubles("ref_up", item.M, N));
  QMLP_ASSIGN(item.ref_hidden, tensors.doubles("ref_hidden", item.M, N));
  return item;
}

}  // namespace

Result<GoldenFile> read_golden_file(const std::string& path) {
  QMLP_ASSIGN(const SafetensorsFile file, SafetensorsFile::open(path));
  const Tensors tensors(file, path);
  std::map<std::string, std::string> metadata(file.header().metadata.begin(),
                                              file.header().metadata.end());
  GoldenFile golden;
  golden.made_with = metadata.count("made_with") != 0 ? metadata["made_with"] : "";

  if (tensors.has("wg_q")) {
    golden.layout = GoldenLayout::swiglu;
    if (golden.made_with.empty()) golden.made_with = "MLX CPU, commit " + metadata["mlx_commit"];
    QMLP_ASSIGN(SwigluCase item, read_swiglu(tensors, metadata, path));
    golden.swiglus.push_back(std::move(item));
    return golden;
  }
  std::set<std::string> cases;
  for (const auto& [name, entry] : tensors.by_name()) {
    const std::size_t underscore = name.find('_');
    const std::string op = name.substr(0, underscore);
    if (op == "sigmoid" || op == "silu") {
      ActivationTable table;
      table.name = name;
      table.type = name.substr(underscore + 1) == "bf16" ? DType::bf16 : DType::f16;
      const char* dtype = safetensors_name(table.type);
      if (entry->dtype != dtype || entry->shape != std::vector<std::int64_t>{65536}) {
        return tensors.error(name, concat("is ", entry->dtype, " ", shape_to_string(entry->shape),
                                          ", must be ", dtype, " [65536]"));
      }
      table.entries.resize(65536);
      std::memcpy(table.entries.data(), file.data(*entry).data(), 131072);
      golden.tables.push_back(std::move(table));
    } else if (const std::size_t dot = name.rfind('.'); dot != std::string::npos) {
      cases.insert(name.substr(0, dot));
    }
  }
  if (!golden.tables.empty()) {
    golden.layout = GoldenLayout::activation_tables;
    return golden;
  }
  if (cases.empty()) {
    return Error{Errc::corrupt_file,
                 concat(path,
                        ": not a file of golden vectors: it has neither wg_q, nor "
                        "<case>.x, .w, .y, nor sigmoid_<type> tensors")};
  }
  for (const std::string& name : cases) {
    QMLP_ASSIGN(MatmulCase item, read_matmul(tensors, name));
    golden.matmuls.push_back(std::move(item));
  }
  return golden;
}

}  // namespace qmlp
