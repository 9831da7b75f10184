#include "convert/writer.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <utility>

#include "base/checked.h"
#include "base/concat.h"
#include "base/float16.h"
#include "base/try.h"
#include "io/files.h"
#include "io/json.h"
#include "io/output_file.h"
#include "io/safetensors.h"
#include "io/safetensors_writer.h"
#include "io/tensor_files.h"
#include "quant/codes.h"
#include "quant/quantize.h"

namespace qmlp {
namespace {

// Rows that one task decodes and quantizes: enough work for a task, little memory for a thread.
constexpr std::int64_t kRowsPerTask = 16;

// One tensor of the output. Its bytes come from matrix `matrix` or vector `vector`, part 0 codes or
// values, 1 scales, 2 biases.
struct Piece {
  SafetensorsOutput output;
  std::ptrdiff_t matrix = -1;
  std::ptrdiff_t vector = -1;
  int part = 0;
};

Result<std::vector<Piece>> plan_pieces(const SourceModel& model,
                                       const std::vector<MatrixTarget>& targets) {
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < model.vectors.size(); ++i) {
    const SourceVector& vector = model.vectors[i];
    Piece piece;
    piece.output = {vector.name,
                    safetensors_name(vector.dtype),
                    {static_cast<std::int64_t>(vector.values.size())},
                    vector.values.size() * size_of(vector.dtype)};
    piece.vector = static_cast<std::ptrdiff_t>(i);
    pieces.push_back(std::move(piece));
  }
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const SourceMatrix& matrix = *targets[i].source;
    const QuantSpec& spec = targets[i].spec;
    QMLP_ASSIGN(const QuantSizes sizes, quant_sizes(matrix.N, matrix.K, spec));
    Piece piece;
    piece.matrix = static_cast<std::ptrdiff_t>(i);
    const char* float_name = safetensors_name(spec.scale_dtype);
    if (spec.is_dense()) {
      piece.output = {
          concat(matrix.path, ".weight"), float_name, {matrix.N, matrix.K}, sizes.codes_bytes};
      pieces.push_back(std::move(piece));
      continue;
    }
    piece.output = {concat(matrix.path, ".weight"),
                    "U32",
                    {matrix.N, matrix.K / 32 * spec.bits},
                    sizes.codes_bytes};
    pieces.push_back(piece);
    const std::vector<std::int64_t> groups{matrix.N, matrix.K / spec.group_size};
    piece.output = {concat(matrix.path, ".scales"), float_name, groups, sizes.scales_bytes};
    piece.part = 1;
    pieces.push_back(piece);
    piece.output.name = concat(matrix.path, ".biases");
    piece.part = 2;
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

// Scales or biases in another type. False when a finite value became infinite.
bool change_type(std::span<const std::byte> from, DType from_type, std::vector<std::byte>& to,
                 DType to_type, bool& exact) {
  const auto count = static_cast<std::int64_t>(from.size() / size_of(from_type));
  to.resize(static_cast<std::size_t>(count) * size_of(to_type));
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = load_float(from.data(), from_type, i);
    store_float(to.data(), to_type, i, value);
    const float stored = load_float(to.data(), to_type, i);
    if (std::isfinite(value) && !std::isfinite(stored)) return false;
    exact = exact && (stored == value || std::isnan(value));
  }
  return true;
}

// Decodes a weight to f32 and quantizes it anew, a few rows a task. `native` is the weight where
// the source has no `decode`.
Status quantize_matrix(const SourceMatrix& matrix, const QuantizedTensorView& native,
                       const QuantSpec& spec, ThreadPool& pool, QuantizedTensor& out) {
  QMLP_ASSIGN(const QuantSizes sizes, quant_sizes(matrix.N, matrix.K, spec));
  out.N = matrix.N;
  out.K = matrix.K;
  out.spec = spec;
  out.codes.resize(sizes.codes_bytes);
  out.scales.resize(sizes.scales_bytes);
  out.biases.resize(sizes.scales_bytes);
  const std::int64_t K = matrix.K;
  const std::int64_t row_codes = packed_row_bytes(K, spec.bits);
  const std::int64_t row_scales =
      K / spec.group_size * static_cast<std::int64_t>(size_of(spec.scale_dtype));
  std::vector<std::vector<float>> scratch(static_cast<std::size_t>(pool.num_threads()));
  for (auto& rows : scratch) rows.resize(static_cast<std::size_t>(kRowsPerTask * K));
  std::atomic<std::int64_t> first_bad{INT64_MAX};  // element index
  pool.for_each(ceil_div(matrix.N, kRowsPerTask), [&](std::int64_t task, int thread) {
    const std::int64_t begin = task * kRowsPerTask;
    const std::int64_t rows = std::min(kRowsPerTask, matrix.N - begin);
    float* values = scratch[static_cast<std::size_t>(thread)].data();
    const auto count = static_cast<std::size_t>(rows * K);
    Status status;
    if (matrix.decode) {
      matrix.decode(begin, begin + rows, values);
    } else {
      status = dequantize(native, begin, begin + rows, DType::f32, {values, count});
    }
    std::int64_t bad = status ? -1 : 0;
    if (status) {
      bad = quantize_rows(values, rows, K, spec, out.codes.data() + begin * row_codes,
                          out.scales.data() + begin * row_scales,
                          out.biases.data() + begin * row_scales);
    }
    if (bad < 0) return;
    const std::int64_t index = begin * K + bad;
    std::int64_t known = first_bad.load();
    while (index < known && !first_bad.compare_exchange_weak(known, index)) {
    }
  });
  if (const std::int64_t bad = first_bad.load(); bad != INT64_MAX) {
    return Error{Errc::unsupported,
                 concat(matrix.path, ": row ", bad / K, ", group at column ", bad % K,
                        " holds a NaN or an infinity, or spans more than f32: not quantized")};
  }
  for (const auto* values : {&out.scales, &out.biases}) {
    for (std::int64_t i = 0; i < matrix.N * (K / spec.group_size); ++i) {
      if (std::isfinite(load_float(values->data(), spec.scale_dtype, i))) continue;
      return Error{Errc::unsupported,
                   concat(matrix.path, ": row ", i / (K / spec.group_size),
                          ": a scale or bias leaves the range of ", to_string(spec.scale_dtype))};
    }
  }
  return {};
}

// One matrix in its target form: views of the native weight, or of `made`.
struct Encoded {
  NativeWeight native;
  QuantizedTensor made;
  QuantizedTensorView view;
};

Status encode(const MatrixTarget& target, ThreadPool& pool, Encoded& out, ConvertReport& report) {
  const SourceMatrix& matrix = *target.source;
  if (!matrix.decode) {
    QMLP_ASSIGN(out.native, matrix.read());
    QMLP_TRY(validate(out.native.view));
  }
  if (!target.keep) {
    report.lossless = false;
    QMLP_TRY(quantize_matrix(matrix, out.native.view, target.spec, pool, out.made));
    out.view = out.made.view();
    return {};
  }
  out.view = out.native.view;
  if (target.spec == out.view.spec) return {};
  bool exact = true;
  const DType from = out.view.spec.scale_dtype;
  const DType to = target.spec.scale_dtype;
  if (!change_type(out.view.scales, from, out.made.scales, to, exact) ||
      !change_type(out.view.biases, from, out.made.biases, to, exact)) {
    return Error{Errc::unsupported,
                 concat(matrix.path, ": a scale or bias leaves the range of ", to_string(to))};
  }
  report.lossless = report.lossless && exact;
  out.view.scales = out.made.scales;
  out.view.biases = out.made.biases;
  out.view.spec = target.spec;
  return {};
}

std::vector<std::byte> vector_bytes(const SourceVector& vector) {
  std::vector<std::byte> out(vector.values.size() * size_of(vector.dtype));
  for (std::size_t i = 0; i < vector.values.size(); ++i) {
    store_float(out.data(), vector.dtype, static_cast<std::int64_t>(i), vector.values[i]);
  }
  return out;
}

// Consecutive pieces [begin, end) of one file.
struct Shard {
  std::string name;
  std::size_t begin = 0;
  std::size_t end = 0;
};

std::vector<Shard> plan_shards(const std::vector<Piece>& pieces, std::uint64_t max_bytes) {
  std::vector<Shard> shards;
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const std::uint64_t size = pieces[i].output.bytes;
    if (shards.empty() || bytes + size > max_bytes) {
      shards.push_back({"", i, i});
      bytes = 0;
    }
    bytes += size;
    shards.back().end = i + 1;
  }
  const auto count = static_cast<std::int64_t>(shards.size());
  std::int64_t number = 0;
  for (Shard& shard : shards) {
    shard.name = count == 1 ? "model.safetensors" : shard_name(++number, count);
  }
  return shards;
}

