// Runs a short made-up simulation against the meter: watts of each sample on stdout, and a lower clock at the end.
#include "wattcast_power.hpp"

#include <iostream>

int main(int argc, char** argv) {
  const std::string config = argv[1], program = argv[2];
  std::vector<std::string> counters;
  std::istringstream names(argv[3]);
  for (std::string name; std::getline(names, name, ',');) counters.push_back(name);
  try {
    wattcast::PowerMeter meter(config, counters, {}, program);
    std::cout << meter.parts().size() << '\n';
    std::cout.precision(17);
    for (int i = 1; i <= 5; ++i) {
      std::vector<double> counts(counters.size(), 0.0);
      for (std::size_t k = 0; k < counters.size(); ++k) {
        if (counters[k] == "TOT_INST") counts[k] = 1000.0 * i;
        if (counters[k] == "INT_ACC") counts[k] = 32000.0 * i;
        if (counters[k] == "MEM_RD") counts[k] = 10.0;
        if (counters[k] == "IDLE_CORE_N") counts[k] = 2.0;
      }
      const auto watts = meter.sample(argc > 4 && i == 3 ? -1.0 : 500.0, counts);
      std::cout << watts[0] << ' ' << watts.size() << '\n';
      if (i == 3) meter.set_clock(0.99e9);  // the next sample carries it, the one after runs at it
    }
  } catch (const std::exception& error) {
    std::cout << error.what() << '\n';
    return 1;
  }
  return 0;
}
