#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "convert/source.h"
#include "qmlp/checkpoint.h"
#include "qmlp/cpu.h"

namespace qmlp {

// How one matrix of the source is written.
struct MatrixTarget {
  const SourceMatrix* source = nullptr;
  QuantSpec spec;
  bool keep = true;  // the source's codes as they stand, at most with another scale type
};

// The targets of a source's matrices under the options' patterns. Refuses patterns that match no
// module; adds notes on modules that a pattern cannot apply to.
Result<std::vector<MatrixTarget>> choose_targets(const SourceModel& model,
                                                 const ConvertOptions& options,
                                                 std::vector<std::string>& notes);

// Writes weights, config.json and the source's other files into an empty folder, a new file of
// weights whenever the next tensor would pass max_shard_bytes.
inline constexpr std::uint64_t kMaxShardBytes = std::uint64_t{5} << 30;
Result<ConvertReport> write_model(const SourceModel& model,
                                  const std::vector<MatrixTarget>& targets,
                                  const ConvertOptions& options, const std::string& folder,
                                  std::uint64_t max_shard_bytes, ThreadPool& pool);

}  // namespace qmlp
