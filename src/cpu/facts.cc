#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "qmlp/cpu.h"
#include "qmlp/plan.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace qmlp {
namespace {

#if defined(__x86_64__)
// Which register states the operating system saves (XCR0).
std::uint64_t saved_states() noexcept {
  std::uint32_t lo = 0, hi = 0;
  __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return static_cast<std::uint64_t>(hi) << 32 | lo;
}

Isa detect_isa() noexcept {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return Isa::portable;
  const bool fma = (c >> 12 & 1u) != 0, f16c = (c >> 29 & 1u) != 0, osxsave = (c >> 27 & 1u) != 0;
  if (!fma || !f16c || !osxsave) return Isa::portable;
  const std::uint64_t states = saved_states();
  if ((states & 0x6u) != 0x6u) return Isa::portable;  // XMM and YMM
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return Isa::portable;
  if ((b >> 5 & 1u) == 0) return Isa::portable;                            // AVX2
  constexpr unsigned kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  if ((b & kAvx512) == kAvx512 && (states & 0xE6u) == 0xE6u) return Isa::avx512;
  return Isa::avx2;
}
#else
Isa detect_isa() noexcept { return Isa::portable; }
#endif

// The first line of a file, empty when it can't be read.
std::string first_line(const std::string& path) {
  std::string line;
  if (std::FILE* file = std::fopen(path.c_str(), "re")) {
    char buffer[512];
    if (std::fgets(buffer, sizeof buffer, file) != nullptr) line = buffer;
    std::fclose(file);
  }
  while (!line.empty() && (line.back() == '\n' || line.back() == ' ')) line.pop_back();
  return line;
}

// CPUs that a cgroup's quota allows, 0 when unlimited. Reads v2, then v1.
int quota_of(const std::string& v2_folder, const std::string& v1_folder) {
  long long quota = 0, period = 0;
  if (std::sscanf(first_line(v2_folder + "/cpu.max").c_str(), "%lld %lld", &quota, &period) == 2 &&
      quota > 0 && period > 0) {
    return std::max<int>(1, static_cast<int>(quota / period));
  }
  quota = std::atoll(first_line(v1_folder + "/cpu.cfs_quota_us").c_str());
  period = std::atoll(first_line(v1_folder + "/cpu.cfs_period_us").c_str());
  if (quota > 0 && period > 0) return std::max<int>(1, static_cast<int>(quota / period));
  return 0;
}

// The tightest quota from this process's own group up to the root of the hierarchy.
int cgroup_quota() {
  std::string v2_path, v1_path;
  if (std::FILE* file = std::fopen("/proc/self/cgroup", "re")) {
    char line[4096];
    while (std::fgets(line, sizeof line, file) != nullptr) {
      line[std::strcspn(line, "\n")] = '\0';
      const char* controllers = std::strchr(line, ':');
      const char* path = controllers == nullptr ? nullptr : std::strchr(controllers + 1, ':');
      if (path == nullptr) continue;
      if (controllers[1] == ':') v2_path = path + 1;
      if (std::string(controllers + 1, path).find("cpu") != std::string::npos &&
          std::string(controllers + 1, path).find("cpuset") != 0) {
        v1_path = path + 1;
      }
    }
    std::fclose(file);
  }
  int least = 0;
  const auto consider = [&](int quota) {
    if (quota > 0 && (least == 0 || quota < least)) least = quota;
  };
  for (std::string* path : {&v2_path, &v1_path}) {
    while (true) {
      consider(quota_of("/sys/fs/cgroup" + *path, "/sys/fs/cgroup/cpu" + *path));
      const std::size_t slash = path->find_last_of('/');
      if (slash == std::string::npos || path->size() <= 1) break;
      path->resize(slash);
    }
  }
  consider(quota_of("/sys/fs/cgroup", "/sys/fs/cgroup/cpu"));
  return least;
}

}  // namespace

int default_num_threads() noexcept {
  int threads = static_cast<int>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
  // Sized for machines with more CPUs than a plain cpu_set_t holds.
  constexpr int kMaxCpus = 8192;
  if (cpu_set_t* set = CPU_ALLOC(kMaxCpus)) {
    const std::size_t bytes = CPU_ALLOC_SIZE(kMaxCpus);
    if (sched_getaffinity(0, bytes, set) == 0) threads = std::min(threads, CPU_COUNT_S(bytes, set));
    CPU_FREE(set);
  }
  if (const int quota = cgroup_quota(); quota > 0) threads = std::min(threads, quota);
  return std::max(1, threads);
}

DeviceFacts host_facts() noexcept {
  DeviceFacts facts;
  facts.kind = DeviceKind::cpu;
  facts.isa = detect_isa();
  facts.num_threads = default_num_threads();
  facts.l2_bytes = static_cast<std::size_t>(std::max(0L, sysconf(_SC_LEVEL2_CACHE_SIZE)));
  facts.present = true;
  return facts;
}

Result<DeviceFacts> machine_facts(std::string_view name) {
  const auto cpu = [](Isa isa) {
    DeviceFacts facts;
    facts.isa = isa;
    facts.num_threads = 16;
    facts.l2_bytes = std::size_t{1} << 20;
    return facts;
  };
  if (name == "portable") return cpu(Isa::portable);
  if (name == "avx2") return cpu(Isa::avx2);
  if (name == "avx512") return cpu(Isa::avx512);
  DeviceFacts gpu;
  gpu.kind = DeviceKind::cuda;
  if (name == "h200") {
    gpu.isa = Isa::sm90a;
    gpu.num_sms = 132;
    gpu.l2_bytes = std::size_t{60} << 20;
    gpu.smem_bytes = std::size_t{227} << 10;
    return gpu;
  }
  if (name == "a100") {
    gpu.isa = Isa::sm80;
    gpu.num_sms = 108;
    gpu.l2_bytes = std::size_t{40} << 20;
    gpu.smem_bytes = std::size_t{163} << 10;
    return gpu;
  }
  return Error{Errc::invalid_argument, "machine '" + std::string(name) +
                                           "' is not known; known are portable, avx2, avx512, "
                                           "a100, h200"};
}

}  // namespace qmlp
