#pragma once

#include <string>
#include <vector>

#include "json_out.h"
#include "qmlp/checkpoint.h"

namespace qmlp::cli {

// What the forward of this model does beyond a plain Llama's, as config.json was understood: one
// line for each subject ("rope llama3, ...", "biases ...").
std::vector<std::string> feature_lines(const ModelConfig& config);

// The same as members of a JSON object.
void add_features(const ModelConfig& config, Json& json);

}  // namespace qmlp::cli
