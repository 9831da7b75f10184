#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "convert/gguf_builder.h"
#include "io/json.h"
#include "io/temp_folder.h"
#include "qmlp/checkpoint.h"

namespace qmlp::test {

inline std::string joined(const std::vector<std::string>& notes) {
  std::string out;
  for (const std::string& note : notes) out += note + "\n";
  return out;
}

// Everything in a folder but `keep`: what a failed conversion must not leave behind.
inline std::vector<std::string> others(const TempFolder& folder, std::string_view keep) {
  std::vector<std::string> out;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    if (entry.path().filename() != keep) out.push_back(entry.path().filename());
  }
  return out;
}

class Converted {
 public:
  explicit Converted(const GgufBuilder& gguf, const ConvertOptions& options = {}) {
    const std::string source = folder_.write("m.gguf", gguf.build());
    report = convert(source, folder_.file("out"), options);
    if (!report) return;
    auto opened = Checkpoint::open(folder_.file("out"));
    EXPECT_TRUE(opened.has_value()) << opened.error().message;
    if (opened) checkpoint = *std::move(opened);
  }
  Json json(std::string_view name) const {
    auto parsed = Json::parse(read_file(folder_.file("out/" + std::string(name))), name);
    EXPECT_TRUE(parsed.has_value()) << parsed.error().message;
    return parsed ? *std::move(parsed) : Json();
  }
  const TempFolder& folder() const { return folder_; }

  Result<ConvertReport> report = Error{};
  std::shared_ptr<const Checkpoint> checkpoint;

 private:
  TempFolder folder_;
};

}  // namespace qmlp::test