Json index_json(const std::vector<Piece>& pieces, const std::vector<Shard>& shards) {
  std::uint64_t total = 0;
  JsonObject map;
  for (const Shard& shard : shards) {
    for (std::size_t i = shard.begin; i < shard.end; ++i) {
      total += pieces[i].output.bytes;
      map.append(pieces[i].output.name, shard.name);
    }
  }
  JsonObject metadata;
  metadata.append("total_size", total);
  JsonObject out;
  out.append("metadata", Json(std::move(metadata)));
  out.append("weight_map", Json(std::move(map)));
  return Json(std::move(out));
}

// MLX's form: the most common bits and group for all, an entry for each module that differs.
Json quantization_json(const std::vector<MatrixTarget>& targets) {
  std::map<std::pair<int, int>, std::int64_t> counts;
  for (const MatrixTarget& target : targets) {
    if (!target.spec.is_dense()) ++counts[{target.spec.bits, target.spec.group_size}];
  }
  if (counts.empty()) return Json();
  const auto common =
      std::max_element(counts.begin(), counts.end(), [](const auto& a, const auto& b) {
        return a.second < b.second;
      })->first;
  const auto entry = [](int bits, int group_size) {
    JsonObject out;
    out.append("group_size", group_size);
    out.append("bits", bits);
    out.append("mode", "affine");
    return out;
  };
  JsonObject out = entry(common.first, common.second);
  for (const MatrixTarget& target : targets) {
    const QuantSpec& spec = target.spec;
    if (spec.is_dense() || std::pair(spec.bits, spec.group_size) == common) continue;
    out.append(target.source->path, Json(entry(spec.bits, spec.group_size)));
  }
  return Json(std::move(out));
}

