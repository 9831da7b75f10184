#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "io/files.h"
#include "io/json.h"
#include "io/output_file.h"
#include "qmlp/tokenizer.h"

namespace qmlp::text {

// The folders and files that tests/data/make_tokenizer_fixture.py wrote.
inline std::string fixture(const std::string& name) {
  return std::string(QMLP_TEST_DATA) + "/tokenizer/" + name;
}

inline Json read_json(const std::string& path) {
  const auto text = read_text_file(path, std::uint64_t{1} << 26);
  EXPECT_TRUE(text) << text.error().message;
  auto json = Json::parse(text ? *text : "null", path);
  EXPECT_TRUE(json) << json.error().message;
  return json ? *std::move(json) : Json();
}

inline std::vector<std::int32_t> read_ids(const Json& json) {
  std::vector<std::int32_t> ids;
  for (const Json& id : *json.array()) ids.push_back(static_cast<std::int32_t>(*id.integer()));
  return ids;
}

inline std::shared_ptr<const Tokenizer> open_tokenizer(const std::string& folder) {
  auto tokenizer = Tokenizer::open(folder);
  EXPECT_TRUE(tokenizer) << tokenizer.error().message;
  return tokenizer ? *tokenizer : nullptr;
}

// A folder of its own for a test, gone after it.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = ::testing::TempDir() + "qmlp_text_XXXXXX";
    path_ = ::mkdtemp(pattern.data()) != nullptr ? pattern : "";
    EXPECT_FALSE(path_.empty());
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }
  void write(const std::string& name, std::string_view text) const {
    const Status status = write_text_file(path_ + "/" + name, text);
    EXPECT_TRUE(status) << status.error().message;
  }

 private:
  std::string path_;
};

}  // namespace qmlp::text
