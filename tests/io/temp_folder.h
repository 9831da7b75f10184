#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>

#include "qmlp/status.h"

namespace qmlp::test {

// A folder that disappears at the end of its scope.
class TempFolder {
 public:
  TempFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "qmlp_test_XXXXXX").string();
    const char* made = mkdtemp(pattern.data());
    if (made == nullptr) std::abort();
    path_ = made;
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string file(std::string_view name) const { return path_ + "/" + std::string(name); }
  std::string write(std::string_view name, std::string_view contents) const {
    // ext4 flushes a file that is truncated and written again.
    std::filesystem::remove(file(name));
    std::ofstream(file(name), std::ios::binary) << contents;
    return file(name);
  }

 private:
  std::string path_;
};

inline std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream out;
  out << in.rdbuf();
  return out.str();
}

// That a Result failed with this code and that its message is one line holding every text.
template <class R, class... Texts>
void expect_error(const R& result, Errc code, const Texts&... texts) {
  ASSERT_FALSE(result.has_value()) << "no error, expected " << to_string(code);
  EXPECT_EQ(to_string(result.error().code), std::string(to_string(code))) << result.error().message;
  EXPECT_EQ(result.error().message.find('\n'), std::string::npos) << result.error().message;
  for (const std::string_view text : {std::string_view(texts)...}) {
    EXPECT_NE(result.error().message.find(text), std::string::npos)
        << "'" << text << "' is not in: " << result.error().message;
  }
}

}  // namespace qmlp::test