Json config_json(const SourceModel& model, const std::vector<MatrixTarget>& targets) {
  JsonObject config = model.config;
  if (config.find("torch_dtype") == nullptr && config.find("dtype") == nullptr &&
      !targets.empty()) {
    const DType dtype = targets.front().spec.scale_dtype;
    config.append("torch_dtype", dtype == DType::f32   ? "float32"
                                 : dtype == DType::f16 ? "float16"
                                                       : "bfloat16");
  }
  const Json quantization = quantization_json(targets);
  if (!quantization.is_null()) {
    config.set("quantization", quantization);
    config.set("quantization_config", quantization);
  }
  return Json(std::move(config));
}

}  // namespace

Result<ConvertReport> write_model(const SourceModel& model,
                                  const std::vector<MatrixTarget>& targets,
                                  const ConvertOptions& options, const std::string& folder,
                                  std::uint64_t max_shard_bytes, ThreadPool& pool) {
  QMLP_ASSIGN(const std::vector<Piece> pieces, plan_pieces(model, targets));
  const std::vector<Shard> shards = plan_shards(pieces, max_shard_bytes);
  ConvertReport report;
  report.lossless = true;
  report.num_tensors = static_cast<std::int64_t>(pieces.size());
  Encoded encoded;
  std::ptrdiff_t encoded_index = -1;
  for (const Shard& shard : shards) {
    std::vector<SafetensorsOutput> outputs;
    for (std::size_t i = shard.begin; i < shard.end; ++i) outputs.push_back(pieces[i].output);
    QMLP_ASSIGN(SafetensorsWriter writer,
                SafetensorsWriter::create(join_path(folder, shard.name), outputs));
    for (std::size_t i = shard.begin; i < shard.end; ++i) {
      if (options.stop_requested && options.stop_requested()) {
        return Error{Errc::interrupted, "conversion stopped; nothing was written"};
      }
      const Piece& piece = pieces[i];
      if (options.progress) {
        options.progress(piece.output.name, static_cast<std::int64_t>(i), report.num_tensors);
      }
      if (piece.vector >= 0) {
        QMLP_TRY(writer.write(vector_bytes(model.vectors[static_cast<std::size_t>(piece.vector)])));
        continue;
      }
      const MatrixTarget& target = targets[static_cast<std::size_t>(piece.matrix)];
      if (piece.matrix != encoded_index) {
        encoded = {};
        QMLP_TRY(encode(target, pool, encoded, report));
        encoded_index = piece.matrix;
      }
      const QuantizedTensorView& view = encoded.view;
      QMLP_TRY(writer.write(piece.part == 0   ? view.codes
                            : piece.part == 1 ? view.scales
                                              : view.biases));
      const bool last = target.spec.is_dense() || piece.part == 2;
      if (last && target.source->release) target.source->release();
    }
    QMLP_TRY(writer.finish());
    report.bytes_written += writer.file_bytes();
  }
  std::vector<std::pair<std::string, std::string>> files = model.files;
  files.emplace_back("config.json", config_json(model, targets).dump(2) + "\n");
  if (shards.size() > 1) {
    files.emplace_back("model.safetensors.index.json", index_json(pieces, shards).dump(2) + "\n");
  }
  for (const auto& [name, text] : files) {
    QMLP_TRY(write_text_file(join_path(folder, name), text));
    report.bytes_written += text.size();
  }
  if (options.progress) options.progress("done", report.num_tensors, report.num_tensors);
  return report;
}

}  // namespace qmlp
