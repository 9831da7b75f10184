#pragma once

#include <string>

#include "qmlp/status.h"

namespace qmlp {

// A folder that appears under its name only when it is complete. It is filled under a temporary
// name beside the destination; commit renames it, and the destructor removes what was not
// committed.
class OutputFolder {
 public:
  // Refuses an existing destination, unless `force` and it is an empty folder or a model folder
  // (with a config.json) that does not contain `source`.
  static Result<OutputFolder> create(const std::string& destination, const std::string& source,
                                     bool force);
  OutputFolder(OutputFolder&& other) noexcept;
  OutputFolder& operator=(OutputFolder&&) = delete;
  ~OutputFolder();

  const std::string& path() const noexcept { return temporary_; }
  // Puts the folder in place; a replaced folder is removed afterwards.
  Status commit();

 private:
  OutputFolder() = default;

  std::string destination_;
  std::string temporary_;  // empty once committed
  bool force_ = false;
};

}  // namespace qmlp
