#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace qmlp::cli {

struct CacheLevel {
  std::string name;  // "L1d", "L2", "L3"
  std::uint64_t bytes = 0;
};

// What the system says about this machine; for reports, never for choosing kernels.
struct MachineInfo {
  std::string cpu;  // model name
  int online_cpus = 0;
  int affinity_cpus = 0;     // CPUs this process may run on
  double cgroup_cpus = 0.0;  // the cgroup's CPU quota; 0: none
  std::uint64_t memory_bytes = 0;
  std::vector<CacheLevel> caches;
  std::string system;  // kernel name and release
  std::uint64_t last_level_cache_bytes() const;
};
MachineInfo machine_info();
std::uint64_t available_memory_bytes();  // 0: unknown

std::string compiler_text();
std::string build_type_text();

}  // namespace qmlp::cli
