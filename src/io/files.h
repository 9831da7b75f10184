#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "qmlp/status.h"

namespace qmlp {

// "PATH: cannot open: Permission denied", the reason from a `code` of errno; of kind out_of_memory
// when that is the reason, else io.
Error system_error(std::string_view path, std::string_view what, int code);

enum class PathKind { missing, file, directory, other };
// Follows symbolic links. An error when the answer is refused (permissions, loops).
Result<PathKind> path_kind(const std::string& path);

// A whole regular file of at most `limit` bytes.
Result<std::string> read_text_file(const std::string& path, std::uint64_t limit);
// Names in a directory, sorted, without "." and "..".
Result<std::vector<std::string>> list_directory(const std::string& path);

std::string join_path(std::string_view directory, std::string_view name);
// The last component: "model.safetensors" of "a/b/model.safetensors".
std::string_view base_name(std::string_view path);

// "00042", as the names of a model's parts write their numbers.
std::string five_digits(std::int64_t number);

// What the first bytes of a file look like when they are not what was expected, as the end of a
// sentence: "a Git LFS pointer, ...". Empty when nothing is recognised.
std::string_view describe_contents(std::span<const std::byte> head);

}  // namespace qmlp
