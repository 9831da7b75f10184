#include <CLI/CLI.hpp>

#include "commands.h"
#include "context.h"
#include "format.h"
#include "json_out.h"
#include "machine.h"
#include "options.h"
#include "qmlp/cpu.h"
#include "qmlp/cuda.h"
#include "qmlp/version.h"

namespace qmlp::cli {
namespace {

struct Flags {
  RunFlags run;
  bool kernels = false;
  bool json = false;
};

const char* device_name(DeviceKind kind) {
  switch (kind) {
    case DeviceKind::cpu:
      return "cpu";
    case DeviceKind::cuda:
      return "cuda";
    case DeviceKind::metal:
      return "metal";
  }
  return "?";
}

std::string threads_reason(const MachineInfo& machine) {
  std::string text =
      format("%d CPUs online, %d in the affinity mask", machine.online_cpus, machine.affinity_cpus);
  text += machine.cgroup_cpus > 0.0 ? format(", cgroup quota %.2f", machine.cgroup_cpus)
                                    : ", no cgroup quota";
  return text;
}

struct CudaDevices {
  std::vector<DeviceFacts> found;
  std::string absence;  // why there is none
};
CudaDevices cuda_devices() {
  CudaDevices devices;
  for (;;) {
    auto facts = cuda_facts(static_cast<int>(devices.found.size()));
    if (!facts) {
      devices.absence = facts.error().message;
      return devices;
    }
    devices.found.push_back(*facts);
  }
}

Json info_json(const RunOptions& options, const MachineInfo& machine, bool kernels) {
  Json caches = Json::object();
  for (const CacheLevel& level : machine.caches) caches.set(level.name, level.bytes);
  Json json = Json::object();
  json.set("version", version());
  json.set("build", Json::object()
                        .set("type", build_type_text())
                        .set("compiler", compiler_text())
                        .set("cuda", false)
                        .take());
  json.set("machine", Json::object()
                          .set("cpu", machine.cpu)
                          .set("system", machine.system)
                          .set("memory_bytes", machine.memory_bytes)
                          .set("caches_bytes", std::move(caches))
                          .take());
  json.set("isa", Json::object()
                      .set("found", to_string(host_facts().isa))
                      .set("used", to_string(options.facts.isa))
                      .set("source", options.isa_source)
                      .take());
  json.set("threads",
           Json::object()
               .set("used", options.num_threads)
               .set("source", options.threads_source)
               .set("default", default_num_threads())
               .set("online_cpus", machine.online_cpus)
               .set("affinity_cpus", machine.affinity_cpus)
               .set("cgroup_cpus", machine.cgroup_cpus > 0.0 ? Json(machine.cgroup_cpus) : Json())
               .take());
  const CudaDevices cuda = cuda_devices();
  Json devices = Json::array();
  devices.push("cpu");
  for (std::size_t i = 0; i < cuda.found.size(); ++i) devices.push("cuda:" + std::to_string(i));
  json.set("devices", std::move(devices));
  json.set("no_cuda", cuda.found.empty() ? Json(cuda.absence) : Json());
  if (kernels) {
    Json list = Json::array();
    for (const KernelInfo& kernel : kernel_table()) {
      list.push(Json::object()
                    .set("name", kernel.name)
                    .set("device", device_name(kernel.device))
                    .set("isa", to_string(kernel.isa))
                    .set("accumulation", to_string(kernel.accumulation))
                    .set("compiled", kernel.compiled)
                    .take());
    }
    json.set("kernels", std::move(list));
  }
  return json;
}

int run_info(const Flags& flags, Context& context) {
  const RunOptions options = flags.run.resolve();
  const MachineInfo machine = machine_info();
  if (flags.json) {
    context.out.line(info_json(options, machine, flags.kernels).dump(2));
    return kDone;
  }
  Output& out = context.out;
  out.line(std::string("qmlp ") + version() + ", " + build_type_text() + " build, " +
           compiler_text());
  out.line("machine  " + machine.cpu + ", " + machine.system + ", memory " +
           human_bytes(machine.memory_bytes));
  std::string caches;
  for (const CacheLevel& level : machine.caches) {
    caches += (caches.empty() ? "" : ", ") + level.name + " " + human_bytes(level.bytes);
  }
  if (!caches.empty()) out.line("caches   " + caches);
  out.line(std::string("isa      ") + to_string(options.facts.isa) + " used (" +
           options.isa_source + "), " + to_string(host_facts().isa) + " found");
  out.line(format("threads  %d used (%s): %s", options.num_threads, options.threads_source.c_str(),
                  threads_reason(machine).c_str()));
  const CudaDevices cuda = cuda_devices();
  std::string devices = "devices  cpu";
  for (std::size_t i = 0; i < cuda.found.size(); ++i) {
    devices += ", cuda:" + std::to_string(i) + " (" + to_string(cuda.found[i].isa) + ", " +
               std::to_string(cuda.found[i].num_sms) + " SMs, for the library's ops)";
  }
  out.line(devices + (cuda.found.empty() ? " (" + cuda.absence + ")" : ""));
  if (flags.kernels) {
    Table table({{"kernel"}, {"device"}, {"isa"}, {"accumulation"}, {"in this build"}});
    for (const KernelInfo& kernel : kernel_table()) {
      table.row({std::string(kernel.name), device_name(kernel.device), to_string(kernel.isa),
                 to_string(kernel.accumulation), kernel.compiled ? "yes" : "no"});
    }
    out.write("\n" + table.text());
  }
  return kDone;
}

}  // namespace

void add_info(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand("info", "Version, build, machine, threads, kernels");
  const auto flags = std::make_shared<Flags>();
  command->add_flag("--kernels", flags->kernels, "List every kernel of the tables");
  command->add_flag("--json", flags->json, "Print one JSON object");
  flags->run.add_to(*command, kThreadOptions | kDeviceOptions);
  command->footer(
      "Examples:\n"
      "  qmlp info\n"
      "  qmlp info --kernels --json\n"
      "  QMLP_ISA=avx2 qmlp info");
  set_run(*command, context, [flags](Context& c) { return run_info(*flags, c); });
}

}  // namespace qmlp::cli
