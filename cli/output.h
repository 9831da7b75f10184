#pragma once

#include <string>
#include <string_view>

namespace qmlp::cli {

// Buffered standard output that reports every failed write: a full disk or a closed descriptor
// throws Exception (Errc::io). Once its reader has closed the pipe, what is written is dropped, and
// the command goes on to its files and its exit status; long work asks reader_gone().
class Output {
 public:
  void write(std::string_view text);
  void line(std::string_view text) {
    write(text);
    write("\n");
  }
  void flush();
  void discard() { buffer_.clear(); }
  bool reader_gone() const noexcept { return reader_gone_; }

 private:
  std::string buffer_;
  bool reader_gone_ = false;
};

// Opens what is missing of descriptors 0, 1 and 2, so that no file of ours takes their numbers and
// receives what was meant for them. Reads and writes on them fail.
void reserve_standard_descriptors();

// The whole of a file, or of standard input for "-". Throws Exception (Errc::io or interrupted).
std::string read_input(const std::string& path);

}  // namespace qmlp::cli
