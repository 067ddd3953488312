// Power of each sample from a running simulator: the C++ side of `wattcast lab power-meter`.
//
// A simulator in C++ (GPGPU-Sim's power_interface.cc, for example) includes this header, makes one meter, and hands it
// the counters of every sample. The answer holds the total and the watts of each component, and the next sample may
// run at another clock and voltage: the feedback of GPUWattch's manual, section 1.3.
//
//     wattcast::PowerMeter meter("accelwattch.xml", {"TOT_INST", "INT_ACC", "IDLE_CORE_N"}, {"--sms", "80"});
//     const auto watts = meter.sample(500, {1200, 38400, 2});     // cycles, counts
//     if (watts[0] > 250.0) meter.set_clock(1.2e9, 0.85);           // from the next sample on
//
// Counters have the names of a metric trace. Three of them, as here, show three components: the sum of these is a
// lower bound, and `is_lower_bound()` says so. Hand over all counters of the trace to get the whole power.
//
// POSIX and C++11, no library. Errors are std::runtime_error with the program's own words.
#ifndef WATTCAST_POWER_HPP
#define WATTCAST_POWER_HPP

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

namespace wattcast {

class PowerMeter {
 public:
  // `config` is an architecture file or a GPU's name; `options` are further ones of `wattcast lab power-meter`.
  PowerMeter(const std::string& config, const std::vector<std::string>& counters,
             const std::vector<std::string>& options = {}, const std::string& program = "wattcast")
      : counters_(counters.size()) {
    int to_child[2], from_child[2];
    if (pipe(to_child) != 0 || pipe(from_child) != 0) throw std::runtime_error("wattcast: no pipe");
    child_ = fork();
    if (child_ < 0) throw std::runtime_error("wattcast: no process");
    if (child_ == 0) {
      dup2(to_child[0], STDIN_FILENO);
      dup2(from_child[1], STDOUT_FILENO);
      for (const int end : {to_child[0], to_child[1], from_child[0], from_child[1]}) close(end);
      std::vector<std::string> words{program, "lab", "power-meter", "--config", config};
      words.insert(words.end(), options.begin(), options.end());
      std::vector<char*> arguments;
      for (auto& word : words) arguments.push_back(&word[0]);
      arguments.push_back(nullptr);
      execvp(arguments[0], arguments.data());
      _exit(127);
    }
    close(to_child[0]);
    close(from_child[1]);
    out_ = fdopen(to_child[1], "w");
    in_ = fdopen(from_child[0], "r");
    std::signal(SIGPIPE, SIG_IGN);  // a meter that ended is an exception, not the simulator's end
    std::ostringstream names;
    for (std::size_t i = 0; i < counters.size(); ++i) names << (i ? "," : "") << counters[i];
    std::string name;
    std::istringstream answer(ask(names.str()));
    while (std::getline(answer, name, ',')) parts_.push_back(name);
  }
  PowerMeter(const PowerMeter&) = delete;
  PowerMeter& operator=(const PowerMeter&) = delete;
  ~PowerMeter() {
    std::fclose(out_);
    std::fclose(in_);
    waitpid(child_, nullptr, 0);
  }

  // Whether the counters leave components out, so that the first number of `sample` is a lower bound and no total.
  bool is_lower_bound() const { return !parts_.empty() && parts_[0] == "power_at_least"; }

  // Names of the watts that `sample` returns: "power" (or "power_at_least"), then the components.
  const std::vector<std::string>& parts() const { return parts_; }

  // Watts of a sample of `cycles` core cycles, with counts in the order of the constructor's counters.
  std::vector<double> sample(double cycles, const std::vector<double>& counts) {
    if (counts.size() != counters_) throw std::runtime_error("wattcast: as many counts as counters are needed");
    std::ostringstream line;
    line.precision(17);
    line << cycles;
    for (const double count : counts) line << ',' << count;
    line << setting_;
    setting_.clear();
    std::vector<double> watts;
    std::string number;
    std::istringstream answer(ask(line.str()));
    while (std::getline(answer, number, ',')) watts.push_back(std::strtod(number.c_str(), nullptr));
    return watts;
  }

  // Clock, and voltage where it changes, from the sample after the next call of `sample` on.
  void set_clock(double hertz, double volts = 0.0) {
    std::ostringstream text;
    text.precision(17);
    text << '|' << hertz;
    if (volts > 0.0) text << ',' << volts;
    setting_ = text.str();
  }

 private:
  std::string ask(const std::string& line) {
    std::string answer;
    int letter = EOF;
    if (std::fprintf(out_, "%s\n", line.c_str()) > 0 && std::fflush(out_) == 0)
      while ((letter = std::fgetc(in_)) != EOF && letter != '\n') answer.push_back(static_cast<char>(letter));
    if (letter == EOF) throw std::runtime_error("wattcast: the meter ended; its stderr says why");
    if (answer.compare(0, 6, "error ") == 0) throw std::runtime_error("wattcast: " + answer.substr(6));
    return answer;
  }

  std::size_t counters_;
  pid_t child_ = -1;
  FILE* out_ = nullptr;
  FILE* in_ = nullptr;
  std::vector<std::string> parts_;
  std::string setting_;
};

}  // namespace wattcast

#endif
