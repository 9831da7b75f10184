#include "convert/gguf_model.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <utility>

#include "base/concat.h"
#include "base/try.h"
#include "io/files.h"
#include "text/quote.h"

namespace qmlp {
namespace {

constexpr std::string_view kOf = "-of-";
constexpr std::string_view kExtension = ".gguf";
constexpr std::size_t kDigits = 5;          // of five_digits()
constexpr std::int64_t kMaxParts = 99'999;  // what five digits count

// PREFIX-00002-of-00003.gguf
struct PartName {
  std::string prefix;
  std::int64_t number = 0;  // from 1
  std::int64_t count = 0;

  std::string sibling(std::int64_t other) const {
    return concat(prefix, "-", five_digits(other), kOf, five_digits(count), kExtension);
  }
};

std::optional<PartName> parse_part_name(std::string_view path) {
  constexpr std::size_t kTail = 1 + kDigits + kOf.size() + kDigits + kExtension.size();
  if (path.size() <= kTail) return std::nullopt;
  const std::string_view tail = path.substr(path.size() - kTail);
  if (tail.front() != '-' || tail.substr(1 + kDigits, kOf.size()) != kOf ||
      !tail.ends_with(kExtension)) {
    return std::nullopt;
  }
  const auto digits = [](std::string_view text) -> std::optional<std::int64_t> {
    std::int64_t value = 0;
    const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (code != std::errc() || end != text.data() + text.size() || value < 0) return std::nullopt;
    return value;
  };
  const auto number = digits(tail.substr(1, kDigits));
  const auto count = digits(tail.substr(1 + kDigits + kOf.size(), kDigits));
  if (!number || !count) return std::nullopt;
  return PartName{std::string(path.substr(0, path.size() - kTail)), *number, *count};
}

// What a part says of itself; count 1 where it says nothing.
struct SplitKeys {
  std::int64_t number = 0;  // from 0
  std::int64_t count = 1;
  std::int64_t num_tensors = -1;  // of all parts; -1: not stated
};

Error part_error(const GgufFile& file, std::string_view rest) {
  return Error{Errc::corrupt_file, concat(file.path(), ": ", rest)};
}

Result<SplitKeys> read_split_keys(const GgufFile& file) {
  SplitKeys keys;
  const auto read = [&file](const char* key, std::int64_t limit, std::int64_t& out) -> Status {
    const GgufValue* value = file.find(key);
    if (value == nullptr) return {};
    const auto number = value->integer();
    if (!number || *number < 0 || *number > limit) {
      return part_error(file, concat(key, " is not an integer from 0 to ", limit));
    }
    out = *number;
    return {};
  };
  QMLP_TRY(read("split.count", kMaxParts, keys.count));
  QMLP_TRY(read("split.no", kMaxParts - 1, keys.number));
  QMLP_TRY(read("split.tensors.count", INT64_MAX, keys.num_tensors));
  if (keys.count == 0) keys.count = 1;  // not split
  if (keys.number >= keys.count) {
    return part_error(file, concat("split.no is ", keys.number, ", split.count is ", keys.count,
                                   ": parts are numbered from 0"));
  }
  if (keys.count > 1 && keys.num_tensors < 0) {
    return part_error(file, "split.count is there, split.tensors.count is missing");
  }
  return keys;
}

Status check_part(const GgufFile& file, const SplitKeys& keys, std::int64_t number,
                  const GgufFile& given, const SplitKeys& given_keys) {
  const auto differs = [&](std::string_view key, std::int64_t have, std::int64_t want) {
    return part_error(file, concat(key, " is ", have, ", ", given.path(), " needs ", want,
                                   ": the parts do not belong together"));
  };
  if (keys.count != given_keys.count) return differs("split.count", keys.count, given_keys.count);
  if (keys.number != number) return differs("split.no", keys.number, number);
  if (keys.num_tensors != given_keys.num_tensors) {
    return differs("split.tensors.count", keys.num_tensors, given_keys.num_tensors);
  }
  return {};
}

}  // namespace

Result<GgufModel> GgufModel::open(const std::string& path, bool use_mmap) {
  GgufModel out;
  QMLP_ASSIGN(GgufFile given, GgufFile::open(path, use_mmap));
  QMLP_ASSIGN(const SplitKeys keys, read_split_keys(given));
  const std::optional<PartName> name = parse_part_name(path);
  if (keys.count == 1) {
    if (name && name->count > 1) {
      return part_error(given, concat("is named as part ", name->number, " of ", name->count,
                                      ", but its metadata has no split.count"));
    }
    out.parts_.push_back(std::move(given));
  } else {
    if (!name || name->number != keys.number + 1 || name->count != keys.count) {
      return part_error(
          given, concat("is part ", keys.number + 1, " of ", keys.count,
                        " by its metadata: its name must end in -", five_digits(keys.number + 1),
                        kOf, five_digits(keys.count), kExtension, " for the others to be found"));
    }
    for (std::int64_t number = 1; number <= keys.count; ++number) {
      const std::string part = name->sibling(number);
      QMLP_ASSIGN(const PathKind kind, path_kind(part));
      if (kind == PathKind::missing) {
        return Error{Errc::corrupt_file, concat(part, ": is missing: ", path, " is one of ",
                                                keys.count, " parts, and all are needed")};
      }
    }
    const std::string extra = name->sibling(keys.count + 1);
    QMLP_ASSIGN(const PathKind extra_kind, path_kind(extra));
    if (extra_kind != PathKind::missing) {
      return Error{Errc::corrupt_file, concat(extra, ": there are only ", keys.count, " parts")};
    }
    for (std::int64_t number = 0; number < keys.count; ++number) {
      QMLP_ASSIGN(GgufFile file, GgufFile::open(name->sibling(number + 1), use_mmap));
      QMLP_ASSIGN(const SplitKeys part_keys, read_split_keys(file));
      QMLP_TRY(check_part(file, part_keys, number, given, keys));
      out.parts_.push_back(std::move(file));
    }
  }
  for (std::size_t part = 0; part < out.parts_.size(); ++part) {
    for (GgufTensor tensor : out.parts_[part].tensors()) {
      tensor.part = static_cast<std::uint32_t>(part);
      out.tensors_.push_back(std::move(tensor));
    }
  }
  if (keys.num_tensors >= 0 && keys.num_tensors != static_cast<std::int64_t>(out.tensors_.size())) {
    return part_error(out.parts_.front(),
                      concat("split.tensors.count is ", keys.num_tensors, ", the ",
                             out.parts_.size(), " parts hold ", out.tensors_.size(), " tensors"));
  }
  std::sort(out.tensors_.begin(), out.tensors_.end(),
            [](const GgufTensor& a, const GgufTensor& b) { return a.name < b.name; });
  for (std::size_t i = 1; i < out.tensors_.size(); ++i) {
    if (out.tensors_[i].name == out.tensors_[i - 1].name) {
      return part_error(out.parts_[out.tensors_[i].part],
                        concat("tensor ", text::quote(out.tensors_[i].name), " is in ",
                               out.path_of(out.tensors_[i - 1]), " too"));
    }
  }
  return out;
}

const GgufTensor* GgufModel::find_tensor(std::string_view name) const noexcept {
  const auto at = std::lower_bound(
      tensors_.begin(), tensors_.end(), name,
      [](const GgufTensor& tensor, std::string_view key) { return tensor.name < key; });
  return at != tensors_.end() && at->name == name ? &*at : nullptr;
}

}  // namespace qmlp
