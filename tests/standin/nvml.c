/* A stand-in for libnvidia-ml.so.1: answers what a script file says, for tests without a GPU.
 *
 * The script is named by WATTCAST_STANDIN and read again whenever it changes. Lines:
 *   epoch S                     CLOCK_MONOTONIC seconds that times below count from (default: load time)
 *   at S power_w clock_mhz [throttle_bits [temperature_c [memory_w]]]   state from then on
 *   tick_ms N                   the energy counter and the power fields step this often (default 100)
 *   start_mj N                  value of the counter at the epoch
 *   wrap_mj N                   the counter wraps here
 *   error NAME CODE FROM TO [DEVICE]   function NAME (energy, clock, fields, temperature, throttle, number, set,
 *                               reset, core_set, memory_set, limit_set) answers CODE then; setters also answer the
 *                               code of "set"; without DEVICE on all devices, as below
 *   lie NAME FROM TO [DEVICE]   setter NAME (set, reset, core_set, memory_set, limit_set) answers OK then and applies
 *                               nothing
 *   gate PATH                   setters wait until this file exists, and then go on, whatever the script says by then
 *   lost S [DEVICE]             the GPU is lost from then on
 *   hang S SECONDS [DEVICE]     every call sleeps this long from then on
 *   devices N                   how many there are (default 1)
 *   calls PATH                  setters append their arguments here
 *   uuid NAME                   of device 0; others get -1, -2 ... (default GPU-standin)
 *   card PATH                   settings outlive processes in this file, PATH.1 ...: core low and high, memory low and
 *                               high (MHz, 0: not locked), power limit (mW); clocks read as locked
 *   memory_mhz N                a second, lower memory clock that can be asked for
 *   name TEXT                   what the driver calls the card
 *   freeze FROM TO CATCHES_UP   the counter keeps its value then; afterwards it has all joules (1) or lost some (0)
 *   rate FROM TO FACTOR         the counter rises so much faster then
 *   jump S MJ                   the counter is so much higher, or lower, from then on
 *   restart S                   the counter begins anew at zero
 *   reading NAME MW FROM TO     instant or average power says this then, whatever is drawn
 *   stale NAME FROM TO          instant or average power repeats what it said at FROM
 *   follow EXPONENT             watts follow a locked core clock: 30 % stay, 70 % times (lock / clock)^EXPONENT
 *   utilisation PERCENT         of SMs and memory; without the line the card does not tell
 *   profiles MASK               power profiles that the firmware has, as bits; without the line there are none
 *   smoothing                   the card has power smoothing; what is requested and on outlives processes in PATH.more
 *   gpm SM DRAM TENSOR FP32     percent that performance monitoring (GPM) tells; without the line there is no GPM
 *
 * With WATTCAST_STANDIN_CLOCK, the name of a file with one double, that is the time in place of CLOCK_MONOTONIC.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, GPU_IS_LOST = 15 };
enum { MOST = 512, LIE = -1, LOST = -2, HANG = -3 }; /* kinds of faults that are no code of the driver */

typedef struct { double at, power_w, clock_mhz, throttle, temperature_c, memory_w; } State;
typedef struct { char name[24]; int code; double from, to; int device; } Fault; /* device -1: all of them */
typedef struct { uint32_t field, scope; int64_t timestamp, latency; uint32_t type, result; uint64_t value; } Field;

static State states[MOST];
static Fault faults[MOST];
static int state_count, fault_count, device_count = 1;
static double epoch_s, tick_s = 0.1, start_mj, wrap_mj, exponent;
static char gate_path[512], calls_path[512], card_path[480], uuid[64] = "GPU-standin", card_name[64] = "Stand-in H200";
static unsigned memory_mhz, tells_utilisation;
static struct timespec seen;
typedef struct { char kind; double from, to, value; int field; } Drift;  /* of the counter or a reading */
static Drift drifts[MOST];
static int drift_count;
static const volatile double *imagined_s;
static double gpm[4];
static int tells_gpm, has_smoothing;
static unsigned profiles;

