#include <algorithm>
#include <string>

#include "base/concat.h"
#include "base/float16.h"
#include "base/try.h"
#include "convert/output_folder.h"
#include "convert/source.h"
#include "convert/writer.h"
#include "io/files.h"
#include "qmlp/checkpoint.h"
#include "qmlp/cpu.h"

namespace qmlp {
namespace {

// A GGUF file keeps norms and linear biases in f32 whatever the weights are. They take the weights'
// type when every value fits it exactly, as MLX would have stored them; else they stay.
void narrow_vectors(SourceModel& model) {
  if (model.matrices.empty()) return;
  const DType wanted = model.matrices.front().spec.scale_dtype;
  std::int64_t kept = 0;
  for (SourceVector& vector : model.vectors) {
    if (vector.dtype != DType::f32 || wanted == DType::f32) continue;
    const bool fits =
        std::all_of(vector.values.begin(), vector.values.end(),
                    [wanted](float value) { return round_to(value, wanted) == value; });
    if (fits) vector.dtype = wanted;
    if (!fits) ++kept;
  }
  if (kept != 0) {
    model.notes.push_back(concat(kept, " norms or linear biases stay f32: ", to_string(wanted),
                                 " does not hold them exactly"));
  }
}

}  // namespace

Result<ConvertReport> convert(const std::string& source, const std::string& destination,
                              const ConvertOptions& options) {
  QMLP_ASSIGN(const PathKind kind, path_kind(source));
  if (kind == PathKind::missing) return Error{Errc::io, concat(source, ": does not exist")};
  QMLP_ASSIGN(OutputFolder folder, OutputFolder::create(destination, source, options.force));
  SourceModel model;
  if (kind == PathKind::directory) {
    QMLP_ASSIGN(model, open_checkpoint_source(source));
  } else {
    QMLP_ASSIGN(model, open_gguf_source(source));
    narrow_vectors(model);
  }
  std::vector<std::string> notes = model.notes;
  QMLP_ASSIGN(const std::vector<MatrixTarget> targets, choose_targets(model, options, notes));
  QMLP_ASSIGN(const std::unique_ptr<ThreadPool> pool, ThreadPool::create(default_num_threads()));
  QMLP_ASSIGN(ConvertReport report,
              write_model(model, targets, options, folder.path(), kMaxShardBytes, *pool));
  // What was written must be what the loader takes.
  if (const auto check = Checkpoint::open(folder.path()); !check) {
    const Errc code = check.error().code;
    return Error{code == Errc::unsupported ? code : Errc::internal,
                 concat("the result does not load: ", check.error().message)};
  }
  QMLP_TRY(folder.commit());
  report.notes = std::move(notes);
  return report;
}

}  // namespace qmlp
