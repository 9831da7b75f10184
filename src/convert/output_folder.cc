#include "convert/output_folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "base/concat.h"
#include "base/try.h"
#include "io/descriptor.h"
#include "io/files.h"

namespace qmlp {
namespace {

namespace fs = std::filesystem;

void remove_tree(const std::string& path) {
  std::error_code ignored;
  fs::remove_all(path, ignored);
}

// Whether `inner` is `outer` or lies below it; false when either does not exist.
bool contains(const std::string& outer, const std::string& inner) {
  std::error_code code;
  const fs::path outer_path = fs::canonical(outer, code);
  if (code) return false;
  fs::path at = fs::canonical(inner, code);
  if (code) return false;
  while (true) {
    if (at == outer_path) return true;
    if (at == at.parent_path()) return false;
    at = at.parent_path();
  }
}

Status check_replaceable(const std::string& destination, const std::string& source, bool force) {
  const auto refuse = [&destination](std::string_view why) {
    return Error{Errc::invalid_argument, concat(destination, ": ", why)};
  };
  struct stat info {};
  if (::lstat(destination.c_str(), &info) != 0) {
    if (errno == ENOENT) return {};
    return system_error(destination, "cannot look at it", errno);
  }
  if (!S_ISDIR(info.st_mode)) return refuse("exists and is not a folder");
  if (!force) return refuse("exists already (use --force to replace it)");
  if (contains(destination, source)) return refuse("holds the source itself");
  QMLP_ASSIGN(const std::vector<std::string> names, list_directory(destination));
  QMLP_ASSIGN(const PathKind config, path_kind(join_path(destination, "config.json")));
  if (!names.empty() && config != PathKind::file) {
    return refuse("is not a model folder (it has files but no config.json): not replaced");
  }
  // Anybody's project may have a config.json; what is removed has to look like weights all through.
  bool has_weights = names.empty();
  for (const std::string& name : names) {
    QMLP_ASSIGN(const PathKind kind, path_kind(join_path(destination, name)));
    if (kind == PathKind::directory) {
      return refuse(
          concat("is not a model folder alone (it has the folder ", name, "): not replaced"));
    }
    has_weights = has_weights || name.ends_with(".safetensors");
  }
  if (!has_weights) {
    return refuse("is not a model folder (it has no .safetensors file): not replaced");
  }
  return {};
}

// Renames make a folder appear at once, but survive a power cut only after this.
void flush_directory(const std::string& path) {
  const Descriptor directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory) ::fsync(directory.get());
}

}  // namespace

Result<OutputFolder> OutputFolder::create(const std::string& destination, const std::string& source,
                                          bool force) {
  OutputFolder out;
  out.destination_ = destination;
  while (out.destination_.size() > 1 && out.destination_.back() == '/') {
    out.destination_.pop_back();
  }
  const std::string_view name = base_name(out.destination_);
  if (name.empty() || name == "/" || name == "." || name == "..") {
    return Error{Errc::invalid_argument, concat("'", destination, "': not a folder name to write")};
  }
  QMLP_TRY(check_replaceable(out.destination_, source, force));
  out.force_ = force;
  const std::string parent = out.destination_.substr(0, out.destination_.size() - name.size());
  std::string pattern = concat(parent, ".", name, ".partial-XXXXXX");
  if (::mkdtemp(pattern.data()) == nullptr) {
    return system_error(parent.empty() ? "." : parent, "cannot create a folder in it", errno);
  }
  out.temporary_ = std::move(pattern);
  // mkdtemp makes it private; a model folder gets the rights that mkdir would give.
  const mode_t mask = ::umask(0);
  ::umask(mask);
  ::chmod(out.temporary_.c_str(), 0777 & ~mask);
  return out;
}

OutputFolder::OutputFolder(OutputFolder&& other) noexcept
    : destination_(std::move(other.destination_)),
      temporary_(std::exchange(other.temporary_, {})),
      force_(other.force_) {}

OutputFolder::~OutputFolder() {
  if (!temporary_.empty()) remove_tree(temporary_);
}

Status OutputFolder::commit() {
  flush_directory(temporary_);
  const std::string replaced = concat(temporary_, ".old");
  bool swapped = false;
  struct stat info {};
  if (::lstat(destination_.c_str(), &info) == 0) {
    if (!force_) {
      return Error{Errc::invalid_argument,
                   concat(destination_, ": appeared during the conversion")};
    }
    if (::rename(destination_.c_str(), replaced.c_str()) != 0) {
      return system_error(destination_, "cannot move the old folder away", errno);
    }
    swapped = true;
  }
  if (::rename(temporary_.c_str(), destination_.c_str()) != 0) {
    const int code = errno;
    if (swapped) ::rename(replaced.c_str(), destination_.c_str());
    return system_error(destination_, "cannot rename the new folder to it", code);
  }
  temporary_.clear();
  if (swapped) remove_tree(replaced);
  const std::string_view name = base_name(destination_);
  const std::string parent = destination_.substr(0, destination_.size() - name.size());
  flush_directory(parent.empty() ? "." : parent);
  return {};
}

}  // namespace qmlp
