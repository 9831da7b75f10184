#include "io/tensor_files.h"

#include <algorithm>
#include <optional>

#include "base/concat.h"
#include "base/try.h"
#include "io/files.h"
#include "io/json.h"

namespace qmlp {
namespace {

constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr std::uint64_t kMaxIndexBytes = 100'000'000;

struct WeightMap {
  Json json;
  std::vector<std::string> files;  // sorted, no repeats
};

Result<std::optional<WeightMap>> read_index(const std::string& directory) {
  const std::string path = join_path(directory, kIndexName);
  QMLP_ASSIGN(const PathKind kind, path_kind(path));
  if (kind == PathKind::missing) return std::optional<WeightMap>();
  QMLP_ASSIGN(const std::string text, read_text_file(path, kMaxIndexBytes));
  WeightMap map;
  QMLP_ASSIGN(map.json, Json::parse(text, path));
  const Json* weights = map.json.find("weight_map");
  if (weights == nullptr || weights->object() == nullptr) {
    return Error{Errc::corrupt_file, concat(path, ": weight_map is missing or not an object")};
  }
  for (const JsonMember& member : weights->object()->members()) {
    const std::string* file = member.value.string();
    // A plain name only: an index must not reach outside its folder.
    if (file == nullptr || file->find('/') != std::string::npos ||
        !file->ends_with(".safetensors")) {
      return Error{Errc::corrupt_file,
                   concat(path, ": tensor '", member.name, "' is said to be in ",
                          member.value.dump(), ", needs the name of a .safetensors file")};
    }
    map.files.push_back(*file);
  }
  std::sort(map.files.begin(), map.files.end());
  map.files.erase(std::unique(map.files.begin(), map.files.end()), map.files.end());
  return std::optional<WeightMap>(std::move(map));
}

// "model-00002-of-00003.safetensors" is one of a set; all of it must be there.
Status check_numbered(const std::string& directory, const std::vector<std::string>& names) {
  constexpr std::string_view kPattern = "model-00000-of-00000.safetensors";
  for (const std::string& name : names) {
    if (name.size() != kPattern.size()) continue;
    bool matches = true;
    for (std::size_t i = 0; i < name.size(); ++i) {
      matches = matches &&
                (kPattern[i] == '0' ? name[i] >= '0' && name[i] <= '9' : name[i] == kPattern[i]);
    }
    if (!matches) continue;
    const int count = std::stoi(name.substr(15, 5));
    for (int i = 1; i <= count; ++i) {
      const std::string need = shard_name(i, count);
      if (!std::binary_search(names.begin(), names.end(), need)) {
        return Error{Errc::corrupt_file,
                     concat(directory, ": shard ", need, " is missing, ", name, " is there")};
      }
    }
  }
  return {};
}

Error no_files(const std::string& directory, const std::vector<std::string>& names) {
  std::string hint;
  for (const std::string& name : names) {
    if (name.ends_with(".gguf")) hint = concat("; ", name, " can be converted (qmlp convert)");
    if (name.ends_with(".bin") || name.ends_with(".pth") || name.ends_with(".npz")) {
      hint = concat("; ", name, " is in a format that is not read");
    }
    if (!hint.empty()) break;
  }
  return Error{Errc::corrupt_file, concat(directory, ": holds no model*.safetensors file", hint)};
}

}  // namespace

std::string shard_name(std::int64_t number, std::int64_t count) {
  return concat("model-", five_digits(number), "-of-", five_digits(count), ".safetensors");
}

Result<TensorFiles> TensorFiles::open(const std::string& directory, bool use_mmap,
                                      std::vector<std::string>& warnings) {
  QMLP_ASSIGN(const std::vector<std::string> listed, list_directory(directory));
  std::vector<std::string> present;
  for (const std::string& name : listed) {
    if (name.starts_with("model") && name.ends_with(".safetensors")) present.push_back(name);
  }
  QMLP_ASSIGN(const std::optional<WeightMap> index, read_index(directory));
  std::vector<std::string> names = present;
  if (index) {
    names = index->files;
    for (const std::string& name : names) {
      if (!std::binary_search(listed.begin(), listed.end(), name)) {
        return Error{Errc::corrupt_file,
                     concat(directory, ": shard ", name, " is missing, ", kIndexName, " names it")};
      }
    }
    for (const std::string& name : present) {
      if (!std::binary_search(names.begin(), names.end(), name)) {
        warnings.push_back(concat(name, ": not in ", kIndexName, ", ignored"));
      }
    }
  } else {
    QMLP_TRY(check_numbered(directory, names));
  }
  if (names.empty()) return no_files(directory, listed);

  TensorFiles out;
  out.files_.reserve(names.size());
  for (const std::string& name : names) {
    QMLP_ASSIGN(SafetensorsFile file, SafetensorsFile::open(join_path(directory, name), use_mmap));
    out.files_.push_back(std::move(file));
  }
  for (const SafetensorsFile& file : out.files_) {
    for (const SafetensorsEntry& entry : file.header().entries) {
      out.tensors_.push_back({entry.name, &file, &entry});
    }
  }
  std::sort(out.tensors_.begin(), out.tensors_.end(),
            [](const Location& a, const Location& b) { return a.name < b.name; });
  for (std::size_t i = 1; i < out.tensors_.size(); ++i) {
    if (out.tensors_[i].name == out.tensors_[i - 1].name) {
      return Error{Errc::corrupt_file,
                   concat("tensor '", out.tensors_[i].name, "' is in both ",
                          base_name(out.tensors_[i - 1].file->file().path()), " and ",
                          base_name(out.tensors_[i].file->file().path()))};
    }
  }
  if (index) {
    for (const JsonMember& member : index->json.find("weight_map")->object()->members()) {
      const Location* found = out.find(member.name);
      if (found == nullptr || base_name(found->file->file().path()) != *member.value.string()) {
        return Error{Errc::corrupt_file,
                     concat(directory, ": tensor '", member.name, "' is not in ",
                            *member.value.string(), ", where ", kIndexName, " says it is")};
      }
    }
  }
  return out;
}

const TensorFiles::Location* TensorFiles::find(std::string_view name) const noexcept {
  const auto at =
      std::lower_bound(tensors_.begin(), tensors_.end(), name,
                       [](const Location& a, std::string_view key) { return a.name < key; });
  return at != tensors_.end() && at->name == name ? &*at : nullptr;
}

std::uint64_t TensorFiles::file_bytes() const noexcept {
  std::uint64_t total = 0;
  for (const SafetensorsFile& file : files_) total += file.file().bytes().size();
  return total;
}

bool TensorFiles::mapped() const noexcept {
  return std::all_of(files_.begin(), files_.end(), [](const SafetensorsFile& file) {
    return file.file().mapped() || file.file().bytes().empty();
  });
}

}  // namespace qmlp
