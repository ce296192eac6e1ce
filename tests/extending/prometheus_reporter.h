// A reporter of one's own: the newest numbers of a run in a file from which Prometheus' node exporter takes them.
#pragma once

#include <tessera/extending.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>

namespace own {

class PrometheusReporter final : public tessera::train::Reporter {
 public:
  explicit PrometheusReporter(std::filesystem::path path, const tessera::train::ReporterOptions& options = {})
      : path_(std::move(path)), writes_(options.rank == 0) {}

  void write(int64_t step, const tessera::train::Values& values) override {
    if (!writes_) return;
    newest_["step"] = static_cast<double>(step);
    for (const auto& value : values) newest_[value.name] = value.value;
    const auto part = path_.string() + ".part";
    std::ofstream file(part);
    for (const auto& [name, number] : newest_) file << "tessera_" << name << ' ' << number << '\n';
    file.close();
    if (!file) throw tessera::IoError("can't write the metrics file " + part);
    std::filesystem::rename(part, path_);  // so that nobody reads half of it
  }

 private:
  const std::filesystem::path path_;
  const bool writes_;
  std::map<std::string, double> newest_;
};

}  // namespace own
