#include "machine.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include <sched.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "parse.h"

namespace qmlp::cli {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// "key : value" of /proc/cpuinfo and /proc/meminfo.
std::string proc_value(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    const std::size_t colon = line.find(':');
    if (!line.starts_with(key) || colon == std::string::npos) continue;
    const std::size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

std::uint64_t size_with_unit(const std::string& text) {  // "480K", "512M"
  char* end = nullptr;
  std::uint64_t value = std::strtoull(text.c_str(), &end, 10);
  if (*end == 'K') value <<= 10;
  if (*end == 'M') value <<= 20;
  return value;
}

std::vector<CacheLevel> cache_levels() {
  std::vector<CacheLevel> levels;
  for (int index = 0; index < 16; ++index) {
    const std::string folder =
        "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/";
    const std::string type = first_line(folder + "type");
    if (type.empty()) break;
    const std::string suffix = type == "Data" ? "d" : type == "Instruction" ? "i" : "";
    std::string name = "L";
    name.append(first_line(folder + "level")).append(suffix);
    levels.push_back({name, size_with_unit(first_line(folder + "size"))});
  }
  return levels;
}

double quota_cpus(const std::string& quota, const std::string& period) {
  const double q = std::atof(quota.c_str());
  const double p = std::atof(period.c_str());
  return q > 0.0 && p > 0.0 ? q / p : 0.0;
}

// The tightest quota of this process's cgroup and the groups above it, versions 2 and 1.
double cgroup_cpus() {
  double least = 0.0;
  const auto consider = [&](double cpus) {
    if (cpus > 0.0 && (least == 0.0 || cpus < least)) least = cpus;
  };
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    const bool version2 = controllers.empty();
    const auto names = split(controllers, ',');
    if (!version2 && std::find(names.begin(), names.end(), "cpu") == names.end()) continue;
    for (;;) {
      const std::string folder =
          (version2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu") + (path == "/" ? "" : path) + "/";
      if (version2) {
        std::istringstream words(first_line(folder + "cpu.max"));
        std::string quota;
        std::string period;
        words >> quota >> period;
        consider(quota_cpus(quota, period));
      } else {
        consider(quota_cpus(first_line(folder + "cpu.cfs_quota_us"),
                            first_line(folder + "cpu.cfs_period_us")));
      }
      const std::size_t slash = path.rfind('/');
      if (slash == std::string::npos || path.size() <= 1) break;
      path = slash == 0 ? "/" : path.substr(0, slash);
    }
  }
  return least;
}

}  // namespace

std::uint64_t MachineInfo::last_level_cache_bytes() const {
  std::uint64_t most = 0;
  for (const CacheLevel& level : caches) most = std::max(most, level.bytes);
  return most;
}

MachineInfo machine_info() {
  MachineInfo info;
  info.cpu = proc_value("/proc/cpuinfo", "model name");
  info.online_cpus = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  cpu_set_t set;
  CPU_ZERO(&set);
  info.affinity_cpus =
      ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : info.online_cpus;
  info.cgroup_cpus = cgroup_cpus();
  info.memory_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
                      static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  info.caches = cache_levels();
  utsname names{};
  if (::uname(&names) == 0) {
    info.system = std::string(names.sysname) + " " + names.release + " " + names.machine;
  }
  return info;
}

std::uint64_t available_memory_bytes() {
  return std::strtoull(proc_value("/proc/meminfo", "MemAvailable").c_str(), nullptr, 10) * 1024;
}

std::string compiler_text() {
#if defined(__clang__)
  return std::string("clang ") + __clang_version__;
#elif defined(__GNUC__)
  return std::string("g++ ") + __VERSION__;
#else
  return "unknown";
#endif
}

std::string build_type_text() { return QMLP_BUILD_TYPE; }

}  // namespace qmlp::cli