static double monotonic_s(void)
{
    struct timespec now;
    if (imagined_s != NULL) return *imagined_s;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

static int read_fault(const char *line, Fault *f)
{
    *f = (Fault){"", 0, 0, INFINITY, -1};
    if (sscanf(line, "error %23s %d %lf %lf %d", f->name, &f->code, &f->from, &f->to, &f->device) >= 4) return 1;
    if (sscanf(line, "lie %23s %lf %lf %d", f->name, &f->from, &f->to, &f->device) >= 3) { f->code = LIE; return 1; }
    if (sscanf(line, "lost %lf %d", &f->from, &f->device) >= 1) { f->code = LOST; return 1; }
    double seconds;
    if (sscanf(line, "hang %lf %lf %d", &f->from, &seconds, &f->device) < 2) return 0;
    f->code = HANG, f->to = seconds; /* of a hang that has no end, the length of a call */
    return 1;
}

static void read_drift(const char *line)
{
    Drift drift = {0, 0, INFINITY, 0, 0};
    char name[16] = "";
    if (sscanf(line, "freeze %lf %lf %lf", &drift.from, &drift.to, &drift.value) == 3) drift.kind = 'f';
    else if (sscanf(line, "rate %lf %lf %lf", &drift.from, &drift.to, &drift.value) == 3) drift.kind = 'r';
    else if (sscanf(line, "jump %lf %lf", &drift.from, &drift.value) == 2) drift.kind = 'j';
    else if (sscanf(line, "restart %lf", &drift.from) == 1) drift.kind = '0';
    else if (sscanf(line, "reading %15s %lf %lf %lf", name, &drift.value, &drift.from, &drift.to) == 4) drift.kind = 'v';
    else if (sscanf(line, "stale %15s %lf %lf", name, &drift.from, &drift.to) == 3) drift.kind = 's';
    if (drift.kind == 0 || drift_count == MOST) return;
    drift.field = strcmp(name, "average") == 0 ? 185 : 186;
    drifts[drift_count++] = drift;
}

static void read_line(const char *line)
{
    State s = {0, 0, 0, 0, 40, 40};
    Fault f;
    if (sscanf(line, "at %lf %lf %lf %lf %lf %lf", &s.at, &s.power_w, &s.clock_mhz, &s.throttle, &s.temperature_c,
               &s.memory_w) >= 3 && state_count < MOST)
        states[state_count++] = s;
    read_drift(line);
    if (fault_count < MOST && read_fault(line, &f)) faults[fault_count++] = f;
    sscanf(line, "epoch %lf", &epoch_s);
    if (sscanf(line, "tick_ms %lf", &tick_s) == 1) tick_s *= 1e-3;
    sscanf(line, "start_mj %lf", &start_mj);
    sscanf(line, "wrap_mj %lf", &wrap_mj);
    sscanf(line, "follow %lf", &exponent);
    sscanf(line, "devices %d", &device_count);
    sscanf(line, "calls %511s", calls_path);
    sscanf(line, "gate %511s", gate_path);
    sscanf(line, "card %479s", card_path);
    sscanf(line, "uuid %63s", uuid);
    sscanf(line, "name %63[^\n]", card_name);
    sscanf(line, "memory_mhz %u", &memory_mhz);
    sscanf(line, "utilisation %u", &tells_utilisation);
    sscanf(line, "profiles %u", &profiles);
    if (strncmp(line, "smoothing", 9) == 0) has_smoothing = 1;
    if (sscanf(line, "gpm %lf %lf %lf %lf", &gpm[0], &gpm[1], &gpm[2], &gpm[3]) == 4) tells_gpm = 1;
}

static void reload(void)
{
    const char *path = getenv("WATTCAST_STANDIN");
    struct stat info;
    if (path == NULL || stat(path, &info) != 0) return;
    if (info.st_mtim.tv_sec == seen.tv_sec && info.st_mtim.tv_nsec == seen.tv_nsec) return;
    FILE *stream = fopen(path, "r");
    if (stream == NULL) return;
    char line[600];
    seen = info.st_mtim;
    state_count = fault_count = drift_count = 0;
    gate_path[0] = 0;
    while (fgets(line, sizeof line, stream) != NULL) read_line(line);
    fclose(stream);
}

static double now_s(void) { return monotonic_s() - epoch_s; }

static int is_on(const Fault *f, void *d) { return f->device < 0 || (uintptr_t)f->device + 1 == (uintptr_t)d; }

static int enter(void *d, const char *name)
{
    reload();
    double at = now_s();
    for (int i = 0; i < fault_count; i++) {
        Fault f = faults[i];
        if (f.code == HANG && is_on(&f, d) && at >= f.from) usleep((useconds_t)(1e6 * f.to));
    }
    for (int i = 0; i < fault_count; i++) {
        Fault f = faults[i];
        if (!is_on(&f, d) || at < f.from) continue;
        if (f.code == LOST) return GPU_IS_LOST;
        if (f.code >= 0 && strcmp(f.name, name) == 0 && at < f.to) return f.code;
    }
    return OK;
}

static int lies(void *d, const char *name)
{
    double at = now_s();
    for (int i = 0; i < fault_count; i++) {
        Fault f = faults[i];
        if (f.code == LIE && is_on(&f, d) && strcmp(f.name, name) == 0 && at >= f.from && at < f.to) return 1;
    }
    return 0;
}

static const State *state_at(double at)
{
    static const State nothing = {0, 0, 345, 0, 30, 40};
    const State *found = &nothing;
    for (int i = 0; i < state_count; i++)
        if (states[i].at <= at) found = &states[i];
    return found;
}

static double stepped_s(void) { return floor(now_s() / tick_s) * tick_s; }

static double joules_until(double at)
{
    double sum = 0.0;
    for (int i = 0; i < state_count; i++) {
        double end = i + 1 < state_count ? fmin(states[i + 1].at, at) : at;
        if (end > states[i].at) sum += (end - states[i].at) * states[i].power_w;
    }
    return sum;
}

/* What the counter says has been drawn until then. */
static double counted_until(double at)
{
    double sum = joules_until(at);
    for (int i = 0; i < drift_count; i++) {
        const Drift *l = &drifts[i];
        double share = l->kind == 'r' ? l->value - 1.0 : l->kind == 'f' ? -1.0 : 0.0;
        if (l->kind == 'f' && l->value > 0 && at >= l->to) share = 0.0;
        if (share != 0.0 && at > l->from) sum += share * (joules_until(fmin(at, l->to)) - joules_until(l->from));
        if (l->kind == 'j' && at >= l->from) sum += 1e-3 * l->value;
    }
    return sum;
}

static double counter_mj(double at)
{
    for (int i = 0; i < drift_count; i++)
        if (drifts[i].kind == '0' && at >= drifts[i].from) return 1e3 * (counted_until(at) - counted_until(drifts[i].from));
    return start_mj + 1e3 * counted_until(at);
}

static double mean_w_at(double window_s, double end)
{
    return (joules_until(end) - joules_until(end - window_s)) / window_s;
}

static double mean_w(double window_s) { return mean_w_at(window_s, stepped_s()); }

static double reading_w(int field)
{
    double end = stepped_s(), at = now_s();
    for (int i = 0; i < drift_count; i++) {
        if (drifts[i].field != field || at < drifts[i].from || at >= drifts[i].to) continue;
        if (drifts[i].kind == 'v') return 1e-3 * drifts[i].value;
        if (drifts[i].kind == 's') end = floor(drifts[i].from / tick_s) * tick_s;
    }
    return mean_w_at(field == 185 ? 1.0 : tick_s, end);
}

__attribute__((constructor)) static void loaded(void)
{
    const char *path = getenv("WATTCAST_STANDIN_CLOCK");
    int file = path == NULL ? -1 : open(path, O_RDONLY);
    void *page = file < 0 ? MAP_FAILED : mmap(NULL, sizeof(double), PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) imagined_s = page;
    epoch_s = monotonic_s();
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; reload(); return OK; }
int nvmlInit_v2(void) { reload(); return OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { (void)code; return "stand-in error"; }

int nvmlDeviceGetCount_v2(unsigned *count) { reload(); *count = (unsigned)device_count; return OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    reload();
    if ((int)index >= device_count) return INVALID_ARGUMENT;
    *device = (void *)(uintptr_t)(index + 1);
    return OK;
}

static int text(char *out, unsigned length, const char *value) { snprintf(out, length, "%s", value); return OK; }
int nvmlDeviceGetName(void *d, char *out, unsigned length) { (void)d; return text(out, length, card_name); }
int nvmlDeviceGetUUID(void *d, char *out, unsigned length)
{
    reload();
    if ((uintptr_t)d > 1) { snprintf(out, length, "%s-%u", uuid, (unsigned)(uintptr_t)d - 1); return OK; }
    return text(out, length, uuid);
}
int nvmlDeviceGetSerial(void *d, char *out, unsigned length) { (void)d; return text(out, length, "0000"); }
int nvmlSystemGetDriverVersion(char *out, unsigned length) { return text(out, length, "580.0"); }
int nvmlSystemGetNVMLVersion(char *out, unsigned length) { return text(out, length, "13.580"); }

typedef struct { unsigned low, high, memory_low, memory_high, limit_mw, requested, smooth; } Card;

static const char *card_file(void *d, const char *ending)
{
    static __thread char path[560];
    unsigned place = (unsigned)(uintptr_t)d - 1;
    if (place) snprintf(path, sizeof path, "%s.%u%s", card_path, place, ending);
    else snprintf(path, sizeof path, "%s%s", card_path, ending);
    return path;
}

static Card read_card(void *d)
{
    Card c = {0, 0, 0, 0, 700000, 0, 0};
    FILE *stream = card_path[0] ? fopen(card_file(d, ""), "r") : NULL;
    if (stream != NULL) {
        if (fscanf(stream, "%u %u %u %u %u", &c.low, &c.high, &c.memory_low, &c.memory_high, &c.limit_mw) != 5) c.low = 0;
        fclose(stream);
    }
    stream = card_path[0] ? fopen(card_file(d, ".more"), "r") : NULL;
    if (stream != NULL) {
        if (fscanf(stream, "%u %u", &c.requested, &c.smooth) != 2) c.requested = 0;
        fclose(stream);
    }
    return c;
}

static int write_more(void *d, Card c)
{
    char fresh[600];
    snprintf(fresh, sizeof fresh, "%s", card_file(d, ".fresh"));
    FILE *stream = fopen(fresh, "w");
    if (stream == NULL) return NOT_FOUND;
    fprintf(stream, "%u %u\n", c.requested, c.smooth);
    fclose(stream);
    return rename(fresh, card_file(d, ".more")) == 0 ? OK : NOT_FOUND;
}

static int write_card(void *d, Card c)
{
    if (card_path[0] == 0) return OK;
    char fresh[600];
    snprintf(fresh, sizeof fresh, "%s", card_file(d, ".new"));
    FILE *stream = fopen(fresh, "w");
    if (stream == NULL) return NOT_FOUND;
    fprintf(stream, "%u %u %u %u %u\n", c.low, c.high, c.memory_low, c.memory_high, c.limit_mw);
    fclose(stream);
    Card had = read_card(d);
    if ((had.requested != c.requested || had.smooth != c.smooth) && write_more(d, c) != OK) return NOT_FOUND;
    return rename(fresh, card_file(d, "")) == 0 ? OK : NOT_FOUND;
}

static int number(void *d, unsigned *out, unsigned value) { *out = value; return enter(d, "number"); }
int nvmlDeviceGetEnforcedPowerLimit(void *d, unsigned *mw) { reload(); return number(d, mw, read_card(d).limit_mw); }
int nvmlDeviceGetPowerManagementLimit(void *d, unsigned *mw) { reload(); return number(d, mw, read_card(d).limit_mw); }
int nvmlDeviceGetPowerManagementDefaultLimit(void *d, unsigned *mw) { (void)d; return number(d, mw, 700000); }
int nvmlDeviceGetPowerManagementLimitConstraints(void *d, unsigned *low, unsigned *high)
{
    (void)d;
    *low = 200000, *high = 700000;
    return enter(d, "number");
}
int nvmlDeviceGetMaxClockInfo(void *d, int type, unsigned *mhz) { (void)d; return number(d, mhz, type == 2 ? 3201 : 1980); }

int nvmlDeviceGetClockInfo(void *d, int type, unsigned *mhz)
{
    int code = enter(d, "clock");
    Card c = read_card(d);
    unsigned natural = type == 2 ? 3201 : (unsigned)state_at(now_s())->clock_mhz;
    unsigned low = type == 2 ? c.memory_low : c.low, high = type == 2 ? c.memory_high : c.high;
    *mhz = high == 0 ? natural : natural < low ? low : natural > high ? high : natural;
    return code;
}

int nvmlDeviceGetSupportedMemoryClocks(void *d, unsigned *count, unsigned *mhz)
{
    (void)d;
    if (memory_mhz == 0) return NOT_SUPPORTED;
    unsigned room = *count;
    *count = 2;
    if (room < 2 || mhz == NULL) return INSUFFICIENT_SIZE;
    mhz[0] = 3201, mhz[1] = memory_mhz;
    return enter(d, "number");
}

int nvmlDeviceGetUtilizationRates(void *d, unsigned rates[2])
{
    (void)d;
    rates[0] = rates[1] = tells_utilisation;
    int code = enter(d, "utilisation");
    return code == OK && !tells_utilisation ? NOT_SUPPORTED : code;
}

/* What a locked clock leaves of the watts. */
static double lock_share(void *d)
{
    double clock_mhz = state_at(now_s())->clock_mhz;
    unsigned high = exponent > 0 ? read_card(d).high : 0;
    return high == 0 || high >= clock_mhz ? 1.0 : 0.3 + 0.7 * pow(high / clock_mhz, exponent);
}

/* The counter of a card whose watts follow its lock, which is taken for as old as the reading before. */
static double followed_mj(void *d)
{
    static double until_s[64], total_mj[64];
    unsigned place = ((unsigned)(uintptr_t)d - 1) % 64;
    double end_s = stepped_s(), before_mj = until_s[place] > 0 ? counter_mj(until_s[place]) : 0.0;
    if (exponent <= 0) return counter_mj(end_s);
    total_mj[place] += (counter_mj(end_s) - before_mj) * lock_share(d);
    until_s[place] = end_s;
    return total_mj[place];
}

int nvmlDeviceGetTotalEnergyConsumption(void *d, unsigned long long *mj)
{
    (void)d;
    int code = enter(d, "energy");
    double value = followed_mj(d);
    if (wrap_mj > 0) value = fmod(value, wrap_mj);
    *mj = (unsigned long long)value;
    return code;
}

int nvmlDeviceGetPowerUsage(void *d, unsigned *mw)
{
    (void)d;
    int code = enter(d, "power");
    *mw = (unsigned)(1e3 * mean_w(1.0) * lock_share(d));
    return code;
}

int nvmlDeviceGetFieldValues(void *d, int count, Field *values)
{
    (void)d;
    int code = enter(d, "fields");
    for (int i = 0; i < count; i++) {
        double watts = reading_w((int)values[i].field) * lock_share(d);
        if (values[i].scope == 2) watts = state_at(stepped_s())->memory_w;
        values[i].result = values[i].field == 185 || values[i].field == 186 ? OK : NOT_SUPPORTED;
        values[i].type = 1;
        values[i].value = (uint32_t)(1e3 * watts);
        if (values[i].field == 251 && has_smoothing) values[i].result = OK, values[i].value = read_card(d).smooth;
    }
    return code;
}

int nvmlDeviceGetTemperature(void *d, int sensor, unsigned *c)
{
    (void)d, (void)sensor;
    int code = enter(d, "temperature");
    *c = (unsigned)state_at(now_s())->temperature_c;
    return code;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *d, unsigned long long *bits)
{
    (void)d;
    int code = enter(d, "throttle");
    *bits = (unsigned long long)state_at(now_s())->throttle;
    return code;
}
int nvmlDeviceGetCurrentClocksEventReasons(void *d, unsigned long long *bits)
{
    return nvmlDeviceGetCurrentClocksThrottleReasons(d, bits);
}

static int record(void *d, const char *kind, Card to, const char *name, unsigned a, unsigned b)
{
    char gate[512];
    int code = enter(d, "set");
    memcpy(gate, gate_path, sizeof gate);
    while (gate[0] && access(gate, F_OK) != 0) usleep(10000);
    if (code == OK) code = enter(d, kind);
    if (code == OK && (lies(d, "set") || lies(d, kind))) return OK;
    if (code == OK) code = write_card(d, to);
    if (code != OK || calls_path[0] == 0) return code;
    FILE *stream = fopen(calls_path, "a");
    if (stream == NULL) return NOT_FOUND;
    fprintf(stream, "%s %u %u\n", name, a, b);
    fclose(stream);
    return OK;
}

int nvmlDeviceSetGpuLockedClocks(void *d, unsigned low, unsigned high)
{
    reload();
    Card c = read_card(d);
    c.low = low, c.high = high;
    return record(d, "core_set", c, "SetGpuLockedClocks", low, high);
}

int nvmlDeviceResetGpuLockedClocks(void *d)
{
    reload();
    Card c = read_card(d);
    c.low = c.high = 0;
    return record(d, "reset", c, "ResetGpuLockedClocks", 0, 0);
}

int nvmlDeviceSetMemoryLockedClocks(void *d, unsigned low, unsigned high)
{
    reload();
    Card c = read_card(d);
    c.memory_low = low, c.memory_high = high;
    return record(d, "memory_set", c, "SetMemoryLockedClocks", low, high);
}

int nvmlDeviceResetMemoryLockedClocks(void *d)
{
    reload();
    Card c = read_card(d);
    c.memory_low = c.memory_high = 0;
    return record(d, "memory_set", c, "ResetMemoryLockedClocks", 0, 0);
}

/* Masks of 256 bits, of which the first word is used, after a word with the version. */
int nvmlDeviceWorkloadPowerProfileGetProfilesInfo(void *d, uint32_t *info)
{
    reload();
    if (!profiles) return NOT_SUPPORTED;
    info[1] = profiles;
    return enter(d, "number");
}

int nvmlDeviceWorkloadPowerProfileGetCurrentProfiles(void *d, uint32_t *info)
{
    reload();
    if (!profiles) return NOT_SUPPORTED;
    info[1] = profiles, info[9] = info[17] = read_card(d).requested;
    return enter(d, "number");
}

int nvmlDeviceWorkloadPowerProfileSetRequestedProfiles(void *d, uint32_t *info)
{
    reload();
    if (!profiles) return NOT_SUPPORTED;
    if (info[1] & ~profiles) return INVALID_ARGUMENT;
    Card c = read_card(d);
    c.requested |= info[1];
    return record(d, "profiles_set", c, "SetRequestedProfiles", info[1], 0);
}

int nvmlDeviceWorkloadPowerProfileClearRequestedProfiles(void *d, uint32_t *info)
{
    reload();
    if (!profiles) return NOT_SUPPORTED;
    Card c = read_card(d);
    c.requested &= ~info[1];
    return record(d, "profiles_set", c, "ClearRequestedProfiles", info[1], 0);
}

int nvmlDevicePowerSmoothingSetState(void *d, uint32_t *state)
{
    reload();
    if (!has_smoothing) return NOT_SUPPORTED;
    Card c = read_card(d);
    c.smooth = state[1];
    return record(d, "smoothing_set", c, "PowerSmoothingSetState", state[1], 0);
}

int nvmlDeviceSetPowerManagementLimit(void *d, unsigned mw)
{
    reload();
    Card c = read_card(d);
    c.limit_mw = mw;
    return record(d, "limit_set", c, "SetPowerManagementLimit", mw, 0);
}

/* Performance monitoring: metric ids as in nvml.h, 2 SM, 5 tensor, 10 DRAM and 12 fp32 utilisation. */
typedef struct { unsigned id; int result; double value; const char *names[3]; } Metric;
typedef struct { unsigned version, count; void *first, *second; Metric metrics[]; } Metrics;

int nvmlGpmQueryDeviceSupport(void *d, unsigned *support) { (void)d; reload(); support[1] = tells_gpm; return OK; }
int nvmlGpmSampleAlloc(void **sample) { *sample = malloc(1); return OK; }
int nvmlGpmSampleFree(void *sample) { free(sample); return OK; }
int nvmlGpmSampleGet(void *d, void *sample) { (void)sample; return enter(d, "gpm"); }
int nvmlGpmMetricsGet(Metrics *asked)
{
    void *d = (void *)(uintptr_t)1;
    for (unsigned i = 0; i < asked->count; i++) {
        Metric *m = &asked->metrics[i];
        m->result = OK;
        m->value = m->id == 2 ? gpm[0] : m->id == 10 ? gpm[1] : m->id == 5 ? gpm[2] : m->id == 12 ? gpm[3] : 0.0;
    }
    return enter(d, "gpm");
}
