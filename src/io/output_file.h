#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "io/descriptor.h"
#include "qmlp/status.h"

namespace qmlp {

// A file that appears under its name only when it is complete: it is written under a temporary name
// beside it, and commit() flushes it to the device and renames it. Until then, and for good when
// that never comes, a file of that name stays as it was. Symbolic links are followed, so that they
// stay and their target is replaced; its rights are kept. Messages call the file by the name that
// the caller gave.
class OutputFile {
 public:
  // A device, FIFO or socket of that name is never replaced: it is refused, or written into.
  enum class Special : bool { refused, written };

  // An error for a directory, for a link to nothing, and where no file can be made.
  static Result<OutputFile> create(const std::string& path, Special special = Special::refused);
  // The error that create() would end with, without making anything: for before long work.
  static Status check(const std::string& path, Special special = Special::refused);

  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;
  ~OutputFile();

  const std::string& name() const noexcept { return name_; }
  // Asks for the space of the whole file, to be told of a full disk before the work is done.
  Status reserve(std::uint64_t bytes);
  Status write(std::span<const std::byte> bytes);
  // What is written next goes over the beginning.
  Status rewind();
  Status commit();

 private:
  OutputFile() = default;

  std::string name_;
  std::string target_;     // with links followed
  std::string temporary_;  // empty: there is none to rename or to remove
  Descriptor descriptor_;
};

// A whole file by the same steps.
Status write_text_file(const std::string& path, std::string_view text,
                       OutputFile::Special special = OutputFile::Special::refused);

}  // namespace qmlp
