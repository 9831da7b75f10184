#pragma once

#include <string>
#include <string_view>

#include "io/files.h"

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
// Throws Exception (Errc::io) when a file could not be made there: said before the long work, not
// after it. Devices and FIFOs can be written, but not replaced.
void require_writable(const std::string& path);
void require_replaceable(const std::string& path);

// A file that appears under its name only when it is complete: written under a temporary name
// beside it, renamed by commit, removed when that never comes. Symbolic links are followed, the
// rights of a file that is there are kept, and what is no regular file is refused.
class PendingFile {
 public:
  explicit PendingFile(const std::string& path);  // throws Exception (Errc::io)
  ~PendingFile();
  PendingFile(const PendingFile&) = delete;
  PendingFile& operator=(const PendingFile&) = delete;
  const std::string& temporary() const noexcept { return temporary_; }
  void commit();  // throws Exception (Errc::io)

 private:
  std::string name_;  // as it was given
  ReplaceTarget target_;
  std::string temporary_;
  bool committed_ = false;
};
// The same at once, or into a device or FIFO. Throws Exception (Errc::io).
void write_file(const std::string& path, std::string_view bytes);

}  // namespace qmlp::cli
