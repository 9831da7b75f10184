#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "qmlp/status.h"

namespace qmlp {

// What errno `code` means, for the end of a message.
std::string system_message(int code);
Error system_error(std::string_view path, std::string_view what, int code);

enum class PathKind { missing, file, directory, other };
// Follows symbolic links. An error when the answer is refused (permissions, loops).
Result<PathKind> path_kind(const std::string& path);

// A whole regular file of at most `limit` bytes.
Result<std::string> read_text_file(const std::string& path, std::uint64_t limit);
// Creates or replaces a file; on return its bytes have reached the device. Messages call it `name`:
// a file that is written under a temporary name is known to users by another.
Status write_text_file(const std::string& path, std::string_view text, std::string_view name);
inline Status write_text_file(const std::string& path, std::string_view text) {
  return write_text_file(path, text, path);
}
// The two halves of that for a file that is written in pieces. The second closes it in any case.
Status write_all(int file, std::string_view bytes, std::string_view name);
Status flush_and_close(int file, std::string_view name);

// What a new file of this name replaces when it is complete: symbolic links are followed, so that
// they stay and their target is replaced.
struct ReplaceTarget {
  std::string path;
  bool is_special = false;  // a device, FIFO or socket, which is written into and never replaced
  int mode = -1;            // rights of the file that is there; -1: none is
};
// An error for a directory and for a link to nothing.
Result<ReplaceTarget> replace_target(const std::string& path);
// The same for what cannot be written into a device, FIFO or socket: an error for those.
Result<ReplaceTarget> regular_target(const std::string& path);

// Names in a directory, sorted, without "." and "..".
Result<std::vector<std::string>> list_directory(const std::string& path);

std::string join_path(std::string_view directory, std::string_view name);
// The last component: "model.safetensors" of "a/b/model.safetensors".
std::string_view base_name(std::string_view path);

// What the first bytes of a file look like when they are not what was expected, as the end of a
// sentence: "a Git LFS pointer, ...". Empty when nothing is recognised.
std::string_view describe_contents(std::span<const std::byte> head);

}  // namespace qmlp
