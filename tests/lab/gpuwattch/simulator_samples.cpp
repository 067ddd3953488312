// Hands the rows of a metric trace to the meter, as GPGPU-Sim's power interface would do.
// Usage: simulator_samples PROGRAM CONFIG TRACE [option...]; prints the watts of every sample.
#include "wattcast_power.hpp"

#include <fstream>
#include <iostream>

static std::vector<std::string> split(const std::string& line) {
  std::vector<std::string> cells;
  std::istringstream stream(line);
  for (std::string cell; std::getline(stream, cell, ',');)
    if (!cell.empty()) cells.push_back(cell);
  return cells;
}

int main(int argc, char** argv) {
  std::ifstream trace(argv[3]);
  std::string line;
  std::getline(trace, line);
  const std::vector<std::string> options(argv + 4, argv + argc);
  try {
    wattcast::PowerMeter meter(argv[2], split(line), options, argv[1]);
    std::cout.precision(17);
    while (std::getline(trace, line)) {
      std::vector<double> counts;
      for (const auto& cell : split(line)) counts.push_back(std::strtod(cell.c_str(), nullptr));
      std::cout << meter.sample(500, counts)[0] << '\n';
    }
    std::cout << (meter.is_lower_bound() ? "at least" : "total") << '\n';
  } catch (const std::exception& error) {
    std::cout << error.what() << '\n';
    return 1;
  }
  return 0;
}
